"""Scans see exactly what is committed, by Polars, by DuckDB and by a plain glob, at any moment."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from builders import (
    CHECKPOINT,
    FINGERPRINT,
    commit_round,
    configuration,
    group,
    policy,
)
from fake_gcs import fake_gcs

from marin_rl.analysis.scan import (
    scan_batches,
    scan_dispositions,
    scan_evals,
    scan_metrics,
    scan_rollouts,
    sql,
)
from marin_rl.batching.build import build_round
from marin_rl.errors import InputError, ObjectMissing
from marin_rl.storage.commits import commit_manifest, new_attempt, new_manifest, part_of
from marin_rl.storage.metrics import write_round_metrics
from marin_rl.storage.rollouts import commit_shard, encode_shard, seal_round
from marin_rl.storage.runs import Run, evals_slot

Where = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def gcs_options() -> Iterator[dict[str, Any]]:
    """fsspec options that reach a fake GCS with an empty bucket named `bucket`."""
    with fake_gcs() as server:
        server.create_bucket("bucket")
        yield server.options


@pytest.fixture(params=["local", "memory", "gs"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Two finished rounds of different padded lengths, and a third with one shard of two."""
    name = uuid.uuid4().hex
    root = {"local": str(tmp_path), "memory": f"memory://{name}", "gs": f"gs://bucket/{name}"}
    options = request.getfixturevalue("gcs_options") if request.param == "gs" else {}
    config = configuration(root[request.param], shards=2, storage_options=options)
    run = Run.create_or_open(config)
    for round, length in ((0, 2), (1, 40)):
        shards = [
            [group(f"{round}a", [0.0, 1.0], completion=range(length), version=round)],
            [group(f"{round}b", [1.0, 1.0, None], version=round)],
        ]
        build_round(run, round, commit_round(run, round, shards))
        write_round_metrics(run, round, {"loss": round + 0.5})
    commit_shard(run, 2, 0, [group("2a", [1.0])], FINGERPRINT, policy(2))
    return run


def _where(run: Run) -> Where:
    return run.config.root, run.run_id, dict(run.config.storage_options)


def test_rollouts_of_sealed_rounds(run: Run) -> None:
    root, run_id, options = _where(run)
    frame = scan_rollouts(root, run_id, options)
    assert isinstance(frame, pl.LazyFrame)
    ids = frame.select("rollout_id").collect()["rollout_id"].to_list()
    assert ids == [
        "0a/0", "0a/1", "0b/0", "0b/1", "0b/2", "1a/0", "1a/1", "1b/0", "1b/1", "1b/2",
    ]  # fmt: skip
    means = frame.group_by("round").agg(pl.col("reward").mean()).sort("round").collect()
    assert means.rows() == [(0, 0.75), (1, 0.75)]
    picked = frame.filter(pl.col("reward") == 0.0).select("rollout_id", "token_ids").collect()
    assert picked.row(0) == ("0a/0", [5, 6, 7, 0, 1])
    assert frame.head(3).collect().height == 3
    seal = [commit_shard(run, 2, 1, [group("2b", [1.0])], FINGERPRINT, policy(2))]
    seal += [commit_shard(run, 2, 0, [group("2a", [1.0])], FINGERPRINT, policy(2))]
    seal_round(run, 2, seal, [CHECKPOINT])
    assert scan_rollouts(root, run_id, options).collect().height == 12


def test_batches_of_different_lengths_and_dispositions(run: Run) -> None:
    root, run_id, options = _where(run)
    batches = scan_batches(root, run_id, options).collect()
    lengths = batches.select("round", pl.col("token_ids").list.len().alias("length")).rows()
    assert lengths == [(0, 32), (0, 32), (1, 64), (1, 64)]
    assert batches["rollout_ids"].to_list()[0] == ["0a/0"]
    fates = scan_dispositions(root, run_id, options).group_by("round", "disposition").len()
    assert fates.sort("round", "disposition").collect().rows() == [
        (round, kind, count)
        for round in (0, 1)
        for kind, count in (("consumed", 2), ("failed", 1), ("filtered", 2))
    ]


def test_metrics_and_evals(run: Run) -> None:
    root, run_id, options = _where(run)
    assert scan_metrics(root, run_id, options).select("round", "loss").collect().rows() == [
        (0, 0.5),
        (1, 1.5),
    ]
    assert scan_evals(root, run_id, options).collect().height == 0
    _commit_evaluation(run, 1)
    found = scan_evals(root, run_id, options).collect()
    assert found.select("round", "reward").rows() == [(1, 1.0), (1, 0.0)]


def _commit_evaluation(run: Run, round: int) -> None:
    attempt = new_attempt()
    data = encode_shard(
        [group("e", [1.0, 0.0])],
        run_id=run.run_id,
        round=round,
        shard=0,
        attempt=attempt,
        replica="",
        fingerprint=FINGERPRINT,
        policy=policy(round),
    )
    name, slot = f"evals-{attempt}.parquet", evals_slot(round)
    run.store.put_part(f"{slot}/{name}", data)
    parts = [part_of(name, data, rows=2)]
    commit_manifest(
        run.store, new_manifest(slot, attempt=attempt, fingerprint=FINGERPRINT, parts=parts)
    )


def test_sql_over_all_views(run: Run) -> None:
    root, run_id, options = _where(run)
    ask = lambda query: sql(root, run_id, query, options).rows()
    assert ask("select round, avg(reward) from rollouts group by round order by round") == [
        (0, 0.75),
        (1, 0.75),
    ]
    assert ask("SELECT count(*) FROM Rollouts WHERE reward = 1") == [(6,)]
    assert ask("select max(len(token_ids)) from batches") == [(64,)]
    joined = (
        "select m.loss, count(*) from dispositions d join metrics m using (round) "
        "where d.disposition = 'consumed' group by all order by all"
    )
    assert ask(joined) == [(0.5, 2), (1.5, 2)]
    assert ask("select count(*) from evals") == [(0,)]


def test_wrong_queries_get_duckdbs_own_words(run: Run) -> None:
    root, run_id, options = _where(run)
    with pytest.raises(InputError, match=r'column "rewrad" not found'):
        sql(root, run_id, "select rewrad from rollouts", options)
    with pytest.raises(InputError, match="syntax error"):
        sql(root, run_id, "selct 1", options)


def test_a_run_without_anything_has_empty_tables(tmp_path: Path) -> None:
    Run.create_or_open(configuration(str(tmp_path)))
    for scan in (scan_rollouts, scan_batches, scan_dispositions, scan_metrics, scan_evals):
        assert scan(tmp_path, "run").collect().height == 0
    assert sql(tmp_path, "run", "select count(*) from rollouts, batches").rows() == [(0,)]


def test_an_unknown_run_is_named(tmp_path: Path) -> None:
    Run.create_or_open(configuration(str(tmp_path)))
    with pytest.raises(ObjectMissing, match=r"no run 'other'.*found there: run"):
        scan_rollouts(tmp_path, "other")


def test_a_plain_glob_sees_exactly_the_committed_shards(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path), shards=2))
    groups = [[group("a", [0.0, 1.0])], [group("b", [1.0, 0.0])]]
    commit_round(run, 0, groups)
    commit_shard(run, 1, 0, groups[0], FINGERPRINT, policy(1))
    # What a killed attempt leaves behind: a temporary file beside the shards.
    (tmp_path / "run/rollouts/round-00001/.shard-0001.parquet.0a1b.tmp").write_bytes(b"half")
    pattern = str(tmp_path / "run" / "rollouts" / "*" / "shard-*.parquet")
    expected = [(0, 0, 2), (0, 1, 2), (1, 0, 2)]
    frame = pl.scan_parquet(pattern).group_by("round", "shard").len().sort("round", "shard")
    assert frame.collect().rows() == expected
    with duckdb.connect() as connection:
        found = connection.sql(
            f"select round, shard, count(*) from '{pattern}' group by all order by all"
        )
        assert found.fetchall() == expected
    assert scan_rollouts(tmp_path, "run").select(pl.col("round").unique()).collect().item() == 0
