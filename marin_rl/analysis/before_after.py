"""Held-out episodes of the first and of the last evaluation side by side, from committed rows."""

import pyarrow as pa

from marin_rl.display.episodes import BeforeAfter, EpisodePair, PlayedEpisode
from marin_rl.rounds import evaluations
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run, evals_slot
from marin_rl.storage.tables.rollouts import iter_row_groups

COLUMNS = ("example_id", "answer", "turns", "reward")
SHOWN = 3


def before_and_after(run: Run) -> BeforeAfter | None:
    """Up to SHOWN held-out examples, evenly spread; None without episodes of several turns.

    Raises ObjectMissing, CorruptObject, NewerSchema.
    """
    measured = evaluations(run)
    if len(measured) < 2 or not any("eval/mean_turns" in row for row in measured.values()):
        return None
    first, last = min(measured), max(measured)
    before, after = _episodes(run, first), _episodes(run, last)
    both = [example_id for example_id in before if example_id in after]
    chosen = [both[len(both) * (2 * place + 1) // (2 * SHOWN)] for place in range(SHOWN)]
    pairs = [
        EpisodePair(
            example_id=example_id,
            answer=before[example_id][0],
            before=before[example_id][1],
            after=after[example_id][1],
        )
        for example_id in dict.fromkeys(chosen)
    ]
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
