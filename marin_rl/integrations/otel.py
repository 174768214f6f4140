"""Rollouts as traces of OpenTelemetry: OTLP's JSON, with the names of its GenAI conventions.

A rollout is a trace: a span `invoke_agent` with a span `chat` for each turn of the model and one
`execute_tool` for each result of a tool. A turn that goes back to an earlier one is linked to it.
Times are those of the turns, one after another; where they were not reported spans have no length.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import orjson

from marin_rl.inference.client.protocol import message_body
from marin_rl.rollouts.forest import segments_of_rollout
from marin_rl.types import InferenceMetadata, Rollout, RolloutGroup, Turn

_INTERNAL, _CLIENT = 1, 3  # kinds of spans
_EPOCH = datetime.fromtimestamp(0, UTC)


def resource_spans(run_id: str, round: int, group: RolloutGroup, rollout: Rollout) -> Any:
    """The `TracesData` of one rollout."""
    resource = {"service.name": "marin-rl", "marin_rl.run_id": run_id, "marin_rl.round": round}
    scope = {"name": "marin_rl"}
    spans = {"scope": scope, "spans": [*_Trace(run_id, group, rollout).spans()]}
    owner = {"attributes": _attributes(resource)}
    return {"resourceSpans": [{"resource": owner, "scopeSpans": [spans]}]}


class _Trace:
    def __init__(self, run_id: str, group: RolloutGroup, rollout: Rollout) -> None:
        self._group, self._rollout = group, rollout
        self._trace_id = _hex(f"{run_id} {rollout.rollout_id}", 32)
        self._borders = np.cumsum([0, *(rollout.segment_lengths or ())])
        segments = segments_of_rollout(rollout)
        self._parents = {segment["turn"]: segment["parent"] for segment in segments}

    def spans(self) -> Iterator[dict[str, Any]]:
        rollout, example = self._rollout, self._group.example
        began, ended = rollout.timing.started_at, rollout.timing.finished_at
        facts = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": example.environment,
            "gen_ai.conversation.id": rollout.rollout_id,
            "marin_rl.group_id": self._group.group_id,
            "marin_rl.example_id": example.example_id,
            "marin_rl.reward": rollout.reward,
            "marin_rl.finish_reason": rollout.finish_reason,
        }
        yield self._span(0, f"invoke_agent {example.environment}", (began, ended), facts)
        now = began + timedelta(seconds=rollout.timing.start_s or 0)
        read, first, waited = list[Turn](), 1, 0.0
        for number, turn in enumerate(rollout.turns, 1):
            if (source := turn.inference_metadata) is not None:
                facts = self._chat(turn, source, read)
                phases = (turn.timing.queue_s, turn.timing.prefill_s, turn.timing.decode_s)
                later = now + timedelta(seconds=sum(filter(None, phases)))
                parent = self._parents.get(first)
                yield self._span(number, f"chat {source.model}", (now, later), facts, parent)
                read, first, waited = [], number + 1, turn.timing.environment_s or 0.0
                now = later + timedelta(seconds=waited)
                continue
            read.append(turn)
            if turn.tool_call_id is not None:
                facts = {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": turn.tool_name,
                    "gen_ai.tool.call.id": turn.tool_call_id,
                    "gen_ai.tool.call.result": turn.content,
                }
                asked = now - timedelta(seconds=waited)
                yield self._span(number, f"execute_tool {turn.tool_name}", (asked, now), facts)

    def _chat(self, turn: Turn, source: InferenceMetadata, read: Sequence[Turn]) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "marin_rl",
            "gen_ai.request.model": source.model,
            "gen_ai.response.model": source.model,
            "gen_ai.response.id": source.request_id or None,
            "gen_ai.response.finish_reasons": [source.finish_reason],
            "gen_ai.input.messages": _json(read),
            "gen_ai.output.messages": _json([turn]),
            "marin_rl.weight_version": source.weight_version,
        }
        for name in ("temperature", "top_p", "max_tokens", "seed"):
            facts[f"gen_ai.request.{name}"] = getattr(source.sampling, name)
        if turn.start is not None and turn.end is not None:
            begin = self._borders[np.searchsorted(self._borders, turn.start, side="right") - 1]
            facts["gen_ai.usage.input_tokens"] = int(turn.start - begin)
            facts["gen_ai.usage.output_tokens"] = turn.end - turn.start
        return facts

    def _span(
        self,
        number: int,
        name: str,
        times: tuple[datetime, datetime],
        facts: Mapping[str, Any],
        parent: int | None = None,
    ) -> dict[str, Any]:
        span = {
            "traceId": self._trace_id,
            "spanId": self._id(number),
            "name": name,
            "kind": _CLIENT if name.startswith("chat ") else _INTERNAL,
            "startTimeUnixNano": _nanoseconds(times[0]),
            "endTimeUnixNano": _nanoseconds(times[1]),
            "attributes": _attributes(facts),
        }
        if number:
            span["parentSpanId"] = self._id(0)
        if parent is not None:
            span["links"] = [{"traceId": self._trace_id, "spanId": self._id(parent)}]
        return span

    def _id(self, number: int) -> str:
        return _hex(f"{self._trace_id} {number}", 16)


def _hex(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _nanoseconds(moment: datetime) -> str:
    return str((moment - _EPOCH) // timedelta(microseconds=1) * 1000)


def _json(turns: Sequence[Turn]) -> str:
    return orjson.dumps([message_body(turn.message) for turn in turns]).decode()


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": k, "value": _value(v)} for k, v in values.items() if v is not None]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [*map(_value, value)]}}
    return {"stringValue": str(value)}
