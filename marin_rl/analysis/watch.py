"""State of a running run for `status --watch`, from files alone: stage, progress, warnings.

The orchestrator is not asked: the stage follows from the committed slots and the one that comes
next, the process from the run's lock file. Rules over metric rows are in warnings.py. Returns plain
records, which `marin_rl.dashboard` draws.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from marin_rl.analysis.dialogues import BRIEF, sample_rollouts
from marin_rl.analysis.status import Followed, Unreadable, each_run
from marin_rl.analysis.warnings import ROUNDS_JUDGED, warnings_of
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
Options = Mapping[str, Any] | None

QUIET_ROUNDS = 5.0  # a run is quiet when nothing was committed for this many of its rounds
QUIET_S_MIN = 120.0
SAMPLED_MAX = 512


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """State of a run at one moment. `idle_s` is the time since its last commit.

    `holder` is the process that has the run locked, on the machine `holder_host`; one of another
    machine counts as alive, for that cannot be known here.
    """

    run_id: str
    rounds: int
    trained: int
    stage: Stage
    idle_s: float | None
    holder: int | None
    holder_host: str | None
    rows: Rows
    samples: Sequence[Mapping[str, Any]]
    warnings: Sequence[str]


class Watched:
    """The runs under a root, read repeatedly: what cannot change is read once."""

    def __init__(self, root: str, options: Options = None) -> None:
        self._root, self._options = root, options
        self._followed: dict[str, Followed] = {}
        self._sampled: dict[tuple[str, int, int, int], Sequence[Mapping[str, Any]]] = {}

    def one(self, run_id: str, *, samples: int = 3) -> Look:
        """Current state of a run. Raises ObjectMissing naming the runs there are, CorruptObject."""
        if run_id not in self._followed:
            self._followed[run_id] = Followed(Run.open(self._root, run_id, self._options))
        followed = self._followed[run_id]
        run, slots = followed.run, followed.progress()
        rows, trained = followed.rows(slots), _trained(slots)
        stage = stage_of(run, slots)
        idle_s = _idle_s(run, stage.round, datetime.now(UTC))
        holder = holder_of(run)
        alive = holder is not None and holder.alive
        warnings = warnings_of(rows, run_id)
        if not stage.ended:
            warnings += _standstill(rows, idle_s, None if alive else holder)
        return Look(
            run_id=run_id,
            rounds=rounds_planned(run, trained),
            trained=trained,
            stage=stage,
            idle_s=idle_s,
            holder=holder.pid if holder and alive else None,
            holder_host=holder.host if holder and alive else None,
            rows=rows,
            samples=self._samples(followed, slots, samples),
            warnings=warnings,
        )

    def all(self) -> list[Look | Unreadable]:
        """Current state of every run; one that cannot be read hides no other."""
        return each_run(self._root, lambda name: self.one(name, samples=0), self._options)

    def _samples(
        self, followed: Followed, slots: Mapping[int, RoundProgress], count: int
    ) -> Sequence[Mapping[str, Any]]:
        """Rollouts of the newest round that is sealed."""
        sealed = [number for number, item in slots.items() if item.rollouts]
        if not count or not sealed:
            return ()
        key = (followed.run.run_id, followed.times_begun, sealed[-1], count)
        if key not in self._sampled:
            self._sampled = {key: _samples(followed.run, sealed[-1], count)}
        return self._sampled[key]


def stage_of(run: Run, slots: Mapping[int, RoundProgress]) -> Stage:
    """The first stage of the run that is not committed yet."""
    if not any(item.checkpoint for item in slots.values()):
        return _warm_start(run)
    round = _trained(slots)
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


def _standstill(rows: Rows, idle_s: float | None, gone: Holder | None) -> list[str]:
    if gone is not None:
        return [f"{gone}, which held the run, is gone: the same command continues it"]
    times = [row["timing_s/round"] for row in rows if row.get("timing_s/round") is not None]
    usual = statistics.median(times[-ROUNDS_JUDGED:]) if times else QUIET_S_MIN
    if idle_s is None or idle_s < max(QUIET_ROUNDS * usual, QUIET_S_MIN):
        return []
    return [f"nothing was committed for {idle_s:.0f} s; a round takes about {usual:.0f} s"]


def _warm_start(run: Run) -> Stage:
    if run.config.policy.init != "sft":
        return Stage(name="loading the policy", round=0)
    done = latest_sft(run)
    steps = int(done.slot.rpartition("-")[2]) if done else 0
    return Stage(name="warm start, steps", round=0, done=steps, total=run.config.sft.steps)


def _trained(slots: Mapping[int, RoundProgress]) -> int:
    return max((number for number, item in slots.items() if item.checkpoint), default=0)


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


def _samples(run: Run, round_number: int, count: int) -> Sequence[Mapping[str, Any]]:
    """Rollouts of a sealed round, each of another example: the best, the worst, and between."""
    sampled = sample_rollouts(run, round_number, SAMPLED_MAX)
    rows = [{name: row[name] for name in BRIEF} for row in sampled]
    examples = list({row["example"]: row for row in rows}.values())
    examples.sort(key=lambda row: -math.inf if row["reward"] is None else row["reward"])
    step = max(1, len(examples) - 1) / max(1, count - 1)
    picked = {min(round(index * step), len(examples) - 1) for index in range(count)}
    return [examples[index] for index in sorted(picked, reverse=True)]
