"""One file per past schema version: every reader still reads what was written then.

The files were written once with the function below each test's expectation and never change. A new
version adds files; it does not replace these.
"""

from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.run_factories import (
    FINGERPRINT,
    dialogue,
    group,
    group_of,
    policy,
    rollout,
    sampled_pair,
)

from marin_rl.analysis.scan import columns_of, scan
from marin_rl.storage.tables.pairs import encode_pairs, read_pairs
from marin_rl.storage.tables.parquet import TableReader
from marin_rl.storage.tables.rollouts import decode_shard, encode_shard, groups_of, identify_shard
from marin_rl.storage.tables.scores import ScoredStep, score_table, scores_writer
from marin_rl.types import NamedReward, PreferencePair, RolloutGroup, ToolCall, Turn, TurnTiming
from schemas.migrations import BATCHES as BATCHES_LADDER
from schemas.migrations import DISPOSITIONS as DISPOSITIONS_LADDER
from schemas.migrations import PAIRS as PAIRS_LADDER
from schemas.migrations import REWARDS as REWARDS_LADDER
from schemas.migrations import ROLLOUTS as ROLLOUTS_LADDER
from schemas.migrations import SCORES as SCORES_LADDER
from schemas.tables import (
    DISPOSITIONS,
    FLOATS,
    PAIRS,
    REWARDS,
    ROLLOUTS,
    SCORES,
    VALUED,
    WEIGHED,
    batches_schema,
)

GOLDEN = Path(__file__).parents[1] / "golden"
ROLLOUTS_V1, ROLLOUTS_V2, ROLLOUTS_V3, ROLLOUTS_V4, ROLLOUTS_V5, ROLLOUTS_V6 = (
    GOLDEN / f"rollouts-v{version}.parquet" for version in range(1, 7)
)
BATCHES_V1, BATCHES_V2 = (GOLDEN / f"batches-v{version}.parquet" for version in (1, 2))
SCORES_V1, SCORES_V2, SCORES_V3 = (GOLDEN / f"scores-v{n}.parquet" for n in (1, 2, 3))
PAIRS_V1, PAIRS_V2 = (GOLDEN / f"pairs-v{version}.parquet" for version in (1, 2))
DISPOSITIONS_V1, REWARDS_V1 = GOLDEN / "dispositions-v1.parquet", GOLDEN / "rewards-v1.parquet"

# Of a turn, what versions 2 and 3 of rollouts added.
ADDED = ("tool_calls", "cut", "queue_s", "prefill_s", "decode_s", "environment_s")
ADDED_3 = ("rewards", "malformed")


def rollouts_v1() -> list[RolloutGroup]:
    """Groups that the golden shard was written from."""
    odd = [
        rollout("odd/0", prompt=[1], completion=[2, 3], policy_versions=[6, 6, 7], reward=-0.25),
        rollout("odd/1", index=1, status="error"),
        rollout("odd/2", index=2, status="truncated", reward=None, completion=[4, 5, 6]),
    ]
    return [group("plain", [0.0, 1.0]), group_of("odd", odd)]


def rollouts_v2() -> list[RolloutGroup]:
    """Groups of the golden shard of version 2: those of version 1, and a dialogue with a tool."""
    timing = TurnTiming(queue_s=0.25, prefill_s=0.5, decode_s=1.0, environment_s=2.0)
    calls = tuple(
        ToolCall(id=f"c0000000{number}", name=name, arguments='{"of": "Ada"}')
        for number, name in enumerate(["look", "count"])
    )
    result = Turn(role="tool", content="née", tool_name="look", tool_call_id="c00000000", cut=True)
    talk = [
        Turn(role="user", content="who?"),
        Turn(role="assistant", content="look, count", tool_calls=calls, timing=timing),
        result,
        Turn(role="assistant", content="Ada", reward=1.0),
    ]
    return [*rollouts_v1(), group_of("talk", [dialogue("talk/0", talk)])]


def rollouts_v3() -> list[RolloutGroup]:
    """Groups of the golden shard of version 3: those of version 2, and one of two segments."""
    parts = (NamedReward(name="form", value=0.25), NamedReward(name="move", value=-1.0))
    turns = (
        Turn(role="user", content="go", start=0, end=1),
        Turn(role="assistant", content="<tool_call>{", start=1, end=3, malformed="<tool_call>{"),
        Turn(role="user", content="on"),
        Turn(role="assistant", content="b", start=6, end=7, reward=-0.75, rewards=parts),
    )
    whole = rollout("cut/0", prompt=[1, 4, 5, 6], completion=[2, 3, 7])
    cut = replace(
        whole,
        token_ids=np.array([1, 2, 3, 4, 5, 6, 7], np.int32),
        loss_mask=np.array([0, 1, 1, 0, 0, 0, 1], np.int32),
        segment_lengths=(3, 4),
        turns=turns,
        timing=replace(whole.timing, start_s=0.125),
    )
    return [*rollouts_v2(), group_of("cut", [cut])]


def rollouts_v4() -> list[RolloutGroup]:
    """With a rollout that a teacher scored."""
    taught = rollout("taught/0", prompt=[1, 4], completion=[2, 3])
    scores = np.array([0, 0, -0.5, -2.0], np.float32)
    return [*rollouts_v3(), group_of("taught", [replace(taught, teacher_logprobs=scores)])]


def rollouts_v5() -> list[RolloutGroup]:
    """With a rollout that was sampled with min_p."""
    own = rollout("least/0", prompt=[1, 4], completion=[2, 3])
    own = replace(own, sampling=replace(own.sampling, min_p=0.125))
    return [*rollouts_v4(), group_of("least", [own])]


def rollouts_v6() -> list[RolloutGroup]:
    """With a rollout that was sampled with a repetition penalty."""
    own = rollout("again/0", prompt=[1, 4], completion=[2, 3])
    own = replace(own, sampling=replace(own.sampling, repetition_penalty=1.25))
    return [*rollouts_v5(), group_of("again", [own])]


def encode(groups: list[RolloutGroup]) -> bytes:
    """The bytes of a golden shard, in the newest version."""
    return encode_shard(
        groups,
        run_id="golden",
        round=7,
        shard=3,
        attempt="attempt-1",
        replica="host:1",
        fingerprint=FINGERPRINT,
        policy=policy(7),
    )


def decoded(path: Path, version: str) -> pa.Table:
    """The rows of a golden shard, which says that it is of a version."""
    reader = TableReader(path.read_bytes(), path.name, ROLLOUTS_LADDER)
    assert reader.stamp["schema_version"] == version
    return reader.table()


def test_our_reader_gives_back_what_was_written() -> None:
    data = ROLLOUTS_V1.read_bytes()
    assert identify_shard(data) == ("attempt-1", FINGERPRINT)
    table = decode_shard(data)
    assert table.schema.equals(ROLLOUTS)
    assert decode_shard(data, ["reward"]).column_names == ["reward"]
    found = groups_of(table)
    assert [g.group_id for g in found] == ["plain", "odd"]
    assert found[0].example == rollouts_v1()[0].example
    assert found[1].rollouts[0].token_ids.tolist() == [1, 2, 3]
    assert found[1].rollouts[1].error == "it broke"
    assert found[1].rollouts[0].turns[1].inference_metadata is not None
    assert found[1].rollouts[0].turns[1].inference_metadata.sampling.temperature == 0.7
    assert {turn.tool_calls for turn in found[0].rollouts[0].turns} == {()}
    assert {turn.cut for turn in found[0].rollouts[0].turns} == {False}
    assert {turn.timing for turn in found[0].rollouts[0].turns} == {TurnTiming()}
    # nothing of version 1 is lost or changed; what version 2 added is null
    now = decode_shard(encode(rollouts_v1())).to_pylist()
    for then, row in zip(table.to_pylist(), now, strict=True):
        row["turns"] = [turn | dict.fromkeys((*ADDED, *ADDED_3)) for turn in row["turns"]]
        assert then == row


def test_our_reader_gives_back_the_calls_and_times_of_version_2() -> None:
    table = decoded(ROLLOUTS_V2, "2")
    now = decode_shard(encode(rollouts_v2())).to_pylist()
    for then, row in zip(table.to_pylist(), now, strict=True):
        row["turns"] = [turn | dict.fromkeys(ADDED_3) for turn in row["turns"]]
        assert then == row
    turns, written = (groups[-1].rollouts[0].turns for groups in (groups_of(table), rollouts_v2()))
    for turn, expected in zip(turns, written, strict=True):
        assert (turn.tool_calls, turn.cut) == (expected.tool_calls, expected.cut)
        assert turn.timing == expected.timing


def test_our_reader_gives_back_the_segments_and_named_rewards_of_version_3() -> None:
    table = decoded(ROLLOUTS_V3, "3")
    assert table.equals(decode_shard(encode(rollouts_v3())))
    (read,), (written,) = (groups[-1].rollouts for groups in (groups_of(table), rollouts_v3()))
    assert read.segment_lengths == (3, 4)
    assert read.timing.start_s == 0.125
    for turn, expected in zip(read.turns, written.turns, strict=True):
        assert (turn.rewards, turn.malformed) == (expected.rewards, expected.malformed)
    assert groups_of(table)[0].rollouts[0].segment_lengths is None
    query = """
        select rollout_id, segment_lengths, turns[4].rewards[2].value
        from read_parquet(['{}', '{}', '{}'], union_by_name=true) where segment_lengths is not null
    """
    for files in ((ROLLOUTS_V1, ROLLOUTS_V2, ROLLOUTS_V3), (ROLLOUTS_V3, ROLLOUTS_V2, ROLLOUTS_V1)):
        with duckdb.connect() as connection:
            rows = connection.sql(query.format(*files)).fetchall()
        assert rows == [("cut/0", [3, 4], -1.0)]
        frame = scan(list(files), columns_of(ROLLOUTS)).collect()
        assert frame["segment_lengths"].drop_nulls().to_list() == [[3, 4]]


def test_our_reader_gives_back_the_scores_of_a_teacher_of_version_4() -> None:
    table = decoded(ROLLOUTS_V4, "4")
    assert table.equals(decode_shard(encode(rollouts_v4())))
    *_, (read,) = (groups.rollouts for groups in groups_of(table))
    assert read.teacher_logprobs is not None
    assert read.teacher_logprobs.tolist() == [0, 0, -0.5, -2.0]
    assert groups_of(table)[0].rollouts[0].teacher_logprobs is None
    frame = scan([ROLLOUTS_V1, ROLLOUTS_V4], columns_of(ROLLOUTS)).collect()
    assert frame["teacher_logprobs"].drop_nulls().to_list() == [[0, 0, -0.5, -2.0]]


def test_our_reader_gives_back_the_min_p_of_version_5() -> None:
    table = decoded(ROLLOUTS_V5, "5")
    assert table.equals(decode_shard(encode(rollouts_v5())))
    *earlier, least = (each.rollouts[0].sampling.min_p for each in groups_of(table))
    assert (least, set(earlier)) == (0.125, {None})
    for files in ([ROLLOUTS_V1, ROLLOUTS_V5], [ROLLOUTS_V5, ROLLOUTS_V4]):
        frame = scan(files, columns_of(ROLLOUTS)).collect()
        kept = frame["sampling"].struct.field("min_p").drop_nulls()
        assert kept.to_list() == [0.125]


def test_our_reader_gives_back_the_repetition_penalty_of_version_6() -> None:
    table = decoded(ROLLOUTS_V6, "6")
    assert table.equals(decode_shard(encode(rollouts_v6())))
    *earlier, again = (each.rollouts[0].sampling.repetition_penalty for each in groups_of(table))
    assert (again, set(earlier)) == (1.25, {None})
    frame = scan([ROLLOUTS_V5, ROLLOUTS_V6], columns_of(ROLLOUTS)).collect()
    kept = frame["sampling"].struct.field("repetition_penalty").drop_nulls()
    assert kept.to_list() == [1.25]


def test_batches_of_version_2_have_the_scores_of_a_teacher() -> None:
    reader = TableReader(BATCHES_V2.read_bytes(), "batches-v2", BATCHES_LADDER)
    assert reader.stamp["schema_version"] == "2"
    table = reader.table(batches_schema(4, distilled=True))
    assert table["teacher_logprobs"].to_pylist() == [[0.0, 0.0, -0.5, -2.0]]
    with duckdb.connect() as connection:
        rows = connection.sql(f"select list_sum(teacher_logprobs) from '{BATCHES_V2}'").fetchall()
    assert rows == [(-2.5,)]


def test_every_reader_reads_both_versions_together() -> None:
    """Shards of a run that was begun with version 1 and goes on with version 2."""
    query = """
        select rollout_id, list_transform(turns, lambda t: t.tool_calls[2].name),
               list_transform(turns, lambda t: t.cut), turns[2].environment_s
        from read_parquet(['{}', '{}'], union_by_name=true) where len(turns) > 3
    """
    expected = [("talk/0", [None, "count", None, None], [False, False, True, False], 2.0)]
    for files in ((ROLLOUTS_V1, ROLLOUTS_V2), (ROLLOUTS_V2, ROLLOUTS_V1)):
        with duckdb.connect() as connection:
            assert connection.sql(query.format(*files)).fetchall() == expected
        turns = scan(list(files), columns_of(ROLLOUTS)).select("turns").collect()["turns"]
        dialogues = [row for row in turns.to_list() if len(row) > 3]
        assert [call["id"] for call in dialogues[0][1]["tool_calls"]] == ["c00000000", "c00000001"]
        assert sum(turn["cut"] is None for row in turns.to_list() for turn in row) == 9


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


def scores_of(*, valued: bool = False, weighed: bool = False) -> pa.Table:
    """The table of the golden scores: a packed row of two segments, no reference."""
    mask = np.array([[0, 1, 1, 0, 1, 0]], np.bool_)
    values = np.arange(6, dtype=np.float32)[None] / 4
    floats = dict.fromkeys(FLOATS, values) | {"reference_logprobs": None, "old_logprobs": None}
    if valued:
        floats |= dict.fromkeys(VALUED, values * 2)
    if weighed:
        floats |= dict.fromkeys(WEIGHED, values / 2)
    scored = ScoredStep(
        rollout_ids=(("g/0", "g/1"),),
        mask=mask,
        segment_ids=np.array([[1, 1, 1, 2, 2, 0]], np.int32),
        positions=np.array([[0, 1, 2, 0, 1, 0]], np.int32),
        clipped=np.array([[0, 0, 1, 0, 0, 0]], np.bool_),
        floats=floats,
    )
    return score_table(7, 3, scored)


def encode_scores(*, valued: bool = False, weighed: bool = False) -> bytes:
    """The bytes of the golden scores: of version 3 with an optimal token baseline, of version 2
    with a critic, of version 1 without either.
    """
    table = scores_of(valued=valued, weighed=weighed)
    writer = scores_writer(table.schema, {"attempt": "attempt-1", "eos_token_id": "1"})
    writer.write(table)
    return writer.finish()


@pytest.mark.parametrize(
    ("version", "columns"), [(1, {}), (2, {"valued": True}), (3, {"weighed": True})]
)
def test_scores_are_written_in_the_lowest_version_that_has_them(version, columns):
    data = encode_scores(**columns)
    stamp = TableReader(data, "scores", SCORES_LADDER).stamp
    assert stamp["schema_version"] == str(version)
    golden = pq.read_table(GOLDEN / f"scores-v{version}.parquet")
    assert pq.read_table(pa.BufferReader(data)).equals(golden)


def pairs_v1() -> pa.Table:
    """The golden pairs: one from rollouts, one from a user's file."""
    sampled = sampled_pair()
    typed = PreferencePair(id="b", messages=sampled.messages, chosen="x", rejected="y")
    data = encode_pairs([sampled, typed], {"attempt": "attempt-1"})
    return TableReader(data, "now", PAIRS_LADDER).table(PAIRS)


def pairs_v2() -> pa.Table:
    """The golden pair with a mask and log-probabilities of the reference."""
    learned = {
        "chosen_loss_mask": np.array([0, 1], np.int8),
        "chosen_reference_logprobs": np.array([0, -0.5], np.float32),
    }
    data = encode_pairs([replace(sampled_pair(), **learned)], {"attempt": "attempt-1"})
    return TableReader(data, "now", PAIRS_LADDER).table(PAIRS)


def rewards_v1() -> pa.Table:
    """The golden rewards, of attempt-1 and the function m:f: one that changed, one that failed."""
    rows = [
        {
            "rollout_id": "g/0",
            "reward": 0.5,
            "reward_before": 1.0,
            "reward_components": [{"name": "short", "value": 2.0, "weight": 0.25}],
        },
        {"rollout_id": "g/1", "reward_before": 0.0, "reward_components": [], "error": "too long"},
    ]
    return pa.Table.from_pylist(rows, schema=REWARDS)


@pytest.mark.parametrize(
    ("path", "ladder", "written"),
    [
        (SCORES_V1, SCORES_LADDER, scores_of()),
        (SCORES_V2, SCORES_LADDER, scores_of(valued=True)),
        (SCORES_V3, SCORES_LADDER, scores_of(weighed=True)),
        (PAIRS_V1, PAIRS_LADDER, pairs_v1()),
        (PAIRS_V2, PAIRS_LADDER, pairs_v2()),
        (REWARDS_V1, REWARDS_LADDER, rewards_v1()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_nothing_of_a_version_is_lost_and_later_columns_are_null(path, ladder, written):
    schema = SCORES if ladder is SCORES_LADDER else written.schema
    table = TableReader(path.read_bytes(), path.name, ladder).table(schema)
    assert table.select(written.column_names).equals(written)
    for name in set(schema.names) - set(written.column_names):
        assert table[name].null_count == table.num_rows


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            DISPOSITIONS_V1,
            [
                ("rollout_id", "disposition", "reason", "row"),
                ("g/0", "consumed", None, 0),
                ("g/1", "consumed", None, 1),
                ("h/0", "filtered", "short_group", None),
                ("h/1", "failed", "no_reward", None),
            ],
        ),
        (
            SCORES_V1,
            [
                ("round", "rollout_id", "step", "row", "segment", "positions", "trainer_logprobs"),
                (7, "g/0", 3, 0, 1, [1, 2], [0.25, 0.5]),
                (7, "g/1", 3, 0, 2, [1], [1.0]),
            ],
        ),
        (
            SCORES_V1,
            [
                ("ratios", "clipped", "reference_logprobs"),
                ([0.25, 0.5], [False, True], None),
                ([1.0], [False], None),
            ],
        ),
        (SCORES_V2, [("rollout_id", "old_values"), ("g/0", [0.5, 1.0]), ("g/1", [2.0])]),
        (
            SCORES_V3,
            [("rollout_id", "squared_score_norms"), ("g/0", [0.125, 0.25]), ("g/1", [0.5])],
        ),
        (
            PAIRS_V1,
            [
                ("id", "chosen", "rejected", "split", "margin", "chosen_token_ids"),
                ("run/round-00000/group-00001", "yes", "", "eval", 0.5, [3, 4]),
                ("b", "x", "y", None, None, None),
            ],
        ),
        (
            REWARDS_V1,
            [
                ("rollout_id", "reward", "reward_before", "error"),
                ("g/0", 0.5, 1.0, None),
                ("g/1", None, 0.0, "too long"),
            ],
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_reader_reads(path: Path, expected: list[tuple]) -> None:
    names, *rows = expected
    table = pq.read_table(path).select(names)
    assert [tuple(row.values()) for row in table.to_pylist()] == rows
    assert pl.read_parquet(path).select(names).rows() == rows
    with duckdb.connect() as connection:
        assert connection.sql(f"select {', '.join(names)} from '{path}'").fetchall() == rows
    if path is PAIRS_V1:
        assert [pair.margin for pair in read_pairs(path).pairs] == [0.5, None]
    if path is DISPOSITIONS_V1:
        reader = TableReader(path.read_bytes(), path.name, DISPOSITIONS_LADDER)
        assert reader.table(DISPOSITIONS).select(names).equals(table)


@pytest.mark.parametrize(
    "path",
    [ROLLOUTS_V1, BATCHES_V1, DISPOSITIONS_V1, SCORES_V1, PAIRS_V1, REWARDS_V1],
    ids=lambda p: p.name,
)
def test_the_version_is_in_the_file(path: Path) -> None:
    metadata = pq.read_metadata(path).metadata
    assert metadata[b"marin_rl.schema_version"] == b"1"
    assert metadata[b"marin_rl.format"].decode() == f"marin-rl/{path.name.partition('-')[0]}"
