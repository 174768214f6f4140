"""One file per past schema version: every reader still reads what was written then.

The files were written once with the function below each test's expectation and never change. A new
version adds files; it does not replace these.
"""

from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest
from builders import FINGERPRINT, group, group_of, policy, rollout

from marin_rl.storage.rollouts import decode_shard, encode_shard, groups_of, identify_shard
from marin_rl.storage.tables import TableReader
from marin_rl.types import RolloutGroup
from schemas.batches import DISPOSITIONS, batches_schema
from schemas.migrations import BATCHES as BATCHES_LADDER
from schemas.migrations import DISPOSITIONS as DISPOSITIONS_LADDER
from schemas.rollouts import ROLLOUTS

GOLDEN = Path(__file__).parents[1] / "golden"
ROLLOUTS_V1 = GOLDEN / "rollouts-v1.parquet"
BATCHES_V1 = GOLDEN / "batches-v1.parquet"
DISPOSITIONS_V1 = GOLDEN / "dispositions-v1.parquet"


def rollouts_v1() -> list[RolloutGroup]:
    """What the golden shard was written from."""
    odd = [
        rollout("odd/0", prompt=[1], completion=[2, 3], policy_versions=[6, 6, 7], reward=-0.25),
        rollout("odd/1", index=1, status="error"),
        rollout("odd/2", index=2, status="truncated", reward=None, completion=[4, 5, 6]),
    ]
    return [group("plain", [0.0, 1.0]), group_of("odd", odd)]


def encode_v1() -> bytes:
    """The bytes of the golden shard; equal to the file while version 1 is the newest."""
    return encode_shard(
        rollouts_v1(),
        run_id="golden",
        round=7,
        shard=3,
        attempt="attempt-1",
        replica="host:1",
        fingerprint=FINGERPRINT,
        policy=policy(7),
    )


def test_our_reader_gives_back_what_was_written() -> None:
    data = ROLLOUTS_V1.read_bytes()
    assert identify_shard(data) == ("attempt-1", FINGERPRINT)
    table = decode_shard(data)
    assert table.schema.equals(ROLLOUTS)
    found = groups_of(table)
    assert [g.group_id for g in found] == ["plain", "odd"]
    assert found[0].example == rollouts_v1()[0].example
    assert found[1].rollouts[0].token_ids.tolist() == [1, 2, 3]
    assert found[1].rollouts[1].error == "it broke"
    assert found[1].rollouts[0].turns[1].inference_metadata is not None
    assert found[1].rollouts[0].turns[1].inference_metadata.sampling.temperature == 0.7
    assert table.equals(decode_shard(encode_v1()))


def test_pyarrow_reads_rollouts() -> None:
    table = pq.read_table(ROLLOUTS_V1)
    assert table["reward"].to_pylist() == [0.0, 1.0, -0.25, None, None]
    assert table["logprobs"][2].as_py() == [0.0, -0.5, -1.0]
    assert table["policy_versions"].to_pylist() == [None, None, [6, 6, 7], None, None]


def test_polars_reads_rollouts() -> None:
    frame = pl.read_parquet(ROLLOUTS_V1)
    assert frame["status"].to_list() == ["complete"] * 3 + ["error", "truncated"]
    turns = frame["turns"][0].to_list()
    assert turns[1]["inference_metadata"]["stop"] == ["\n"]
    assert frame["loss_mask"].to_list()[0] == [0, 0, 0, 1, 1]
    assert frame["messages"][0][1] == {"role": "user", "content": "é?"}


def test_duckdb_reads_rollouts() -> None:
    query = f"""
        select rollout_id, round, len(token_ids), turns[1].content, sampling.top_k,
               metadata::json->'difficulty'->>'digits', finished_at::varchar
        from '{ROLLOUTS_V1}' where status = 'complete' order by rollout_id
    """
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        rows = connection.sql(query).fetchall()
    moment = "2026-01-02 03:04:05.678901+00"
    assert rows == [
        ("odd/0", 7, 3, "what?", 3, "3", moment),
        ("plain/0", 7, 5, "what?", 3, "3", moment),
        ("plain/1", 7, 5, "what?", 3, "3", moment),
    ]


def test_every_reader_reads_batches() -> None:
    reader = TableReader(BATCHES_V1.read_bytes(), "batches-v1", BATCHES_LADDER)
    table = reader.table(batches_schema(8))
    expected = [
        ([5, 6, 7, 8, 9, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]),
        ([5, 6, 7, 8, 9, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]),
    ]
    names = ("token_ids", "loss_mask", "positions")
    columns = [table[name].to_pylist() for name in names]
    assert list(zip(*columns, strict=True)) == expected
    assert table["advantages"].to_pylist()[1] == [0, 0, 0, 1, 1, 0, 0, 0]
    frame = pl.read_parquet(BATCHES_V1)
    assert [tuple(row) for row in frame.select(names).rows()] == expected
    with duckdb.connect() as connection:
        query = f"select step, row, rollout_ids, list_sum(returns) from '{BATCHES_V1}'"
        rows = connection.sql(query).fetchall()
    assert rows == [(0, 0, ["g/0"], 0.0), (0, 1, ["g/1"], 2.0)]


def test_every_reader_reads_dispositions() -> None:
    data = DISPOSITIONS_V1.read_bytes()
    table = TableReader(data, "dispositions-v1", DISPOSITIONS_LADDER).table(DISPOSITIONS)
    expected = [("g/0", "consumed", None, 0), ("g/1", "consumed", None, 1)]
    expected += [("h/0", "filtered", "short_group", None), ("h/1", "failed", "no_reward", None)]
    names = ["rollout_id", "disposition", "reason", "row"]
    assert [tuple(row.values()) for row in table.select(names).to_pylist()] == expected
    assert pl.read_parquet(DISPOSITIONS_V1).select(names).rows() == expected
    with duckdb.connect() as connection:
        query = f"select {', '.join(names)} from '{DISPOSITIONS_V1}'"
        assert connection.sql(query).fetchall() == expected


@pytest.mark.parametrize("path", [ROLLOUTS_V1, BATCHES_V1, DISPOSITIONS_V1], ids=lambda p: p.name)
def test_the_version_is_in_the_file(path: Path) -> None:
    metadata = pq.read_metadata(path).metadata
    assert metadata[b"marin_rl.schema_version"] == b"1"
    assert metadata[b"marin_rl.format"].decode() == f"marin-rl/{path.name.partition('-')[0]}"
