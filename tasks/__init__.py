"""Thin Prefect wrappers of the stages: call the library, which commits, and return a reference."""

import os

# Read when Prefect is imported, which would otherwise report its first use to its makers.
os.environ.setdefault("DO_NOT_TRACK", "1")
