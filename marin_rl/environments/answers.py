"""Ready-made rewards and extractors for prompts with one right answer, to be named by import path.

For `chat`: `reward: marin_rl.environments.answers:exact_match`. An extractor takes a completion and
gives the answer in it, or None; votes are counted over what it gives.
"""

import re

from marin_rl.types import Example

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


def exact_match(example: Example, completion: str) -> float:
    """1 if completion and answer are the same text, white space at their ends aside."""
    return float(example.answer is not None and completion.strip() == example.answer.strip())


def number_match(example: Example, completion: str) -> float:
    """1 if the last number of the completion equals the last number of the answer."""
    expected, actual = last_number(example.answer or ""), last_number(completion)
    return float(expected is not None and expected == actual)


def last_number(completion: str) -> str | None:
    """The last number in a text, written in one way: `1,200.0` and `1200` are the same."""
    numbers = _NUMBER.findall(completion)
    return f"{float(numbers[-1].replace(',', '')):.12g}" if numbers else None
