"""Progress of a run: which slots of each round are committed, and how many rounds are planned.

Read from listings and manifests at each call; nothing here is written but what a checkpoint records
of the free keys that its writer went by. Leaves out the run itself and single slots (`runs`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from marin_rl.config import Config
from marin_rl.errors import ConfigError, CorruptObject
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.layout import checkpoint_slot, evals_slot, metrics_key, round_of
from marin_rl.storage.runs import Run, rounds_in
from schemas.manifests import Manifest

ROUNDS_PLANNED = "rounds_planned"  # in a checkpoint's `extra`: `rounds`, as its writer had it
RETENTION = "retention"  # likewise the rule of retention
# Likewise the latest checkpoint that holds the optimizer's state, where this one does not.
OPTIMIZER_ROUND = "optimizer_round"
BEST_BY = "eval/accuracy"  # of evaluations, where `retention.best` names none


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProgress:
    """Committed slots of one round. `checkpoint` is the policy the round starts from."""

    round: int
    shards: int = 0
    rollouts: bool = False
    batches: bool = False
    checkpoint: bool = False
    evaluation: bool = False
    metrics: bool = False


def progress(run: Run, known: Collection[int] = ()) -> dict[int, RoundProgress]:
    """Committed slots by round, ascending: one fresh listing per kind, for people and starts.

    A checkpoint takes one more listing, which is spared for those `known` to be committed.
    """
    slots: dict[int, dict[str, Any]] = {}
    for kind in ("rollouts", "batches", "evals", "metrics"):
        for key in run.store.list(kind):
            _, name, *path = key.split("/")
            if (round := round_of(name)) is None:
                continue
            marks = slots.setdefault(round, {})
            # Metrics are commits of their own; a manifest in an attempt's folder is only a part.
            if kind == "metrics" or path == ["manifest.json"]:
                marks["evaluation" if kind == "evals" else kind] = True
            elif kind == "rollouts" and path and path[0].startswith("shard-"):
                marks["shards"] = marks.get("shards", 0) + 1
    # Children only: a listing of all keys would name every file of every checkpoint.
    for name in run.store.children("checkpoints"):
        if (round := round_of(name)) is not None and (
            round in known or "manifest.json" in run.store.children(f"checkpoints/{name}")
        ):
            slots.setdefault(round, {})["checkpoint"] = True
    return {round: RoundProgress(round=round, **slots[round]) for round in sorted(slots)}


def is_closed(run: Run, round: int) -> bool:
    return metrics_key(round).rpartition("/")[2] in run.store.children("metrics")


def rounds_planned(run: Run, trained: int) -> int:
    """Number of rounds planned for a run that trained `trained`, by its own latest checkpoint.

    run.json has what was planned when the run began; `rounds` may be another at each continuation.
    """
    slot = checkpoint_slot(trained)
    # A new fork starts from its parent's checkpoint, which records the parent's plan.
    latest = read_manifest(run.store, slot) if run.owner_of(slot) == run.run_id else None
    planned = latest[0].extra.get(ROUNDS_PLANNED) if latest else None
    if planned is None:
        return max(run.config.rounds, trained)
    if not isinstance(planned, int) or not 0 <= planned < 2**31:
        raise CorruptObject(
            f"{run.store.url_of(slot)}: expected a number of rounds as {ROUNDS_PLANNED}, found "
            f"{str(planned)[:100]!r}"
        )
    return max(planned, trained)


def evaluated(run: Run, metric: str) -> dict[int, float]:
    """A metric of the committed evaluations by checkpoint, ascending.

    Raises ConfigError where there are evaluations, and none has it.
    """
    manifests = {n: read_manifest(run.store, evals_slot(n)) for n in rounds_in(run.store, "evals")}
    totals = {number: item[0].totals for number, item in sorted(manifests.items()) if item}
    values = {number: own[metric] for number, own in totals.items() if metric in own}
    if totals and not values:
        known = ", ".join(sorted({name for own in totals.values() for name in own}))
        raise ConfigError(
            f"retention.best: expected a metric of the run's evaluations, found {metric!r}; they "
            f"have {known}"
        )
    return values


def best_checkpoints(values: Mapping[int, float]) -> list[int]:
    """Checkpoints that were better than all before, of values by `evaluated`; the best is last."""
    found = list[int]()
    for number, value in values.items():
        if not found or value > values[found[-1]]:
            found.append(number)
    return found


def ends_early(run: Run, config: Config, number: int) -> bool:
    """True if a run that goes by `config` ends with this checkpoint, by `evaluation.patience`.

    Only evaluations that were due count, up to its own: what is evaluated by hand, or by a later
    attempt, does not change where a run ends.
    """
    evaluation = config.evaluation
    if evaluation.patience is None or number % evaluation.every_rounds:
        return False
    every = evaluated(run, config.retention.best or BEST_BY)
    due = {n: v for n, v in every.items() if n <= number and n % evaluation.every_rounds == 0}
    since = [n for n in due if n > best_checkpoints(due)[-1]]
    return number in due and len(since) >= evaluation.patience


def optimizer_round(checkpoint: Manifest) -> int | None:
    """The earlier checkpoint that holds the optimizer's state, by number; None: this one does.

    The rounds since that one are trained again for what a checkpoint of parameters leaves out.
    """
    whole = checkpoint.extra.get(OPTIMIZER_ROUND)
    number = checkpoint_slot.first(checkpoint.slot) or 0
    if not (whole is None or (isinstance(whole, int) and 0 <= whole < number)):
        raise CorruptObject(
            f"{checkpoint.slot}: expected the number of an earlier checkpoint as "
            f"{OPTIMIZER_ROUND}, found {str(whole)[:100]!r}"
        )
    return whole


def as_continued(run: Run) -> dict[str, Any]:
    """Free keys that a checkpoint's `extra` records, in force until the next checkpoint."""
    rule = run.config.retention.model_dump(mode="json")
    return {ROUNDS_PLANNED: run.config.rounds, RETENTION: rule}
