"""Stage of a run, and warnings of one that stands still, from its files alone.

The orchestrator is not asked: the stage follows from the committed slots and the one that comes
next, the process from the run's lock file. Rules over metric rows are in warnings.py.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from marin_rl.analysis.warnings import ROUNDS_JUDGED
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.run_progress import RoundProgress, rounds_planned
from marin_rl.storage.runs import (
    LOCK_KEY,
    Run,
    batches_slot,
    checkpoint_slot,
    latest_sft,
    rollouts_slot,
)
from marin_rl.storage.stores.locks import Holder, holder_in

Rows = Sequence[Mapping[str, Any]]

QUIET_ROUNDS = 5.0  # a run is quiet when nothing was committed for this many of its rounds
QUIET_S_MIN = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Next stage of a run: its name, and `done` of `total` where it has parts."""

    name: str
    round: int
    done: int = 0
    total: int = 0
    ended: bool = False

    @property
    def text(self) -> str:
        """A short text, such as `generating round 12 (1 of 2)`."""
        if self.ended:
            return "complete"
        parts = f" ({self.done} of {self.total})" if self.total else ""
        return f"{self.name}{parts}"


def stage_of(run: Run, slots: Mapping[int, RoundProgress]) -> Stage:
    """The first stage of the run that is not committed yet."""
    checkpoints = [number for number, item in slots.items() if item.checkpoint]
    if not checkpoints:
        return _warm_start(run)
    round = max(checkpoints)
    here = slots.get(round, RoundProgress(round=round))
    if round >= rounds_planned(run, round) and not here.shards:
        holder = holder_of(run)
        if holder is None or not holder.alive:
            return Stage(name="complete", round=round, ended=True)
        last = "continuing after" if here.evaluation else "evaluating after"
        return Stage(name=f"{last} round {round - 1}", round=round)
    if not here.rollouts:
        shards = max(here.shards, run.config.rollouts.shards_per_round)
        return Stage(name=f"generating round {round}", round=round, done=here.shards, total=shards)
    name = "training on" if here.batches else "processing"
    return Stage(name=f"{name} round {round}", round=round)


def standstill(run: Run, slots: Mapping[int, RoundProgress], rows: Rows) -> list[str]:
    """Warnings of a run whose process is gone, or that has committed nothing for a long time."""
    stage = stage_of(run, slots)
    if stage.ended:
        return []
    holder = holder_of(run)
    if holder is not None and not holder.alive:
        return [f"{holder}, which held the run, is gone: the same command continues it"]
    times = [row["timing_s/round"] for row in rows if row.get("timing_s/round") is not None]
    usual = statistics.median(times[-ROUNDS_JUDGED:]) if times else QUIET_S_MIN
    idle_s = _idle_s(run, stage.round, datetime.now(UTC))
    if holder is None or idle_s is None or idle_s < max(QUIET_ROUNDS * usual, QUIET_S_MIN):
        return []
    return [f"nothing was committed for {idle_s:.0f} s; a round takes about {usual:.0f} s"]


def _warm_start(run: Run) -> Stage:
    if run.config.policy.init != "sft":
        return Stage(name="loading the policy", round=0)
    done = latest_sft(run)
    steps = int(done.slot.rpartition("-")[2]) if done else 0
    return Stage(name="warm start, steps", round=0, done=steps, total=run.config.sft.steps)


def _idle_s(run: Run, round: int, now: datetime) -> float | None:
    """Seconds since the newest commit of this round or of the policy it starts from."""
    slots = (checkpoint_slot(round), rollouts_slot(round), batches_slot(round))
    commits = [item for slot in slots if (item := read_manifest(run.store, slot))]
    if not commits:
        return None
    newest = max(datetime.fromisoformat(manifest.created_at) for manifest, _ in commits)
    return max(0.0, (now - newest).total_seconds())


def holder_of(run: Run) -> Holder | None:
    """Process that has the run locked, or had it and did not release it; see `Holder.alive`."""
    path = run.store.local_path(LOCK_KEY)
    return None if path is None else holder_in(path)
