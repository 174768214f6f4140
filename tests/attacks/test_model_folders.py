"""Model folders with what is no file in them, and updates from places outside of the roots."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks.forgeries import unix_socket
from support.policy_runs import small_run, weights
from support.servers import talk

from marin_rl.config import InferenceConfig, ServerConfig
from marin_rl.errors import InputError
from marin_rl.plain_files import (
    ENTRIES_MAX,
    SETTINGS_BYTES_MAX,
    VOCABULARY_BYTES_MAX,
    check_model_folder,
)
from marin_rl.serving.launch import proven_server
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.checkpoint_loader import Loaded, Places, with_update_root
from marin_rl.tokenizers import character_tokenizer, load_tokenizer
from marin_rl.training.hf_folders import load_hf, save_hf
from marin_rl.training.hf_weights import hf_template
from marin_rl.training.model import parameters_digest

KEY = {"Authorization": "Bearer manage"}
UPDATE = "/admin/update_weights_from_disk"


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly(compiled_quickly: None) -> None:
    """Speed of the model does not matter here."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with nothing wrong."""
    run = small_run(tmp_path / "runs")
    save_hf(weights(run, 2), character_tokenizer(), tmp_path / "models/good")
    return tmp_path / "models/good"


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link_to(target: str) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return link


def subfolder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def sparse(size: int) -> Callable[[Path], None]:
    def stretch(path: Path) -> None:
        with path.open("ab") as file:
            file.truncate(size)

    return stretch


SPECIAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "a FIFO": (fifo, "found a FIFO"),
    "a socket": (unix_socket, "found a socket"),
    "a device": (link_to("/dev/zero"), "found a device"),
    "a folder": (subfolder, "found a folder"),
    "a huge file": (sparse(2**40), "found 1099511627776"),
}
READ = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "merges.txt",
)


def ends(work: Callable[[], object]) -> BaseException | None:
    """Exception of a piece of work; the test fails where it does not end."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            raised.append(None)
        except BaseException as error:  # noqa: BLE001 - it is what the test looks at
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "blocked"
    return raised[0]


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_are_opened_by_no_command(folder: Path, kind: str) -> None:
    make, words = SPECIAL[kind]
    for name in READ:
        kept = (folder / name).read_bytes() if (folder / name).exists() else None
        make(folder / name)
        for work in (load_tokenizer, hf_template, load_hf):
            error = ends(lambda work=work: work(folder))
            assert isinstance(error, InputError), (name, error)
            assert words in str(error)
            assert name in str(error)
        if (folder / name).is_dir():
            (folder / name).rmdir()
        else:
            (folder / name).unlink()
        if kept is not None:
            (folder / name).write_bytes(kept)
    load_hf(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-00002.safetensors"])
def test_weights_are_ordinary_files_too(folder: Path, name: str) -> None:
    fifo(folder / name)
    error = ends(lambda: load_hf(folder))
    assert isinstance(error, InputError)
    assert "found a FIFO" in str(error)


def test_links_of_the_hugging_face_cache_are_followed(folder: Path) -> None:
    expected = parameters_digest(load_hf(folder))
    blobs = folder.with_name("blobs")
    blobs.mkdir()
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(f"../blobs/{file.name}")
    (folder / "onnx").mkdir()
    (folder / "README.md").symlink_to("nowhere")
    assert parameters_digest(load_hf(folder)) == expected


def test_sizes_and_numbers_have_bounds(tmp_path: Path) -> None:
    for name, bytes_max in (
        ("config.json", SETTINGS_BYTES_MAX),
        ("tokenizer.json", VOCABULARY_BYTES_MAX),
    ):
        (tmp_path / name).write_bytes(b"{}")
        sparse(bytes_max)(tmp_path / name)
        check_model_folder(tmp_path)
        sparse(bytes_max + 1)(tmp_path / name)
        with pytest.raises(InputError, match=f"at most {bytes_max} bytes, found {bytes_max + 1}"):
            check_model_folder(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "additional_chat_templates").mkdir()
    os.mkfifo(tmp_path / "additional_chat_templates/default.jinja")
    with pytest.raises(InputError, match="found a FIFO"):
        check_model_folder(tmp_path)
    crowded = tmp_path / "crowded"
    crowded.mkdir()
    for number in range(ENTRIES_MAX + 1):
        os.close(os.open(crowded / str(number), os.O_CREAT))
    with pytest.raises(InputError, match=f"more than {ENTRIES_MAX} entries"):
        check_model_folder(crowded)


# ---------------------------------------------------------------- updates


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyServer]:
    """A server of the folder, as `marin-rl serve --model` starts it."""
    monkeypatch.setenv("MARIN_RL_ADMIN_KEY", "manage")
    model = load_hf(folder)
    run = small_run(folder.parents[1] / "runs")
    inference = with_update_root(run.config.inference, folder.parent)
    loaded = Loaded(model=model, parameters_digest=parameters_digest(model))
    config = run.config.model_copy(update={"inference": inference})
    running = proven_server(loaded, character_tokenizer(), config)
    running.start()
    yield running
    running.stop()


def update(server: PolicyServer, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, _, answer = talk(server, "POST", UPDATE, body, KEY)
    return status, answer


def test_weights_come_from_below_the_servers_roots_alone(server, folder, tmp_path, monkeypatch):
    secret = tmp_path / "home"
    (secret / "private-diary").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(secret))
    (folder.parent / "way-out").symlink_to(secret)
    places = [
        {"root": "~", "run_id": "debug"},
        {"root": "~root", "run_id": "debug"},
        {"root": "file://~", "run_id": "debug"},
        {"root": str(secret), "run_id": "debug"},
        {"root": f"{folder.parent}/../home", "run_id": "debug"},
        {"root": str(folder.parent / "way-out"), "run_id": "debug"},
        {"root": "s3://bucket/runs", "run_id": "debug"},
        {"root": "memory://runs", "run_id": "debug"},
        {"root": "/", "run_id": "debug"},
        {"model_path": str(secret)},
        {"model_path": "~"},
        {"model_path": "/dev"},
    ]
    for body in places:
        status, answer = update(server, body)
        message = answer["error"]["message"]
        assert (status, answer["error"]["code"]) == (400, "weights_refused"), (body, answer)
        assert "expected a place below a root that this server was started with" in message
        assert "private-diary" not in message
    # nor is a file behind a link in a folder below a root
    (secret / "config.json").write_text('["the diary"]')
    linked = folder.with_name("linked")
    linked.mkdir()
    (linked / "config.json").symlink_to(secret / "config.json")
    (linked / "model.safetensors").symlink_to(folder / "model.safetensors")
    status, answer = update(server, {"model_path": str(linked)})
    assert (status, answer["error"]["code"]) == (400, "weights_refused")
    assert "config.json is a link that leads out of" in answer["error"]["message"]
    # below a root, what else lies there is not listed either
    status, answer = update(server, {"root": str(folder.parent), "run_id": "debug"})
    assert status == 400
    assert "no run 'debug'" in answer["error"]["message"]
    assert "good" not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("roots", "place", "held"),
    [
        (("/a/b",), "/a/b", True),
        (("/a/b",), "/a/b/c", True),
        (("/a/b",), "/a/bc", False),
        (("/a/b",), "/a/b/../c", False),
        (("/a/b/",), "file:///a/b/c", True),
        (("file:///a/b",), "/a/b/c", True),
        (("/a/b",), "~", False),
        (("~nobody-here",), "~nobody-here", False),
        (("/",), "/etc", True),
        (("s3://bucket/runs",), "s3://bucket/runs", True),
        (("s3://bucket/runs/",), "s3://bucket/runs/x", True),
        (("s3://bucket/runs",), "s3://bucket/runs2", False),
        (("s3://bucket/runs",), "s3://bucket/runs/../other", False),
        (("s3://bucket/runs",), "s3://other/runs", False),
        (("s3://bucket/runs",), "simplecache::s3://bucket/runs", False),
        (("s3://bucket",), "s3://bucket/a::b", False),
        ((), "/a", False),
        ((), "s3://a", False),
    ],
)
def test_objects_below_a_root(roots: tuple[str, ...], place: str, held: object) -> None:
    assert Places(roots).holds(place) is held


def test_no_root_is_open_by_default() -> None:
    assert InferenceConfig().server.update_roots == ()
    opened = with_update_root(InferenceConfig(server=ServerConfig(update_roots=("/a",))), "/b")
    assert opened.server.update_roots == ("/a", "/b")
