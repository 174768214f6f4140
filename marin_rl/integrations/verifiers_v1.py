"""Environment servers of verifiers v1: `environment.name: verifiers_v1`.

A server of verifiers plays a task with the policy that it is given the address of, scores it, and
returns the episode with the ids and logprobs that were sampled. Its wire (ZMQ, msgpack) is spoken
by verifiers itself, in an interpreter that has it and the taskset.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator

from marin_rl.config import EnvironmentConfig, OneOrMany
from marin_rl.environments.episode import FinishedMessage, FinishedRollout, PolicyAddress
from marin_rl.environments.registry import register
from marin_rl.errors import EndpointUnavailable, RewardFault
from marin_rl.integrations.hosted import Library, RowsEnvironment, RowsOptions
from marin_rl.types import BEYOND_OPENAI, Example, Message, Sampling, Split, ToolCall

_GONE = re.compile(r"ServerGone: ([^\n]*)")


class VerifiersV1Options(RowsOptions):
    """Options of `verifiers_v1`."""

    taskset: dict[str, Any] = Field(default={}, description="settings of the taskset `id`")
    address: Annotated[tuple[str, ...], OneOrMany] = Field(
        default=("tcp://127.0.0.1:5000",),
        min_length=1,
        description="ZMQ address of an environment server of the same taskset, or a list of such",
    )
    agent: str | None = Field(
        default=None,
        description="name of the agent that is trained, where an episode has several that are",
    )
    renderer: dict[str, Any] | None = Field(
        default=None,
        description="configuration of verifiers' renderer, such as {name: qwen3}; null: chosen by "
        "the name of the tokenizer's folder",
    )
    tasks_max: int = Field(
        default=100_000, ge=2, description="tasks that are loaded, of a taskset without an end"
    )
    connect_timeout_s: float = Field(
        default=30.0, gt=0, le=60, description="time that a server has to answer at the start"
    )

    @field_validator("address")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(address.startswith(("tcp://", "ipc://")) for address in value):
            raise ValueError("expected tcp://HOST:PORT or ipc://PATH, or a list of such")
        return value


@register("verifiers_v1", VerifiersV1Options, tools=True, package="verifiers", server=True)
class VerifiersV1(RowsEnvironment):
    """Rewards a rollout as the server does."""

    name = "verifiers_v1"
    library = Library("verifiers", ">=0.3,<0.4", "verifiers_v1_host.py")
    options_kind = VerifiersV1Options
    options: VerifiersV1Options
    replayable = False  # the server samples

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self.workers = 0  # the server has the processes

    def example(self, seed: int, index: int, split: Split) -> Example:
        row = self.row(seed, index, split)
        return self.make_example(
            _prompt(row, self.options.id),
            seed=seed,
            index=index,
            split=split,
            metadata={"task": row},
        )

    async def rollouts(
        self, example: Example, policy: PolicyAddress
    ) -> Sequence[FinishedRollout | RewardFault]:
        numbered = enumerate(policy.sampling)
        return await asyncio.gather(*(self._play(example, policy, n, s) for n, s in numbered))

    async def _play(
        self, example: Example, policy: PolicyAddress, number: int, sampling: Sampling
    ) -> FinishedRollout | RewardFault:
        always = ("temperature", "top_p", "max_tokens", "seed")
        fields = {name: getattr(sampling, name) for name in (*always, *BEYOND_OPENAI, "stop")}
        address = {
            "endpoint": policy.endpoints[number % len(policy.endpoints)],
            "model": policy.model,
            "tokenizer": policy.tokenizer,
            "api_key_variable": policy.api_key_variable,
            "sampling": {n: value for n, value in fields.items() if n in always or value},
        }
        try:
            row, number = example.metadata["task"], example.seed + number
            episode = await self.interpreter.answer("play", row=row, policy=address, number=number)
            return self._rollout(episode)
        except RewardFault as error:
            if gone := _GONE.match(str(error)):
                raise EndpointUnavailable(gone[1]) from None
            return error

    def _rollout(self, episode: Mapping[str, Any]) -> FinishedRollout:
        """The trace of the agent that is trained. Raises RewardFault."""
        traces = [t for t in episode["traces"] if t["trainable"]]
        if self.options.agent is not None:
            traces = [t for t in traces if t["agent"] == self.options.agent]
        if not episode["ok"] or not all(trace["ok"] for trace in traces):
            errors = [*episode["errors"], *(e for trace in traces for e in trace["errors"])]
            raise RewardFault(f"the episode failed: {'; '.join(errors) or 'no reason given'}")
        if len(traces) != 1:
            names = ", ".join(trace["agent"] for trace in traces) or "none"
            raise RewardFault(
                f"the episode has {len(traces)} traces to train on ({names}): expected one; name "
                "the agent in environment.options.agent"
            )
        (trace,) = traces
        rewards = {name: r["score"] * r["weight"] for name, r in trace["rewards"].items() if r}
        if not rewards:
            raise RewardFault("the trace has no reward: expected a task with @reward")
        info = {"metrics": trace["metrics"], "stop_condition": trace["stop_condition"]}
        return FinishedRollout(
            messages=tuple(_messages(trace["nodes"])),
            reward=rewards,
            truncated=trace["truncated"],
            info=info,
        )


def _prompt(row: Mapping[str, Any], name: str) -> list[Message]:
    """Messages of a task, for people: the server makes the prompt."""
    system, prompt = row.get("system_prompt"), row.get("prompt") or name
    messages = [Message(role="system", content=system)] if system else []
    if isinstance(prompt, str):
        return [*messages, Message(role="user", content=prompt)]
    return [*messages, *(Message(role=m["role"], content=_text(m["content"])) for m in prompt)]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _messages(nodes: Sequence[Mapping[str, Any]]) -> Iterator[FinishedMessage]:
    """Messages of every branch; shared nodes are sampled once. RewardFault for ids out of order."""
    inner = {node["parent"] for node in nodes}
    names: dict[str, str] = {}
    trained: set[int] = set()
    for leaf in [n for n in range(len(nodes)) if n not in inner]:
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = nodes[at]["parent"]
        path.reverse()
        if not any(nodes[n]["sampled"] and n not in trained for n in path):
            continue
        for place, number in enumerate(path):
            node = nodes[number]
            names |= {call["id"]: call["name"] for call in node["tool_calls"]}
            mask, logprobs = node["mask"], node["logprobs"] if number not in trained else []
            if logprobs and not all(mask[len(mask) - len(logprobs) :]):
                raise RewardFault("a message has ids that were not sampled after those that were")
            if node["sampled"]:
                trained.add(number)
            yield FinishedMessage(
                role=node["role"],
                content=node["content"],
                token_ids=node["token_ids"],
                logprobs=logprobs,
                tool_calls=tuple(ToolCall(**call) for call in node["tool_calls"]),
                tool_call_id=node["tool_call_id"],
                name=node["name"] or names.get(node["tool_call_id"] or ""),
                begins_segment=place == 0,
            )
