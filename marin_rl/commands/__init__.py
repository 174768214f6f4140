"""What `marin-rl …` runs: a module per kind of command, each a few lines over the library.

They are named in `marin_rl.cli`. Heavy modules are imported when a command runs.
"""
