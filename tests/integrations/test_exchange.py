"""Rollouts in the formats of other libraries, by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_factories import commit_round, configuration, group, group_of, rollout

from marin_rl.errors import InputError
from marin_rl.integrations.exchange import Exported, export_rollouts
from marin_rl.storage.runs import Run
from marin_rl.types import Rollout, ToolCall, Turn

CALL = ToolCall(id="c1", name="look", arguments='{"at": "map"}')


def two_segments() -> Rollout:
    """A question, a call, its result, and an answer whose prompt was rendered again."""
    whole = rollout("cut/0", prompt=[1, 4, 5, 6], completion=[2, 3, 7], reward=0.5)
    said = whole.turns[1].inference_metadata
    turns = (
        Turn(role="user", content="where?"),
        Turn(
            role="assistant",
            content="",
            start=1,
            end=3,
            tool_calls=(CALL,),
            inference_metadata=said,
        ),
        Turn(role="tool", content="north", tool_name="look", tool_call_id="c1"),
        Turn(role="assistant", content="N", start=6, end=7, inference_metadata=said),
    )
    return replace(
        whole,
        token_ids=np.array([1, 2, 3, 4, 5, 6, 7], np.int32),
        loss_mask=np.array([0, 1, 1, 0, 0, 0, 1], np.int32),
        logprobs=np.array([0, -0.5, -1, 0, 0, 0, -1.5], np.float32),
        segment_lengths=(3, 4),
        turns=turns,
    )


def exported(tmp_path: Path, name: str, groups: list[Any]) -> tuple[Exported, list[dict[str, Any]]]:
    run = Run.create_or_open(configuration(str(tmp_path / "runs")))
    commit_round(run, 0, [groups])
    target = tmp_path / "out.jsonl"
    written = export_rollouts(run, name, target)
    return written, [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.parametrize("name", ["trl", "verl"])
def test_a_sample_has_its_prompt_and_what_followed(tmp_path: Path, name: str) -> None:
    written, (first, second, third) = exported(
        tmp_path, name, [group("g", [1.0, None]), group_of("cut", [two_segments()])]
    )
    assert written == Exported(lines=3, left_out=1)
    ids, mask, logprobs = {
        "trl": ("completion_ids", "env_mask", "logprobs"),
        "verl": ("response_ids", "response_mask", "response_logprobs"),
    }[name]
    assert (first["prompt_ids"], first[ids]) == ([5, 6, 7], [8, 9])
    assert (first[mask], first[logprobs]) == ([1, 1], [-0.5, -1.0])
    assert (second["prompt_ids"], second[ids], second[logprobs]) == ([1], [2, 3], [-0.5, -1.0])
    assert (third["prompt_ids"], third[ids], third[logprobs]) == ([4, 5, 6], [7], [-1.5])
    names = third if name == "trl" else third["extra_fields"]
    assert (names["rollout_id"], names["segment"], names["group_id"]) == ("cut/0", 1, "cut")
    assert third["reward" if name == "trl" else "reward_score"] == 0.5


def test_messages_of_trl_are_those_that_a_segment_was_rendered_of(tmp_path: Path) -> None:
    _, (first, second) = exported(tmp_path, "trl", [group_of("cut", [two_segments()])])
    function = {"name": "look", "arguments": '{"at": "map"}'}
    asked = {"role": "user", "content": "where?"}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "content": "north", "tool_call_id": "c1", "name": "look"}
    assert (first["prompt"], first["completion"]) == ([asked], [called])
    assert second["prompt"] == [asked, called, result]
    assert second["completion"] == [{"role": "assistant", "content": "N"}]


def test_a_group_of_atropos_masks_what_was_not_sampled(tmp_path: Path) -> None:
    written, (line,) = exported(tmp_path, "atropos", [group("g", [1.0, 0.25, None])])
    assert written == Exported(lines=1, left_out=1)
    assert line["tokens"] == [[5, 6, 7, 8, 9]] * 2
    assert line["masks"] == [[-100, -100, -100, 8, 9]] * 2
    assert line["inference_logprobs"] == [[1.0, 1.0, 1.0, -0.5, -1.0]] * 2
    assert line["scores"] == [1.0, 0.25]


def test_branches_of_a_trace_are_the_segments(tmp_path: Path) -> None:
    _, (line,) = exported(tmp_path, "traces", [group_of("cut", [two_segments()])])
    (trace,) = line["traces"]
    nodes = trace["nodes"]
    assert [node["parent"] for node in nodes] == [None, 0, None, 2, 3, 4]
    assert [node["token_ids"] for node in nodes] == [[], [1, 2, 3], [], [], [], [4, 5, 6, 7]]
    assert nodes[1]["mask"] == [False, True, True]
    assert nodes[1]["logprobs"] == [-0.5, -1.0]
    assert [node["sampled"] for node in nodes] == [False, True, False, False, False, True]
    assert nodes[3]["message"]["tool_calls"][0]["name"] == "look"
    assert trace["rewards"] == {"correct": {"score": 0.5, "weight": 1.0}}


def test_a_refused_export_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rollout cut/0 has 2 segments: expected one"):
        exported(tmp_path, "atropos", [group_of("cut", [two_segments()])])
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    run = Run.open(str(tmp_path / "runs"), "run")
    with pytest.raises(InputError, match="one of trl, verl, atropos, traces, otel, found 'trll'"):
        export_rollouts(run, "trll", tmp_path / "x")
    (tmp_path / "x").write_text("mine")
    with pytest.raises(InputError, match="x exists, and is not overwritten"):
        export_rollouts(run, "trl", tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"
    export_rollouts(run, "trl", tmp_path / "new/folder/x", [])
    assert (tmp_path / "new/folder/x").read_bytes() == b""
