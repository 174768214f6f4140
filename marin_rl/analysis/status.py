"""Status of a run, from committed slots only: its stage, its rows, warnings if it stands still.

The stage follows from the committed slots, the process from the run's lock file. Returns plain
rows; `marin_rl.display` draws them. Rules over metric rows are in warnings.py.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from marin_rl.analysis.warnings import ROUNDS_JUDGED, warnings_of
from marin_rl.errors import MarinRLError
from marin_rl.inference.client.fleet_sources import board_of
from marin_rl.rollouts.estimates import Estimate, held_out_accuracies
from marin_rl.rounds import evaluations
from marin_rl.storage import layout, run_progress, runs
from marin_rl.storage.commits import manifest_of, read_manifest
from marin_rl.storage.fleet import Unreadable as UnreadableHeartbeat
from marin_rl.storage.run_progress import RoundProgress
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.locks import Holder, holder_in
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.tokenizer_files import tokenizer_folder

Options = Mapping[str, Any] | None
Result = TypeVar("Result")

QUIET_ROUNDS = 5.0  # a run is quiet when nothing was committed for this many of its rounds
QUIET_S_MIN = 120.0


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
        slots = run_progress.progress(self.run, self._checkpoints)
        if not self._metrics.keys() <= {number for number, item in slots.items() if item.metrics}:
            self.times_begun += 1  # rounds that were closed are gone: this is another run
            for cache in (self._checkpoints, self._metrics, self._evaluations):
                cache.clear()
            slots = run_progress.progress(self.run)
        self._checkpoints.update(number for number, item in slots.items() if item.checkpoint)
        return slots

    def rows(self, slots: dict[int, RoundProgress]) -> list[dict[str, Any]]:
        """Metrics of the rounds in `slots`, ascending; row r has the evaluation of checkpoint r.

        The last row may hold an evaluation alone.
        """
        closed = [n for n, item in slots.items() if item.metrics and n not in self._metrics]
        if closed:
            table = read_metrics(self.run, closed)
            self._metrics |= {row["round"]: row for row in table.to_pylist()}
        new = [n for n, item in slots.items() if item.evaluation and n not in self._evaluations]
        if new:
            self._evaluations |= evaluations(self.run, new)
        rows = {round: dict(row) for round, row in self._metrics.items()}
        for round, values in self._evaluations.items():
            rows.setdefault(round, {"round": round}).update(values)
        return [rows[round] for round in sorted(rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Committed slots of a run, its metric rows, warnings, and one sentence on what it learned.

    Rows have the 95 % interval of `eval/accuracy` as `eval/accuracy/low` and `…/high`. `fleet` are
    servers, as their last heartbeats say. `trained` counts rounds, of `planned`. What does not
    apply to the run is None.
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
    warm_start: str | None
    reward_model: str | None
    preference: str | None
    best: str | None
    headline: str
    warnings: Sequence[str]
    rounds: Sequence[Mapping[str, Any]]
    fleet: Sequence[Mapping[str, Any]] = ()

    @property
    def facts(self) -> dict[str, str]:
        """The same as text, in reading order, without the rows."""
        of_pairs = {"reward model": self.reward_model, "learning from pairs": self.preference}
        facts: dict[str, str | None] = {
            "root": self.root,
            "warm start": self.warm_start,
            "rounds trained": f"{self.trained} of {self.planned}",
            "checkpoints": str(self.checkpoints),
            "best checkpoint": self.best,
            "shards": str(self.shards),
            "environment": self.environment,
            "policy": self.policy,
            "in progress": self.in_progress,
        }
        if any(of_pairs.values()) and not self.checkpoints:  # a run that learns from pairs alone
            facts = {"root": self.root, "policy": self.policy}
        return {name: text for name, text in (facts | of_pairs).items() if text is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    run_id: str
    error: str


def run_status(root: str, run_id: str, options: Options = None) -> RunStatus:
    """Committed slots and metrics of one run. Raises ObjectMissing naming the runs there are."""
    followed = Followed(Run.open(root, run_id, options))
    return status_of(followed, followed.progress())


def status_of(followed: Followed, slots: dict[int, RoundProgress]) -> RunStatus:
    """The status of a run with these committed slots. Raises CorruptObject, NewerSchema."""
    run, rows = followed.run, followed.rows(slots)
    environment = run.config.environment
    mixture = environment.mixture or ()
    played = ", ".join(f"{entry.shown_label} {entry.weight:g}" for entry in mixture)
    checkpoints = [number for number, item in slots.items() if item.checkpoint]
    trained = max(checkpoints, default=0)
    bounds = {
        round: {"eval/accuracy/low": known.low, "eval/accuracy/high": known.high}
        for round, known in held_out_accuracies(rows).items()
    }
    return RunStatus(
        run_id=run.run_id,
        root=run.store.url,
        planned=run_progress.rounds_planned(run, trained),
        trained=trained,
        checkpoints=len(checkpoints),
        shards=sum(item.shards for item in slots.values()),
        environment=played or environment.name,
        policy=_policy(run, trained),
        in_progress=_open_round(run, slots),
        warm_start=None if trained else _warm_start(run),
        reward_model=_learned_from_pairs(run, "reward_model"),
        preference=_learned_from_pairs(run, "preference"),
        best=_best(run, trained),
        headline=headline(rows, run.run_id),
        warnings=[*warnings_of(rows, run.run_id), *standstill(run, slots, rows)],
        rounds=[{**row, **bounds.get(row["round"], {})} for row in rows],
        fleet=fleet_rows(run),
    )


def _best(run: Run, trained: int) -> str | None:
    """The best checkpoint, where the run keeps it or ends by it, and its value."""
    config = run.config
    metric = config.retention.best or (run_progress.BEST_BY if config.evaluation.patience else None)
    if metric is None or not (values := run_progress.evaluated(run, metric)):
        return None
    best = run_progress.best_checkpoints(values)[-1]
    ended = "; the run ended early" if run_progress.ends_early(run, config, trained) else ""
    return f"{layout.checkpoint_slot(best)}, {metric} {values[best]:.4g}{ended}"


def fleet_rows(run: Run) -> list[dict[str, Any]]:
    """Servers that announce themselves next to a run, by address; none of them is asked anything.

    `beat_ago_s` is by the clocks of this machine and of the server, which may differ. What cannot
    be read has its `error` alone.
    """
    rows: list[dict[str, Any]] = []
    board = board_of(run.config.inference, run.folder)
    for beat in board.heartbeats():
        if isinstance(beat, UnreadableHeartbeat):
            rows.append({"server": beat.name, "error": beat.error})
            continue
        shown = ("server", "url", "model", "weight_version", "slots", "busy", "queued", "beat")
        row: dict[str, Any] = {name: getattr(beat, name) for name in shown}
        row |= {"labels": dict(beat.labels), "tokens_per_second": beat.tokens_per_second}
        row |= {"idle": beat.idle, "base_digest": beat.base_digest, "adapters": beat.adapters}
        rows.append(row | {"beat_ago_s": time.time() - beat.beat_at})
    return sorted(rows, key=lambda row: str(row.get("url", row["server"])))


def _policy(run: Run, trained: int) -> str:
    """Source of the first parameters, tokenizer, and the adapter where one is trained."""
    config = run.config.policy
    # What a folder or a checkpoint decides has its name.
    named = config.checkpoint if config.init == "checkpoint" else config.hf_path
    source = f"init {config.init}" + (f" ({named})" if named else "")
    facts = [source, f"tokenizer {_tokenizer(run, trained)}"]
    lora = config.lora
    if lora is not None:
        kind = f"of rank {lora.rank}" if lora.rank else f"as {lora.init_from}"
        facts.append(f"adapter {kind}")
    if config.quantize_base is not None:
        facts.append(f"base quantised to {config.quantize_base}")
    return ", ".join(facts)


def _tokenizer(run: Run, trained: int) -> str:
    """The built-in tokenizer's name, or the folder's with the digest that checkpoints record."""
    folder = tokenizer_folder(run.config.policy)
    if folder is None:
        return run.config.policy.tokenizer
    checkpoint = runs.committed_checkpoint(run, trained)
    extra = {} if checkpoint is None else manifest_of(run.store, checkpoint).extra
    digest = extra.get("tokenizer_digest")
    return folder + (f" (digest {digest[:12]})" if digest else "")


def each_run(root: str, read: Callable[[str], Result]) -> list[Result | Unreadable]:
    """Apply `read` to every run under a root, and report the runs that cannot be read."""
    results: list[Result | Unreadable] = []
    for run_id in runs.runs_under(root):
        try:
            results.append(read(run_id))
        except Exception as error:
            if isinstance(error, MarinRLError) and error.transient:
                raise
            results.append(Unreadable(run_id=run_id, error=f"{type(error).__name__}: {error}"))
    return results


def metric_rows(run: Run) -> list[dict[str, Any]]:
    """The committed metrics of a run; see `Followed.rows`."""
    followed = Followed(run)
    return followed.rows(followed.progress())


def headline(rows: Sequence[Mapping[str, Any]], run_id: str) -> str:
    """Change of the held-out accuracy, in one sentence; empty before two evaluations."""
    accuracies = held_out_accuracies(rows)
    if len(accuracies) < 2:
        return ""
    first, *_, last = accuracies
    change = 100 * (accuracies[last].value - accuracies[first].value)
    if change == 0:
        return (
            f"Nothing was learned: held-out accuracy is {_shown(accuracies[last])} in round {last} "
            f"as in round {first}. Look at rewards and texts: `marin-rl rollouts {run_id}`."
        )
    return (
        f"Held-out accuracy went from {_shown(accuracies[first])} in round {first} to "
        f"{_shown(accuracies[last])} in round {last}: {change:+.1f} points."
    )


def _shown(accuracy: Estimate) -> str:
    return f"{accuracy.value:.1%} ({accuracy.low:.1%} to {accuracy.high:.1%})"


def _warm_start(run: Run) -> str | None:
    reached, steps = runs.latest_sft(run), run.config.sft.steps
    if reached is None:
        return f"0 of {steps} steps" if run.config.policy.init == "sft" else None
    loss = reached.summary.get("sft/loss")
    shown = "" if loss is None else f", loss {loss:.3f}"
    return f"{reached.number} of {steps} steps{shown}"


def _learned_from_pairs(run: Run, section: str) -> str | None:
    if (settings := getattr(run.config, section)) is None:
        return None
    reached = runs.LATEST_OF_PAIRS[section](run)
    if reached is None:
        return f"0 of {settings.steps} steps"
    accuracy = reached.summary.get(f"{section}/held_out_accuracy")
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
    # A round may sample more shards than it begins with.
    expected = max(item.shards, run.config.rollouts.shards_per_round)
    shards = f"{item.shards}/{expected} shards"
    return f"round {number}: {shards}" + (f", {', '.join(done)} committed" if done else "")


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
        return self.name + (f" ({self.done} of {self.total})" if self.total else "")


def stage_of(run: Run, slots: Mapping[int, RoundProgress]) -> Stage:
    """The first stage of the run that is not committed yet."""
    checkpoints = [number for number, item in slots.items() if item.checkpoint]
    if not checkpoints:
        if learning := _learning_from_pairs(run):
            return learning
        if run.config.policy.init != "sft":
            return Stage(name="loading the policy", round=0)
        done = runs.latest_sft(run)
        steps, total = done.number if done else 0, run.config.sft.steps
        return Stage(name="warm start, steps", round=0, done=steps, total=total)
    round = max(checkpoints)
    here = slots.get(round, RoundProgress(round=round))
    if round >= run_progress.rounds_planned(run, round) and not here.shards:
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


def _learning_from_pairs(run: Run) -> Stage | None:
    for section, latest in runs.LATEST_OF_PAIRS.items():
        settings, done = getattr(run.config, section), latest(run)
        if settings is not None and done is not None:
            steps, holder = done.number, holder_of(run)
            ended = steps >= settings.steps and (holder is None or not holder.alive)
            name = "complete" if ended else "learning from pairs, steps"
            return Stage(name=name, round=0, done=steps, total=settings.steps, ended=ended)
    return None


def standstill(
    run: Run, slots: Mapping[int, RoundProgress], rows: Sequence[Mapping[str, Any]]
) -> list[str]:
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


def _idle_s(run: Run, round: int, now: datetime) -> float | None:
    """Seconds since the newest commit of this round or of the policy it starts from."""
    slots = (layout.checkpoint_slot(round), layout.rollouts_slot(round), layout.batches_slot(round))
    commits = [item for slot in slots if (item := read_manifest(run.store, slot))]
    if not commits:
        return None
    newest = max(datetime.fromisoformat(manifest.created_at) for manifest, _ in commits)
    return max(0.0, (now - newest).total_seconds())


def holder_of(run: Run) -> Holder | None:
    """Process that has the run locked, or had it and did not release it; see `Holder.alive`."""
    path = run.store.local_path(runs.LOCK_KEY)
    return None if path is None else holder_in(path)
