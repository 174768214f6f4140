"""`marin-rl merge`: a whole model out of a base and an adapter, never over another, to the Hub too.

The Hub is a stand-in over loopback that speaks the four routes of an upload and keeps the files.
"""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from support.engine_adapters import adapter_for, merged
from support.policy_runs import small_config
from typer.testing import CliRunner

from marin_rl import cli
from marin_rl.errors import ConfigError, InputError, StoreUnavailable
from marin_rl.lora.peft import write_peft
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.hf_folders import load_hf, save_hf
from marin_rl.training.model import build_model, named_parameters

pytestmark = pytest.mark.usefixtures("compiled_quickly")


class Hub(ThreadingHTTPServer):
    """A stand-in for the Hub: repositories' files by name, and the tokens that came with them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRoutes)
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()


class HubRoutes(BaseHTTPRequestHandler):
    """Creation, the choice of how files travel (within the commit), and the commit."""

    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path == "/api/repos/create":
            name = json.loads(body)["name"]
            self._answer({"url": f"http://{self.headers['Host']}/user/{name}"})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            kinds = [{"path": f["path"], "uploadMode": "regular"} for f in files]
            self._answer({"files": [kind | {"shouldIgnore": False} for kind in kinds]})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            self._answer(
                {
                    "commitUrl": f"http://{self.headers['Host']}/user/mine/commit/1",
                    "commitOid": "1" * 40,
                }
            )
        else:
            self.send_error(404)

    def do_GET(self) -> None:
        self._answer({"id": "user/x", "sha": "1" * 40, "siblings": []})

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{hub.server_address[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        yield hub
        hub.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """A base, an adapter of it, and what they make together."""
    root, tokenizer = tmp_path_factory.mktemp("models"), character_tokenizer()
    policy = small_config(root, "policy.model.layers=1").policy
    base = build_model(policy, len(tokenizer), 0)
    save_hf(base, tokenizer, root / "base")
    adapter = adapter_for(base, 3)
    write_peft(root / "adapter", adapter)
    whole = named_parameters(merged(base, adapter))
    return root / "base", root / "adapter", {n: np.asarray(a) for n, a in whole.items()}


def merge(folders, output: Path, *options: str) -> None:
    arguments = ["merge", "--base", str(folders[0]), "--adapter", str(folders[1])]
    arguments += ["--output", str(output), *options]
    result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.01)])
def test_a_whole_model_is_written_in_a_dtype_and_never_over_another(
    folders, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    merge(folders, tmp_path / "out", "--dtype", dtype)
    for name, array in named_parameters(load_hf(tmp_path / "out")).items():
        np.testing.assert_allclose(array, folders[2][name], rtol=tolerance, atol=tolerance)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(InputError, match="nothing is overwritten"):
        merge(folders, tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_the_folder_is_uploaded_with_the_users_token(folders, hub: Hub, tmp_path: Path) -> None:
    merge(folders, tmp_path / "out", "--push-to-hub", "mine")
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert hub.tokens == {"Bearer hf_of_a_test"}
    assert {name: hub.files[name] for name in written} == written


def test_a_failed_upload_is_an_error_and_the_folder_stays(folders, hub, tmp_path):
    with pytest.raises(ConfigError, match="expected NAME or USER/NAME"):
        merge(folders, tmp_path / "out", "--push-to-hub", "../mine")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="--dtype: expected one of float32"):
        merge(folders, tmp_path / "out", "--dtype", "int3")
    huggingface_hub.constants.ENDPOINT = "http://127.0.0.1:9"  # nothing listens there
    with pytest.raises(StoreUnavailable, match="is written, but could not be uploaded as mine"):
        merge(folders, tmp_path / "out", "--push-to-hub", "mine")
    assert (tmp_path / "out/model.safetensors").is_file()
