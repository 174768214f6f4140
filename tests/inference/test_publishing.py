"""Weights sent to vLLM and to SGLang: the order of the routes, and what a fault of each means."""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.policy_runs import small_run, weights_of

from flows.server import free_port
from marin_rl.errors import (
    EndpointUnavailable,
    FleetEmpty,
    InputError,
    RequestRejected,
    StalePolicy,
)
from marin_rl.inference.client.publishing import Publisher, check_complete
from marin_rl.storage.layout import round_name
from marin_rl.tokenizers import character_tokenizer
from marin_rl.weight_sync import FromFolder, Published, Weights

LABEL = "00003-01234567"
SGLANG = {"data": [{"id": "policy", "owned_by": "sglang"}]}


class Server:
    """Routes that are answered as scripted; `asked` has what was sent, in order."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self._answers = answers

    async def send(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        self.asked.append((method, path, body))
        answer = self._answers.get(path.strip("/").partition("?")[0].replace("/", "_"), {})
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that a server could load."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a": np.ones((4, 4), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def publish(kind: Any, folder: Path, server: Server, **options: bool) -> None:
    digest = "0123456789" * 6
    weights = Publisher(kind=kind, folder=str(folder), version=3, digest=digest, **options)
    asyncio.run(weights.publish(server.send))


def test_vllm_is_paused_reloaded_emptied_named_and_resumed(folder: Path) -> None:
    server = Server(weight_info={"weight_version": LABEL})
    publish("vllm_reload", folder, server)
    assert server.paths == [
        "/pause?mode=keep",
        "/collective_rpc",
        "/reset_prefix_cache?reset_running_requests=true",
        "/update_weight_version",
        "/resume",
        "/weight_info",
    ]
    bodies = [body for _, _, body in server.asked]
    assert bodies[1] == {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    assert bodies[3] == {"new_version": LABEL}


def test_a_reload_that_fails_leaves_the_server_paused_and_lost(folder: Path) -> None:
    server = Server(collective_rpc=EndpointUnavailable("status 500"))
    with pytest.raises(EndpointUnavailable, match="restart it"):
        publish("vllm_reload", folder, server)
    assert server.paths == ["/pause?mode=keep", "/collective_rpc"], "resumed, it would die"


def test_a_server_that_names_another_version_is_stale(folder: Path) -> None:
    server = Server(weight_info={"weight_version": "default"})
    with pytest.raises(StalePolicy, match="'default', not '00003-01234567'"):
        publish("vllm_reload", folder, server)


@pytest.mark.parametrize("harm", ["config.json", "tokenizer.json", "cut", "header", "empty"])
def test_an_incomplete_folder_is_refused_before_anything_is_sent(folder: Path, harm: str) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    if harm.endswith(".json"):
        (folder / harm).unlink()
    else:
        weights.write_bytes({"cut": data[:-1], "header": data[:20], "empty": b""}[harm])
    server = Server()
    with pytest.raises(InputError, match=r"not complete.*nothing was sent"):
        publish("vllm_reload", folder, server)
    assert server.asked == []


def test_weights_in_several_files_are_all_looked_at(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model-2.safetensors is not complete"):
        check_complete(folder)
    save_file({"b": np.ones(3, np.float32)}, folder / "model-2.safetensors")
    check_complete(folder)


class LateVllm(BaseHTTPRequestHandler):
    """The routes of a vLLM that has loaded the weights that it was sent."""

    def do_GET(self) -> None:
        named = {"weight_version": LABEL, "data": [{"id": "policy"}]}
        self._answer(json.dumps(named).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(b"{}")

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def vllm(port: int) -> Iterator[int]:
    """A vLLM on a port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", port), LateVllm) as server, ThreadPoolExecutor() as pool:
        pool.submit(server.serve_forever, 0.02)
        yield port
        server.shutdown()


def published_to(
    port: int,
    root: Path,
    complete: Path,
    fleet_timeout_s: float,
    amid: Callable[[Path], None] = lambda _: None,
) -> Published:
    """Publish the weights in the folder `complete` to a vLLM on a port of this machine.

    `amid` is called with the unfinished folder, once the weights are in it.
    """
    run = small_run(
        root,
        f"inference.endpoints=http://127.0.0.1:{port}/v1",
        "inference.publish=vllm_reload",
        "inference.request_attempts_max=1",
        f"inference.fleet_timeout_s={fleet_timeout_s}",
    )
    weights = weights_of(3, "0123456789" * 6)

    class Copying(FromFolder):
        def save(self, weights: Weights, folder: Path) -> None:
            shutil.copytree(complete, folder)
            amid(folder)

    return Copying(run, character_tokenizer()).publish(weights)


def test_a_vllm_that_is_restarted_between_rounds_is_waited_for(folder, tmp_path_factory, caplog):
    port, root = free_port(), tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor() as pool, caplog.at_level(logging.WARNING):
        call = pool.submit(published_to, port, root, folder, 60.0)
        while "is lost" not in caplog.text:
            time.sleep(0.01)
        with vllm(port):
            assert call.result(60).endpoints == (f"http://127.0.0.1:{port}/v1",)


@pytest.mark.parametrize("complete", [True, False])
def test_an_export_of_another_process_is_loaded_where_it_is_complete_and_else_replaced(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, *, complete: bool
) -> None:
    def export_first(partial: Path) -> None:
        other = partial.with_name(partial.name.removeprefix(".").partition(".")[0])
        shutil.copytree(folder, other)
        (other / "of another").touch()
        if not complete:
            (other / "model.safetensors").unlink()

    with vllm(free_port()) as port:
        published = published_to(port, tmp_path_factory.mktemp("runs"), folder, 60, export_first)
    assert published.weights is not None
    exported = Path(published.weights)
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]
    assert (exported / "of another").exists() == complete
    assert (exported / "model.safetensors").exists()


def test_exports_are_removed_but_for_the_last_two_and_those_under_way(folder, tmp_path_factory):
    first, second = f"{round_name(1)}-a", f"{round_name(2)}-b"
    under_way = f".{round_name(3)}-0123456789012345.99"

    def add_others(partial: Path) -> None:
        for name in (first, second, f".{second}.7", under_way):
            partial.with_name(name).mkdir()

    with vllm(free_port()) as port:
        published = published_to(port, tmp_path_factory.mktemp("runs"), folder, 60, add_others)
    assert published.weights is not None
    exported = Path(published.weights)
    names = {path.name for path in exported.parent.iterdir()}
    assert names == {second, exported.name, under_way}


def test_a_vllm_that_does_not_come_back_ends_in_one_error(folder, tmp_path_factory):
    with pytest.raises(FleetEmpty, match=r"no endpoint took the weights for 0\.1 s"):
        published_to(free_port(), tmp_path_factory.mktemp("runs"), folder, 0.1)


def test_sglang_is_paused_while_it_loads(folder: Path) -> None:
    server = Server(v1_models=SGLANG)
    publish("update_weights_from_disk", folder, server)
    assert server.paths == [
        "/v1/models",
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    assert server.asked[1][2] == {"mode": "retract"}
    assert server.asked[2][2] == {
        "model_path": str(folder),
        "weight_version": "3",
        "flush_cache": True,
    }


def test_sglang_goes_on_with_the_old_weights_where_it_cannot_load(folder: Path) -> None:
    refused = {"success": False, "message": "shape mismatch"}
    server = Server(v1_models=SGLANG, update_weights_from_disk=refused)
    with pytest.raises(StalePolicy, match="shape mismatch"):
        publish("update_weights_from_disk", folder, server)
    assert server.paths[-1] == "/continue_generation"


@pytest.mark.parametrize("models", [{"data": [{"id": "p"}]}, RequestRejected("404"), []])
@pytest.mark.parametrize("again", [False, True])
def test_others_are_sent_the_digest_without_a_pause(folder, models, *, again):
    """And are asked to compute caches again where weights change in flight."""
    server = Server(v1_models=models)
    publish("update_weights_from_disk", folder, server, recompute_kv_cache=again)
    assert server.paths == ["/v1/models", "/update_weights_from_disk"]
    body = server.asked[1][2]
    assert body["parameters_digest"] == "0123456789" * 6
    assert body.get("recompute_kv_cache") == (True if again else None)
