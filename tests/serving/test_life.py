"""The server's life: what keeps it from starting, how it drains, and how it ends on a signal."""

import gc
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.models import tiny_model
from support.servers import CHAT, CONTEXT, asks_well, chat_body, raw, serving, talk, wait_until
from typer.testing import CliRunner

from marin_rl.cli import app
from marin_rl.compilation import spare_long_lived_objects
from marin_rl.config import InferenceConfig, ServerConfig, load_config
from marin_rl.errors import ConfigError, InputError
from marin_rl.serving import server as server_module
from marin_rl.serving.http.auth import check_address
from marin_rl.serving.launch import serving as briefly
from marin_rl.serving.server import PolicyServer, serve_forever
from marin_rl.serving.weights.checkpoint_loader import Loaded
from marin_rl.tokenizers import character_tokenizer, load_tokenizer
from marin_rl.types import SlotRef

TESTS = Path(__file__).parents[1]


def test_without_a_token_it_is_not_started_for_the_network(server, monkeypatch):
    with pytest.raises(ConfigError, match="set a token in the environment variable"):
        server.start("0.0.0.0")
    # and the admin's opens nothing
    monkeypatch.setenv("MARIN_RL_ADMIN_KEY", "x")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="MARIN_RL_API_KEY, or bind to"):
            check_address(InferenceConfig(), host, 0)
    for host in ("127.0.0.1", "127.0.0.2", "localhost"):
        check_address(InferenceConfig(), host, 0)
    monkeypatch.setenv("MARIN_RL_API_KEY", "y")
    check_address(InferenceConfig(), "0.0.0.0", 0)


@pytest.mark.slow
def test_a_server_for_a_while_that_cannot_start_leaves_no_engine(monkeypatch):
    loaded = Loaded(model=tiny_model(), parameters_digest="0123456789")
    source = SlotRef(slot="here", sha256="")

    def fail(*args: object) -> None:
        raise OSError("no more of them")

    config = load_config(TESTS.parent / "configs/debug.yaml")
    before = [thread for thread in threading.enumerate() if thread.name == "engine"]
    monkeypatch.setattr(socket.socket, "bind", fail, raising=False)
    with (
        pytest.raises(ConfigError, match="no more of them"),
        briefly(loaded, character_tokenizer(), source, config),
    ):
        pass
    assert [thread for thread in threading.enumerate() if thread.name == "engine"] == before


@pytest.mark.slow
def test_the_folders_other_end_tokens_end_completions_too(tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    listed = tmp_path / "generation_config.json"

    def made() -> PolicyServer:
        tokenizer, config = load_tokenizer(tmp_path), InferenceConfig()
        return PolicyServer(tiny_model(), tokenizer, config, context_length=CONTEXT)

    listed.write_text('{"eos_token_id": [1, 6]}')
    server = made()
    try:
        assert server.engine.stop_token_ids == (1, 6)
    finally:
        server.stop()
    listed.write_text('{"eos_token_id": [1, 103]}')
    with pytest.raises(InputError, match="ids below 103"):
        made()


def test_a_wrong_start_of_the_command_is_one_message_before_any_model(tmp_path, monkeypatch):
    absent = str(tmp_path / "absent")  # a missing model is the last check
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, told in (
            (["--host", "0.0.0.0"], "open to others: set a token"),
            (["--port", port], f"cannot listen on 127.0.0.1:{port}"),
            (["--set", "inference.server.body_byte_max=1"], "did you mean inference.server.body_"),
            (["--set", "inference.server.origins_allowed=[example.org]"], "scheme://host"),
            (["--config", absent], "no configuration file"),
        ):
            shown = CliRunner().invoke(app, ["serve", "--model", absent, *arguments])
            assert isinstance(shown.exception, ConfigError), arguments
            assert told in str(shown.exception)
    monkeypatch.setenv("MARIN_RL_HOST", "0.0.0.0")
    shown = CliRunner().invoke(app, ["serve", "--model", absent])
    assert "open to others" in str(shown.exception)


def test_it_tells_how_to_call_it(server: PolicyServer) -> None:
    told = server.how_to_call()
    first, *rest = told.splitlines()
    assert first == f"serving {server.model_id} at {server.base_url}"
    assert "MARIN_RL_API_KEY is not set: this machine only" in rest[0]
    assert "MARIN_RL_ADMIN_KEY is not set: no admin routes" in rest[1]
    body = json.loads(rest[2].split("-d '")[1].rstrip("'"))
    assert talk(server, "POST", CHAT, body | {"max_tokens": 2})[0] == 200


def test_the_collector_looks_at_what_came_after_the_start_only() -> None:
    spare_long_lived_objects()
    frozen = gc.get_freeze_count()
    assert frozen > 100_000  # the libraries
    assert len(gc.get_objects()) < frozen
    spare_long_lived_objects()  # once a process
    assert gc.get_freeze_count() <= frozen


def test_weights_that_were_swapped_out_while_a_request_waited_are_a_404() -> None:
    found: list[tuple] = []
    with serving() as server:
        bodies = (
            (CHAT, chat_body(model=server.model_id)),
            (CHAT, chat_body(model=server.model_id, stream=True)),
            ("/v1/completions", {"model": server.model_id, "prompt": ["a", "b"]}),
            (CHAT, chat_body(model="policy")),
        )
        server.engine.pause()
        threads = [
            threading.Thread(target=lambda p=path, b=body: found.append(talk(server, "POST", p, b)))
            for path, body in bodies
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.engine.queued == 5)
        server.updater.swap(tiny_model(seed=9), 4, "fedcba9876")
        server.engine.resume()
        for thread in threads:
            thread.join(timeout=60)
        statuses = sorted(status for status, _, _ in found)
        assert statuses == [200, 404, 404, 404]
        for status, _, answer in found:
            if status == 404:
                assert answer["error"]["code"] == "model_not_found"
                assert "known: policy@00004-fedcba98, policy" in answer["error"]["message"]
        assert server.engine.active == 0


def test_streams_that_outlive_the_drain_end_properly() -> None:
    """A plain request gets an error, a stream an error event; neither is cut off."""
    with serving(ServerConfig(drain_timeout_s=0.2)) as server:
        assert asks_well(server)
        streamed, plain = (chat_body(n=2000, max_tokens=90, stream=s) for s in (True, False))
        connection = http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=60)
        connection.request("POST", CHAT, json.dumps(streamed))
        response = connection.getresponse()  # its head comes with the first piece
        assert response.status == 200
        found: list[tuple] = []
        asking = threading.Thread(target=lambda: found.append(talk(server, "POST", CHAT, plain)))
        before = server.engine.stats.requests
        asking.start()
        wait_until(lambda: server.engine.stats.requests > before)
        assert not server.drain()
        server.stop()
        text = response.read().decode()
        asking.join(timeout=60)
        connection.close()
    status, headers, answer = found[0]
    assert (status, answer["error"]["code"]) == (503, "draining")
    assert int(headers["retry-after"]) >= 1
    assert_ended_properly(text)
    assert '"error"' in text


def test_stopping_twice_is_stopping_once_and_the_port_is_free_again() -> None:
    with serving() as server:
        port = urlsplit(server.base_url).port
        assert port
        with raw(server):
            server.stop()
        server.stop()
        check_address(InferenceConfig(), "127.0.0.1", port)


def assert_ended_properly(text: str) -> None:
    """Every event is whole, and the last one says that nothing follows."""
    events = [event for event in text.split("\n\n") if event]
    assert text.endswith("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        json.loads(event.removeprefix("data: "))


@pytest.fixture
def growing() -> Iterator[PolicyServer]:
    """A server that compiles what requests need, so that it is ready at once."""
    config = InferenceConfig(server=ServerConfig(access_log=False))
    tokenizer = character_tokenizer()
    yield PolicyServer(tiny_model(), tokenizer, config, context_length=CONTEXT, grows=True)
    gc.unfreeze()


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_once_it_can_be_asked(growing: PolicyServer, number: int) -> None:
    before, states, told = handlers(), list[Any](), list[str]()

    def announce(line: str) -> None:
        told.append(line)
        if line.startswith("serving "):
            os.kill(os.getpid(), number)

    assert serve_forever(growing, "127.0.0.1", 0, announce=announce, report=states.append) == 0
    assert [state["state"] for state in states] == ["compiling", "ready", "draining", "ended"]
    assert (states[1]["model"], states[1]["url"][:17]) == (growing.model_id, "http://127.0.0.1:")
    assert [line.split()[0] for line in told] == ["ready", "serving", "draining:"]
    assert handlers() == before
    assert not growing.engine.alive


def test_a_second_signal_ends_at_once(growing: PolicyServer, monkeypatch: pytest.MonkeyPatch):
    class Exited(BaseException):
        pass

    def leave(code: int) -> None:
        assert code == 1
        raise Exited

    def announce(line: str) -> None:
        if line.startswith(("serving ", "draining")):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Exited):
        serve_forever(growing, "127.0.0.1", 0, announce=announce)


def test_an_engine_that_ended_ends_the_process_with_1(growing, monkeypatch):
    monkeypatch.setattr(server_module, "ALIVE_S", 0)
    before, states, told = handlers(), list[Any](), list[str]()

    def announce(line: str) -> None:
        told.append(line)
        if line.startswith("serving "):
            growing.engine.close()

    assert serve_forever(growing, "127.0.0.1", 0, announce=announce, report=states.append) == 1
    assert states[-1] == {"state": "ended", "exit_code": 1}
    assert handlers() == before
    assert "the engine ended by itself" in told[-1]
