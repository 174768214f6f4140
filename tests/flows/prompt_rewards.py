"""Rewards of some prompts, for runs that choose by them; runs name this file."""

from collections.abc import Sequence

from marin_rl.types import Example


def rare(example: Example, completion: str) -> float:
    """1 for completions that begin with a letter from a to d, so that few differ in a group."""
    return float(completion[:1] in "abcd")


def solved(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """Score by the answer's name: always, never, or (anything else) an even length."""
    fixed = {"always": 1.0, "never": 0.0}
    return [
        fixed.get(name, float(len(text) % 2 == 0))
        for text, name in zip(completions, answer, strict=True)
    ]
