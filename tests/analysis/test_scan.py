"""Scans see exactly what is committed, by Polars, by DuckDB and by a plain glob, at any moment."""

import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal
from support.cases import others_slow
from support.fake_stores import fake_gcs
from support.run_factories import (
    CHECKPOINT,
    FINGERPRINT,
    commit_round,
    configuration,
    evaluate,
    group,
    play,
    policy,
    whole_run,
)

from marin_rl.analysis.query import sql
from marin_rl.analysis.scan import (
    scan_batches,
    scan_dispositions,
    scan_evals,
    scan_metrics,
    scan_rollouts,
    scan_scores,
)
from marin_rl.batching.build import build_round
from marin_rl.errors import CorruptObject, InputError
from marin_rl.storage.runs import Run, latest_checkpoint
from marin_rl.storage.stores.filesystem import MemoryStore
from marin_rl.storage.tables.metrics import write_round_metrics
from marin_rl.storage.tables.rollouts import commit_shard, seal_round
from marin_rl.storage.upkeep.forks import fork_run

SCANS = {
    "rollouts": scan_rollouts,
    "batches": scan_batches,
    "dispositions": scan_dispositions,
    "metrics": scan_metrics,
    "evals": scan_evals,
    "scores": scan_scores,
}
Where = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def gcs_options() -> Iterator[dict[str, Any]]:
    """fsspec options that reach a fake GCS with an empty bucket named `bucket`."""
    with fake_gcs() as server:
        server.create_bucket("bucket")
        yield server.options


@pytest.fixture(params=others_slow(["local", "memory", "gs"], "local"))
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
    assert lengths == [(0, 32), (0, 32), (1, 48), (1, 48)]
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
    evaluate(run, 1, CHECKPOINT)
    found = scan_evals(root, run_id, options).collect()
    assert found.select("round", "reward").rows() == [(1, 0.0), (1, 1.0)]
    # DuckDB reads local files itself.
    for table, stored in (
        ("evals", found),
        ("metrics", scan_metrics(root, run_id, options).collect()),
    ):
        asked = sql(root, run_id, f"select * from {table}", options)
        assert asked.select(stored.columns).rows() == stored.rows()
        assert asked.columns[: len(stored.columns)] == stored.columns


def test_sql_over_all_views(run: Run) -> None:
    root, run_id, options = _where(run)
    ask = lambda query: sql(root, run_id, query, options).rows()
    assert ask("select round, avg(reward) from rollouts group by round order by round") == [
        (0, 0.75),
        (1, 0.75),
    ]
    assert ask("SELECT count(*) FROM Rollouts WHERE reward = 1") == [(6,)]
    assert ask("select max(len(token_ids)) from batches") == [(48,)]
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


def test_sql_sees_a_run_made_again_under_the_same_name(tmp_path: Path) -> None:
    """DuckDB remembers footers, but not those of a run that is another one now."""
    for attempt in range(6):
        run = Run.create_or_open(configuration(str(tmp_path)))
        commit_round(run, 0, [[group("a", [float(attempt), attempt + 2.0])]])
        query = "select avg(reward), min(reward) from rollouts"
        for _ in range(2):
            assert sql(tmp_path, "run", query).rows() == [(attempt + 1, attempt)]
        assert sql(tmp_path, "run", f"select 1 from rollouts where reward < {attempt}").is_empty()
        shutil.rmtree(tmp_path / "run")


def test_tables_that_a_query_creates_are_dropped_at_its_end(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    commit_round(run, 0, [[group("a", [0.0, 1.0])]])
    made = "create table kept as from rollouts; select count(*) from kept"
    for _ in range(2):
        assert sql(tmp_path, "run", made).rows() == [(2,)]
    with pytest.raises(InputError, match="kept does not exist"):
        sql(tmp_path, "run", "from kept")
    with pytest.raises(InputError, match="rollouts does not exist"):
        sql(tmp_path, "run", "select 1; from (from query_table('roll' || 'outs'))")


def test_sql_from_several_threads_at_once(tmp_path: Path) -> None:
    for name, reward in (("one", 1.0), ("two", 2.0)):
        run = Run.create_or_open(configuration(str(tmp_path), run_id=name))
        commit_round(run, 0, [[group("a", [reward])]])
        write_round_metrics(run, 0, {"loss": reward})
    query = "select r.reward, m.loss from rollouts r join metrics m using (round)"
    with ThreadPoolExecutor(4) as pool:
        asked = ["one", "two"] * 8
        found = list(pool.map(lambda name: sql(tmp_path, name, query).rows(), asked))
    assert found == [[(1.0, 1.0)], [(2.0, 2.0)]] * 8


def test_metrics_that_are_damaged_are_named(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    write_round_metrics(run, 0, {"loss": 1.0})
    path = tmp_path / "run" / "metrics" / "round-00000.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptObject, match=r"round-00000\.parquet is not a readable Parquet"):
        scan_metrics(tmp_path, "run")


@pytest.mark.slow
def test_a_folder_whose_name_looks_like_a_pattern_is_that_folder(tmp_path: Path) -> None:
    """`a[1]b` is no pattern of `a1b`, and `star*` no pattern that a sibling fits."""
    run = whole_run(str(tmp_path / "starX"), 2, shards=1)
    evaluate(run, 0, CHECKPOINT)
    plain = {table: scan(tmp_path / "starX", "run").collect() for table, scan in SCANS.items()}
    for name in ("a[1]b", "star*", "sta?X", "back\\s[l"):
        shutil.copytree(tmp_path / "starX", tmp_path / name)
        for table, scan in SCANS.items():
            assert_frame_equal(scan(tmp_path / name, "run").collect(), plain[table])
            found = sql(tmp_path / name, "run", f"select count(*) from {table}")
            assert found.item() == plain[table].height > 0, (name, table)


def test_a_run_without_anything_has_empty_tables(tmp_path: Path) -> None:
    Run.create_or_open(configuration(str(tmp_path)))
    for scan in SCANS.values():
        assert scan(tmp_path, "run").collect().height == 0
        assert scan(tmp_path, "run").collect_schema().names()[:2] == ["run_id", "round"]
    assert sql(tmp_path, "run", "select count(*) from rollouts, batches").rows() == [(0,)]


def test_a_plain_glob_sees_exactly_the_committed_shards(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path), shards=2))
    groups = [[group("a", [0.0, 1.0])], [group("b", [1.0, 0.0])]]
    commit_round(run, 0, groups)
    commit_shard(run, 1, 0, groups[0], FINGERPRINT, policy(1))
    # A killed attempt leaves this behind: a temporary file next to the shards.
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


def test_several_runs_are_one_table_and_every_table_names_its_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = Run.create_or_open(configuration(str(tmp_path), run_id=name))
        build_round(run, 0, commit_round(run, 0, [[group("a", [0.0, 1.0])]]))
        write_round_metrics(run, 0, {"loss": 0.5})
        evaluate(run, 0, CHECKPOINT)
    for scan in (scan_rollouts, scan_batches, scan_dispositions, scan_metrics, scan_evals):
        for runs in (None, ["two", "one", "two"]):
            counts = scan(tmp_path, runs).group_by("run_id").len().sort("run_id").collect().rows()
            assert counts in ([("one", 1), ("two", 1)], [("one", 2), ("two", 2)])
        only = scan(tmp_path, "one").select(pl.col("run_id").unique()).collect()["run_id"]
        assert only.to_list() == ["one"]
    query = "select run_id, count(*) from rollouts join dispositions using (run_id, rollout_id)"
    assert sql(tmp_path, None, f"{query} group by all order by all").rows() == [
        ("one", 2),
        ("two", 2),
    ]


def test_a_scan_reads_only_the_row_groups_and_columns_it_needs(tmp_path: Path) -> None:
    """Damage in what a query does not need goes unnoticed: the proof that it is not read."""
    run = Run.create_or_open(configuration(str(tmp_path), shards=2))
    commit_round(run, 0, [[group("0a", [0.0, 1.0])], [group("0b", [1.0, 0.0])]])
    path = run.store.local_path("rollouts/round-00000/shard-0001.parquet")
    assert path is not None
    chunks = {
        chunk.path_in_schema: chunk
        for chunk in map(
            pq.read_metadata(path).row_group(0).column, range(pq.read_metadata(path).num_columns)
        )
    }
    data = bytearray(path.read_bytes())
    for name in ("token_ids.list.element", "rollout_id"):
        chunk = chunks[name]
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        data[start : start + chunk.total_compressed_size] = b"\0" * chunk.total_compressed_size
    path.write_bytes(data)
    frame = scan_rollouts(tmp_path, "run")
    assert frame.select(pl.col("reward").mean()).collect().item() == 0.5
    found = frame.filter(pl.col("rollout_id") == "0a/1").collect()
    assert found["token_ids"].to_list() == [[5, 6, 7, 8, 9]]
    with pytest.raises(pl.exceptions.ComputeError):
        frame.select("token_ids").collect()


@pytest.mark.parametrize("run", ["memory", "gs"], indirect=True)
def test_a_question_about_a_round_fetches_no_other_from_a_bucket(run: Run) -> None:
    """A query of one round needs no object of another."""
    root, run_id, options = _where(run)
    for shard in (0, 1):
        run.store.delete(f"rollouts/round-00000/shard-{shard:04d}.parquet")
    frame = scan_rollouts(root, run_id, options)
    round = pl.col("round")
    late = ((round > 0) & (pl.col("rollout_id") != "x")) & (round < 2)
    for predicate in (round == 1, round.is_in([1, 7]), late):
        assert frame.filter(predicate).select("rollout_id").collect().height == 5
    assert frame.filter(round == 1, pl.col("reward") > 0).collect().height == 3
    assert sql(root, run_id, "select count(*) from rollouts where round = 1", options).item() == 5
    for predicate in (pl.col("reward") > 0, (round == 1) | (pl.col("reward") > 0)):
        with pytest.raises(Exception, match="shard-0000"):
            frame.filter(predicate).collect()


@pytest.fixture(scope="module", params=others_slow(["local", "memory"], "local"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root with `run`, three rounds of it, and `fork`, which has a round 2 of its own."""
    local = str(tmp_path_factory.mktemp("family"))
    parent = whole_run(local if request.param == "local" else f"memory://{uuid.uuid4().hex}", 3)
    fork = fork_run(parent, 2, "fork")
    start = latest_checkpoint(fork)
    assert start is not None
    play(fork, 2, start)
    for run, round in ((parent, 1), (parent, 2), (fork, 2)):
        evaluate(run, round, CHECKPOINT)
    return parent.config.root


OWNERS = [("run", 0), ("run", 1), ("run", 2), ("fork", 2)]  # of each round that was played


@pytest.mark.parametrize("table", SCANS)
def test_shared_rounds_of_a_fork_are_their_ancestors_and_there_once(family, table):
    scan, played = SCANS[table], [place for place in OWNERS if table != "evals" or place[1]]
    rows = scan(family, "run").filter(pl.col("round") == 1).collect().height
    assert rows > 0
    for runs, seen in (
        (None, played),
        (["run", "fork"], played),
        (["fork", "run"], played),
        ("fork", [place for place in played if place != ("run", 2)]),
    ):
        expected = sorted((*place, rows) for place in seen)
        found = scan(family, runs).group_by("run_id", "round").len().collect().rows()
        assert sorted(found) == expected
        query = f"select run_id, round, count(*) from {table} group by all"
        assert sorted(sql(family, runs, query).rows()) == expected


def test_tables_of_a_fork_join_by_run_and_rollout(family: str) -> None:
    """Ids repeat from run to run, which is what the run's name is in each table for."""
    keys = ["run_id", "rollout_id"]
    rollouts, scores = (scan(family, "fork") for scan in (scan_rollouts, scan_scores))
    assert scores.join(rollouts, on=keys).collect().height == scores.collect().height > 0
    query = "select count(*) from rollouts join dispositions using (run_id, rollout_id)"
    assert sql(family, "fork", query).item() == rollouts.collect().height


def test_a_part_of_a_bucket_is_fetched_when_it_is_asked_for(monkeypatch):
    """Metrics alone are read to know their columns; and no condition on the round is lost."""
    run = whole_run(f"memory://{uuid.uuid4().hex}", 3, shards=1)
    for round in range(3):
        evaluate(run, round, CHECKPOINT)
    read, fetched = MemoryStore.read, list[str]()

    def counted(self: MemoryStore, key: str) -> bytes:
        fetched.extend([key] if key.endswith(".parquet") else [])
        return read(self, key)

    def fetches(ask: Any) -> tuple[Any, int]:
        fetched.clear()
        return ask(), len(fetched)

    monkeypatch.setattr(MemoryStore, "read", counted)
    for table, scan in SCANS.items():
        known = 3 if table == "metrics" else 0
        frame, building = fetches(lambda scan=scan: scan(run.config.root, "run"))
        of_a_round = frame.filter(pl.col("round") == 1, pl.col("run_id") == "run")
        some, asking = fetches(lambda frame=of_a_round: frame.collect().height)
        every, whole = fetches(lambda frame=frame: frame.collect().height)
        assert (building, asking, whole) == (known, 0 if known else 1, 0 if known else 3), table
        assert every == 3 * some > 0
        query = f"select count(*) from {table} where round = 1"
        found, asking = fetches(lambda query=query: sql(run.config.root, "run", query).item())
        assert (found, asking) == (some, known or 1), table
