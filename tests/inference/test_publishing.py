"""Weights sent to vLLM and to SGLang: the order of the routes, and what a fault of each means."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from marin_rl.errors import EndpointUnavailable, InputError, RequestRejected, StalePolicy
from marin_rl.inference.client.publishing import Publisher, check_complete

LABEL = "00003-01234567"


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


def publish(kind: str, folder: Path, server: Server) -> None:
    weights = Publisher(kind=kind, folder=str(folder), version=3, digest="0123456789" * 6)  # type: ignore[arg-type]
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


def test_sglang_is_paused_while_it_loads(folder: Path) -> None:
    server = Server(v1_models={"data": [{"id": "policy", "owned_by": "sglang"}]})
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
    sglang = {"data": [{"id": "policy", "owned_by": "sglang"}]}
    refused = {"success": False, "message": "shape mismatch"}
    server = Server(v1_models=sglang, update_weights_from_disk=refused)
    with pytest.raises(StalePolicy, match="shape mismatch"):
        publish("update_weights_from_disk", folder, server)
    assert server.paths[-1] == "/continue_generation"


@pytest.mark.parametrize("models", [{"data": [{"id": "p"}]}, RequestRejected("404"), []])
def test_others_are_sent_the_digest_without_a_pause(folder: Path, models: Any) -> None:
    server = Server(v1_models=models)
    publish("update_weights_from_disk", folder, server)
    assert server.paths == ["/v1/models", "/update_weights_from_disk"]
    assert server.asked[1][2]["parameters_digest"] == "0123456789" * 6
