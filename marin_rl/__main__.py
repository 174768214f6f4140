"""`python -m marin_rl` is `marin-rl`."""

from marin_rl.cli import main

main()
