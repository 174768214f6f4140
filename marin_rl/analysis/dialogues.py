"""Rollouts as people read them: all turns in order, with rewards, stop reasons and times.

One record serves lists, a single rollout and `--json`. Texts are those of a model: control
characters are replaced, and no markup is interpreted. Leaves out tokens (`pages`).
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import pyarrow as pa
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from marin_rl.display.tables import empty_table, key_values, plain, printable, shortened
from marin_rl.errors import InputError, ObjectMissing
from marin_rl.rollouts.forest import TOKENS, segments_of
from marin_rl.rounds import evaluations
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run, committed, evals_slot, rollouts_slot, round_of, rounds_in
from marin_rl.storage.tables.records import python_values
from marin_rl.storage.tables.rollouts import iter_row_groups, iter_shards, rollouts_manifest

COLUMNS = (
    "round", "rollout_id", "group_id", "environment", "example_id", "turns", "answer", "reward",
    "reward_components", "status", "finish_reason", "error", "n_prompt_tokens",
    "n_completion_tokens", "policy_version_min", "policy_version_max", "started_at", "finished_at",
    "queue_s", "prefill_s", "decode_s", "segment_lengths", "start_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Conditions on a rollout; None and 0 ask for nothing. Turns are those of the model."""

    tool: str | None = None
    finish_reason: str | None = None
    min_turns: int = 0
    max_turns: int | None = None

    def passes(self, row: Mapping[str, Any]) -> bool:
        if self.finish_reason is not None and row["finish_reason"] != self.finish_reason:
            return False
        if self.tool is not None and self.tool not in tools_of(row["turns"]):
            return False
        n_turns = sum(map(is_sampled, row["turns"]))
        return self.min_turns <= n_turns and (self.max_turns is None or n_turns <= self.max_turns)

    @property
    def asks(self) -> bool:
        return self != RolloutFilter()


def is_sampled(turn: Mapping[str, Any]) -> bool:
    return turn["role"] == "assistant" and turn["inference_metadata"] is not None


def tools_of(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the tools that a rollout called or whose results it read, in order of first use."""
    names: dict[str, None] = {}
    for turn in turns:
        # The name of a turn repeats those of its calls, and is all that older files have.
        called = [call["name"] for call in calls_of(turn)] or [turn["tool_name"]]
        names |= dict.fromkeys(filter(None, called))
    return list(names)


def calls_of(turn: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return turn["tool_calls"] or ()  # None in files of schema version 1


def sample_rollouts(
    run: Run,
    round_number: int | None,
    limit: int,
    *,
    worst_first: bool = False,
    where: RolloutFilter | None = None,
) -> list[dict[str, Any]]:
    """Rollouts of a round, default the newest sealed one, by reward, that `where` lets pass."""
    rows = pa.concat_tables(iter_shards(run, _round(run, round_number), COLUMNS))
    rewards = rows["reward"].to_pylist()  # `to_numpy` imports pandas
    sign = 1.0 if worst_first else -1.0
    rank = [(reward is None, sign * (reward or 0.0), place) for place, reward in enumerate(rewards)]
    if where is None or not where.asks:
        order = heapq.nsmallest(limit, rank)
        return [dialogue_of(_row(rows, place)) for _, _, place in order]
    chosen = (_row(rows, place) for _, _, place in sorted(rank))
    return [dialogue_of(row) for row in islice(filter(where.passes, chosen), limit)]


def count_rollouts(run: Run, rollout_id: str) -> int:
    """Number of rollouts of the sealed round that this one is of. Raises as `sample_rollouts`."""
    number = _round(run, round_of(rollout_id.partition("/")[0]))
    return sum(part.rows or 0 for part in rollouts_manifest(run, number).parts)


def rollout_named(run: Run, name: str, round_number: int | None = None) -> dict[str, Any]:
    """The rollout with this id, or the only one of a round whose id ends in `/name`.

    The round is that of the id, else `round_number`, else the newest. Raises ObjectMissing where
    there is none, InputError where several end like that, CorruptObject, NewerSchema.
    """
    number = round_of(name.partition("/")[0])  # an id of a rollout begins with its round
    number = _round(run, round_number if number is None else number)
    rows = pa.concat_tables(iter_shards(run, number, COLUMNS))
    ids = rows["rollout_id"].to_pylist()
    places = [place for place, own in enumerate(ids) if f"/{own}".endswith(f"/{name}")]
    if len(places) > 1:
        raise InputError(
            f"{len(places)} rollouts of round {number} end in {name!r}, {ids[places[0]]} and "
            f"{ids[places[1]]} among them: give more of the id"
        )
    if not places:
        raise ObjectMissing(
            f"run {run.run_id!r} has no rollout {name!r} in round {number}: expected an id such as "
            f"{ids[0] if ids else 'round-00000/group-00000/000'}; `marin-rl rollouts "
            f"{run.run_id} --round {number}` lists some"
        )
    row = _row(rows, places[0])
    if row["segment_lengths"]:  # tokens say what each segment goes on from
        tokens = pa.concat_tables(iter_shards(run, number, TOKENS))
        row |= tokens.slice(places[0], 1).to_pylist()[0]
    return dialogue_of(row)


def dialogue_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a rollout for people and `--json`: all turns, rewards, times in seconds."""
    turns = row["turns"] or []
    first = next((place for place, turn in enumerate(turns) if is_sampled(turn)), len(turns))
    asked = [turn["content"] for turn in turns[:first] if turn["role"] == "user"]
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    waits = [t["environment_s"] for t in turns if t["environment_s"] is not None]
    return {
        **_named(row, "rollout_id", "round", "group_id", "environment"),
        "example": row["example_id"],
        "prompt": asked[-1] if asked else "",
        "completion": said[-1] if said else "",
        "answer": row["answer"] or "",
        **_named(row, "reward", "reward_components", "status", "finish_reason", "error"),
        "n_turns": sum(map(is_sampled, turns)),
        "tools": tools_of(turns),
        **_named(row, "n_prompt_tokens", "n_completion_tokens", "segment_lengths"),
        **_named(row, "policy_version_min", "policy_version_max"),
        # Seconds of the model, of the environment, and of the group up to its scores.
        "timing": {
            "started_at": row["started_at"],
            "group_s": (row["finished_at"] - row["started_at"]).total_seconds(),
            **_named(row, "queue_s", "prefill_s", "decode_s"),
            "environment_s": sum(waits) if waits else None,
            "start_s": row["start_s"],
        },
        "segments": segments_of(row, turns) if "token_ids" in row else [],
        "turns": [_turn(turn) for turn in turns],
    }


def _named(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn with the facts of its sampling next to its text; None where they are not recorded."""
    facts = turn["inference_metadata"] or {}
    phases = [turn[name] for name in ("queue_s", "prefill_s", "decode_s")]
    start, end = turn["start"], turn["end"]
    record = {name: value for name, value in turn.items() if name != "inference_metadata"}
    return record | {
        "n_tokens": None if start is None or end is None else end - start,
        "finish_reason": facts.get("finish_reason") or None,
        "weight_version": facts.get("weight_version"),
        "request_id": facts.get("request_id") or None,
        "model_s": None if None in phases else sum(phases),
    }


def _row(rows: pa.Table, place: int) -> dict[str, Any]:
    row = rows.slice(place, 1)
    return {name: python_values(row[name])[0] for name in row.column_names}


def _round(run: Run, chosen: int | None) -> int:
    """The chosen round or the newest sealed one. Raises ObjectMissing where it is not sealed."""
    rounds = reversed(rounds_in(run.store, "rollouts")) if chosen is None else [chosen]
    number = next((n for n in rounds if committed(run, rollouts_slot(n)) is not None), None)
    if number is None:
        which = "" if chosen is None else f" of round {chosen}"
        raise ObjectMissing(
            f"run {run.run_id!r} has no committed rollouts{which} under {run.config.root}: "
            f"`marin-rl status {run.run_id}` shows which rounds there are"
        )
    return number


SHOWN, DIALOGUES_SHOWN = 10, 3
TURN_MAX = 160  # characters of a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """A held-out episode: its turns as (sampled by the model, short text), and its reward."""

    turns: tuple[tuple[bool, str], ...]
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Episodes of two rounds: the answer to each example, and how both checkpoints played it."""

    rounds: tuple[int, int]
    pairs: Sequence[tuple[str, PlayedEpisode, PlayedEpisode]]


def before_and_after(run: Run) -> BeforeAfter | None:
    """Up to SHOWN held-out examples, evenly spread; None before two evaluations.

    Of episodes of several turns, DIALOGUES_SHOWN.
    """
    measured = evaluations(run)
    if len(measured) < 2:
        return None
    shown = DIALOGUES_SHOWN if any("eval/mean_turns" in row for row in measured.values()) else SHOWN
    first, last = min(measured), max(measured)
    before, after = _episodes(run, first), _episodes(run, last)
    both = [name for name in before if name in after]
    shown = min(shown, len(both))
    chosen = [both[len(both) * (2 * place + 1) // (2 * shown)] for place in range(shown)]
    pairs = [(*before[name], after[name][1]) for name in chosen]
    return BeforeAfter(rounds=(first, last), pairs=pairs) if pairs else None


def _episodes(run: Run, round: int) -> dict[str, tuple[str, PlayedEpisode]]:
    manifest = committed_manifest(run.store, evals_slot(round))
    columns = ("example_id", "answer", "turns", "reward")
    table = pa.concat_tables(iter_row_groups(run, manifest, columns))
    episodes: dict[str, tuple[str, PlayedEpisode]] = {}
    for row in table.to_pylist():
        turns = tuple(
            (turn["inference_metadata"] is not None, _short(turn["content"] or ""))
            for turn in row["turns"] or ()
        )
        episode = PlayedEpisode(turns=turns, reward=row["reward"])
        episodes.setdefault(row["example_id"], (_short(row["answer"] or ""), episode))
    return episodes


def episodes_table(compared: BeforeAfter) -> Table:
    """Held-out episodes of two rounds side by side: the model's turns in bold, and the reward."""
    first, last = compared.rounds
    names = ("prompt", "answer", f"round {first}", f"round {last}")
    table = empty_table("The same held-out examples before and after", names, left=names)
    for answer, before, after in compared.pairs:
        prompt = [text for _, text in takewhile(lambda turn: not turn[0], before.turns)]
        row = [plain(" ".join(prompt)), plain(answer)]
        for episode in (before, after):
            cell = Text()
            for sampled, text in episode.turns[len(prompt) :]:
                cell.append(printable(text), "bold" if sampled else "dim").append(" ")
            reward = "no reward" if episode.reward is None else f"reward {episode.reward:.2f}"
            row.append(cell.append(f" {reward}"))
        table.add_row(*row)
    return table


def _short(text: str) -> str:
    return text if len(text) <= TURN_MAX else f"{text[:TURN_MAX]}…"


_STYLES = {"assistant": "bold green", "user": "bold cyan", "tool": "bold magenta"}


def dialogue(row: Mapping[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [key_values(f"Rollout {row['rollout_id']}", _facts(row)), ""]
    begins = {segment["turn"]: segment for segment in row["segments"]}
    for number, turn in enumerate(row["turns"], start=1):
        if number in begins:
            parts.append(plain(f"── {begins[number]['about']}", "bold"))
        parts += _drawn_turn(number, turn)
    if row["error"]:
        parts.append(plain(f"error: {shortened(row['error'])}", "red"))
    return Group(*parts)


def _facts(row: Mapping[str, Any]) -> dict[str, str]:
    parts = [f"{c['name']} {c['weight']:g} * {c['value']:.3f}" for c in row["reward_components"]]
    total = f" = {' + '.join(parts)}" if parts else ""
    facts = {
        "environment": row["environment"],
        "example": row["example"],
        "reference answer": shortened(row["answer"]),
        "reward": "none" if row["reward"] is None else f"{row['reward']:.3f}{total}",
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


def _drawn_turn(number: int, turn: Mapping[str, Any]) -> Iterator[RenderableType]:
    head = Text(f"{number:>3}  ", "dim")
    head.append(turn["role"], _STYLES.get(turn["role"], "bold"))
    rewards = ", ".join(f"{part['name']} {part['value']:g}" for part in turn["rewards"] or ())
    facts: Sequence[tuple[str, Any]] = (
        ("{}", turn["tool_name"]),
        ("answers {}", turn["tool_call_id"]),
        ("{}", "cut at the limit" if turn["cut"] else None),
        ("{} tokens", turn["n_tokens"]),
        ("{}", turn["finish_reason"]),
        ("reward {:g}", turn["reward"]),
        ("{}", rewards or None),
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


def call_text(call: Mapping[str, Any]) -> str:
    called = f"→ {call['name']}({shortened(call['arguments'])})"
    return f"{called} [{call['id']}]" if call["id"] else called
