"""Rollouts of several turns are listed, chosen and read whole, from the command line and in SQL."""

import json
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from support.run_factories import (
    CHECKPOINT,
    FINGERPRINT,
    SEARCHED,
    commit_round,
    configuration,
    dialogue,
    dialogue_run,
    group_of,
    policy,
)
from typer.testing import CliRunner

from marin_rl.analysis.dialogues import RolloutFilter, rollout_named, sample_rollouts
from marin_rl.analysis.query import sql
from marin_rl.analysis.scan import scan_rollouts
from marin_rl.cli import app
from marin_rl.errors import ConfigError, InputError, ObjectMissing
from marin_rl.storage.runs import Run, shard_key
from marin_rl.storage.tables.parquet import TableReader, TableWriter
from marin_rl.storage.tables.rollouts import encode_shard, seal_round, shard_ref
from marin_rl.storage.upkeep.fsck import check_run
from schemas.migrations import ROLLOUTS as LADDER
from schemas.tables import ROLLOUTS


def as_version_1(shard: bytes) -> bytes:
    """A shard as schema version 1 had it: turns without calls, cuts and times."""
    reader = TableReader(shard, "shard", LADDER)
    table = reader.table(ROLLOUTS)
    kind = ROLLOUTS.field("turns").type
    old = pa.list_(kind.field(0).with_type(pa.struct([kind.value_type.field(i) for i in range(8)])))
    turns = [[dict(list(turn.items())[:8]) for turn in row] for row in table["turns"].to_pylist()]
    schema = pa.schema(
        field.with_type(old)
        if field.name == "turns"
        else field.with_nullable(False)
        if field.name in ("queue_s", "prefill_s", "decode_s")
        else field
        for field in ROLLOUTS
        if field.name not in ("segment_lengths", "start_s", "teacher_logprobs")
    )
    columns = [pa.array(turns, old) if n == "turns" else table[n] for n in schema.names]
    stamp = {name: value for name, value in reader.stamp.items() if name != "format"}
    writer = TableWriter(LADDER, schema, stamp | {"schema_version": "1"})
    writer.write(pa.table(columns, schema=schema))
    return writer.finish()


SEARCH, GUESS = "round-00000/group-00000/000", "round-00000/group-00000/001"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return dialogue_run(tmp_path_factory.mktemp("runs"))


def invoke(run: Run, *arguments: str, columns: int = 100):
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return runner.invoke(
        app, [*arguments[:1], run.run_id, *arguments[1:], "--root", run.config.root]
    )


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        (RolloutFilter(tool="search"), [SEARCH]),
        (RolloutFilter(tool="weigh"), [SEARCH]),
        (RolloutFilter(tool="sea"), []),
        (RolloutFilter(finish_reason="max_turns"), [GUESS]),
        (RolloutFilter(min_turns=2), [SEARCH, GUESS]),
        (RolloutFilter(min_turns=3), [GUESS]),
        (RolloutFilter(min_turns=2, max_turns=2), [SEARCH]),
        (RolloutFilter(max_turns=0), []),
        (RolloutFilter(min_turns=2, finish_reason="stop"), [SEARCH]),
    ],
)
def test_filters_choose_by_tool_stop_reason_and_turns(run: Run, where: RolloutFilter, ids) -> None:
    assert [row["rollout_id"] for row in sample_rollouts(run, 0, 8, where=where)] == ids


def test_a_filter_looks_at_all_rollouts_before_the_limit(run: Run) -> None:
    (worst,) = sample_rollouts(run, 0, 1, worst_first=True, where=RolloutFilter(min_turns=2))
    assert worst["rollout_id"] == GUESS  # a single answer with reward 0 ranks before it


def test_a_dialogue_has_its_turns_in_order_with_reward_tokens_and_times(run: Run) -> None:
    row = rollout_named(run, "group-00000/001")
    assert row["rollout_id"] == GUESS
    assert [turn["content"] for turn in row["turns"] if turn["role"] != "user"] == [
        "be brief", "4", "6", "7",
    ]  # fmt: skip
    assert (row["prompt"], row["completion"]) == ("1-8", "7")  # not the last answer to a guess
    assert (row["n_turns"], row["finish_reason"], row["status"]) == (3, "max_turns", "truncated")
    assert [turn["n_tokens"] for turn in row["turns"]] == [8, 3, 1, 1, 1, 1, 1]
    assert [turn["finish_reason"] for turn in row["turns"]] == [
        None, None, "stop", None, "stop", None, "stop",
    ]  # fmt: skip
    assert row["turns"][-1]["reward"] == 0.5
    assert row["timing"]["decode_s"] == 0.25


def test_an_id_that_names_no_rollout_or_several_is_refused(run: Run) -> None:
    with pytest.raises(ObjectMissing, match="expected an id such as round-00000/group-00000/000"):
        rollout_named(run, "group-00000/009")
    with pytest.raises(ObjectMissing, match="no committed rollouts of round 7"):
        rollout_named(run, "round-00007/group-00000/000")
    with pytest.raises(InputError, match="2 rollouts of round 0 end in '001'"):
        rollout_named(run, "001", 0)


@pytest.mark.parametrize("place", ["local", "memory"])
def test_sql_counts_turns_and_names_tools_as_the_command_does(tmp_path: Path, place: str) -> None:
    root = str(tmp_path) if place == "local" else f"memory://{uuid.uuid4().hex}"
    run = dialogue_run(root)
    frame = sql(root, run.run_id, "select rollout_id, n_turns, tools from rollouts")
    told = {row["rollout_id"]: row for row in sample_rollouts(run, 0, 8)}
    assert {row["rollout_id"]: (row["n_turns"], row["tools"]) for row in frame.to_dicts()} == {
        name: (row["n_turns"], row["tools"]) for name, row in told.items()
    }
    assert told[GUESS]["n_turns"] == 3


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_round_of_version_1_is_read_next_to_one_of_version_2(tmp_path: Path, place: str) -> None:
    root = str(tmp_path) if place == "local" else f"memory://{uuid.uuid4().hex}"
    run = Run.create_or_open(configuration(root, groups=1))
    for number in (0, 1):
        name = f"round-0000{number}/group-00000"
        groups = [group_of(name, [dialogue(f"{name}/000", SEARCHED)])]
        if number == 0:
            data = encode_shard(
                groups, run_id=run.run_id, round=0, shard=0, attempt="a", replica="",
                fingerprint=FINGERPRINT, policy=policy(),
            )  # fmt: skip
            run.store.put_part(shard_key(0, 0), as_version_1(data))
            ref = shard_ref(run, 0, 0, FINGERPRINT)
            assert ref is not None
            seal_round(run, 0, [ref], [CHECKPOINT])
            checked = check_run(root, run.run_id)  # of a run without checkpoints
            assert {fault.kind for fault in checked.faults} == {"missing"}
            query = "select turns[2].tool_calls, turns[2].environment_s, tools from rollouts"
            assert sql(root, run.run_id, query).rows() == [(None, None, ["search"])]
            query = "select segment_lengths, start_s, turns[2].rewards from rollouts"
            assert sql(root, run.run_id, query).rows() == [(None, None, None)]
        else:
            commit_round(run, number, [groups])
    query = (
        "select round, turns[2].tool_calls[2].name, turns[3].cut, tools from rollouts order by 1"
    )
    expected = [(0, None, None, ["search"]), (1, "weigh", True, ["search", "weigh"])]
    assert sql(root, run.run_id, query).rows() == expected
    assert scan_rollouts(root, run.run_id).collect()["round"].to_list() == [0, 1]
    old = rollout_named(run, "round-00000/group-00000/000")
    assert (old["tools"], old["timing"]["environment_s"]) == (["search"], None)
    where = RolloutFilter(tool="search")
    assert len(sample_rollouts(run, 0, 8, where=where)) == 1


def test_the_list_tells_turns_and_stop_reason_within_80_columns(run: Run) -> None:
    shown = invoke(run, "rollouts", "--min-turns", "2", columns=80)
    assert shown.exit_code == 0, shown.output
    assert "max_turns" in shown.output
    assert f"rollouts {run.run_id} --id {GUESS}" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80


def test_one_rollout_is_a_dialogue_whose_text_moves_no_cursor(run: Run) -> None:
    shown = invoke(run, "rollouts", "--id", SEARCH).output
    places = [shown.index(text) for text in ("who was it?", "let me look", "<b>Ada</b>")]
    assert [*places, shown.rindex("Ada")] == sorted([*places, shown.rindex("Ada")])
    assert shown.rindex("Ada") > places[-1] + len("<b>Ada")
    assert "\x1b" not in shown
    assert "tool · search · answers call-1 · cut at the limit" in shown
    assert "model 1.75 s · environment 3.25 s" in " ".join(shown.split())  # a line may end there
    assert '→ search({"for": "<i>Ada</i>"}) [call-1]' in shown
    assert "reward 0.25" in shown
    assert "reward 0.5" in shown


def test_json_of_one_has_what_the_dialogue_has(run: Run) -> None:
    row = json.loads(invoke(run, "rollouts", "--id", SEARCH, "--json").output)
    assert row["tools"] == ["search", "weigh"]
    assert row["turns"][2]["tool_call_id"] == "call-1"
    assert row["turns"][1]["tool_calls"][1] == {"id": "call-2", "name": "weigh", "arguments": "{}"}
    assert [turn["cut"] for turn in row["turns"]] == [False, False, True, False]
    assert [turn["model_s"] for turn in row["turns"]] == [None, 1.75, None, None]
    assert [turn["environment_s"] for turn in row["turns"]] == [None, 3.25, None, None]
    assert row["timing"]["environment_s"] == 3.25
    assert row["turns"][1]["reward"] == 0.25
    assert row["timing"]["started_at"] == "2026-01-02T03:04:05.678901+00:00"


def test_one_rollout_and_a_choice_among_several_exclude_each_other(run: Run) -> None:
    for choice in (
        ["--tool", "search"],
        ["--worst"],
        ["--limit", "3"],
        ["--min-turns", "2"],
        ["--max-turns", "2"],
    ):
        refused = invoke(run, "rollouts", "--id", SEARCH, *choice)
        assert isinstance(refused.exception, ConfigError), choice


def test_conditions_that_nothing_fulfils_say_so(run: Run) -> None:
    shown = invoke(run, "rollouts", "--tool", "calculator")
    assert shown.exit_code == 0
    assert "no rollout of this round fulfils these conditions" in shown.output
