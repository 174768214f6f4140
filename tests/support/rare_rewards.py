"""A reward that seldom differs within a group. Runs name this file, relative to the repository."""

from marin_rl.types import Example


def rare(example: Example, completion: str) -> float:
    """1 for completions that begin with a letter from a to d."""
    return float(completion[:1] in "abcd")
