"""Episodes whose tokens another program samples: our environments in another library's trainer.

`python -m marin_rl.rollouts.relay CONFIG` is the process that such a program starts. It plays
episodes as a run of ours does, with its limits, chat template, tools and scores; where a run asks
an endpoint for a completion, it asks its parent. Both write JSON, an object a line. The parent asks

    {"id": 1, "call": "play", "example": {...}}
    {"id": 2, "call": "score", "example": {...}, "completion": TEXT}

and is asked for each turn of an episode, which it answers:

    {"id": 1, "sample": {"prompt_ids": [...], "max_tokens": N}}
    {"id": 1, "sampled": {"token_ids": [...], "logprobs": [...]}}

A call ends with {"id": 1, "answer": {...}} or {"id": 1, "error": TEXT}. Leaves out the parent
(`verl`).
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, BinaryIO

import numpy as np
import orjson
from jaxtyping import Int32
from pydantic import TypeAdapter

from marin_rl.config import Config, load_config
from marin_rl.environments.base import reward_of
from marin_rl.environments.checks import environment_of
from marin_rl.environments.registry import part_for, sampling_for
from marin_rl.environments.scoring import scorer_for
from marin_rl.errors import BadResponse, MarinRLError
from marin_rl.finite import fit_logprobs
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.protocol import ChatClient, ChatRequest
from marin_rl.rollouts.assemble import RolloutMaker, samples_of
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.rollouts.generate import episode_driver
from marin_rl.rollouts.pinned import policy_as_begun
from marin_rl.rollouts.trajectories import GroupRequest, score_group
from marin_rl.tokenizers import PolicyTokenizer
from marin_rl.types import Example, Sampling, ServedPolicy, SlotRef

LINE_BYTES_MAX = 64 << 20
MODEL = "relayed"

# Asks the parent for a turn of an episode.
Ask = Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]

_EXAMPLE = TypeAdapter(Example)
# The parent knows which weights it samples with; nothing here is committed.
_POLICY = ServedPolicy(
    endpoints=(),
    model=MODEL,
    weight_version=0,
    parameters_digest="",
    tokenizer_digest="",
    chat_template_digest="",
    checkpoint=SlotRef(slot="", sha256=""),
)


class RelayClient(ChatClient):
    """Client of a policy that the parent samples from; prompts are rendered here."""

    model = MODEL

    def __init__(self, relay: "Relay", ask: Ask) -> None:
        self._relay, self._ask = relay, ask
        self.prompt: Int32[np.ndarray, " P"] | None = None  # of the first turn

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """A completion of the parent. Raises BadResponse for one that cannot be trained on."""
        assert request.n == 1, "members are played one at a time"
        prompt_ids = request.prompt_ids
        if prompt_ids is None:
            prompt_ids = self._relay.template.prompt(
                request.messages, request.tools, request.template_options
            )
        if self.prompt is None:
            self.prompt = prompt_ids
        room = self._relay.config.policy.context_length - len(prompt_ids)
        if room < 1:
            raise BadResponse(f"the prompt has {len(prompt_ids)} ids: no room for a completion")
        asked = {"prompt_ids": prompt_ids, "max_tokens": min(request.sampling.max_tokens, room)}
        completion = self._relay.completion(await self._ask(asked))
        return ChatAnswer(model=self.model, prompt_token_ids=prompt_ids, completions=(completion,))


class Relay:
    """Plays and scores examples of one configuration. Raises InputError, ConfigError."""

    def __init__(self, config: Config) -> None:
        # No run records these choices: the policy is the parent's.
        config = config.model_copy(update={"policy": policy_as_begun(config.policy)})
        self.config = config
        self._environment = environment_of(config)
        self.template = TemplateBridge(config.policy)
        self._tokenizer = PolicyTokenizer(config.policy)
        self._ends = self._tokenizer.end_ids

    async def play(self, example: Example, ask: Ask) -> dict[str, Any]:
        """Play an episode and score it; tokens, mask, logprobs and reward for a trainer.

        An episode that failed has one token that is not trained on, a reward of 0, and its fault.
        """
        client, config = RelayClient(self, ask), self.config
        sampling = sampling_for(config.sampling, config.environment, example.environment)
        request = GroupRequest(
            group_id=MODEL, example=example, size=1, sampling=Sampling(**sampling.model_dump())
        )
        part = part_for(self._environment, config.environment, example)
        bridge = None if part.config.chat_template_options else self.template
        driver = episode_driver(config, part, client, _POLICY, bridge, segments=False)
        maker = RolloutMaker(_POLICY, request, datetime.now(UTC))
        try:
            (trajectory,) = await driver.play_group(request)
            scorer = scorer_for(part.environment, part.config)
            (score,) = await score_group(scorer, example, [trajectory])
            rollout = maker.sampled(0, trajectory, score)
        except BadResponse as error:
            rollout = maker.failed(0, error)
        if rollout.reward is None or not len(rollout.token_ids):
            prompt = client.prompt
            return {
                "prompt_ids": self.template.prompt(example.messages) if prompt is None else prompt,
                "response_ids": [self._ends[0]],
                "response_mask": [0],
                "response_logprobs": [0.0],
                "reward": 0.0,
                "turns": len(example.messages),
                "finish_reason": "error",
                "fault": rollout.error or rollout.status,
            }
        (sample,) = samples_of(rollout)
        return {
            "prompt_ids": sample.prompt_ids,
            "response_ids": sample.response_ids,
            "response_mask": sample.mask,
            "response_logprobs": sample.logprobs,
            "reward": rollout.reward,
            "turns": len(sample.prompt) + len(sample.response),
            "finish_reason": rollout.finish_reason,
            "fault": None,
        }

    async def score(self, example: Example, completion: str) -> dict[str, Any]:
        """The reward of a completion, and its components; 0 and the fault where scoring fails."""
        part = part_for(self._environment, self.config.environment, example)
        (score,) = await scorer_for(part.environment, part.config).score(example, [completion])
        if isinstance(score, MarinRLError):
            return {"reward": 0.0, "components": [], "fault": str(score)}
        return {
            "reward": reward_of(score),
            "components": [asdict(component) for component in score],
            "fault": None,
        }

    def completion(self, sampled: Mapping[str, Any]) -> Completion:
        """The parent's tokens as a completion; one that no end token ends was cut.

        Raises BadResponse.
        """
        ids = np.array(sampled["token_ids"], np.int32)
        if not len(ids):
            raise BadResponse("expected a completion with tokens, found none")
        given = sampled.get("logprobs")
        logprobs = np.zeros(len(ids), np.float32) if given is None else np.array(given, np.float32)
        if len(logprobs) != len(ids) or not fit_logprobs(logprobs).all():
            raise BadResponse(
                f"expected a finite logprob for each of {len(ids)} tokens, found {len(logprobs)}"
            )
        ended = int(ids[-1]) in self._ends
        return Completion(
            text=self._tokenizer.decoded((ids[:-1] if ended else ids).tolist()),
            token_ids=ids,
            logprobs=np.minimum(logprobs, 0),
            finish_reason="stop" if ended else "length",
        )


class _Server:
    """The calls of one parent, which interleave."""

    def __init__(self, relay: Relay, answers: BinaryIO) -> None:
        self._relay, self._answers = relay, answers
        self._sampled: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, requests: BinaryIO) -> None:
        """Answer calls until the parent closes its end."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        while line := await reader.readline():
            record = orjson.loads(line)
            if "sampled" in record:
                self._sampled.pop(record["id"]).set_result(record["sampled"])
                continue
            task = loop.create_task(self._answer(record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, record: Mapping[str, Any]) -> None:
        number = record["id"]

        async def ask(wanted: dict[str, Any]) -> Mapping[str, Any]:
            future = self._sampled[number] = asyncio.get_running_loop().create_future()
            _write(self._answers, {"id": number, "sample": wanted})
            return await future

        try:
            example = _EXAMPLE.validate_python(record["example"])
            if record["call"] == "play":
                answer = await self._relay.play(example, ask)
            else:
                answer = await self._relay.score(example, record["completion"])
        except Exception as error:  # noqa: BLE001 - the parent raises it
            _write(self._answers, {"id": number, "error": f"{type(error).__name__}: {error}"})
        else:
            _write(self._answers, {"id": number, "answer": answer})


def _write(answers: BinaryIO, record: Mapping[str, Any]) -> None:
    left = memoryview(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    while left:
        left = left[answers.write(left) :]


def main() -> None:
    """Serve one parent: the first line that it reads is {"ready": true} or {"unfit": TEXT}."""
    requests, answers = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what an environment prints is no answer
    try:
        relay = Relay(load_config(sys.argv[1]))
    except MarinRLError as error:
        _write(answers, {"unfit": str(error)})
        return
    _write(answers, {"ready": True})
    with suppress(KeyboardInterrupt):
        asyncio.run(_Server(relay, answers).serve(requests))


if __name__ == "__main__":
    main()
