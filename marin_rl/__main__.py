"""`python -m marin_rl` is `marin-rl`, which does not look for modules in the current folder."""

import sys
from pathlib import Path

# `-m` puts the current folder first, where a user's tasks.py would be taken for ours.
if sys.path[0] == str(Path.cwd()) != str(Path(__file__).parents[1]):
    del sys.path[0]

from marin_rl.cli import main

main()
