"""Rollouts as traces of OpenTelemetry, by hand."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from integrations.test_exchange import two_segments
from support.run_factories import commit_round, configuration, group_of

from marin_rl.integrations.exchange import export_rollouts
from marin_rl.storage.runs import Run


def values_of(span: dict[str, Any]) -> dict[str, Any]:
    """Attributes by name, each with its only value."""
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


def test_a_rollout_is_a_trace_of_its_turns_and_tools(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path / "runs")))
    rollout = two_segments()
    first, second = (replace(turn, timing=replace(turn.timing, prefill_s=0.5, decode_s=1.0,
                             environment_s=0.25)) for turn in rollout.turns[1::2])  # fmt: skip
    turns = rollout.turns[0], first, rollout.turns[2], second
    commit_round(run, 0, [[group_of("cut", [replace(rollout, turns=turns)])]])
    export_rollouts(run, "otel", tmp_path / "out.jsonl")
    (line,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    (resource,) = line["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "marin-rl"}} in resource["resource"][
        "attributes"
    ]
    spans = {span["name"]: span for span in resource["scopeSpans"][0]["spans"]}
    whole, *_ = resource["scopeSpans"][0]["spans"]
    chats = [s for s in resource["scopeSpans"][0]["spans"] if s["name"].startswith("chat ")]
    tool = spans["execute_tool look"]
    assert len(resource["scopeSpans"][0]["spans"]) == 4
    assert {span["parentSpanId"] for span in (*chats, tool)} == {whole["spanId"]}
    assert len({span["traceId"] for span in (whole, *chats, tool)}) == 1
    assert values_of(whole)["marin_rl.reward"] == 0.5
    assert values_of(tool)["gen_ai.tool.call.result"] == "north"
    # a turn of a segment counts the tokens of its own prompt
    usage = [values_of(c)["gen_ai.usage.input_tokens"] for c in chats]
    assert usage == ["1", "3"]
    assert [values_of(c)["gen_ai.usage.output_tokens"] for c in chats] == ["2", "1"]
    times = [int(s[f"{end}TimeUnixNano"]) for s in (chats[0], tool) for end in ("start", "end")]
    seconds = [timedelta(microseconds=(t - times[0]) / 1000).total_seconds() for t in times]
    assert seconds == [0, 1.5, 1.5, 1.75]
