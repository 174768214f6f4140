"""A rollout in the terminal: its facts, then every turn in order, as a dialogue.

Texts are those of a model: control characters are replaced, and no markup is interpreted.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from marin_rl.analysis.dialogues import calls_of
from marin_rl.display.tables import key_values, plain, shortened

_STYLES = {"assistant": "bold green", "user": "bold cyan", "tool": "bold magenta"}


def dialogue(row: Mapping[str, Any]) -> RenderableType:
    """Draw a record of `analysis.dialogues`: facts, turns, components of the reward."""
    parts: list[RenderableType] = [key_values(f"Rollout {row['rollout_id']}", _facts(row)), ""]
    for number, turn in enumerate(row["turns"], start=1):
        parts += _turn(number, turn)
    if row["error"]:
        parts.append(plain(f"error: {shortened(row['error'])}", "red"))
    return Group(*parts)


def _facts(row: Mapping[str, Any]) -> dict[str, str]:
    facts = {
        "environment": row["environment"],
        "example": row["example"],
        "reference answer": shortened(row["answer"]),
        "reward": _reward_line(row),
        "status": ended(row),
        "turns": f"{row['n_turns']} of the model, {len(row['turns'])} in all",
        "tools": ", ".join(row["tools"]),
        "tokens": f"{row['n_prompt_tokens']} read, {row['n_completion_tokens']} sampled",
        "segments": ", ".join(f"{length} tokens" for length in row["segment_lengths"] or ()),
        "time": _times(row["timing"]),
    }
    return {name: value for name, value in facts.items() if value}


def ended(row: Mapping[str, Any]) -> str:
    """Status of a rollout, with the reason that it stopped where that says more."""
    reason = row.get("finish_reason")
    return f"{row['status']} ({reason})" if reason else str(row["status"])


def _reward_line(row: Mapping[str, Any]) -> str:
    if row["reward"] is None:
        return "none"
    parts = [f"{c['name']} {c['weight']:g} * {c['value']:.3f}" for c in row["reward_components"]]
    return f"{row['reward']:.3f}" + (f" = {' + '.join(parts)}" if parts else "")


def _times(timing: Mapping[str, Any]) -> str:
    """Return seconds of the model's requests, of the environment's steps, and of the group."""
    names = {"queued": "queue_s", "prefill": "prefill_s", "decode": "decode_s"}
    seconds = [(name, timing[key]) for name, key in names.items() if timing[key] is not None]
    model = ", ".join(f"{name} {value:.2f} s" for name, value in seconds) or "not reported"
    if timing["environment_s"] is not None:
        model += f"; environment: {timing['environment_s']:.2f} s"
    if timing["start_s"] is not None:
        model += f", its start: {timing['start_s']:.2f} s"
    return f"model: {model}; group with environment and scoring: {timing['group_s']:.2f} s"


def _turn(number: int, turn: Mapping[str, Any]) -> Iterator[RenderableType]:
    head = Text(f"{number:>3}  ", "dim")
    head.append(turn["role"], _STYLES.get(turn["role"], "bold"))
    facts: Sequence[tuple[str, Any]] = (
        ("{}", turn["tool_name"]),
        ("answers {}", turn["tool_call_id"]),
        ("{}", "cut at the limit" if turn["cut"] else None),
        ("{} tokens", turn["n_tokens"]),
        ("{}", turn["finish_reason"]),
        ("reward {:g}", turn["reward"]),
        ("{}", _parts(turn["rewards"])),
        ("{}", None if turn["malformed"] is None else "a call that cannot be read"),
        ("model {:.2f} s", turn["model_s"]),
        ("environment {:.2f} s", turn["environment_s"]),
    )
    for fact in [pattern.format(value) for pattern, value in facts if value is not None]:
        head.append(" · ", "dim").append(plain(fact, "dim"))
    yield head
    if turn["content"]:
        yield Padding(Text(shortened(turn["content"])), (0, 0, 0, 5))
    for call in calls_of(turn):
        yield Padding(plain(call_text(call), "magenta"), (0, 0, 0, 5))


def _parts(rewards: Sequence[Mapping[str, Any]] | None) -> str | None:
    return ", ".join(f"{part['name']} {part['value']:g}" for part in rewards or ()) or None


def call_text(call: Mapping[str, Any]) -> str:
    called = f"→ {call['name']}({shortened(call['arguments'])})"
    return f"{called} [{call['id']}]" if call["id"] else called
