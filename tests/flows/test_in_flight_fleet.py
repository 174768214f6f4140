"""Runs whose servers follow them, and change weights while completions are sampled."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.fleet_servers import RegisteredServer
from support.flow_runs import debug
from support.models import full_logprobs
from support.windowed_runs import checked

from flows.rl_loop import start
from marin_rl.analysis.lineage import trace
from marin_rl.inference.client.fleet_sources import board_of
from marin_rl.progress import ProgressEvent, listening
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.training.replay import replay_round

ROUNDS = 4
CHANGING = (
    "inference.endpoints=registered",
    "inference.publish=pull",
    "asynchrony.max_staleness=3",
    "asynchrony.limits.max_inflight_groups=4",
    "asynchrony.sampler=windowed",
    "asynchrony.in_flight_updates=true",
    f"rounds={ROUNDS}",
    "policy.init=random",
    "sampling.max_tokens=48",
    "inference.engine.chunk_steps=1",
)


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """Ends the servers that are entered into it, whatever happens."""
    with ExitStack() as stack:
        yield stack


def rows_of(run: Run) -> list[dict[str, object]]:
    """The rollouts of all rounds."""
    columns = ["token_ids", "loss_mask", "logprobs", "policy_versions", "policy_version_min",
               "policy_version_max", "policy_digest"]  # fmt: skip
    rounds = range(run.config.rounds)
    return pa.concat_tables([t for r in rounds for t in iter_shards(run, r, columns)]).to_pylist()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_completions_of_servers_that_follow_go_on_with_new_weights(
    api: str, tmp_path: Path, servers: ExitStack
) -> None:
    """Of two servers one is killed in the middle, with requests under way, and one is added."""
    config = debug(tmp_path / "runs", *CHANGING)
    run = Run.create_or_open(config)
    started = [RegisteredServer(run, tmp_path / f"{name}.log") for name in ("first", "second")]
    for server in started:
        servers.callback(server.end)

    def listen(event: ProgressEvent) -> None:
        if event.stage == "generate" and event.done and len(started) == 2:
            for server in started:
                server.wait()
            started[0].kill()
            started.append(RegisteredServer(run, tmp_path / "third.log"))
            servers.callback(started[2].end)

    with listening(listen):
        start(config)
    assert started[0].process.returncode == -9
    assert started[1].requests > 0
    run = checked(config)
    rows = read_metrics(run).to_pylist()
    assert all(row["staleness/max"] <= 3 for row in rows)
    continued = sum(row["tokens/in_flight/continued"] for row in rows)
    kept = sum(row["tokens/in_flight/kept"] for row in rows)
    # Others are of one version, which may be a later one than the request began with.
    mixed = [r for r in rows_of(run) if r["policy_version_min"] != r["policy_version_max"]]
    assert (continued > 0, kept > 0) == (bool(mixed), bool(mixed))
    assert replay_round(run, ROUNDS - 1).equal
    assert any(node.startswith("intakes/") for node in trace(run, ROUNDS - 1).nodes)
    checked_tokens(run)
    proven = board_of(run.config.inference, run.folder).canaries(run_sha256(run.folder))
    sampled_by = {row[f"policy_version_{end}"] for row in rows_of(run) for end in ("min", "max")}
    assert sampled_by <= {*proven}, "a version that is replaced soon may be served by nobody"
    assert {*proven} <= {*range(ROUNDS + 1)}


def checked_tokens(run: Run) -> None:
    """Each token has the log-probability of the policy that its version names."""
    models = {version: read_checkpoint(run, version) for version in range(ROUNDS)}
    for row in rows_of(run):
        assert_of(row, models)


def assert_of(row: Mapping[str, object], models: Mapping[int, object]) -> None:
    ids, mask = np.asarray(row["token_ids"]), np.asarray(row["loss_mask"]) == 1
    versions = row["policy_versions"]
    versions = np.full(len(ids), row["policy_version_min"]) if versions is None else versions
    of_sampled = np.asarray(versions)[mask]
    assert (np.diff(of_sampled) >= 0).all()
    for version in set(of_sampled.tolist()):
        expected = full_logprobs(models[version].model, ids[~mask], ids[mask])
        gap = np.abs(np.asarray(row["logprobs"])[mask] - expected)[of_sampled == version]
        assert gap.max() < 1e-4
