"""A game with a tool: the model asks about numbers from 1 to 8 until it knows which one is meant.

`Guess` is the environment. Its public methods are the tools that the model may call; type hints and
docstrings become their JSON schemas. `Demonstrations` has examples for the warm start.
"""

import json
import random

from marin_rl.environments.base_environment import BaseEnvironment
from marin_rl.types import Example, Message, RewardComponent

LARGEST = 8
QUESTIONS_MAX = 4
PROMPT = f"1-{LARGEST}"


def answer(number, secret):
    """Return what the tool says about a number: <, > or =."""
    return "=" if number == secret else "<" if secret < number else ">"


class Guess:
    """An episode: an instance is made for each, and `reset` gets the columns of its row."""

    def example(self, seed, index, split):
        """Return a row; rows may come from a file as well (environment.options.path)."""
        return {"prompt": PROMPT, "secret": 1 + (seed + index) % LARGEST}

    def reset(self, secret: int, **row) -> None:
        self.secret = secret
        self.asked = []

    def ask(self, number: int) -> str:
        """Compare a number with the secret one.

        Args:
            number: A number from 1 to 8.
        """
        self.asked.append(number)
        return answer(number, self.secret)

    def get_reward(self) -> float:
        """Return 1 for the right number at once, less for later questions, 0 if never."""
        if self.secret not in self.asked[:QUESTIONS_MAX]:
            return 0.0
        return 1.0 - 0.1 * self.asked.index(self.secret)


class Demonstrations(BaseEnvironment):
    """Turns of episodes that ask at random: they show how to call, and no strategy."""

    def example(self, seed, index, split):
        draw = random.Random(f"{seed} {index} {split}")
        secret = 1 + draw.randrange(LARGEST)
        # The chat template lists the names of tools as a system message.
        messages = [Message(role="system", content="ask"), Message(role="user", content=PROMPT)]
        for _ in range(draw.randrange(QUESTIONS_MAX)):  # questions before the turn to learn
            number = 1 + draw.randrange(LARGEST)
            messages += [
                Message(role="assistant", content=call(number)),
                Message(role="tool", content=answer(number, secret), name="ask"),
            ]
            if number == secret:
                break
        known = messages[-1].content == "="
        shown = str(secret) if known else call(1 + draw.randrange(LARGEST))
        return Example(
            environment=self.name,
            environment_version="1",
            example_id=f"{split}-{seed}-{index}",
            split=split,
            seed=seed + index,
            messages=tuple(messages),
            answer=shown,
        )

    def score(self, example, completion):
        return (RewardComponent(name="same", value=float(completion == example.answer)),)


def call(number):
    """Return a call of `ask` as the chat template writes it."""
    body = json.dumps({"name": "ask", "arguments": {"number": number}})
    return f"<tool_call>\n{body}\n</tool_call>"
