"""The admin routes over loopback: new weights from disk, and all that must not get through."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import servers
from support.policy_runs import commit, parts, small_run, weights

from marin_rl.errors import RequestRejected, StalePolicy
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.publishing import Publisher
from marin_rl.inference.generation import Delta, GenerationRequest
from marin_rl.models.module import LanguageModel
from marin_rl.serving.launch import proven_server
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.checkpoint_loader import Loaded, Served, Source, read_checkpoint
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.model import (
    build_model,
    named_parameters,
    parameters_digest,
    with_parameters,
)
from marin_rl.types import Sampling

KEY = "manage"
UPDATE = "/admin/update_weights_from_disk"
CHAT = "/v1/chat/completions"
Answer = tuple[int, dict[str, str], dict[str, Any]]


def talk(
    server: PolicyServer, method: str, path: str, body: Any = None, key: str | None = KEY
) -> Answer:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return servers.talk(server, method, path, body, headers)


def chat_body(**fields: Any) -> dict[str, Any]:
    return servers.chat_body(**{"max_tokens": 12, **fields})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of three checkpoints; its server takes weights from all folders of these tests."""
    root, everywhere = tmp_path_factory.mktemp("runs"), tmp_path_factory.getbasetemp()
    roots = f"inference.server.update_roots=[{everywhere}]"
    run = small_run(root, "inference.engine.chunk_steps=2", roots)
    for round in range(3):
        commit(run, round)
    return run


@pytest.fixture(scope="module")
def server(run: Run) -> Iterator[PolicyServer]:
    """A server of round 1, with an admin token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARIN_RL_ADMIN_KEY", KEY)
        server = proven_server(read_checkpoint(run, 1), character_tokenizer(), run.config)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def unchanged(server: PolicyServer) -> Iterator[None]:
    """The same model id, and bitwise the same answers, after the test as before it."""

    def seen() -> bytes:
        body = chat_body(n=4, return_token_ids=True, logprobs=True)
        status, _, answer = talk(server, "POST", CHAT, body)
        assert status == 200
        return json.dumps([answer["model"], answer["choices"]]).encode()

    before = seen()
    yield
    assert seen() == before


SAMPLED = Sampling(max_tokens=8, seed=1)


def update(server: PolicyServer, body: dict[str, Any], path: str = UPDATE) -> Answer:
    return talk(server, "POST", path, body)


def refused(server: PolicyServer, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, code and message of a refused update."""
    failures = server.updater.failures
    status, _, answer = update(server, body)
    error = answer["error"]
    assert "Traceback" not in error["message"]
    assert error["message"].startswith("the old weights go on: ")
    assert server.updater.failures == failures + 1
    assert server.updater.last is not None
    assert server.updater.last.refused in error["message"]
    return status, error["code"], error["message"]


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    """One bit in the middle, where there is neither a header nor a footer."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def other_order(folder: Path) -> None:
    """Two characters change places: the same size, other ids."""
    file = folder / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tree))


def other_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent": (shutil.rmtree, "no tokenizer folder"),
    "torn weights": (lambda f: truncate(f / "model.safetensors"), "cannot read"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json"),
    "another width": (lambda f: edit_config(f, intermediate_size=80), "another architecture"),
    "another tokenizer": (other_order, "expected the tokenizer that is served"),
    "another template": (other_template, "expected the chat template that is served"),
}


@pytest.mark.usefixtures("unchanged")
def test_a_folder_that_is_unfit_is_refused(server, run, tmp_path):
    save_hf(weights(run, 2), character_tokenizer(), tmp_path / "whole")
    for damage, (spoil, words) in DAMAGED.items():
        folder = tmp_path / damage
        shutil.copytree(tmp_path / "whole", folder)
        spoil(folder)
        status, code, message = refused(server, {"model_path": str(folder)})
        assert (status, code) == (400, "weights_refused")
        assert words in message


def spoiled(run: Run, value: float) -> LanguageModel:
    """Weights with a single number that is none."""
    model = weights(run, 2)
    parameters = {name: np.array(array) for name, array in named_parameters(model).items()}
    parameters["transformer/norm/weight"][3] = value
    return with_parameters(model, parameters)


@pytest.mark.usefixtures("unchanged")
def test_finite_weights_with_logits_that_are_not_fail_the_canary(server, run, tmp_path):
    save_hf(spoiled(run, 3e38), character_tokenizer(), tmp_path / "model")
    status, code, message = refused(server, {"model_path": str(tmp_path / "model")})
    assert (status, code) == (409, "canary_mismatch")
    assert "not finite" in message


@pytest.mark.usefixtures("unchanged")
def test_a_flipped_bit_contradicts_the_promised_digest(server, run, tmp_path):
    model = weights(run, 2)
    promised = parameters_digest(model)
    save_hf(model, character_tokenizer(), tmp_path / "model")
    flip(tmp_path / "model/model.safetensors")
    body = {"model_path": str(tmp_path / "model"), "parameters_digest": promised}
    status, code, message = refused(server, body)
    assert (status, code) == (409, "digest_mismatch")
    assert f"expected parameters with the digest {promised}, found " in message


def own_run(root: Path, round: int, **options: Any) -> Run:
    """A run of its own to be damaged, with one checkpoint."""
    run = small_run(root)
    commit(run, round, **options)
    return run


def manifest(run: Run) -> Path:
    path = run.store.local_path(f"{checkpoint_slot(2)}/manifest.json")
    assert path is not None
    return path


@pytest.mark.usefixtures("unchanged")
def test_a_damaged_checkpoint_is_refused(server: PolicyServer, tmp_path: Path) -> None:
    """Each damage is worse than the one before."""
    run = own_run(tmp_path, 2)
    part, record = parts(run, 2)[0], manifest(run)
    for spoil, words in (
        (lambda: truncate(part), "was damaged after it was committed"),
        (lambda: part.unlink(), "does not exist"),
        (lambda: truncate(record), "manifest"),
        (lambda: record.unlink(), "no checkpoint of round 2"),
        (lambda: shutil.rmtree(record.parents[2]), "no run 'debug'"),
    ):
        spoil()
        body = {"root": str(tmp_path), "run_id": "debug", "round": 2}
        status, code, message = refused(server, body)
        assert (status, code) == (400, "weights_refused")
        assert words in message


@pytest.mark.usefixtures("unchanged")
def test_a_checkpoint_must_be_what_its_manifest_says(server, tmp_path):
    for extra, status, words in (
        ("parameters_digest", 409, "expected parameters with the digest 0000"),
        ("tokenizer_digest", 400, "found another (000000000000)"),
        ("chat_template_digest", 400, "expected the chat template"),
    ):
        own_run(tmp_path / extra, 2, extra={extra: "0" * 64})
        found = refused(server, {"root": str(tmp_path / extra), "run_id": "debug"})
        assert found[0] == status
        assert words in found[2]


@pytest.mark.usefixtures("unchanged")
def test_checkpoints_of_other_models_and_of_no_numbers_are_refused(server, run, tmp_path):
    other = small_run(tmp_path / "wide", "policy.model.hidden_size=64")
    commit(other, 0, build_model(other.config.policy, 103, 0))
    body = {"root": str(tmp_path / "wide"), "run_id": "debug"}
    assert "another architecture: parameter" in refused(server, body)[2]
    own_run(tmp_path / "nan", 0, model=spoiled(run, np.nan))
    assert "not finite" in refused(server, body | {"root": str(tmp_path / "nan")})[2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": "a\0b"}, "model_path"),
        ({"root": "a\0b", "run_id": "z"}, "root"),
        ({"model_path": "x", "root": "y", "run_id": "z"}, "model_path"),
        ({"model_path": "x", "round": 1}, "round"),
        ({"root": "x"}, "model_path"),
        ({"run_id": "x"}, "run_id"),
        ({"root": "x", "run_id": "../y"}, "run_id"),
        ({"root": "x", "run_id": "y", "round": -1}, "round"),
        ({"model_path": "x", "parameters_digest": "AB"}, "parameters_digest"),
        ({"model_path": "x", "flush_cache": True}, "flush_cache"),
    ],
)
def test_the_wrong_field_of_a_body_is_named(server, body, param):
    status, _, answer = update(server, body)
    assert status == 400
    told = answer["error"]
    assert param in (told["param"] or told["message"])


def test_good_weights_are_taken_from_folder_and_run(server, run, tmp_path):
    model = weights(run, 7)
    digest = parameters_digest(model)
    save_hf(model, character_tokenizer(), tmp_path / "model")
    version = server.engine.policy.weight_version
    body = {"model_path": str(tmp_path / "model"), "parameters_digest": digest}
    status, _, answer = update(server, body)
    assert (status, answer["model"]) == (200, f"policy@{version + 1:05d}-{digest[:8]}")
    last, size = answer["last_update"], sum(a.nbytes for a in named_parameters(model).values())
    assert (last["outcome"], last["source"], last["bytes"]) == ("switched", "disk", size)
    _, _, chosen = talk(server, "POST", CHAT, chat_body())
    assert chosen["model"] == answer["model"]
    root = str(Path(run.store.url).parent)
    for round in (0, 2, 1):
        _, _, answer = update(server, {"root": root, "run_id": "debug", "round": round})
        digest = parameters_digest(weights(run, round))
        assert answer["model"] == f"policy@{round:05d}-{digest[:8]}"
    _, _, answer = update(server, {"root": root, "run_id": "debug", "weight_version": "41"})
    digest = parameters_digest(weights(run, 2))
    assert (answer["weight_version"], answer["parameters_digest"]) == (41, digest)
    update(server, {"root": root, "run_id": "debug", "round": 1})


def test_sglangs_route_is_the_same_and_takes_the_admin_key_of_our_client(server, run, tmp_path):
    model = weights(run, 8)
    save_hf(model, character_tokenizer(), tmp_path / "model")

    async def tell(digest: str, key: str | None = KEY) -> None:
        kind, folder = "update_weights_from_disk", str(tmp_path / "model")
        publisher = Publisher(kind=kind, folder=folder, version=8, digest=digest)
        client = PolicyClient(endpoints=[server.base_url], model="policy", admin_key=key)
        async with client:
            await client.publish(publisher, server.base_url)

    digest = parameters_digest(model)
    asyncio.run(tell(digest))
    assert server.model_id == f"policy@00008-{digest[:8]}"
    with pytest.raises(StalePolicy, match="expected parameters with the digest"):
        asyncio.run(tell("0" * 64))
    with pytest.raises(RequestRejected, match="admin_key_variable"):
        asyncio.run(tell(digest, None))
    assert server.model_id == f"policy@00008-{digest[:8]}"


def held(model: LanguageModel, begun: threading.Event, release: threading.Event) -> Source:
    """Weights that take as long to read as the test wants."""

    def read(served: Served) -> Loaded:
        begun.set()
        assert release.wait(60)
        return Loaded(model=model, parameters_digest=parameters_digest(model))

    return Source(kind="disk", place="held", read=read)


def test_one_update_at_a_time_and_requests_go_on_meanwhile(server: PolicyServer, run: Run) -> None:
    begun, release = threading.Event(), threading.Event()
    source = held(weights(run, 5), begun, release)
    loading = threading.Thread(target=server.updater.load, args=(source,))
    loading.start()
    try:
        assert begun.wait(60)
        before = server.model_id
        root = str(Path(run.store.url).parent)
        status, headers, answer = update(server, {"root": root, "run_id": "debug"})
        assert (status, answer["error"]["code"]) == (409, "busy")
        assert headers["retry-after"] == "1"
        assert talk(server, "GET", "/admin/status")[2]["updating"] is True
        assert talk(server, "POST", CHAT, chat_body())[2]["model"] == before
        assert server.model_id == before
    finally:
        release.set()
        loading.join(60)
    assert server.engine.policy.parameters_digest == parameters_digest(weights(run, 5))


def test_paused_requests_wait_and_weights_may_change(server: PolicyServer, run: Run) -> None:
    status, _, answer = talk(server, "POST", "/admin/pause")
    answers: list[Answer] = []
    asking = threading.Thread(
        target=lambda: answers.append(talk(server, "POST", CHAT, chat_body()))
    )
    try:
        assert (status, answer["paused"]) == (200, True)
        chunks = server.engine.stats.chunks
        asking.start()
        servers.wait_until(lambda: server.engine.queued)
        _, _, answer = talk(server, "GET", "/admin/status")
        assert (answer["running"], answer["queued"]) == (1, 1)
        status, _, answer = talk(server, "POST", "/admin/drain", {})
        assert (status, answer["error"]["code"]) == (409, "paused")
        server.updater.swap(weights(run, 6), 6, parameters_digest(weights(run, 6)))
        assert (server.engine.stats.chunks, answers) == (chunks, [])
    finally:
        _, _, answer = talk(server, "POST", "/admin/resume")
    assert answer["paused"] is False
    asking.join(60)
    assert answers[0][2]["model"] == server.model_id


class Held:
    """Listener that holds the engine at a request's first tokens until `release` is set."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.begun.set()
        self.release.wait(60)


def test_a_version_that_running_requests_have_from_other_weights_is_taken_later(server, run):
    held = Held()
    root, version = str(Path(run.store.url).parent), server.engine.policy.weight_version
    body = {"root": root, "run_id": "debug", "round": 2, "weight_version": version}
    prompt = np.array([4], np.int32)
    request = GenerationRequest(prompt_ids=prompt, sampling=Sampling(max_tokens=8))
    running = server.engine.submit(request, held)
    try:
        assert held.begun.wait(60)
        status, code, told = refused(server, body)
        assert (status, code) == (409, "busy")
        assert f"version {version}" in told
    finally:
        held.release.set()
    running.result(timeout=60)
    assert update(server, body)[2]["parameters_digest"] == parameters_digest(weights(run, 2))


def test_an_update_computes_the_cache_of_running_requests_again_where_it_says_so(server, run):
    stats, before = server.engine.stats, server.engine.stats.recomputed_sequences
    for again in (False, True):
        held = Held()
        request = GenerationRequest(prompt_ids=np.array([4], np.int32), sampling=SAMPLED)
        running = server.engine.submit(request, held)
        try:
            assert held.begun.wait(60)
            root, version = str(Path(run.store.url).parent), 20 + again
            body = {"root": root, "run_id": "debug", "round": 2, "weight_version": version}
            assert update(server, body | ({"recompute_kv_cache": True} if again else {}))[0] == 200
        finally:
            held.release.set()
        (sample,) = running.result(timeout=60).samples
        assert sample.policy_versions is not None
        assert sample.policy_versions[-1] == version
        assert stats.recomputed_sequences == before + again


def test_draining_refuses_what_is_new_and_waits_for_what_runs(server: PolicyServer) -> None:
    answers: list[Answer] = []
    body = chat_body(n=120, max_tokens=50)
    asking = threading.Thread(target=lambda: answers.append(talk(server, "POST", CHAT, body)))
    asking.start()
    servers.wait_until(lambda: server.engine.queued)
    try:
        status, _, answer = talk(server, "POST", "/admin/drain", {"timeout_s": 0.05})
        assert (status, answer["drained"], answer["draining"]) == (200, False, True)
        assert talk(server, "GET", "/readyz")[0] == 503
        assert talk(server, "POST", CHAT, chat_body())[0] == 503
        _, _, answer = talk(server, "POST", "/admin/drain", {"timeout_s": 120})
        assert (answer["drained"], answer["running"], answer["queued"]) == (True, 0, 0)
        asking.join(60)
        assert len(answers[0][2]["choices"]) == 120
    finally:
        assert talk(server, "POST", "/admin/resume")[2]["draining"] is False
    assert talk(server, "GET", "/readyz")[0] == 200
    assert talk(server, "POST", CHAT, chat_body())[0] == 200


@pytest.mark.parametrize("timeout", ["soon", -1, 1e9, True])
def test_a_timeout_of_the_drain_is_a_number_of_seconds(server: PolicyServer, timeout: Any) -> None:
    assert talk(server, "POST", "/admin/drain", {"timeout_s": timeout})[0] == 400
    assert talk(server, "GET", "/admin/status")[2]["draining"] is False


def test_status_reports_what_is_served_and_the_load(server: PolicyServer, run: Run) -> None:
    server.updater.swap(weights(run, 1), 1, parameters_digest(weights(run, 1)))
    _, _, answer = talk(server, "GET", "/admin/status")
    last = answer.pop("last_update")
    assert answer == {
        "model": server.model_id,
        "weight_version": 1,
        "parameters_digest": parameters_digest(weights(run, 1)),
        "paused": False,
        "draining": False,
        "running": 0,
        "queued": 0,
        "updating": False,
        "transfers": server.updater.transfers,
        "adapters": [],
        "failures": server.updater.failures,
    }
    assert (last["source"], last["outcome"], last["bytes"]) == ("memory", "switched", 0)
    assert 0 <= last["seconds_ago"] < 60


def test_a_server_that_shuts_down_is_neither_paused_nor_resumed(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setenv("MARIN_RL_ADMIN_KEY", KEY)
    server = proven_server(read_checkpoint(run, 1), character_tokenizer(), run.config)
    server.start()
    try:
        talk(server, "POST", "/admin/pause")
        assert server.drain()
        assert server.engine.paused is False
        for path in ("/admin/pause", "/admin/resume"):
            status, _, answer = talk(server, "POST", path)
            assert (status, answer["error"]["code"]) == (409, "stopping")
        assert server.engine.paused is False
        assert talk(server, "GET", "/readyz")[0] == 503
    finally:
        server.stop()
