"""A run that is looked at again and again: what cannot change is read once.

Metrics of a round, evaluations and committed checkpoints never change, so that another look at a
long run costs a few listings and what is new, not a read per round.
"""

from typing import Any

from marin_rl.rounds import evaluations
from marin_rl.storage.runs import RoundProgress, Run, progress
from marin_rl.storage.tables.metrics import read_metrics


class Followed:
    """A run that is read repeatedly, with a cache of what was read. Not thread safe.

    `times_begun` counts how often the run turned out to be another one: its folder was deleted
    and started again. Callers that cache more of the run then drop it too.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.times_begun = 1
        self._checkpoints: set[int] = set()
        self._metrics: dict[int, dict[str, Any]] = {}
        self._evaluations: dict[int, dict[str, float]] = {}

    def progress(self) -> dict[int, RoundProgress]:
        """Committed slots by round, as `storage.runs.progress` returns them."""
        found = progress(self.run, self._checkpoints)
        if not self._metrics.keys() <= {number for number, item in found.items() if item.metrics}:
            self._forget()
            found = progress(self.run)
        self._checkpoints.update(number for number, item in found.items() if item.checkpoint)
        return found

    def rows(self, found: dict[int, RoundProgress]) -> list[dict[str, Any]]:
        """Metrics of the rounds in `found`, ascending; row r has the evaluation of checkpoint r.

        A last row may hold nothing else. Raises CorruptObject, NewerSchema.
        """
        fresh = [n for n, item in found.items() if item.metrics and n not in self._metrics]
        if fresh:
            table = read_metrics(self.run, fresh)
            self._metrics |= {row["round"]: row for row in table.to_pylist()}
        asked = [n for n, item in found.items() if item.evaluation and n not in self._evaluations]
        if asked:
            self._evaluations |= evaluations(self.run, asked)
        rows = {number: dict(self._metrics[number]) for number in sorted(self._metrics)}
        for number, metrics in self._evaluations.items():
            rows.setdefault(number, {"round": number}).update(metrics)
        return [rows[number] for number in sorted(rows)]

    def _forget(self) -> None:
        self.times_begun += 1
        self._checkpoints.clear()
        self._metrics.clear()
        self._evaluations.clear()
