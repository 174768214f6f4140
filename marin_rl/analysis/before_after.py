"""Held-out examples of the first and of the last evaluation side by side, from committed rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import pyarrow as pa
from rich.table import Table
from rich.text import Text

from marin_rl.display.tables import empty_table, plain, printable
from marin_rl.rounds import evaluations
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run, evals_slot
from marin_rl.storage.tables.rollouts import iter_row_groups

COLUMNS = ("example_id", "answer", "turns", "reward")
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

    Of episodes of several turns, DIALOGUES_SHOWN. Raises ObjectMissing, CorruptObject, NewerSchema.
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
    """Answer and first episode of each example of an evaluation."""
    manifest = committed_manifest(run.store, evals_slot(round))
    table = pa.concat_tables(iter_row_groups(run, manifest, COLUMNS))
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
        cells = (_episode_cell(each, len(prompt)) for each in (before, after))
        table.add_row(plain(" ".join(prompt)), plain(answer), *cells)
    return table


def _episode_cell(episode: PlayedEpisode, begin: int) -> Text:
    cell = Text()
    for sampled, text in episode.turns[begin:]:
        cell.append(printable(text), "bold" if sampled else "dim").append(" ")
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:.2f}"
    return cell.append(f" {reward}")


def _short(text: str) -> str:
    return text if len(text) <= TURN_MAX else f"{text[:TURN_MAX]}…"
