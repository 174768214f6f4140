"""Status of a run and samples of its rollouts, from committed slots only.

Returns plain rows; `marin_rl.display` draws them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from marin_rl.errors import MarinRLError, ObjectMissing
from marin_rl.rounds import evaluations
from marin_rl.storage.runs import (
    RoundProgress,
    Run,
    committed,
    latest_reward_model,
    progress,
    rollouts_slot,
    round_of,
    rounds_planned,
    runs_under,
)
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import iter_shards

Options = Mapping[str, Any] | None
Result = TypeVar("Result")

SAMPLE_COLUMNS = ("round", "rollout_id", "example_id", "turns", "answer", "reward", "status")


class Followed:
    """A run that is read repeatedly. Metrics and evaluations, which never change, are read once.

    So a look at a long run costs a few listings and what is new, not a read per round.
    `times_begun` increases where the folder was deleted and holds another run of the name: callers
    that cache more of the run then drop it too. Not thread safe.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.times_begun = 1
        self._checkpoints: set[int] = set()
        self._metrics: dict[int, dict[str, Any]] = {}
        self._evaluations: dict[int, dict[str, float]] = {}

    def progress(self) -> dict[int, RoundProgress]:
        """Committed slots by round, as `storage.runs.progress` returns them."""
        slots = progress(self.run, self._checkpoints)
        if not self._metrics.keys() <= {number for number, item in slots.items() if item.metrics}:
            self.times_begun += 1  # rounds that were closed are gone: this is another run
            for cache in (self._checkpoints, self._metrics, self._evaluations):
                cache.clear()
            slots = progress(self.run)
        self._checkpoints.update(number for number, item in slots.items() if item.checkpoint)
        return slots

    def rows(self, slots: dict[int, RoundProgress]) -> list[dict[str, Any]]:
        """Metrics of the rounds in `slots`, ascending; row r has the evaluation of checkpoint r.

        The last row may hold an evaluation alone. Raises CorruptObject, NewerSchema.
        """
        closed = [n for n, item in slots.items() if item.metrics and n not in self._metrics]
        if closed:
            table = read_metrics(self.run, closed)
            self._metrics |= {row["round"]: row for row in table.to_pylist()}
        new = [n for n, item in slots.items() if item.evaluation and n not in self._evaluations]
        if new:
            self._evaluations |= evaluations(self.run, new)
        return _merged(self._metrics, self._evaluations)


def _merged(
    metrics: Mapping[int, Mapping[str, Any]], evaluations: Mapping[int, Mapping[str, float]]
) -> list[dict[str, Any]]:
    rows = {round: dict(row) for round, row in metrics.items()}
    for round, values in evaluations.items():
        rows.setdefault(round, {"round": round}).update(values)
    return [rows[round] for round in sorted(rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Committed slots of a run, its metric rows, and one sentence on what it learned.

    `trained` counts rounds, of `planned`; `reward_model` is None where the run trains none.
    """

    run_id: str
    root: str
    planned: int
    trained: int
    checkpoints: int
    shards: int
    environment: str
    policy: str
    in_progress: str
    reward_model: str | None
    headline: str
    rounds: Sequence[Mapping[str, Any]]

    @property
    def facts(self) -> dict[str, str]:
        """The same as text, in reading order, without the rows."""
        learned = {} if self.reward_model is None else {"reward model": self.reward_model}
        return {
            "root": self.root,
            "rounds trained": f"{self.trained} of {self.planned}",
            "checkpoints": str(self.checkpoints),
            "shards": str(self.shards),
            "environment": self.environment,
            "policy": self.policy,
            "in progress": self.in_progress,
            **learned,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A run among others that cannot be read, and why."""

    run_id: str
    error: str


def run_status(root: str, run_id: str, options: Options = None) -> RunStatus:
    """Committed slots and metrics of one run. Raises ObjectMissing naming the runs there are."""
    followed = Followed(Run.open(root, run_id, options))
    return status_of(followed, followed.progress())


def status_of(followed: Followed, slots: dict[int, RoundProgress]) -> RunStatus:
    """The status of a run with these committed slots. Raises CorruptObject, NewerSchema."""
    run, rows = followed.run, followed.rows(slots)
    checkpoints = [number for number, item in slots.items() if item.checkpoint]
    trained = max(checkpoints, default=0)
    return RunStatus(
        run_id=run.run_id,
        root=run.store.url,
        planned=rounds_planned(run, trained),
        trained=trained,
        checkpoints=len(checkpoints),
        shards=sum(item.shards for item in slots.values()),
        environment=run.config.environment.name,
        policy=f"init {run.config.policy.init}, tokenizer {run.config.policy.tokenizer}",
        in_progress=_open_round(run, slots),
        reward_model=_reward_model(run),
        headline=headline(rows),
        rounds=rows,
    )


def each_run(
    root: str, read: Callable[[str], Result], options: Options = None
) -> list[Result | Unreadable]:
    """Apply `read` to every run under a root; one that cannot be read hides no other."""
    results: list[Result | Unreadable] = []
    for run_id in runs_under(root, options):
        try:
            results.append(read(run_id))
        except Exception as error:
            if isinstance(error, MarinRLError) and error.transient:
                raise
            results.append(Unreadable(run_id=run_id, error=f"{type(error).__name__}: {error}"))
    return results


def metric_rows(run: Run) -> list[dict[str, Any]]:
    """The committed metrics of a run, one row per round, ascending.

    Row r has the evaluation of checkpoint r; the last row may hold an evaluation alone.
    """
    rows = {row["round"]: row for row in read_metrics(run).to_pylist()}
    return _merged(rows, evaluations(run))


def headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Change of the held-out accuracy, in one sentence; empty before two evaluations."""
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    if len(evaluated) < 2:
        return ""
    first, last = evaluated[0], evaluated[-1]
    change = 100 * (last["eval/accuracy"] - first["eval/accuracy"])
    return (
        f"Held-out accuracy went from {first['eval/accuracy']:.1%} (round {first['round']}) to "
        f"{last['eval/accuracy']:.1%} (round {last['round']}): {change:+.1f} points."
    )


def sample_rollouts(
    run: Run, round_number: int | None, limit: int, *, worst_first: bool = False
) -> list[dict[str, Any]]:
    """Rollouts of one round (default: the newest) by reward: question, completion, reward.

    Raises ObjectMissing when the round has no committed rollouts, CorruptObject, NewerSchema.
    """
    import polars as pl  # large; a training process, which asks for metrics alone, spares it

    number = _newest_sealed(run) if round_number is None else round_number
    if number is None or committed(run, rollouts_slot(number)) is None:
        which = "" if number is None else f" of round {number}"
        raise ObjectMissing(
            f"run {run.run_id!r} has no committed rollouts{which} under {run.config.root}: "
            f"`marin-rl status {run.run_id}` shows which rounds there are"
        )
    shards = (pl.from_arrow(table) for table in iter_shards(run, number, SAMPLE_COLUMNS))
    rows = pl.concat([shard for shard in shards if isinstance(shard, pl.DataFrame)])
    ranked = rows.sort("reward", descending=not worst_first, nulls_last=True, maintain_order=True)
    return [_sample(row) for row in ranked.head(limit).to_dicts()]


def _newest_sealed(run: Run) -> int | None:
    """The highest round whose rollouts are sealed: a listing, and a read or two."""
    named = (round_of(name) for name in run.store.children("rollouts"))
    rounds = sorted((number for number in named if number is not None), reverse=True)
    return next((n for n in rounds if committed(run, rollouts_slot(n)) is not None), None)


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = row["turns"] or []
    text = {turn["role"]: turn["content"] for turn in turns}
    return {
        "rollout_id": row["rollout_id"],
        "example": row["example_id"],
        "prompt": text.get("user", ""),
        "completion": text.get("assistant", ""),
        "answer": row["answer"] or "",
        "reward": row["reward"],
        "status": row["status"],
    }


def _reward_model(run: Run) -> str | None:
    """Progress of the run's reward model, where it trains one."""
    settings = run.config.reward_model
    if settings is None:
        return None
    reached = latest_reward_model(run)
    if reached is None:
        return f"0 of {settings.steps} steps"
    accuracy = reached.summary.get("reward_model/held_out_accuracy")
    held_out = "" if accuracy is None else f", held-out accuracy {accuracy:.1%}"
    return f"{reached.slot} of {settings.steps} steps{held_out}"


def _open_round(run: Run, slots: Mapping[int, RoundProgress]) -> str:
    trained = {number - 1 for number, item in slots.items() if item.checkpoint}
    unfinished = [n for n, item in slots.items() if item.shards and n not in trained]
    if not unfinished:
        return "nothing"
    number = unfinished[-1]
    item = slots[number]
    done = [name for name in ("rollouts", "batches") if getattr(item, name)]
    shards = f"{item.shards}/{run.config.rollouts.shards_per_round} shards"
    return f"round {number}: {shards}" + (f", {', '.join(done)} committed" if done else "")
