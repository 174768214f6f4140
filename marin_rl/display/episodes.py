"""The same held-out episodes before and after training, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from marin_rl.display.tables import empty_table, plain
from marin_rl.display.text import shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """A held-out episode: its turns as (sampled by the model, text), and its reward."""

    turns: tuple[tuple[bool, str], ...]
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePair:
    """The same example, played by the first and by the last evaluated checkpoint."""

    example_id: str
    answer: str
    before: PlayedEpisode
    after: PlayedEpisode


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Episodes of two rounds."""

    rounds: tuple[int, int]
    pairs: Sequence[EpisodePair]


def episodes_table(compared: BeforeAfter) -> Table:
    """Held-out episodes of two rounds side by side: the model's turns in bold, and the reward."""
    first, last = compared.rounds
    names = ("answer", f"round {first}", f"round {last}")
    table = empty_table("The same held-out episodes before and after", names, left=names)
    for pair in compared.pairs:
        table.add_row(plain(pair.answer), _episode_cell(pair.before), _episode_cell(pair.after))
    return table


def _episode_cell(episode: PlayedEpisode) -> Text:
    cell = Text()
    for sampled, text in episode.turns:
        cell.append(shortened(text), "bold" if sampled else "dim").append(" ")
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:.2f}"
    return cell.append(f" {reward}")
