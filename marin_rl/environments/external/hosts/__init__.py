"""Scripts for other interpreters: they import the standard library and the library they play."""
