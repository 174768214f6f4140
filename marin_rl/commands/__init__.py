"""Commands of `marin-rl`: a module per kind, each a few lines over the library.

They are named in `marin_rl.cli`. Heavy modules are imported when a command runs.
"""
