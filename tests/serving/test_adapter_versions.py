"""Versions of a run's adapter next to their base: in the run's own process, and on followers."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.faults import outcome
from support.policy_runs import play_round, small_config, small_run
from support.servers import CHAT, chat_body, talk

from marin_rl.analysis.lineage import Edge, trace
from marin_rl.analysis.status import fleet_rows, run_status
from marin_rl.config import parse_config
from marin_rl.errors import ConfigError, StalePolicy
from marin_rl.inference.client.fleet_sources import board_of
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.rollouts.pinned import as_begun
from marin_rl.runtime import RunRuntime
from marin_rl.serving.launch import proven_follower, proven_server
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.adapters import (
    adapter_checkpoints,
    read_base_of,
    version_of,
    with_adapters_room,
)
from marin_rl.serving.weights.following import Announcement, CheckpointWatcher, Registration
from marin_rl.storage.runs import Run, checkpoint_at, checkpoint_slot, committed
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.state import identity_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]
LORA = ("policy.lora.rank=4", "policy.model.layers=1")
FLEET = (
    "inference.endpoints=registered", "inference.publish=pull",
)  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """A run of two rounds whose engine has the base and the adapter apart, and its models."""
    run = small_run(tmp_path_factory.mktemp("runs"), *LORA, "inference.serve_merged=false")
    runtime, models = RunRuntime(run), list[str]()
    try:
        checkpoint = runtime.init_policy()
        for round in range(2):
            checkpoint = play_round(runtime, run, round, checkpoint)
        policy = runtime.serve(checkpoint)
        models = [card["id"] for card in talk(_url(policy), "GET", "/v1/models")[2]["data"]]
    finally:
        runtime.close()
    return run, models


def _url(policy) -> str:
    return policy.endpoints[0].removesuffix("/v1")


def served_id(run: Run, round: int) -> str:
    ref = committed(run, checkpoint_slot(round))
    assert ref is not None
    return served_model_id("policy", round, identity_of(run, ref).parameters_digest)


def test_a_run_samples_from_the_base_and_the_adapter_next_to_it(played):
    run, models = played
    base = version_of(run, checkpoint_at(run, 0)).base_digest
    # The version of the round and the one before; the first one went.
    base_id = served_model_id("policy", 0, base)
    assert models == [base_id, "policy", served_id(run, 1), served_id(run, 2)]
    assert all(audit.balanced for audit in audit_run(run))
    # What is given to the engine is the adapter, not the base.
    adapter = version_of(run, checkpoint_at(run, 1)).adapter
    size = sum(np.asarray(array).nbytes for array in adapter.arrays.values())
    assert read_metrics(run, [1])["weights/bytes"].to_pylist() == [size]


def test_lineage_and_status_name_the_adapter_and_its_base(played):
    run, _ = played
    graph, identity = trace(run, 1), identity_of(run, committed(run, checkpoint_slot(1)))
    checkpoint, base = graph.nodes["checkpoints/round-00001"], graph.nodes["base"]
    assert checkpoint.facts["adapter"] == identity.adapter_digest
    assert checkpoint.facts["base"] == base.facts["parameters"] == identity.base_digest
    assert Edge("checkpoints/round-00001", "base") in graph.edges
    status = run_status(run.config.root, run.run_id)
    assert status.policy == "init random, tokenizer characters, adapter of rank 4"


def test_merged_is_recorded_as_such_and_concerns_adapters_alone(tmp_path):
    tree = small_config(tmp_path, *LORA).model_dump(mode="json", exclude_unset=True)
    assert parse_config(tree).inference.serve_merged is None
    begun = Run.create_or_open(small_config(tmp_path, *LORA, "inference.serve_merged=true"))
    assert begun.config.inference.serve_merged is True
    with pytest.raises(ConfigError, match=r"inference\.serve_merged"):
        Run.create_or_open(small_config(tmp_path, *LORA, "inference.serve_merged=false"))
    with pytest.raises(ConfigError, match=r"policies with an adapter, and policy\.lora is null"):
        small_config(tmp_path, "inference.serve_merged=true")


@pytest.fixture
def followed(played) -> Iterator[tuple[PolicyServer, CheckpointWatcher, Run]]:
    """A started server of a run's base, with its first version, and what follows the run."""
    run, _ = played
    tokenizer, version = character_tokenizer(), version_of(run, checkpoint_at(run, 0))
    base = read_base_of(run, version)
    server = proven_server(base, tokenizer, with_adapters_room(run.config, 8, adapters=4))
    take = adapter_checkpoints(server.adapters, run, base.model, tokenizer, run.config.inference)
    take(0, None)
    server.start()
    try:
        yield server, CheckpointWatcher(take, run, 0), run
    finally:
        server.stop()


def test_followers_serve_each_version_by_its_name(followed):
    server, follower, run = followed
    cards = {card["id"]: card for card in talk(server, "GET", "/v1/models")[2]["data"]}
    assert cards[served_id(run, 0)]["parent"] == server._service.base_id
    status, _, answer = talk(server, "POST", CHAT, chat_body())
    assert (status, answer["model"]) == (200, served_id(run, 0))
    # A request on the first version, which is unloaded before it has begun to be sampled.
    long = chat_body(model=served_id(run, 0), max_tokens=40)
    expected = talk(server, "POST", CHAT, long)[2]
    answers: list[dict] = []
    server.engine.pause()
    request = threading.Thread(target=lambda: answers.append(talk(server, "POST", CHAT, long)[2]))
    request.start()
    while not server.engine.adapters.in_use():
        request.join(0.01)
        assert request.is_alive(), answers
    server.adapters.unload(served_id(run, 0))
    server.engine.resume()
    request.join()
    assert answers[0]["model"] == served_id(run, 0)
    assert answers[0]["choices"] == expected["choices"]
    follower.look()
    assert follower.round == 2
    assert server.model_id == served_id(run, 2)
    # Its row follows from its version, whatever was loaded before.
    loaded = server.adapters.get(served_id(run, 2))
    assert loaded is not None
    assert loaded.row == 1
    status, _, refused = talk(server, "POST", CHAT, long)
    assert (status, refused["error"]["code"]) == (404, "model_not_found")
    assert talk(server, "POST", CHAT, chat_body())[2]["model"] == served_id(run, 2)


def test_a_version_that_was_promised_otherwise_is_refused(played):
    run, _ = played
    with pytest.raises(StalePolicy, match="expected the policy with the digest 0000"):
        version_of(run, checkpoint_at(run, 1), "0" * 64)


@contextmanager
def registered(run: Run) -> Iterator[PolicyServer]:
    """A server that announces itself to a run, and takes the versions that its trainer asks for."""
    board = board_of(run.config.inference, run.folder)
    follower = proven_follower(run, run.config, None, board=board, registered=True)
    options = {"adapters": follower.adapters, "every_s": 0.05}
    registration = Registration(run, run.config, follower.server.engine, Announcement(), **options)
    watched = {"board": board, "answer": registration.answer, "poll_s": 0.02}
    with CheckpointWatcher(follower.take, run, follower.round, **watched):
        try:
            registration.start(follower.server.start())
            yield follower.server
        finally:
            registration.stop()
            follower.server.stop()


@pytest.mark.bits
def test_registered_followers_sample_each_version_by_name_as_the_run_itself_does(played, tmp_path):
    alone, _ = played
    config = small_config(tmp_path, *LORA, *FLEET, "rounds=2")
    run = Run.create_or_open(config, as_begun)
    assert run.config.inference.serve_merged is False
    runtime = RunRuntime(run)
    try:
        checkpoint = runtime.init_policy()
        with registered(run) as first:
            checkpoint = play_round(runtime, run, 0, checkpoint)
            # Another one joins, which never had the first version.
            with registered(run) as second:
                play_round(runtime, run, 1, checkpoint)
                rows = beats(run, served_id(run, 1), servers=2)
                names = [served_id(run, 0), served_id(run, 1)]
                assert first.adapters.names == names
                loaded = [one.adapters.get(names[1]) for one in (first, second)]
    finally:
        runtime.close()
    assert outcome(alone.config.model_copy(update={"rounds": 2})).same_as(outcome(run.config)) == []
    assert [one and one.row for one in loaded] == [2, 2], (
        "the row follows from the version, and so do the last bits"
    )
    assert all(names[1] in row["adapters"] for row in rows)
    base = version_of(run, checkpoint_at(run, 0)).base_digest
    assert {row["base_digest"] for row in rows} == {base}
    shards = [table["model"].to_pylist() for table in iter_shards(run, 1, ("model",))]
    assert {model for models in shards for model in models} == {names[1]}
    assert {row["model"] for row in rows} == {names[1]}
    # The adapter alone is sent, to those that were there in time; the base once, where it can be.
    sent = version_of(run, checkpoint_at(run, 1)).adapter.arrays.values()
    size = sum(np.asarray(array).nbytes for array in sent)
    assert read_metrics(run, [1])["weights/bytes"].to_pylist()[0] in (size, 2 * size)


def beats(run: Run, model: str, servers: int) -> list[dict]:
    """Rows of `status` for servers of a model, once `servers` of them are there."""
    deadline = time.monotonic() + 60
    while len(rows := [row for row in fleet_rows(run) if row["model"] == model]) < servers:
        assert time.monotonic() < deadline, fleet_rows(run)
        time.sleep(0.02)
    return rows
