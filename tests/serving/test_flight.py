"""Weights by Arrow Flight: those that were asked for, with the token, else from files."""

import asyncio
import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight
from support.cases import others_slow
from support.policy_runs import commit, small_run, weights

from marin_rl.config import parse_config
from marin_rl.digests import digest_of
from marin_rl.errors import ConfigError, EndpointUnavailable, InputError, StalePolicy
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.lora import Shapes
from marin_rl.runtime import RunRuntime
from marin_rl.serving.launch import proven_server
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.adapter_versions import read_base_of, read_version
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint
from marin_rl.serving.weights.checkpoint_watcher import CheckpointWatcher, whole_checkpoints
from marin_rl.serving.weights.flight import PIECE_BYTES, SCHEMA, WeightServer, fetch
from marin_rl.serving.weights.trainer_source import trainer_at
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.fleet import FleetBoard, Target, run_sha256
from marin_rl.storage.runs import Run, committed_checkpoint
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.model import named_parameters, parameter_shapes
from marin_rl.types import Message, Sampling

pytestmark = pytest.mark.usefixtures("compiled_quickly")

DIGEST = "01" * 32
LARGE = PIECE_BYTES // 4 + 3  # two pieces of float32
ARRAYS = {
    "large": np.arange(LARGE, dtype=np.float32),
    "square": np.ones((3, 5), np.float32),
    "scalar": np.float32(7).reshape(()),
}
SHAPES = {name: array.shape for name, array in ARRAYS.items()}
HERE = "grpc://127.0.0.1:0"


@pytest.fixture
def trainer() -> Iterator[WeightServer]:
    """A trainer that hands out `ARRAYS` to those with the token."""
    server = WeightServer(HERE, "token")
    server.offer(DIGEST, ARRAYS)
    yield server
    server.close()


def test_arrays_arrive_bit_for_bit_and_are_copies(trainer: WeightServer) -> None:
    source = ARRAYS["square"].copy()
    trainer.offer(DIGEST, ARRAYS | {"square": source})
    source[:] = 9  # as a trainer that goes on
    arrived = fetch(trainer.url, DIGEST, SHAPES, "token")
    assert set(arrived) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrived[name], array)


@pytest.mark.parametrize("token", [None, "another"])
def test_no_call_is_answered_without_the_token(trainer: WeightServer, token: str | None) -> None:
    with pytest.raises(EndpointUnavailable, match="API token"):
        fetch(trainer.url, DIGEST, SHAPES, token)


def test_others_than_those_that_were_asked_for_are_never_sent(trainer: WeightServer) -> None:
    with pytest.raises(EndpointUnavailable, match="has parameters 01010101"):
        fetch(trainer.url, "02" * 32, SHAPES, "token")


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (SHAPES | {"square": (5, 3)}, "square"),
        (SHAPES | {"more": (1,)}, "without more"),
        ({"square": (3, 5)}, "large"),
    ],
)
def test_parameters_of_another_model_are_refused(
    trainer: WeightServer, shapes: Mapping[str, tuple[int, ...]], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        fetch(trainer.url, DIGEST, shapes, "token")


class Liar(flight.FlightServerBase):
    """Sends a table of its own."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__(HERE)
        self.table = table

    def do_get(self, _context: Any, _ticket: flight.Ticket) -> flight.FlightDataStream:
        return flight.RecordBatchStream(self.table)


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"name": ["square"]}),
        pa.table([pa.nulls(1, field.type) for field in SCHEMA], schema=SCHEMA),
    ],
)
def test_a_stream_of_another_kind_is_refused(table: pa.Table) -> None:
    with Liar(table) as liar, pytest.raises(InputError, match="expected a row of"):
        fetch(f"grpc://127.0.0.1:{liar.port}", DIGEST, SHAPES, None)


def test_it_is_closed_unless_asked_for_and_never_open_to_others_without_a_token() -> None:
    assert parse_config({}).inference.flight is None
    with pytest.raises(ConfigError, match="open to others"):
        WeightServer("grpc://0.0.0.0:0", None)
    with pytest.raises(ConfigError, match="expected pull"):
        parse_config({"inference": {"flight": HERE}})
    pulled = {"endpoints": "registered", "publish": "pull", "flight": HERE}
    with pytest.raises(ConfigError, match="flight"):
        parse_config({"inference": pulled | {"flight": "http://a:1"}})
    first = WeightServer(HERE, None)
    with pytest.raises(ConfigError, match="cannot listen"):
        WeightServer(first.url, None)
    first.close()


@pytest.fixture
def run() -> Run:
    """A run in memory with the checkpoints of rounds 0 to 3."""
    run = small_run(f"memory://{uuid.uuid4().hex}")
    for round in range(4):
        commit(run, round)
    return run


@pytest.fixture
def follower(run: Run) -> Iterator[PolicyServer]:
    """A server of round 0."""
    server = proven_server(read_checkpoint(run, 0), character_tokenizer(), run.config)
    yield server
    server.stop()


def digest_of_round(run: Run, round: int) -> str:
    ref = committed_checkpoint(run, round)
    assert ref is not None
    return str(manifest_of(run.store, ref).extra["parameters_digest"])


def aim(run: Run, board: FleetBoard, round: int, url: str) -> None:
    """Ask followers for a round, and name the trainer that hands it out."""
    board.aim(
        Target(
            run_sha256=run_sha256(run.folder),
            version=round,
            through=round + 9,
            parameters_digest=digest_of_round(run, round),
            flight=url,
        )
    )


@pytest.mark.slow
def test_followers_swap_to_weights_from_the_trainer_while_requests_run(
    run: Run, follower: PolicyServer, trainer: WeightServer, caplog: pytest.LogCaptureFixture
) -> None:
    board, ended, versions = FleetBoard(run.folder, "token"), threading.Event(), set[str]()
    watcher = CheckpointWatcher(
        whole_checkpoints(follower.updater, run, board.api_key), run, 0, board=board
    )
    url = follower.start()

    async def ask() -> None:
        async with PolicyClient(endpoints=[url], model="policy") as client:
            client._check = lambda answer, n: None  # type: ignore[method-assign] # any version
            while not ended.is_set():
                answer = await client.chat(
                    (Message(role="user", content="abc"),), 2, Sampling(max_tokens=8, seed=1)
                )
                versions.add(answer.model)

    asking = threading.Thread(target=lambda: asyncio.run(ask()))
    asking.start()
    with caplog.at_level(logging.INFO):
        for round in (1, 2, 3):
            digest = digest_of_round(run, round)
            trainer.offer(digest, named_parameters(weights(run, round)))
            aim(run, board, round, trainer.url)
            watcher.look()
            policy = follower.engine.policy
            assert (policy.weight_version, policy.parameters_digest) == (round, digest)
    ended.set()
    asking.join()
    assert caplog.text.count(f"came from {trainer.url}") == 3
    assert "read from files" not in caplog.text
    assert versions


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["away", "damaged", "token"])
def test_files_are_read_where_the_trainer_does_not_give_the_right_weights(
    run: Run,
    follower: PolicyServer,
    trainer: WeightServer,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    board = FleetBoard(run.folder, "another" if fault == "token" else "token")
    given = named_parameters(weights(run, 2 if fault == "damaged" else 1))
    trainer.offer(digest_of_round(run, 1), given)
    aim(run, board, 1, "grpc://127.0.0.1:9" if fault == "away" else trainer.url)
    with caplog.at_level(logging.WARNING):
        CheckpointWatcher(
            whole_checkpoints(follower.updater, run, board.api_key), run, 0, board=board
        ).look()
    assert "is read from files" in caplog.text
    assert follower.engine.policy.parameters_digest == digest_of_round(run, 1)


def test_a_trainer_hands_out_the_checkpoint_that_it_has_served(tmp_path: Path) -> None:
    fleet = ("inference.endpoints=registered", "inference.publish=pull", f"inference.flight={HERE}")
    run = small_run(tmp_path, *fleet)
    ref = commit(run, 0)
    runtime = RunRuntime(run)
    weights_of_trainer = runtime._weights_of(ref)
    url = runtime._handed_out(weights_of_trainer, 0)
    assert url is not None
    shapes = parameter_shapes(weights_of_trainer.model)
    digest = digest_of_round(run, 0)
    assert digest_of(fetch(url, digest, shapes, None)) == digest
    runtime.close()


@pytest.mark.parametrize(
    "override",
    others_slow(
        [
            "inference.serve_merged=false",
            "inference.serve_merged=true",
            "policy.quantize_base=int8",
        ],
        "inference.serve_merged=false",
    ),
)
def test_of_an_adapter_its_own_arrays_are_handed_out_and_the_base_once(
    tmp_path: Path, override: str
) -> None:
    """For servers that have it next to its base, merged, or on a base that is quantised."""
    fleet = ("inference.endpoints=registered", "inference.publish=pull", f"inference.flight={HERE}")
    run = small_run(tmp_path, *fleet, "policy.lora.rank=4", "policy.model.layers=1", override)
    runtime = RunRuntime(run)
    ref = runtime.init_policy()
    url = runtime._handed_out(runtime._weights_of(ref), 0)
    source = trainer_at(url, None)
    assert source is not None
    asked: list[str] = []

    def fetch(digest: str, shapes: Shapes) -> Mapping[str, np.ndarray]:
        asked.append(digest)
        return source.fetch(digest, shapes)

    version, loaded = read_version(run, 0, fetch=fetch), read_checkpoint(run, 0, fetch=fetch)
    expected = read_checkpoint(run, 0)
    assert loaded.parameters_digest == expected.parameters_digest == version.parameters_digest
    same = digest_of(named_parameters(loaded.model)), digest_of(named_parameters(expected.model))
    assert same[0] == same[1]
    base = read_base_of(run, version, fetch)
    assert digest_of(named_parameters(base.model)) == base.parameters_digest == version.base_digest
    assert asked == [version.parameters_digest] * 2 + [version.base_digest]
    # Arrays of another adapter, or base, under the right digest are caught by theirs.
    with pytest.raises(StalePolicy, match="another adapter than promised"):
        read_version(run, 0, fetch=lambda d, s: {n: a + 1 for n, a in source.fetch(d, s).items()})
    with pytest.raises(StalePolicy, match="expected the base with the digest"):
        read_base_of(run, version, lambda d, s: {n: -a for n, a in source.fetch(d, s).items()})
    runtime.close()
