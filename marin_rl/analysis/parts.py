"""Committed Parquet objects of runs: which files each table is made of.

A part belongs to the run that wrote it: rounds that a fork shares are its ancestor's, so a part of
several runs is there once. Nothing here reads a table; `frames` does with Polars, and `query` lets
DuckDB do it, for which neither Polars nor Arrow is imported.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, round_of
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.stores.local import checked_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Committed Parquet object, the run that wrote it, and the round of its rows."""

    store: ObjectStore
    run_id: str
    round: int
    key: str

    @property
    def path(self) -> str | None:
        """Path on this machine, or None. Raises CorruptObject, ObjectMissing."""
        path = self.store.local_path(self.key)
        return None if path is None else str(checked_file(path, self.key))

    def open(self) -> str | io.BytesIO:
        """Argument for readers: the path, or the bytes."""
        return self.path or io.BytesIO(self.store.read(self.key))


def shards(runs: Sequence[Run]) -> list[Part]:
    """The shards of all sealed rounds, in order of runs, rounds and shards."""
    return sealed(runs, "rollouts", "shard-")


def sealed(runs: Sequence[Run], kind: str, prefix: str, *, behind: int = 0) -> list[Part]:
    """The parts that committed manifests of a kind name, each once, in order of runs and rounds.

    The rows of a slot are of `behind` rounds before the slot's own: scores lie in the checkpoint
    that their round ended in.
    """
    seen, parts = set[tuple[str, str]](), []
    for run in runs:
        for number, name in slots(run, kind):
            round, slot = number - behind, f"{kind}/{name}"
            owner = run.player_of(round)
            if round < 0 or (owner, slot) in seen:
                continue
            seen.add((owner, slot))
            manifest = read_manifest(run.store, slot)
            names = [part.name for part in manifest[0].parts] if manifest else []
            parts += [
                Part(store=run.store, run_id=owner, round=round, key=f"{slot}/{name}")
                for name in names
                if name.startswith(prefix) and name.endswith(".parquet")
            ]
    return parts


def of_metrics(runs: Sequence[Run]) -> list[Part]:
    """The metrics of all closed rounds, each once, in order of runs and rounds."""
    parts = [
        Part(store=run.store, run_id=run.player_of(round), round=round, key=f"metrics/{name}")
        for run in runs
        for round, name in slots(run, "metrics")
    ]
    return list({(part.run_id, part.key): part for part in parts}.values())


def slots(run: Run, kind: str) -> list[tuple[int, str]]:
    """The rounds of a kind and the names of their slots, ascending."""
    rounds = {round_of(name): name for name in run.store.children(kind)}
    return sorted((round, name) for round, name in rounds.items() if round is not None)
