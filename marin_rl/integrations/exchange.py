"""Rollouts in the formats of other libraries, a JSON object per line.

- `trl`: what a `rollout_func` of TRL returns of a sample, with its messages and its reward;
- `verl`: an `AgentLoopOutput` of verl;
- `atropos`: a `ScoredDataGroup` of atropos, a line per group;
- `traces`: an `Episode` of verifiers 0.3 (v1), which its own tools read as `traces.jsonl`;
- `otel`: a trace of OpenTelemetry, as OTLP has it in JSON (`otel`).

A rollout of several segments is as many samples for TRL and verl, each with the whole reward, and
as many branches of one trace; atropos has nothing like it. Logprobs are in nats.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from marin_rl.errors import InputError
from marin_rl.inference.client.protocol import message_body
from marin_rl.integrations import integration
from marin_rl.plain_files import whole_or_absent
from marin_rl.rollouts.assemble import UNTRAINED_LABEL, UNTRAINED_LOGPROB, Sample, samples_of
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import groups_of, iter_shards
from marin_rl.types import Rollout, RolloutGroup, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Numbers of an export: lines written, and rollouts left out for want of a reward or tokens."""

    lines: int
    left_out: int


def export_rollouts(
    run: Run, name: str, target: Path, rounds: Sequence[int] | None = None
) -> Exported:
    """Write the rollouts of sealed rounds (all, or `rounds`) to `target` in the format `name`.

    Nothing is at `target` until it is whole. Raises InputError for an unknown format, a file that
    exists and a rollout that the format has no place for; ObjectMissing for a round not sealed.
    """
    if name not in FORMATS:
        raise InputError(f"--format: expected one of {', '.join(FORMATS)}, found {name!r}")
    if target.exists():
        raise InputError(f"{target} exists, and is not overwritten: name another file")
    chosen = [p.round for p in progress(run).values() if p.rollouts] if rounds is None else rounds
    lines = left_out = 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_absent(target) as partial, partial.open("wb") as file:
        groups = ((r, g) for r in chosen for t in iter_shards(run, r) for g in groups_of(t))
        for round, group in groups:
            whole = [r for r in group.rollouts if r.reward is not None and len(r.token_ids)]
            left_out += len(group.rollouts) - len(whole)
            for line in FORMATS[name](run, round, group, whole):
                file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
                lines += 1
    return Exported(lines=lines, left_out=left_out)


def _samples(group: RolloutGroup, rollout: Rollout) -> list[Sample]:
    return samples_of(rollout, begins_anew=group.example.environment == "agent")


def _messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [message_body(turn.message) for turn in turns]


Members = Sequence[Rollout]
Lines = Callable[[Run, int, RolloutGroup, Members], Iterator[Mapping[str, Any]]]


def _trl(run: Run, round: int, group: RolloutGroup, members: Members) -> Iterator[dict[str, Any]]:
    for rollout in members:
        for sample in _samples(group, rollout):
            yield {
                "prompt": _messages(sample.prompt),
                "completion": _messages(sample.response),
                "prompt_ids": sample.prompt_ids,
                "completion_ids": sample.response_ids,
                "logprobs": sample.logprobs,
                "env_mask": sample.mask,
                "reward": rollout.reward,
                "answer": group.example.answer,
                **_names(run, round, group, rollout, sample),
            }


def _verl(run: Run, round: int, group: RolloutGroup, members: Members) -> Iterator[dict[str, Any]]:
    for rollout in members:
        timing = rollout.timing
        for sample in _samples(group, rollout):
            yield {
                "prompt_ids": sample.prompt_ids,
                "response_ids": sample.response_ids,
                "response_mask": sample.mask,
                "response_logprobs": sample.logprobs,
                "reward_score": rollout.reward,
                "num_turns": len(sample.prompt) + len(sample.response),
                "metrics": {
                    "generate_sequences": float(timing.prefill_s or 0) + (timing.decode_s or 0),
                    "tool_calls": float(sum(t.timing.environment_s or 0 for t in rollout.turns)),
                },
                "extra_fields": _names(run, round, group, rollout, sample),
            }


def _names(
    run: Run, round: int, group: RolloutGroup, rollout: Rollout, sample: Sample
) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "round": round,
        "group_id": group.group_id,
        "rollout_id": rollout.rollout_id,
        "segment": sample.segment,
        "environment": group.example.environment,
        "policy_version": rollout.policy_version_min,
    }


def _atropos(
    run: Run, round: int, group: RolloutGroup, members: Members
) -> Iterator[dict[str, Any]]:
    for rollout in members:
        if (segments := len(rollout.segment_lengths or ())) > 1:
            raise InputError(
                f"rollout {rollout.rollout_id} has {segments} segments: "
                "expected one, since a member of an atropos group is one sequence; the formats "
                "trl, verl and traces have a place for segments"
            )
    if members:
        yield {
            "tokens": [rollout.token_ids for rollout in members],
            "masks": [_where(r, r.token_ids, UNTRAINED_LABEL) for r in members],
            "scores": [rollout.reward for rollout in members],
            "inference_logprobs": [_where(r, r.logprobs, UNTRAINED_LOGPROB) for r in members],
            "messages": [
                _messages((*sample.prompt, *sample.response))
                for rollout in members
                for sample in _samples(group, rollout)
            ],
            "generation_params": asdict(members[0].sampling),
            "group_overrides": {"run_id": run.run_id, "round": round, "group_id": group.group_id},
        }


def _where(rollout: Rollout, values: np.ndarray, otherwise: float) -> np.ndarray:
    return np.where(rollout.loss_mask == 1, values, values.dtype.type(otherwise))


def _traces(
    run: Run, round: int, group: RolloutGroup, members: Members
) -> Iterator[dict[str, Any]]:
    example = group.example
    data: dict[str, Any] = {"name": example.example_id, "answer": example.answer}
    data["prompt"] = [message_body(message) for message in example.messages]
    if example.metadata:
        data["info"] = dict(example.metadata)
    task = {"type": example.environment, "data": data, "key": example.example_id}
    for rollout in members:
        policy = {"start": rollout.policy_version_min, "end": rollout.policy_version_max}
        yield {
            "id": rollout.rollout_id,
            "env": {"id": example.environment},
            "task": task,
            "group": {"id": group.group_id},
            "run": {
                "type": "train",
                "id": run.run_id,
                "work": {"type": "train", "step": round, "policy": policy},
            },
            "ok": True,
            "traces": [_trace(group, rollout, task)],
        }


def _trace(group: RolloutGroup, rollout: Rollout, task: Mapping[str, Any]) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    for sample in _samples(group, rollout):
        nodes += _nodes(rollout, sample, len(nodes))
    parts = rollout.reward_components
    rewards = {part.name: {"score": part.value, "weight": part.weight} for part in parts}
    times = rollout.timing.started_at.timestamp(), rollout.timing.finished_at.timestamp()
    return {
        "version": 1,
        "id": rollout.rollout_id,
        "task": task,
        "agent": {"config": {}, "name": "policy"},
        "nodes": nodes,
        "rewards": rewards or {"reward": {"score": rollout.reward}},
        "is_completed": True,
        "ok": True,
        "stop_condition": rollout.finish_reason,
        "timing": {"start": times[0], "agent": {"start": times[0], "end": times[1]}},
    }


def _nodes(rollout: Rollout, sample: Sample, first: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of a segment as a path of nodes; node `first` is its root.

    A sampled message has its own tokens and those before it that no one sampled.
    """
    done = sum((rollout.segment_lengths or ())[: sample.segment])
    for number, turn in enumerate([*sample.prompt, *sample.response]):
        end = done
        if number >= len(sample.prompt) and turn.inference_metadata is not None:
            assert turn.end is not None, "a sampled turn has its tokens"
            end = turn.end
        mask = rollout.loss_mask[done:end] == 1
        message = message_body(turn.message)
        if calls := message.get("tool_calls"):  # verifiers has name and arguments at their top
            flat = [{"id": call["id"], "type": "function", **call["function"]} for call in calls]
            message |= {"tool_calls": flat}
        yield {
            "parent": first + number - 1 if number else None,
            "message": message,
            "sampled": end > done,
            "timestamp": rollout.timing.finished_at.timestamp(),
            "token_ids": rollout.token_ids[done:end],
            "mask": mask,
            "logprobs": rollout.logprobs[done:end][mask],
        }
        done = end


def _otel(run: Run, round: int, group: RolloutGroup, members: Members) -> Iterator[Any]:
    traces = integration("otel").resource_spans
    return (traces(run.run_id, round, group, rollout) for rollout in members)


FORMATS: Mapping[str, Lines] = {
    "trl": _trl,
    "verl": _verl,
    "atropos": _atropos,
    "traces": _traces,
    "otel": _otel,
}
