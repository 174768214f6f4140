"""Held-out episodes of the first and of the last evaluation side by side, from committed rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from rich.table import Table
from rich.text import Text

from marin_rl.display.tables import empty_table, plain
from marin_rl.display.text import shortened
from marin_rl.rounds import evaluations
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run, evals_slot
from marin_rl.storage.tables.rollouts import iter_row_groups

COLUMNS = ("example_id", "answer", "turns", "reward")
SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """A held-out episode: its turns as (sampled by the model, text), and its reward."""

    turns: tuple[tuple[bool, str], ...]
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Episodes of two rounds: the answer to each example, and how both checkpoints played it."""

    rounds: tuple[int, int]
    pairs: Sequence[tuple[str, PlayedEpisode, PlayedEpisode]]


def before_and_after(run: Run) -> BeforeAfter | None:
    """Up to SHOWN held-out examples, evenly spread; None without episodes of several turns.

    Raises ObjectMissing, CorruptObject, NewerSchema.
    """
    measured = evaluations(run)
    if len(measured) < 2 or not any("eval/mean_turns" in row for row in measured.values()):
        return None
    first, last = min(measured), max(measured)
    before, after = _episodes(run, first), _episodes(run, last)
    both = [name for name in before if name in after]
    chosen = {both[len(both) * (2 * place + 1) // (2 * SHOWN)] for place in range(SHOWN)}
    pairs = [(*before[name], after[name][1]) for name in both if name in chosen]
    return BeforeAfter(rounds=(first, last), pairs=pairs)


def _episodes(run: Run, round: int) -> dict[str, tuple[str, PlayedEpisode]]:
    """Answer and first episode of each example of an evaluation."""
    manifest = committed_manifest(run.store, evals_slot(round))
    table = pa.concat_tables(iter_row_groups(run, manifest, COLUMNS))
    episodes: dict[str, tuple[str, PlayedEpisode]] = {}
    for row in table.to_pylist():
        turns = tuple(
            (turn["inference_metadata"] is not None, turn["content"] or "")
            for turn in row["turns"] or ()
        )
        episode = PlayedEpisode(turns=turns, reward=row["reward"])
        episodes.setdefault(row["example_id"], (row["answer"] or "", episode))
    return episodes


def episodes_table(compared: BeforeAfter) -> Table:
    """Held-out episodes of two rounds side by side: the model's turns in bold, and the reward."""
    first, last = compared.rounds
    names = ("answer", f"round {first}", f"round {last}")
    table = empty_table("The same held-out episodes before and after", names, left=names)
    for answer, before, after in compared.pairs:
        table.add_row(plain(answer), _episode_cell(before), _episode_cell(after))
    return table


def _episode_cell(episode: PlayedEpisode) -> Text:
    cell = Text()
    for sampled, text in episode.turns:
        cell.append(shortened(text), "bold" if sampled else "dim").append(" ")
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:.2f}"
    return cell.append(f" {reward}")
