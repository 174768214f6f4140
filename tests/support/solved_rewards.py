"""A reward that some prompts always get, some never, and others by the completion's length."""

from collections.abc import Sequence


def solved(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """Score by the answer's name: always, never, or (anything else) an even length."""
    fixed = {"always": 1.0, "never": 0.0}
    return [
        fixed.get(name, float(len(text) % 2 == 0))
        for text, name in zip(completions, answer, strict=True)
    ]
