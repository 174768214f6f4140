"""A policy whose tokens follow from seed and position, as the engine's random numbers do."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from support.flow_runs import DEBUG

from marin_rl.config import Config, load_config
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.protocol import ChatClient, ChatRequest, served_model_id
from marin_rl.rollouts.trajectories import Interruption

END = 1
MODEL = served_model_id("policy", 0, "ab" * 32)
PIECE, TOKENS_MAX = 3, 11


def settings(root: str | Path, *items: str) -> Config:
    """A run that samples in pieces."""
    window = ["asynchrony.sampler=windowed", "asynchrony.max_staleness=2"]
    pieces = [f"asynchrony.partial_tokens={PIECE}"]
    limits = [f"sampling.max_tokens={TOKENS_MAX}", "rollouts.shards_per_round=1"]
    return load_config(DEBUG, [f"root={root}", *window, *pieces, *limits, *items])


# A module of an environment whose episodes are dialogues, without the steps.
TALKS = """
from marin_rl.environments.base_environment import BaseEnvironment
from marin_rl.environments.episode import StepResult
from marin_rl.types import Message, RewardComponent

class Talks(BaseEnvironment):
    workers = 0

    def example(self, seed, index, split):
        return self.make_example(f"say w{index}", "w", seed=seed, index=index, split=split)

    def score(self, example, completion):
        return (RewardComponent(name="length", value=float(len(completion))),)

    def episode(self, example):
        return Talk(example)

class Talk:
    def __init__(self, example):
        self.example, self.turns = example, 0

    def start(self):
        return self.example.messages, ()

    async def close(self):
        pass

    async def step(self, turn):
        self.turns += 1
"""


def token_at(seed: int, position: int) -> int:
    """A token that depends on its seed and position alone, as the engine's random numbers do."""
    return hashlib.sha256(f"{seed} {position}".encode()).digest()[0] % 12 + 1


@dataclass
class ScriptedClient(ChatClient):
    """A policy whose tokens are `token_at`; counts requests, and interrupts after some of them."""

    model = MODEL
    interruption: Interruption = field(default_factory=Interruption)
    pieces_max: int = 1000
    asked: list[tuple[int, int]] = field(default_factory=list)  # prompt's length, max_tokens

    async def __aenter__(self) -> "ScriptedClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Sample completions."""
        ids, sampling = request.prompt_ids, request.sampling
        prompt = np.arange(5, dtype=np.int32) if ids is None else ids
        self.asked.append((len(prompt), sampling.max_tokens))
        if len(self.asked) >= self.pieces_max:
            self.interruption.request()
        made = [
            _completion(prompt, (sampling.seed or 0) + i, sampling.max_tokens, sampling.stop)
            for i in range(request.n)
        ]
        return ChatAnswer(model=MODEL, prompt_token_ids=prompt, completions=tuple(made))


def _completion(
    prompt: np.ndarray, seed: int, tokens_max: int, stop: Sequence[str] = ()
) -> Completion:
    """As an endpoint answers, which sees no more of a text than what it samples itself."""
    ids, text = list[int](), ""
    ends = list[int]()
    while len(ids) < tokens_max and END not in ids and not ends:
        ids.append(token_at(seed, len(prompt) + len(ids)))
        text = text_of(ids, "")
        ends = [at for at in map(text.find, stop) if at >= 0]
    return Completion(
        text=text[: min(ends, default=len(text))],
        token_ids=np.array(ids, np.int32),
        logprobs=np.array([-1 / (2 + i + len(prompt)) for i in range(len(ids))], np.float32),
        finish_reason="stop" if END in ids or ends else "length",
    )


def text_of(ids: Sequence[int], _reason: str) -> str:
    return "".join(chr(96 + i) for i in ids if i != END)


class FirstPieces(Interruption):
    """Interrupts sampling after some pieces."""

    def __init__(self, pieces: int) -> None:
        self._pieces, self._asked = pieces, 0

    @property
    def requested(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """False for the first questions."""
        self._asked += 1
        return self._asked > self._pieces
