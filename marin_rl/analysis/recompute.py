"""Token metrics of a round, recomputed by the trainer's own functions from recorded numbers.

Scores in a checkpoint record what forward passes gave. What follows from these and from the batches
(advantages, ratios, losses, metrics) is computed here by the functions that the trainer calls: a
difference means that files do not belong together, or that a metric was altered.

Axes: N trained tokens of a step, B rows of its batch, R rows that it is filled up to, T positions.
Arrays of a step are one microbatch, [1, R, T], and 0 where nothing is trained on.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from marin_rl.config import Config, ObjectiveConfig
from marin_rl.errors import CorruptObject, ObjectMissing
from marin_rl.metrics import over_steps
from marin_rl.storage.commits import read_manifest, ref_of
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.batches import dispositions_of, read_batches
from marin_rl.storage.tables.scores import StepScores, iter_scores
from marin_rl.training.compiled_step import rows_compiled_for
from marin_rl.training.logprobs import TokenScores
from marin_rl.training.losses import log_ratios
from marin_rl.training.optimizer import learning_rate_schedule, policy_adamw, with_adapter_rate
from marin_rl.training.precompute import RowExtras, RowPrecompute
from marin_rl.training.reference_policy import kl_coefficient
from marin_rl.training.step_metrics import step_metrics
from marin_rl.training.step_types import (
    ForwardOutputs,
    StepArrays,
    StepRows,
    StepSettings,
    step_arrays,
)
from marin_rl.types import TrainingBatch
from schemas.manifests import Manifest

NORMS = "squared_score_norms"
# Recorded numbers are float32. Whitening, or the returns of a long completion, multiply their
# rounding, so what is derived may be off by this, relative or absolute.
RATIO_TOLERANCE = 1e-3
ADVANTAGE_TOLERANCE = 1e-4
WHITENED_TOLERANCE = 1e-3
NORM_TOLERANCE = 0.02  # a norm and its bounds come from two programs, of bfloat16 perhaps

Step32 = Float32[np.ndarray, "1 R T"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """Optimizer step of a round: its batch, its scores, and the batch as the step's arrays.

    `url` names the checkpoint's slot in errors.
    """

    batch: TrainingBatch
    scores: StepScores
    arrays: StepArrays
    url: str

    @property
    def mask(self) -> Bool[np.ndarray, "B T"]:
        return self.arrays.mask[0, : len(self.batch.token_ids)]

    def flat(self, name: str) -> Float32[np.ndarray, " N"]:
        """A column of the scores. Raises CorruptObject where it is null."""
        values_N = self.scores.floats[name]
        if values_N is None:
            raise CorruptObject(
                f"{self.url}: the scores of step {self.scores.step} have no {name}, which the "
                "run's objective needs"
            )
        return values_N.astype(np.float32)

    def rows(self, name: str) -> Step32:
        # In the places of the step's tokens.
        array = np.zeros(self.arrays.mask.shape, np.float32)
        array[self.arrays.mask] = self.flat(name)
        return array

    def rows_if_recorded(self, name: str) -> Step32 | None:
        return None if self.scores.floats[name] is None else self.rows(name)


def token_metrics(
    run: Run, round: int, batches: Manifest, checkpoint: Manifest
) -> dict[str, float]:
    """Metrics of a round's steps, reduced as the round reduces them.

    Besides metrics this has `scores/*`: numbers of tokens whose scores contradict the batches, 0 in
    a true run.
    """
    config, coefficient = run.config, coefficient_of(run, round)
    steps = partial(_recorded_steps, run, batches, checkpoint)
    extras, of_round = _precomputed(run, batches, coefficient, steps)
    settings = StepSettings(
        objective=config.objective,
        temperature=config.sampling.temperature or 1.0,
        length_norm=config.sampling.max_tokens,
        critic=config.training.critic,
    )
    in_loss = coefficient is not None and config.objective.kl_placement == "loss"
    weight = np.float32(coefficient) if in_loss else None
    metrics: list[dict[str, float]] = []
    contradicting: Counter[str] = Counter()
    ends = 0
    for number, step in enumerate(steps()):
        extra = extras[number] if extras else None
        contradicting.update(_contradictions(step, extra, config))
        metrics.append(_reported(step, settings, weight))
        ends += int((step.batch.token_ids[step.mask] == step.scores.eos_token_id).sum())
    if not metrics:
        return {}
    steered = {} if coefficient is None else {"objective/kl_coefficient": coefficient}
    return (
        over_steps(metrics)
        | {name: float(count) for name, count in contradicting.items()}
        | steered
        | of_round
        | _of_updates(config, round, checkpoint)
        | {"val/num_eos_tokens": float(ends)}
    )


def coefficient_of(run: Run, round: int) -> float | None:
    """The weight of the KL to the reference in a round, or None."""
    objective = run.config.objective
    if objective.kl_coefficient == 0:
        return None
    manifest = read_manifest(run.store, checkpoint_slot(round))
    if objective.kl_target is None or manifest is None:
        return objective.kl_coefficient
    return kl_coefficient(run, ref_of(manifest[0]))


def _recorded_steps(run: Run, batches: Manifest, checkpoint: Manifest) -> Iterator[RecordedStep]:
    """The steps of a round's first pass with their scores. Raises ObjectMissing, CorruptObject."""
    recorded, url = iter_scores(run, checkpoint), run.store.url_of(checkpoint.slot)
    rollouts = run.config.rollouts.groups_per_round * run.config.rollouts.group_size
    rows_max = min(run.config.batching.sequences_per_step or rollouts, rollouts)
    for number, batch in enumerate(read_batches(run, ref_of(batches))):
        scores = next(recorded, None)
        if scores is None or scores.step != number:
            raise ObjectMissing(
                f"{url}: expected the scores of step {number}, found "
                f"{'none' if scores is None else f'those of step {scores.step}'}"
            )
        # Rows as the trainer fills them up, so that a round needs few compiled programs.
        count = len(batch.token_ids)
        arrays = step_arrays(batch, rows_compiled_for(count, max(count, rows_max)), 1).arrays
        tokens = int(arrays.mask.sum())
        if tokens != len(scores.positions):
            raise CorruptObject(
                f"{url}: expected scores of the {tokens} tokens that step {number} trains on, "
                f"found {len(scores.positions)}"
            )
        yield RecordedStep(batch=batch, scores=scores, arrays=arrays, url=url)


def _precomputed(
    run: Run,
    batches: Manifest,
    coefficient: float | None,
    steps: Callable[[], Iterator[RecordedStep]],
) -> tuple[Sequence[RowExtras], dict[str, float]]:
    """The trainer's additions to a round's rows before its first update, and their metrics.

    Empty where the objective takes advantages from the batches as they are. Passes over the model
    are replaced by what was recorded of them.
    """
    objective, critic = run.config.objective, run.config.training.critic
    distillation = run.config.rollout_teacher
    in_reward = coefficient is not None and objective.kl_placement == "reward"
    if not objective.estimator.by_token and not in_reward and distillation is None:
        return [], {}
    recorded = list(steps())
    # Where the trainer counts the microbatches in use, a pass here gets the number of its step.
    rows = [StepRows(step.arrays, number) for number, step in enumerate(recorded)]
    groups = _groups(run, batches, recorded)
    precompute = RowPrecompute(objective, [step.batch for step in recorded], rows)
    precompute.extras = [
        RowExtras(old_logprobs=step.rows_if_recorded("old_logprobs")) for step in recorded
    ]

    def column(name: str) -> Callable[[StepRows], Step32]:
        return lambda step: recorded[step.used].rows(name)

    if in_reward and recorded:
        precompute.penalise(column("reference_logprobs"), float(np.float32(coefficient)), groups)
    if critic is not None:
        precompute.estimate(critic, column("old_values"))
    elif objective.estimator.by_token and recorded:
        precompute.weigh(column(NORMS), groups)
    if distillation is not None and recorded:
        precompute.distil(distillation.coefficient)
    return precompute.extras, dict(precompute.metrics)


def _groups(run: Run, batches: Manifest, recorded: Sequence[RecordedStep]) -> dict[str, str]:
    """The group of every rollout. Raises CorruptObject where a trained one has no disposition."""
    table = dispositions_of(run, batches).select(["rollout_id", "group_id"])
    groups = dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
    names = (name for step in recorded for row in step.batch.rollout_ids for name in row)
    unknown = next((name for name in names if name not in groups), None)
    if unknown is not None:
        url = run.store.url_of(batches.slot)
        raise CorruptObject(f"{url}: {unknown} was trained on and has no disposition")
    return groups


_step_metrics = jax.jit(step_metrics, static_argnums=0)


def _reported(
    step: RecordedStep, settings: StepSettings, weight: np.float32 | None
) -> dict[str, float]:
    """Metrics of a step by the trainer's own report; `weight` is that of the KL in the loss."""
    critic = settings.critic is not None
    arrays = step.arrays._replace(
        advantages=step.rows("advantages"),
        old_logprobs=step.rows_if_recorded("old_logprobs"),
        old_values=step.rows_if_recorded("old_values") if critic else None,
        returns=step.rows_if_recorded("returns") if critic else None,
    )
    outputs = ForwardOutputs(
        TokenScores(step.rows("trainer_logprobs"), step.rows("entropies")),  # type: ignore[arg-type]
        None if weight is None else step.rows("reference_logprobs"),  # type: ignore[arg-type]
        step.rows("values") if critic else None,  # type: ignore[arg-type]
    )
    metrics = _step_metrics(settings, outputs, weight, arrays)
    return {name: float(value) for name, value in metrics.items()}


def _contradictions(step: RecordedStep, extra: RowExtras | None, config: Config) -> dict[str, int]:
    """Number of a step's tokens whose scores contradict its batch or follow from nothing, by kind.

    `extra` is what the trainer adds to the rows, None where nothing.
    """
    scores, mask, objective = step.scores, step.mask, config.objective
    names = tuple(name for row in step.batch.rollout_ids for name in row)
    if names != scores.rollout_ids or not np.array_equal(_counts(step), scores.counts):
        return {"scores/rollout_id": len(names)}
    arrays = step.arrays if extra is None else extra(StepRows(step.arrays, 1)).arrays
    near = 0.0 if extra is None else ADVANTAGE_TOLERANCE
    if extra is not None and (objective.kl_by_token or config.training.critic is not None):
        near = WHITENED_TOLERANCE
    differing = {
        "rollout_id": np.zeros(1, bool),
        "positions": scores.positions != step.batch.positions[mask],
        "sampler_logprobs": step.flat("sampler_logprobs") != step.batch.policy_logprobs[mask],
        "advantages": _apart(step.flat("advantages"), arrays.advantages[arrays.mask], near),
        "ratios": _apart(step.flat("ratios"), _ratios(step, objective), RATIO_TOLERANCE),
    }
    if arrays.returns is not None:
        returns_N = arrays.returns[arrays.mask]
        differing["returns"] = _apart(step.flat("returns"), returns_N, ADVANTAGE_TOLERANCE)
    if extra is not None and extra.norms is not None:
        differing[NORMS] = _impossible_norms(step)
    return {f"scores/{name}": int(np.sum(flags)) for name, flags in differing.items()}


def _apart(recorded_N: np.ndarray, derived_N: np.ndarray, near: float) -> Bool[np.ndarray, " N"]:
    return ~np.isclose(recorded_N, derived_N, near, near, equal_nan=True)


def _counts(step: RecordedStep) -> Int64[np.ndarray, " S"]:
    """The trained tokens of every named segment, in the order of rows and segments."""
    segments = [len(row) for row in step.batch.rollout_ids]
    row_N, position_N = np.nonzero(step.mask)
    first = np.cumsum(segments) - segments
    place_N = first[row_N] + step.batch.segment_ids[row_N, position_N] - 1
    return np.bincount(place_N, minlength=sum(segments)).astype(np.int64)


def _ratios(step: RecordedStep, objective: ObjectiveConfig) -> Float32[np.ndarray, " N"]:
    old = step.rows_if_recorded("old_logprobs")
    log_BT = log_ratios(
        step.rows("trainer_logprobs")[0],
        (step.rows("sampler_logprobs") if old is None else old)[0],
        step.arrays.mask[0],
        step.arrays.segment_ids[0],
        objective.ratio_level,
    )
    return np.exp(np.asarray(log_BT))[step.arrays.mask[0]]


def _impossible_norms(step: RecordedStep) -> Bool[np.ndarray, " N"]:
    """Squared norms outside of (1 - p)^2 and twice that: the others' p sum to 1 - p.

    All False where p(y) before the first update is not recorded.
    """
    corrected = step.scores.floats["old_logprobs"] is not None
    if not corrected and step.scores.step > 0:
        return np.zeros(len(step.scores.positions), bool)
    logprob_N = step.flat("old_logprobs" if corrected else "trainer_logprobs")
    least_N: Float64[np.ndarray, " N"] = np.square(np.expm1(logprob_N.astype(np.float64)))
    norm_N = step.flat(NORMS)
    return (norm_N < least_N - NORM_TOLERANCE) | (norm_N > 2 * least_N + NORM_TOLERANCE)


def _of_updates(config: Config, round: int, checkpoint: Manifest) -> dict[str, float]:
    """Number of updates, and the learning rate of the last, unless it was refused."""
    updates, critic = checkpoint.extra.get("step"), config.training.critic
    if updates is None:
        return {}  # no trainer made it
    warming = critic is not None and round < critic.warmup_rounds
    adamw = with_adapter_rate(policy_adamw(config.training), config.policy.lora)
    schedule = learning_rate_schedule(adamw)
    rate = 0.0 if warming else float(schedule(updates - 1))
    return {"updates/steps": float(updates), "lr": rate}
