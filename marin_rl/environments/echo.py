"""The smallest environment: repeat a random word. For tests and first steps on any machine."""

import random
import string

from pydantic import Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.base import Environment
from marin_rl.environments.registry import parse_options, register
from marin_rl.types import Example, RewardComponent, Split


class EchoOptions(Section):
    """Options of `echo`."""

    letters_min: int = Field(default=1, ge=1, le=1000, description="letters of the shortest word")
    letters_max: int = Field(default=4, ge=1, le=1000, description="letters of the longest word")
    alphabet: str = Field(
        default=string.ascii_lowercase, min_length=1, description="letters to draw from"
    )


@register("echo", EchoOptions)
class Echo(Environment):
    """Rewards the share of characters that are right, in place: 1 for exactly the word."""

    name = "echo"
    workers = 0

    def __init__(self, config: EnvironmentConfig) -> None:
        self._options = parse_options(EchoOptions, config)

    def example(self, seed: int, index: int, split: Split) -> Example:
        draw = random.Random(seed + index)
        low = min(self._options.letters_min, self._options.letters_max)
        length = draw.randint(low, max(low, self._options.letters_max))
        word = "".join(draw.choices(self._options.alphabet, k=length))
        return self.make_example(
            f"repeat {word}", word, seed=seed, index=index, split=split, metadata={"index": index}
        )

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        expected, actual = example.answer or "", completion.strip()
        right = sum(a == b for a, b in zip(expected, actual, strict=False))
        return (RewardComponent(name="echo", value=right / max(len(expected), len(actual), 1)),)
