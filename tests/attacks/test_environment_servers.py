"""Servers of environments that answer wrongly, slowly, without end, or from elsewhere."""

import asyncio
import gzip
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from integrations.openenv_server import openenv_server

from marin_rl.config import EnvironmentConfig, parse_config
from marin_rl.doctor.policy import tools
from marin_rl.environments.episode_pool import PlayedEpisode, open_episodes
from marin_rl.environments.http_answers import HttpAnswer, UnfitAnswer, ask, ask_once
from marin_rl.environments.registry import construct
from marin_rl.errors import EndpointUnavailable, EnvironmentTimeout, InputError, RewardFault
from marin_rl.integrations.openenv_session import server_facts
from marin_rl.isolated.worker import charged, uncharged
from marin_rl.types import ToolCall, Turn

LIMIT_S = 0.5
BYTES_MAX = 2**20
Write = Callable[[Callable[[bytes], object]], None]


class Server(ThreadingHTTPServer):
    """Answers each path with bytes as they stand, and takes down what it is asked."""

    daemon_threads = True

    def __init__(self, answers: dict[str, Write]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.heard, self.over = answers, list[str](), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients leave: that is what they are tested for."""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.heard.append(self.path)
        self.close_connection = True
        self.server.answers[self.path](self.wfile.write)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(**answers: Write) -> Iterator[Server]:
    """A server of paths whose names are those of the answers."""
    with Server({f"/{name}": write for name, write in answers.items()}) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def plain(body: bytes, status: str = "200 OK", *headers: str) -> Write:
    """A whole answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return lambda write: write("\r\n".join([*lines, "", ""]).encode() + body)


def said(value: Any) -> Write:
    return plain(value if isinstance(value, bytes) else json.dumps(value).encode())


def endless(piece: bytes, pause_s: float, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Write:
    """An answer that has no end, piece by piece."""

    def answer(write: Callable[[bytes], object]) -> None:
        write(head)
        try:
            while True:
                write(piece)
                time.sleep(pause_s)
        except OSError:
            return

    return answer


BOMB = gzip.compress(bytes(60 * BYTES_MAX))
REDIRECT = plain(b"", "302 Found", "Location: /secret")
HOSTILE: dict[str, tuple[Write, str]] = {
    "drip": (endless(b" ", 0.05), "no whole answer in 0.5 s"),
    "headers": (endless(b"a: b\r\n", 0.05, b"HTTP/1.1 200 OK\r\n"), "no whole answer in 0.5 s"),
    "silence": (lambda write: time.sleep(1.5), "no whole answer in 0.5 s|timed out"),
    "flood": (endless(bytes(2**16), 0), f"more than {BYTES_MAX} bytes"),
    "bomb": (plain(BOMB, "200 OK", "Content-Encoding: gzip"), f"more than {BYTES_MAX} bytes"),
    "damaged": (plain(b"no gzip", "200 OK", "Content-Encoding: gzip"), "no gzip"),
    "cut": (plain(BOMB[:40], "200 OK", "Content-Encoding: gzip"), "a part of a body in gzip"),
    "coding": (plain(b"{}", "200 OK", "Content-Encoding: br"), "answers in 'br'"),
    "redirect": (REDIRECT, "answers 302, a redirect, and none is followed"),
}


def asked_async(url: str) -> HttpAnswer:
    async def work() -> HttpAnswer:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
            return await ask(client, "GET", url, timeout_s=LIMIT_S, bytes_max=BYTES_MAX)

    return asyncio.run(work())


def asked_once(url: str) -> HttpAnswer:
    return ask_once("GET", url, timeout_s=LIMIT_S, bytes_max=BYTES_MAX)


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_answer_takes_more_than_its_time_and_its_bytes(kind: str) -> None:
    write, words = HOSTILE[kind]
    with serving(answer=write) as server:
        for way in (asked_async, asked_once):
            tracemalloc.start()
            try:
                with pytest.raises((httpx.ReadTimeout, UnfitAnswer), match=words):
                    way(f"{server.url}/answer")
                assert tracemalloc.get_traced_memory()[1] < 20 * BYTES_MAX
            finally:
                tracemalloc.stop()
        assert "/secret" not in server.heard


def test_an_ordinary_answer_may_be_compressed() -> None:
    body = gzip.compress(b'{"a": 1}')
    with serving(answer=plain(body, "200 OK", "Content-Encoding: gzip")) as server:
        for way in (asked_async, asked_once):
            assert way(f"{server.url}/answer").object() == {"a": 1}


# ---------------------------------------------------------------- NeMo Gym

ROUTES = {"/seed_session": {}, "/verify": {}, "/add": {}}
ROW = {"responses_create_params": {"input": "add", "tools": [{"type": "function", "name": "add"}]}}


def gym(folder: Path, url: str) -> tuple[EnvironmentConfig, Callable[[], PlayedEpisode]]:
    """The environment of a server, and how an episode of it is opened."""
    (folder / "rows.jsonl").write_text("\n".join([json.dumps(ROW)] * 2))
    options = {"url": url, "path": str(folder / "rows.jsonl")}
    config = EnvironmentConfig(name="nemo_gym", options=options, step_timeout_s=1.0)
    environment = construct(config)
    environment.load_examples()
    example = environment.example(0, 0, "train")
    return config, lambda: open_episodes(environment, config, example, 1)[0]


async def first_step(episode: PlayedEpisode) -> Any:
    """Start and take the first step, then close."""
    try:
        await episode.start()
        return await episode.step(Turn(role="assistant", content="done"))
    finally:
        await episode.close()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (said({"reward": 1.0}), None, ""),
        (said(b'{"reward": 1e400}'), RewardFault, "found 1e400"),
        (said(b"[" * 9_000), RewardFault, "at most 200 levels"),
        (said([1]), RewardFault, r"expected a JSON object, found \[1\]"),
        (said({"reward": "1"}), RewardFault, "expected a number as reward, found '1'"),
        (said({}), RewardFault, "expected a number as reward, found None"),
        (plain(b"broken", "500 Oops"), RewardFault, "answers 500: broken"),
        (REDIRECT, RewardFault, "a redirect, and none is followed"),
        (endless(b" ", 0.05), EnvironmentTimeout, "took longer than 1 s"),
    ],
)
def test_wrong_answers_of_nemo_gym_are_named_faults(tmp_path, answer, error, words):
    answers = {"openapi.json": said({"paths": ROUTES}), "seed_session": said({})}
    with serving(**answers, verify=answer) as server:
        _, opened = gym(tmp_path, server.url)
        if error is None:
            assert asyncio.run(first_step(opened())).received == 1.0
            return
        with pytest.raises((error, EndpointUnavailable), match=words) as caught:
            asyncio.run(first_step(opened()))
        assert "/secret" not in server.heard
        if error is RewardFault:
            assert f"{server.url}/verify" in str(caught.value)


def test_each_call_of_an_episode_in_this_process_has_one_deadline(tmp_path: Path) -> None:
    """Several calls of tools, each of which is in time, are one step."""
    slow = lambda write: (time.sleep(0.4), said({})(write))
    calls = [{"id": str(n), "name": "add", "arguments": "{}"} for n in range(9)]
    described = said({"paths": ROUTES})
    answers = {"openapi.json": described, "seed_session": said({}), "add": slow}
    with serving(**answers) as server:
        _, opened = gym(tmp_path, server.url)

        async def play() -> None:
            episode = opened()
            await episode.start()
            try:
                await episode.step(turn_of(calls))
            finally:
                await episode.close()

        with pytest.raises(EnvironmentTimeout, match="the step of an episode took longer than 1 s"):
            asyncio.run(play())


def turn_of(calls: list[dict[str, str]]) -> Turn:
    return Turn(role="assistant", content="", tool_calls=tuple(ToolCall(**each) for each in calls))


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (said([1]), r"no resources server of NeMo Gym answers .*found \[1\]"),
        (said({"paths": ROUTES, "info": "x"}), "expected objects as paths and info"),
    ],
)
def test_a_server_that_describes_itself_wrongly_is_refused_at_the_start(tmp_path, described, words):
    with serving(**{"openapi.json": described}) as server, pytest.raises(InputError, match=words):
        gym(tmp_path, server.url)


# ---------------------------------------------------------------- OpenEnv

SCHEMA = {"action": {"properties": {"message": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("route", "answer", "words"),
    [
        ("schema", said({"action": 3}), "has no schema of an action.*found 3"),
        ("metadata", said("name"), "expected a JSON object, found 'name'"),
        ("mcp", said({"result": {"tools": 3}}), "a list as result.tools, found 3"),
        ("mcp", said({"result": {"tools": [{"description": "a"}]}}), "expected tools with a name"),
        ("mcp", plain(b"", "503 Busy"), "answers 503"),
    ],
)
def test_facts_of_an_openenv_server_are_checked(route: str, answer: Write, words: str) -> None:
    answers = {"schema": said(SCHEMA), "metadata": said({}), "mcp": said({"error": "none"})}
    with serving(**{**answers, route: answer}) as server:
        with pytest.raises(InputError, match=words) as caught:
            server_facts(server.url)
        assert server.url in str(caught.value)
    with serving(**answers) as server:
        assert server_facts(server.url).tools == ()


OBSERVED = {"observation": {"message": "a"}, "reward": 0.0, "done": False}


WRONG_HELLOS: list[tuple[Any, str]] = [
    ({"data": {"reward": 1}}, "observation: expected an object, found None"),
    ({"data": {**OBSERVED, "observation": [1]}}, r"observation: expected an object"),
    ({"data": {**OBSERVED, "metadata": [1]}}, r"metadata: expected an object or null, found"),
    ({"data": {**OBSERVED, "done": "no"}}, "done: expected true or false, found 'no'"),
    ({"data": {**OBSERVED, "reward": "1"}}, "reward: expected a finite number or null, found"),
    ({"data": {**OBSERVED, "observation": {"error": 3}}}, "observation.error: expected a text"),
    ({"data": 3}, "expected a message of type observation"),
    ({"type": "error", "data": {"code": 3, "message": [1]}}, r"reset: 3: \[1\]"),
    ({"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": [{"loc": 3}]}}, ": None"),
    ("[" * 9_000, "no JSON: expected at most 200 levels"),
]


def openenv_episode(url: str) -> PlayedEpisode:
    config = EnvironmentConfig(name="openenv", options={"url": url})
    environment = construct(config)
    environment.load_examples()
    return open_episodes(environment, config, environment.example(0, 0, "train"), 1)[0]


def test_wrong_answers_of_openenv_are_named_faults() -> None:
    with openenv_server() as server:
        for hello, words in WRONG_HELLOS:
            text = hello if isinstance(hello, str) else json.dumps({"type": "observation", **hello})
            server.hello = text
            with pytest.raises(RewardFault, match=words) as caught:
                asyncio.run(first_step(openenv_episode(server.url)))
            assert server.url in str(caught.value)


def test_no_websocket_follows_a_redirect() -> None:
    answers = {"schema": said(SCHEMA), "metadata": said({}), "mcp": said({}), "ws": REDIRECT}
    with serving(secret=said({}), **answers) as server:
        with pytest.raises(EndpointUnavailable, match="HTTP 302"):
            asyncio.run(first_step(openenv_episode(server.url)))
        assert server.heard[-1] == "/ws"
        assert "/secret" not in server.heard


def test_time_that_is_not_charged_ends_no_call() -> None:
    async def work(inside_s: float, outside_s: float) -> None:
        async with charged(0.3):
            with uncharged(), uncharged():
                await asyncio.sleep(inside_s)
            await asyncio.sleep(outside_s)

    asyncio.run(work(0.6, 0.0))
    with pytest.raises(TimeoutError):
        asyncio.run(work(0.6, 0.6))


def test_no_tools_need_no_template_with_tool_calls(tmp_path: Path) -> None:
    """The template of the built-in tokenizer knows none."""
    answers = {"schema": said(SCHEMA), "metadata": said({}), "mcp": said({"error": "none"})}
    row = {"responses_create_params": {"input": "add", "tools": []}}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    with serving(**answers, **{"openapi.json": said({"paths": ROUTES})}) as server:
        for environment in (
            {"name": "openenv", "options": {"url": server.url}},
            {
                "name": "nemo_gym",
                "options": {"url": server.url, "path": str(tmp_path / "rows.jsonl")},
            },
        ):
            config = parse_config({"environment": environment})
            assert tools(config) == "none (an episode may add some when it starts)"
