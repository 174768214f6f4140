"""Episodes of NeMo Gym's protocol, against a small server of it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.http_threads import running_application
from support.scripted_policies import call, record, write_tokenizer
from support.templates import QWEN

from marin_rl.config import Config, load_config
from marin_rl.environments.checks import make_environment
from marin_rl.errors import InputError
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.types import Message

COOKIE = "StatefulCounterResourcesServer"


@dataclass
class CounterServer:
    """The server's sessions, and what was posted to be scored."""

    routes: tuple[str, ...] = ("/seed_session", "/verify", "/increment_counter", "/get_counter")
    counters: dict[str, int] = field(default_factory=dict[str, int])
    verified: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    url: str = ""

    async def seed(self, request: Request) -> Response:
        """Open the session of the cookie that the answer sets."""
        body = await request.json()
        session = str(uuid4())
        self.counters[session] = body["initial_count"]
        answer = JSONResponse({})
        answer.set_cookie(COOKIE, session)
        return answer

    async def increment(self, request: Request) -> Response:
        """A tool; the answer to a wrong body is FastAPI's."""
        body = await request.json()
        if not isinstance(body.get("count"), int):
            return JSONResponse({"detail": "count: expected an integer"}, status_code=422)
        self.counters[request.cookies[COOKIE]] += body["count"]
        return JSONResponse({"success": True})

    async def get(self, request: Request) -> Response:
        """A tool without arguments."""
        return JSONResponse({"count": self.counters[request.cookies[COOKIE]]})

    async def verify(self, request: Request) -> Response:
        """The whole body again, with the reward."""
        body = await request.json()
        self.verified.append(body)
        right = self.counters[request.cookies[COOKIE]] == body["expected_count"]
        return JSONResponse({**body, "reward": float(right), "reached": right})

    async def described(self, request: Request) -> Response:
        """FastAPI's description."""
        info = {"title": "FastAPI", "version": "0.1.0"}
        return JSONResponse({"info": info, "paths": {route: {} for route in self.routes}})


@contextmanager
def counter_server(**options: Any) -> Iterator[CounterServer]:
    """A running server, which ends with the block."""
    made = CounterServer(**options)
    handlers = (made.seed, made.verify, made.increment, made.get)
    routes = [
        Route(path, handler, methods=["POST"])
        for path, handler in zip(made.routes, handlers, strict=False)
    ]
    application = Starlette(routes=[*routes, Route("/openapi.json", made.described)])
    with running_application(application) as made.url:
        yield made


COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
TOOLS = [
    {"type": "function", "name": "increment_counter", "description": "Add.", "parameters": COUNT},
    {"type": "function", "name": "get_counter", "parameters": {"type": "object", "properties": {}}},
]
MODEL = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 32}


def row(first: int, **fields: Any) -> dict[str, Any]:
    """A row as Gym's data files have it: count on by three."""
    question = {"role": "user", "content": f"{first}: add 3"}
    told = {"role": "developer", "content": "Count."}
    parameters = {"input": [told, question], "tools": TOOLS, **fields}
    return {
        "initial_count": first,
        "expected_count": first + 3,
        "responses_create_params": parameters,
    }


def configuration(folder: Path, url: str, rows: Sequence[Any], *, trained: bool = False) -> Config:
    """A run in a server's environment, with rows of its data file; one that may be trained."""
    write_tokenizer(folder / "tokenizer", QWEN, "<|im_end|>")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {
        "run_id": "gym",
        "rounds": 1,
        "root": str(folder / ("trained" if trained else "runs")),
        "policy": {
            "tokenizer": str(folder / "tokenizer"),
            "context_length": 2048,
            **({"init": "random", "model": MODEL} if trained else {}),
        },
        "environment": {
            "name": "nemo_gym",
            "turns_max": 3,
            "options": {"url": url, "path": str(folder / "rows.jsonl")},
        },
        "batching": {"length_buckets": [2048]},
        "rollouts": {"groups_per_round": 2, "group_size": 4, "shards_per_round": 1},
        "sampling": {"max_tokens": 64},
        "evaluation": {"examples": 1},
        "training": {"microbatch_sequences": 2},
    }
    (folder / "gym.yaml").write_text(yaml.safe_dump(values))
    return load_config(folder / "gym.yaml")


def script(messages: Sequence[Message], member: int) -> str:
    """Ways of four members, which their first turns tell apart."""
    said = [message for message in messages if message.role == "assistant"]
    first = (
        call("increment_counter", count=3),
        call("increment_counter", count="three"),
        "done",
        call("get_counter"),
    )
    if not said:
        return first[member]
    made = said[0].tool_calls[0]
    if made.name == "get_counter":
        return call("get_counter")  # until its turns are over
    return "done" if made.arguments == '{"count": 3}' else call("reset_counter")


@pytest.mark.slow
def test_sessions_tools_and_scores_are_the_servers(tmp_path: Path) -> None:
    with counter_server() as server:
        config = configuration(tmp_path, server.url, [row(n) for n in range(4)])
        recorded, groups = record(config, script)
        replays = replay_rollouts(recorded, 0)
    assert replays.equal, replays
    for group in groups:
        right, wrong, lazy, looking = group.rollouts
        assert [(turn.role, turn.content) for turn in right.turns[2:]][1:] == [
            ("tool", '{"success":true}'),
            ("assistant", "done"),
        ]
        assert (right.reward, right.finish_reason) == (1.0, "stop")
        assert "count: expected an integer" in wrong.turns[3].content
        assert "no tool reset_counter: there are increment_counter" in wrong.turns[5].content
        assert (wrong.reward, lazy.reward) == (0.0, 0.0)
        assert looking.reward == 0.0
        assert [t.role for t in looking.turns[2:]] == ["assistant", "tool"] * 2 + ["assistant"]
    check_responses(server)


def check_responses(server: CounterServer) -> None:
    """Each session was scored once, on the response that an agent of Gym would send."""
    assert len(server.verified) == len(server.counters) == 16  # played, and replayed
    bodies = {json.dumps(body["response"]["output"]) for body in server.verified}
    kinds = [[item["type"] for item in json.loads(body)] for body in bodies]
    assert sorted(kinds, key=len)[0] == ["message"]
    assert ["function_call", "function_call_output", "message"] in kinds
    (first, *_) = server.verified
    assert first["response"]["object"] == "response"
    assert first["responses_create_params"]["tools"] == TOOLS


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"messages": []}] * 2, "expected a row with responses_create_params"),
        ([row(0), row(0, input=[{"role": "user", "content": [{"type": "input_image"}]}])],
         r"line 2.*expected messages of text"),
        ([row(0), row(0, tools=[{"type": "mcp"}])], "expected functions, found"),
        ([row(0)], "expected two rows or more"),
    ],
)  # fmt: skip
def test_rows_that_a_policy_of_texts_cannot_play_are_refused(tmp_path, rows, expected):
    config = configuration(tmp_path, "http://127.0.0.1:9", rows)
    with pytest.raises(InputError, match=expected):
        make_environment(config.environment)


def test_a_server_that_is_away_or_another_is_refused_before_anything_starts(tmp_path):
    rows = [row(n) for n in range(4)]
    config = configuration(tmp_path, "http://127.0.0.1:9", rows)
    with pytest.raises(InputError, match="no resources server of NeMo Gym answers at"):
        make_environment(config.environment)
    with counter_server(routes=("/seed_session",)) as server:
        config = configuration(tmp_path, server.url, rows)
        with pytest.raises(InputError, match=r"has no route /verify.*found /seed_session"):
            make_environment(config.environment)
