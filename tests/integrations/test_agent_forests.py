"""Agents that branch: seeded histories of a session against the forest that the agent drew.

A program of its own kind draws a forest: it extends, goes back, begins anew, rewrites, asks side
by side and in three APIs, over the session's socket. It knows which answer each call goes on from,
so that the ids of each prompt are known without any matching.
"""

import asyncio
import io
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from integrations.test_agent import configured
from integrations.test_agent_clients import model_that_says
from rich.console import Console
from support.run_factories import audit_round
from support.scripted_policies import ScriptedClient, served
from support.servers import serving

from marin_rl.analysis.dialogues import dialogue, rollout_named
from marin_rl.batching.build import build_round
from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.config import Config, EngineConfig
from marin_rl.environments.episode import function_tool
from marin_rl.inference.client.answers import Completion
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.integrations.agent import SOCKET, Agent
from marin_rl.integrations.agent_gateway import Session
from marin_rl.integrations.otel import resource_spans
from marin_rl.isolated.sandbox import SandboxResult
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.assemble import samples_of
from marin_rl.rollouts.generate import SamplingJob, sample_groups
from marin_rl.rollouts.trajectories import GroupRequest
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import commit_shard, seal_round
from marin_rl.tokenizers import tokenizer_for
from marin_rl.types import Example, Message, Rollout, RolloutGroup, Sampling, ServedPolicy

CALLS_MAX = 14
TOOLS = [function_tool("add", "two numbers", {"type": "object", "properties": {}})]
WORDS = ("go on", "why", "again", "so")
PAD = 0  # the tokenizer's padding, which texts leave out


@dataclass(slots=True)
class Call:
    """A call as the agent means it; `parent` is the answer that it goes on from."""

    messages: list[dict[str, str]]
    tools: list[Any]
    parent: "Call | None" = None
    answer: str = ""


@dataclass(slots=True)
class Draw:
    """The forest of one session, drawn by a seed; `calls` are answered ones."""

    seed: str
    calls: list[Call] = field(default_factory=list[Call])

    def run(self, post: Any) -> None:
        rng = random.Random(self.seed)
        while len(self.calls) < rng.randint(2, CALLS_MAX):
            together = [self.drawn(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
            apis = [rng.choice(["chat", "responses", "messages"]) for _ in together]
            with ThreadPoolExecutor(len(together)) as threads:
                answers = list(threads.map(post, together, apis))
            for call, answer in zip(together, answers, strict=True):
                call.answer = answer
            # the same call twice at once is one, whose client tried again
            self.calls += {call.answer: call for call in together}.values()

    def drawn(self, rng: random.Random) -> Call:
        word = {"role": "user", "content": rng.choice(WORDS)}
        kind = rng.choice(["extend"] * 4 + ["back"] * 3 + ["begin", "rewrite", "tools", "compact"])
        if not self.calls or kind == "begin":
            system = {"role": "system", "content": rng.choice(["be brief", "name the task"])}
            return Call(
                [system, word] if rng.random() < 0.5 else [word], TOOLS[: rng.randint(0, 1)]
            )
        if kind == "compact":
            return Call([{"role": "user", "content": f"so far: {self.calls[-1].answer}"}], [])
        chosen = self.calls[-1] if kind == "extend" else rng.choice(self.calls)
        said = [*chosen.messages, {"role": "assistant", "content": chosen.answer}, word]
        if kind == "tools":
            return Call(said, TOOLS[: not chosen.tools])
        if kind == "rewrite":
            place = rng.choice([n for n, m in enumerate(said) if m["role"] == "assistant"])
            said[place] = {"role": "assistant", "content": f"never said {rng.random()}"}
            return Call(said, chosen.tools)
        return Call(said, chosen.tools, parent=chosen)


def body_of(call: Call, api: str) -> tuple[str, dict[str, Any]]:
    """The path and the body of a call, with the freedoms that clients take."""
    functions = [tool["function"] for tool in call.tools]
    if api == "chat":
        return "/v1/chat/completions", {"messages": call.messages, "tools": call.tools}
    if api == "responses":
        tools = [{"type": "function", **each} for each in functions]
        return "/v1/responses", {"input": call.messages, "tools": tools}
    system = [m["content"] for m in call.messages if m["role"] == "system"]
    said = [m for m in call.messages if m["role"] != "system"]
    if call.parent is not None:  # what is rendered is rendered as it is sent
        spaced = {m["content"]: f" {m['content']}\n" for m in said if m["role"] == "assistant"}
        said = [m | {"content": spaced.get(m["content"], m["content"])} for m in said]
    tools = [{**f, "input_schema": f["parameters"]} for f in functions]
    return "/v1/messages", {"max_tokens": 9, "system": system[0] if system else "",
                            "messages": said, "tools": tools}  # fmt: skip


def text_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    parts = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return parts[0]["text"]


class Drawing(Agent):
    """The environment with an agent in this process."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.environment)
        self.workers = 0
        self.load_scorer()
        self.version, self.drawn = "test", list[Draw]()
        self.numbers = itertools.count()

    def run(self, example: Example, session: Session, workspace: Path) -> SandboxResult:
        draw = Draw(f"{example.example_id} {next(self.numbers)}")
        transport = httpx.HTTPTransport(uds=str(workspace / SOCKET))
        headers = {"x-api-key": session.key}
        with httpx.Client(transport=transport, base_url="http://agent", headers=headers) as client:

            def post(call: Call, api: str) -> str:
                path, body = body_of(call, api)
                answer = client.post(path, json={"model": "any", **body}, timeout=60)
                assert answer.status_code == 200, answer.text
                return text_of(answer.json())

            draw.run(post)
        self.drawn.append(draw)
        printed = draw.seed.encode()
        return SandboxResult(exit_status=0, limit=None, stdout=printed, stderr=b"", wall_s=0.0)


class Says(ScriptedClient):
    """A policy whose answers are all different, of ids that no tokenizer makes of their texts."""

    def __init__(self, config: Config) -> None:
        self.numbers, self.ids = itertools.count(), dict[str, list[int]]()
        super().__init__(config, lambda *_: f"answer {next(self.numbers)}.")

    def _sampled(self, text: str) -> Completion:
        sampled = super()._sampled(text)
        ids = np.insert(sampled.token_ids, len(text) // 2, PAD).astype(np.int32)
        self.ids[text] = ids.tolist()
        logprobs = np.full(len(ids), -1.0, np.float32)
        return Completion(text=text, token_ids=ids, logprobs=logprobs, finish_reason="stop")

    def prompt_of(self, call: Call) -> list[int]:
        """The ids of a prompt: those of its parent's, what was sampled, and what is new."""
        template = ChatTemplate.of(self._tokenizer, tools=bool(call.tools))
        rendered = template.render(
            Conversation(messages=call.messages, tools=call.tools or None, opening=True)
        ).text
        if (parent := call.parent) is None:
            return self._encoded(rendered)
        _, _, new = rendered.rpartition(f"{parent.answer}<|im_end|>")
        return [*self.prompt_of(parent), *self.ids[parent.answer], *self._encoded(new)]


def check(rollout: Rollout, draw: Draw, policy: Says) -> None:
    assert (rollout.status, rollout.finish_reason) == ("complete", "stop"), rollout.error
    assert rollout.reward == len(draw.seed)
    lengths = rollout.segment_lengths or (len(rollout.token_ids),)
    starts = np.cumsum([0, *lengths])
    seen = Counter[str]()
    calls = {call.answer: call for call in draw.calls}
    trained = np.zeros(len(rollout.token_ids), int)
    asked = defaultdict[tuple[int, ...], dict[str, slice]](dict)  # of each prompt, its answers
    for turn in rollout.turns:
        if turn.inference_metadata is None:
            continue
        assert turn.start is not None
        assert turn.end is not None
        seen[turn.content] += 1
        begin = starts[starts <= turn.start].max()
        ids = rollout.token_ids.tolist()
        assert ids[begin : turn.start] == policy.prompt_of(calls[turn.content])
        assert ids[turn.start : turn.end] == policy.ids[turn.content]
        asked[tuple(ids[begin : turn.start])][turn.content] = slice(turn.start, turn.end)
    assert seen == Counter([*calls])
    gone_on = {call.parent.answer for call in draw.calls if call.parent is not None}
    for said in asked.values():
        for answer in gone_on.intersection(said) or [*said][-1:]:
            trained[said[answer]] += 1
    assert len(calls) == len(draw.calls)
    assert rollout.loss_mask.tolist() == trained.tolist()
    spans = (span for said in asked.values() for span in said.values())
    assert rollout.n_completion_tokens == sum(span.stop - span.start for span in spans)
    for sample in samples_of(rollout, begins_anew=True):
        said = next(turn.content for turn in sample.response if turn.role == "assistant")
        wanted = [(m["role"], m["content"]) for m in calls[said].messages]
        assert [(turn.role, turn.content.strip()) for turn in sample.prompt] == wanted
    # a turn's first continuation is in its segment, and every other one is a segment, linked to it
    links = Counter(links_of(rollout))
    children = Counter(id(call.parent) for call in draw.calls if call.parent is not None)
    roots = sum(call.parent is None for call in draw.calls)
    assert len(lengths) == roots + sum(count - 1 for count in children.values())
    known = {id(call): call.answer for call in draw.calls}
    assert links == Counter({known[each]: n - 1 for each, n in children.items() if n > 1})


def links_of(rollout: Rollout) -> Iterator[str]:
    """The answers that segments go back to, as the trace of a rollout has them."""
    example = Example(
        environment="agent", environment_version="", example_id="", split="train", seed=0,
        messages=(),
    )  # fmt: skip
    group = RolloutGroup(group_id="g", example=example, rollouts=(rollout,), group_size=1)
    (resource,) = resource_spans("run", 0, group, rollout)["resourceSpans"]
    spans = {span["spanId"]: span for span in resource["scopeSpans"][0]["spans"]}
    assert len(spans) == 1 + sum(turn.inference_metadata is not None for turn in rollout.turns)
    for span in spans.values():
        for link in span.get("links", ()):
            facts = {each["key"]: each["value"] for each in spans[link["spanId"]]["attributes"]}
            said = json.loads(facts["gen_ai.output.messages"]["stringValue"])
            yield said[0]["content"]


def drawn_groups(
    config: Config, seeds: Sequence[int], client: PolicyClient, policy: ServedPolicy
) -> tuple[Drawing, list[RolloutGroup]]:
    environment = Drawing(config)
    requests = [
        GroupRequest(
            group_id=f"round-00000/group-{number:05d}",
            example=Example(
                environment="agent",
                environment_version="test",
                example_id=f"forest {seed}",
                split="train",
                seed=seed,
                messages=(Message(role="user", content="draw"),),
                answer="x",
                metadata={},
            ),
            size=2,
            sampling=Sampling(seed=seed),
        )
        for number, seed in enumerate(seeds)
    ]
    progress = ProgressEvent(run_id=config.run_id, stage="generate", round=0)
    job = SamplingJob(config=config, policy=policy, environment=environment, progress=progress)
    return environment, asyncio.run(sample_groups(job, requests, client))


SLOW = pytest.param(range(8, 500), marks=pytest.mark.slow)


@pytest.mark.parametrize("seeds", [range(8), SLOW])
def test_every_call_is_trained_once_in_the_context_that_its_agent_drew(tmp_path, seeds):
    config = configured(tmp_path, "", settings={"turns_max": 4 * CALLS_MAX})
    policy = Says(config)
    environment, groups = drawn_groups(config, seeds, policy, served())
    draws = {draw.seed: draw for draw in environment.drawn}
    known = {answer.answer: draw for draw in draws.values() for answer in draw.calls}
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.error is None
            first = next(turn for turn in rollout.turns if turn.inference_metadata is not None)
            draw = known[first.content]
            try:
                check(rollout, draw, policy)
            except AssertionError as error:
                error.add_note(f"the forest of seed {draw.seed!r}")
                raise
    assert len(draws) == 2 * len(seeds)
    # a round of them is stored, made into batches and audited
    run = Run.create_or_open(config)
    ref = commit_shard(run, 0, 0, groups[:8], "f", served())
    sealed = seal_round(run, 0, [ref], [served().checkpoint])
    build_round(run, 0, sealed)
    assert audit_round(run, 0).offences == {}
    branching = [each for group in groups[:8] for each in group.rollouts if any(links_of(each))]
    record = rollout_named(run, branching[0].rollout_id)
    segments = record["segments"]
    assert sum(segment["n_turns"] for segment in segments) == record["n_turns"]
    assert sum(segment["n_sampled"] for segment in segments) == record["n_completion_tokens"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(dialogue(record))
    shown = console.export_text()
    assert all(f"── {segment['about']}" in shown for segment in segments)
    assert "first call" in shown
    assert "goes back to turn" in shown


@pytest.mark.slow
def test_continued_histories_are_not_computed_again(tmp_path: Path) -> None:
    """The embedded engine computes what a session's calls add, also where they go back."""
    config = configured(tmp_path, "", settings={"turns_max": 4 * CALLS_MAX})
    tokenizer = tokenizer_for(config.policy)
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    said = tokenizer.encode("done<|im_end|>", add_special_tokens=False)
    model = model_that_says([opening[-1], *said], len(tokenizer), config.policy.context_length)
    settings = EngineConfig(slots=16, chunk_steps=4, prefill_rows=4, prefix_cache=True)
    identity = {"weight_version": 0, "parameters_digest": served().parameters_digest}
    with serving(
        engine=settings, tokenizer=tokenizer, model=model, context_length=4096, **identity
    ) as server:
        policy = replace(served(), endpoints=(server.base_url,))
        before = server.engine.stats.snapshot()
        client = PolicyClient(endpoints=policy.endpoints, model=policy.model)
        _, groups = drawn_groups(config, range(3), client, policy)
        after = server.engine.stats
    if not after.continued_prompts:
        pytest.skip("on this machine prefill and decode have other bits: nothing is kept")
    new = 0
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert rollout.error is None
        contexts, sampled = set[bytes](), set[bytes]()
        borders = np.cumsum(rollout.segment_lengths or ())[:-1].astype(int)
        own = np.zeros_like(rollout.loss_mask)
        for turn in rollout.turns:
            if turn.inference_metadata is not None:
                own[turn.start : turn.end] = 1
        masks = np.split(own, borders)
        for ids, mask in zip(np.split(rollout.token_ids, borders), masks, strict=True):
            prefixes = [ids[: end + 1].tobytes() for end in range(len(ids))]
            contexts.update(prefixes)
            sampled.update(prefix for prefix, said in zip(prefixes, mask, strict=True) if said)
        # an answer's last token is computed with what follows it
        calls = sum(turn.inference_metadata is not None for turn in rollout.turns)
        new += len(contexts - sampled) + calls
    prefilled = after.prefilled_tokens - before.prefilled_tokens
    print(f"{prefilled} tokens computed, {new} new ones")
    assert prefilled <= 1.1 * new
    assert after.cached_tokens - before.cached_tokens > new
