"""Are the committed metrics true? Each is computed again from the other files, and compared.

Rewards, lengths and where rollouts went come from the shards and the dispositions; what the trainer
scored, from the scores in its checkpoint, compared with the batches; storage from the
manifests, evaluations from their rows. Nothing of the metrics themselves is believed. What no file
can tell (times, gradients) is named as unchecked: `Definition.recomputable` says which.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from marin_rl.analysis.critic import ExpectedValues, unlearned, value_metrics, values_of
from marin_rl.analysis.penalty import ExpectedPenalty, coefficient_of, penalty_of
from marin_rl.analysis.token_baseline import COLUMN, ExpectedBaseline, baseline_of
from marin_rl.analysis.tokens import (
    ADVANTAGE_TOLERANCE,
    contradictions,
    step_losses,
    step_metrics,
    trained,
)
from marin_rl.batching.scalar_columns import SCALAR_COLUMNS, scalar_metrics
from marin_rl.config import Config
from marin_rl.errors import CorruptObject, NewerSchema, ObjectMissing
from marin_rl.metrics import KL_OF_REWARDS, Definition, definition_of, over_steps
from marin_rl.rollouts.evaluate import evaluation_metrics, judges_of
from marin_rl.rounds import rates, rlhf_metrics, storage_metrics
from marin_rl.storage.commits import committed_manifest, count_in, ref_of
from marin_rl.storage.runs import (
    Run,
    batches_slot,
    checkpoint_slot,
    evals_slot,
    rollouts_slot,
)
from marin_rl.storage.tables.batches import dispositions_of, read_batches
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import groups_of, iter_row_groups
from marin_rl.storage.tables.scores import StepScores, iter_scores
from marin_rl.trust import Consent, check_named
from marin_rl.types import TrainingBatch
from schemas.manifests import Manifest

UNREADABLE = "(unreadable)"
CODE = ("environment", "evaluation")  # sections that name what extracts answers
Reckoned = ExpectedBaseline | ExpectedPenalty | ExpectedValues
VALUED_TOLERANCE = 1e-3  # whitening multiplies the rounding of advantages that hardly differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One metric of one round: recomputed from the files, and as the metrics row has it.

    `expected` is None where the files give none, `found` where the row has none; `problem` says in
    words what is wrong, and is empty where nothing is. `unchecked` says why a metric of the row was
    compared with nothing, and is empty where it was compared.
    """

    round: int
    metric: str
    expected: float | None
    found: float | None
    problem: str = ""
    unchecked: str = ""

    @property
    def told(self) -> str:
        """The finding in one line."""
        if self.metric == UNREADABLE:
            return f"round {self.round}: {self.problem}"
        values = f"expected {_shown(self.expected)}, found {_shown(self.found)}"
        return f"round {self.round}: {self.metric} {self.problem}: {values}"


def verify_run(run: Run, round: int | None = None, *, trust: bool = False) -> Iterator[Finding]:
    """Every metric of every closed round, or of `round` alone; `unchecked` where no file gives it.

    Raises ObjectMissing where no round, or not that one, is closed; ConfigError where somebody
    else's run names code that extracts answers, unless with `trust`. Files that are missing or
    damaged are findings.
    """
    rows = read_metrics(run, None if round is None else [round]).to_pylist()
    if not rows:
        raise ObjectMissing(f"{run.store.url_of('metrics')}: no round has been closed")
    episodes = _Episodes(run)
    for row in rows:
        number, said = row["round"], _said(row)
        try:
            player = run.at_round(number)  # a fork's first rounds are as its parent's settings say
            if any(name.startswith("eval/") for name in said):  # whose answers are extracted
                check_named(player, player.config, Consent(trust=trust), CODE)
            expected = expected_metrics(player, number, said)
            expected["episode"] = episodes.up_to(number)
            yield from _compare(player, number, said, expected)
        except (CorruptObject, NewerSchema, ObjectMissing) as error:
            yield Finding(
                round=number, metric=UNREADABLE, expected=None, found=None, problem=str(error)
            )


def not_checked(findings: Sequence[Finding]) -> list[str]:
    """Metrics that were compared with nothing, a line for each reason."""
    reasons = dict.fromkeys(found.unchecked for found in findings if found.unchecked)
    return [
        f"not checked ({reason}): {', '.join(sorted(set(names)))}"
        for reason in reasons
        if (names := [found.metric for found in findings if found.unchecked == reason])
    ]


def expected_metrics(run: Run, round: int, said: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a round, recomputed from its files. Two things are taken from `said`, its row:

    its seconds, of which rates are made, and the presence of its evaluation: one that was made
    after the round was closed is in no row. Besides metrics, this has
    `scores/*`: how many tokens of the scores contradict the batches, which should be none. Raises
    ObjectMissing, CorruptObject, NewerSchema.
    """
    rollouts, batches = (
        committed_manifest(run.store, rollouts_slot(round)),
        committed_manifest(run.store, batches_slot(round)),
    )
    checkpoint = committed_manifest(run.store, checkpoint_slot(round + 1))
    manifests = [rollouts, batches, checkpoint]
    result = _of_rollouts(run, round, rollouts, batches, said)
    result |= _of_tokens(run, round, batches, checkpoint)
    result |= rlhf_metrics(result)
    if any(name.startswith("eval/") for name in said):
        evaluation = committed_manifest(run.store, evals_slot(round))
        manifests.append(evaluation)
        result |= evaluation_of(run, evaluation)
    return result | storage_metrics(manifests)


def evaluation_of(run: Run, manifest: Manifest) -> dict[str, float]:
    """The `eval/*` metrics of a committed evaluation, from its rows."""
    groups = [
        group for table in iter_row_groups(run, manifest) for group in groups_of(table)
    ]  # the rows have the shape of rollouts
    return evaluation_metrics(groups, run.config.evaluation, judges_of(run.config))


def _of_rollouts(
    run: Run, round: int, rollouts: Manifest, batches: Manifest, said: Mapping[str, float]
) -> dict[str, float]:
    light = pa.concat_tables(iter_row_groups(run, rollouts, SCALAR_COLUMNS)).combine_chunks()
    dispositions = dispositions_of(run, batches)
    if dispositions["rollout_id"].to_pylist() != light["rollout_id"].to_pylist():
        raise CorruptObject(
            f"{run.store.url_of(batches.slot)}: the dispositions are not those of the round's "
            "rollouts; `marin-rl audit` names which"
        )
    kinds = dispositions["disposition"].to_numpy(zero_copy_only=False)
    found = scalar_metrics(light, kinds, round)
    seconds = {name: value for name, value in said.items() if name.startswith("timing_s/")}
    found |= rates(seconds | found, found)
    return {name: value for name, value in found.items() if definition_of(name) is not None}


def _of_tokens(run: Run, round: int, batches: Manifest, checkpoint: Manifest) -> dict[str, float]:
    """Metrics of a round's steps, reduced as the round reduces them."""
    config, coefficient = run.config, coefficient_of(run, round)
    reckoned = _reckoned(run, batches, checkpoint, coefficient)
    steps: list[dict[str, float]] = []
    wrong: dict[str, float] = {}
    ends = 0
    scored = iter_scores(run, checkpoint)
    for batch in read_batches(run, ref_of(batches)):
        scores = _next(scored, run, checkpoint, len(steps))
        for name, count in _wrong(scores, batch, config, reckoned, len(steps)).items():
            wrong[name] = wrong.get(name, 0.0) + count
        losses = {}
        if config.training.epochs == 1 and "scores/tokens" not in wrong:
            losses = step_losses(scores, batch, config, coefficient)
        if config.training.critic is not None:
            losses |= value_metrics(scores, config.training.critic)
        steps.append(step_metrics(scores, config.objective) | losses)
        ends += int((batch.token_ids[trained(batch)] == scores.eos_token_id).sum())
    if not steps:
        return {}
    held = {} if coefficient is None else {"objective/kl_coefficient": coefficient}
    held |= {} if reckoned is None else reckoned.metrics
    updates = _of_updates(config, round, checkpoint)
    return over_steps(steps) | wrong | held | updates | {"val/num_eos_tokens": float(ends)}


def _of_updates(config: Config, round: int, checkpoint: Manifest) -> dict[str, float]:
    """Number of updates, and the learning rate of the last, unless it was refused."""
    from marin_rl.training.optimizer import learning_rate_schedule, policy_adamw

    done, critic = checkpoint.extra.get("step"), config.training.critic
    if done is None:
        return {}  # no trainer made it
    warming = critic is not None and round < critic.warmup_rounds
    schedule = learning_rate_schedule(policy_adamw(config.training))
    return {"updates/steps": float(done), "lr": 0.0 if warming else float(schedule(done - 1))}


def _reckoned(
    run: Run, batches: Manifest, checkpoint: Manifest, coefficient: float | None
) -> Reckoned | None:
    """Additions to the advantages of the batches before the round's first update."""
    if run.config.objective.advantage == "optimal_token_baseline":
        return baseline_of(run, batches, checkpoint)
    if run.config.training.critic is not None:
        return values_of(run, batches, checkpoint, coefficient)
    if coefficient is not None and run.config.objective.kl_placement == "reward":
        return penalty_of(run, batches, checkpoint, coefficient)
    return None


def _wrong(
    scores: StepScores,
    batch: TrainingBatch,
    config: Config,
    reckoned: Reckoned | None,
    step: int,
) -> dict[str, float]:
    """Number of tokens whose scores contradict the batch, or earlier steps, by kind."""
    if reckoned is None:
        return contradictions(scores, batch, config.objective)
    added = reckoned.advantages[step]
    if isinstance(reckoned, ExpectedPenalty):
        near = VALUED_TOLERANCE if config.objective.kl_by_token else ADVANTAGE_TOLERANCE
        return contradictions(scores, batch, config.objective, added, near)
    if isinstance(reckoned, ExpectedBaseline):
        impossible = {f"scores/{COLUMN}": float(reckoned.out_of_bounds[step])}
        return contradictions(scores, batch, config.objective, added) | impossible
    found = contradictions(scores, batch, config.objective, added, VALUED_TOLERANCE)
    return found | {"scores/returns": unlearned(scores, reckoned.returns[step])}


def _next(scored: Iterator[StepScores], run: Run, checkpoint: Manifest, step: int) -> StepScores:
    scores = next(scored, None)
    if scores is None or scores.step != step:
        raise ObjectMissing(
            f"{run.store.url_of(checkpoint.slot)}: expected the scores of step {step}, found "
            f"{'none' if scores is None else f'those of step {scores.step}'}"
        )
    return scores


def _compare(
    run: Run, round: int, said: Mapping[str, float], expected: Mapping[str, float]
) -> Iterator[Finding]:
    earlier = not any(_is_late(name) for name in said)
    for name in sorted({*said, *expected}):
        if earlier and _is_late(name):
            continue
        if name.startswith("scores/"):
            yield _contradiction(round, name, expected[name])
            continue
        definition = definition_of(name)
        unchecked = "" if definition is None else _unchecked(name, definition, run.config, said)
        if unchecked and name in said:
            yield Finding(
                round=round, metric=name, expected=None, found=said[name], unchecked=unchecked
            )
        if unchecked:
            continue
        value, found = expected.get(name), said.get(name)
        if value is not None and not math.isfinite(value) and found is None:
            continue  # what is not finite is not written
        yield Finding(
            round=round,
            metric=name,
            expected=value,
            found=found,
            problem=_problem(definition, value, found),
        )


def _is_late(name: str) -> bool:
    """Return True for metrics that rows of earlier versions lack."""
    definition = definition_of(name)
    return definition is not None and definition.late


def _unchecked(name: str, definition: Definition, config: Config, said: Mapping[str, float]) -> str:
    """Why a metric cannot be computed again; empty where it can."""
    if definition.recomputable == "no":
        return "no file gives it again"
    if name == "lr" and said.get("updates/skipped"):
        return "an update of the round was refused"
    epochs, objective = config.training.epochs, config.objective
    in_loss = objective.kl_coefficient > 0 and not objective.kl_in_reward
    if definition.recomputable == "yes" or (name in KL_OF_REWARDS and not in_loss):
        return ""
    return "" if epochs == 1 else f"scores are kept of the first of {epochs} passes"


def _problem(definition: Definition | None, expected: float | None, found: float | None) -> str:
    if definition is None:
        return "is not defined"
    if found is None:
        return "is missing from the row"
    if expected is None:
        return "is in the row, but no file gives it"
    return "" if definition.allows(expected, found) else "differs"


def _contradiction(round: int, name: str, count: float) -> Finding:
    problem = "" if not count else "tokens of the scores contradict the batches"
    return Finding(round=round, metric=name, expected=0.0, found=count, problem=problem)


def _said(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if name not in ("run_id", "round") and value is not None
    }


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


class _Episodes:
    """Counts the rollouts of a run, reading each round's manifest once."""

    def __init__(self, run: Run) -> None:
        self._run, self._next, self._count = run, 0, 0.0

    def up_to(self, round: int) -> float:
        """Rollouts of all sealed rounds up to this one; rounds are asked for in order."""
        while self._next <= round:
            slot = rollouts_slot(self._next)
            manifest = committed_manifest(self._run.store, slot)
            self._count += count_in(manifest, "rows", self._run.store.url_of(slot))
            self._next += 1
        return self._count
