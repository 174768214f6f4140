"""Every metric, once: its name, unit and formula, and whether the files give it again.

Names are the field's own (TRL's and Huang's "N implementation details of RLHF"), so that curves can
be laid over those of other trainers. `DEFINITIONS` is the source of docs/metrics.md; a round's row
holds only names that stand there, or that follow one of its patterns (`rewards/{component}/mean`).
Computing is elsewhere: over rollouts in rollouts/summary.py, over tokens in the training step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

import numpy as np

# Under the variance of returns in critic/explained_variance, where they are all but equal; verl's.
EXPLAINED_VARIANCE_MIN = 1e-5

Recomputable = Literal["yes", "one epoch", "no"]
OverSteps = Literal["mean", "first", "last", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """Definition of a metric. `formula` is over the rollouts or tokens of one round.

    `recomputable` says whether the committed files alone give the number again: "one epoch" does
    where each batch is trained on once, for the scores are those of the first pass (for
    more see `KL_OF_REWARDS`). Then both numbers agree within `relative` of the expected or
    `absolute`, the larger. `over_steps` is how the numbers of several optimizer steps become that
    of the round. Rows of earlier versions lack all that are `late`.
    """

    name: str
    unit: str
    formula: str
    recomputable: Recomputable = "no"
    relative: float = 1e-9
    absolute: float = 1e-9
    over_steps: OverSteps = "mean"
    late: bool = False

    def allows(self, expected: float, found: float) -> bool:
        """True if `found` agrees with `expected` within the tolerance; NaN agrees with NaN."""
        if np.isnan(expected) or np.isnan(found):
            return bool(np.isnan(expected) and np.isnan(found))
        return abs(found - expected) <= max(self.absolute, self.relative * abs(expected))


def _timed(name: str, unit: str, formula: str, over_steps: OverSteps = "mean") -> Definition:
    """Of a clock, of memory, or of weights: no file gives it again."""
    return Definition(name=name, unit=unit, formula=formula, over_steps=over_steps)


def _followed(
    name: str, unit: str, formula: str, over_steps: OverSteps = "mean", relative: float = 1e-9
) -> Definition:
    """From the settings and a count that is kept, or from seconds that the same row tells."""
    return Definition(
        name=name,
        unit=unit,
        formula=formula,
        recomputable="yes",
        relative=relative,
        over_steps=over_steps,
    )


def _counted(name: str, unit: str, formula: str) -> Definition:
    """Over rollouts, computed in float64."""
    return Definition(name=name, unit=unit, formula=formula, recomputable="yes")


def _scored(
    name: str,
    unit: str,
    formula: str,
    *,
    over_steps: OverSteps = "mean",
    absolute: float = 1e-6,
    fixed: bool = False,
    late: bool = False,
) -> Definition:
    """Over trained tokens, computed on the device in float32; again from the scores in float64.

    What is `fixed` before the first update is the same in every pass.
    """
    before = fixed or over_steps == "first"
    recomputable: Recomputable = "yes" if before else "one epoch"
    return Definition(
        name=name,
        unit=unit,
        formula=formula,
        recomputable=recomputable,
        relative=1e-3,
        absolute=absolute,
        over_steps=over_steps,
        late=late,
    )


DEFINITIONS: tuple[Definition, ...] = (
    # ------------------------------------------------------------ rewards
    _counted("reward", "reward", "mean of the rewards of the round's valid rollouts"),
    _counted("reward_std", "reward", "mean over groups of the std (ddof 1) of the group's rewards"),
    _counted("rewards/*/mean", "reward", "mean of one reward component, unweighted"),
    _counted("rewards/*/std", "reward", "std (ddof 1) of one reward component over the round"),
    _counted("frac_reward_zero_std", "fraction", "groups whose valid rewards are all equal"),
    _counted("objective/scores", "reward", "mean reward of the consumed rollouts"),
    _scored(
        "objective/non_score_reward",
        "reward",
        "-objective/kl_coefficient * objective/kl; 0 without a KL term",
        absolute=1e-5,
    ),
    _scored(
        "objective/rlhf_reward",
        "reward",
        "objective/scores + objective/non_score_reward",
        absolute=1e-5,
    ),
    _counted("train/rewards", "reward", "mean reward of the consumed rollouts"),
    _counted(
        "train/format_rewards",
        "reward",
        "mean of the component named `format`, unweighted, over the consumed rollouts that have it",
    ),
    _counted(
        "train/correct_rewards",
        "reward",
        "mean of the component named `correct`, unweighted, over the consumed rollouts that have "
        "it",
    ),
    _counted("train/output_length", "tokens", "mean number of sampled tokens of the consumed"),
    # ------------------------------------------------------------ completions
    _counted("completions/mean_length", "tokens", "mean number of sampled tokens"),
    _counted("completions/min_length", "tokens", "fewest sampled tokens of a rollout"),
    _counted("completions/max_length", "tokens", "most sampled tokens of a rollout"),
    _counted(
        "completions/mean_terminated_length",
        "tokens",
        "mean number of sampled tokens of the rollouts that ended by themselves (status complete)",
    ),
    _counted("completions/min_terminated_length", "tokens", "fewest of these"),
    _counted("completions/max_terminated_length", "tokens", "most of these"),
    _counted(
        "completions/clipped_ratio",
        "fraction",
        "sampled rollouts (neither error nor aborted) that were cut off at max_tokens",
    ),
    _counted(
        "val/num_eos_tokens",
        "tokens",
        "trained tokens that are the tokenizer's end token, over the round's batches once",
    ),
    # ------------------------------------------------------------ where rollouts went
    _counted("rollouts/errors", "fraction", "rollouts with status error or aborted"),
    _counted("rollouts/generated", "rollouts", "rollouts written by the round"),
    _counted("rollouts/consumed", "rollouts", "rollouts that entered a training batch"),
    _counted("rollouts/filtered", "rollouts", "rollouts dropped by a filter"),
    _counted("rollouts/stale", "rollouts", "rollouts older than staleness_rounds_max"),
    _counted("rollouts/failed", "rollouts", "rollouts without a usable reward"),
    _counted("replay/enqueue", "rollouts", "rollouts that the round generated"),
    _counted("replay/dequeue", "rollouts", "rollouts that the round consumed"),
    _counted(
        "replay/drops", "rollouts", "rollouts that the round dropped: filtered + stale + failed"
    ),
    _timed(
        "replay/occupancy",
        "rollouts",
        "rollouts of sealed rounds that have no disposition yet when the round is closed; 0 unless "
        "generation runs ahead of training",
    ),
    _counted("staleness/mean", "rounds", "mean age of the consumed rollouts' policy"),
    _counted("staleness/max", "rounds", "largest age of a consumed rollout's policy"),
    _counted("episode", "rollouts", "rollouts generated since the run began"),
    _followed("env/*/eps", "episodes/s", "rollouts of one environment / timing_s/round"),
    _counted("env/*/errors", "fraction", "its rollouts with status error or aborted"),
    _counted(
        "env/*/format_rate",
        "fraction",
        "of its rollouts with a component named `format`, those where it is above 0",
    ),
    _counted("env/*/reward", "reward", "mean of the rewards of its valid rollouts"),
    # ------------------------------------------------------------ objective and update
    _scored(
        "objective/kl",
        "nats",
        "mean over sequences of the KL to the reference, summed over tokens; with kl_placement "
        "loss, k1 (whatever the estimator of the loss) of the policy before the update of each "
        "step; with kl_placement reward, the configured estimator of the sampler, which the "
        "rewards were lowered by, before the first update",
        absolute=1e-5,
    ),
    _scored(
        "objective/kl_coefficient",
        "",
        "weight of the KL to the reference in the round; absent without one",
        fixed=True,
    ),
    _scored(
        "objective/entropy",
        "nats",
        "mean over sequences of minus the summed log-probability of the tokens that were sampled",
    ),
    _scored(
        "kl",
        "nats",
        "mean over tokens of the configured estimator of KL to the reference; with kl_placement "
        "reward, of the sampler's log-probabilities, before the first update",
    ),
    _scored("entropy", "nats", "mean over trained tokens of the policy's entropy"),
    _scored("policy/entropy_avg", "nats", "the same as `entropy`, under Huang's name"),
    _scored(
        "loss",
        "",
        "surrogate, KL term, entropy bonus and weighted value loss; their sum is what is "
        "minimised, but for the rounds that warm a critic up, where the value loss alone is",
        absolute=1e-4,
    ),
    _scored("loss/policy_avg", "", "the surrogate part of the loss", absolute=1e-4),
    _scored(
        "loss/value_avg",
        "",
        "half the mean over tokens of max((V - R)^2, (V_clipped - R)^2); R are the returns, "
        "V_clipped is V held within value_clip of the value before the round's first update",
    ),
    _scored(
        "val/clipfrac_avg",
        "fraction",
        "tokens whose (V_clipped - R)^2 is the larger of the two",
        absolute=1e-3,
    ),
    _scored(
        "critic/explained_variance",
        "",
        "1 - var(R - V) / (var(R) + 1e-5) over tokens, V before the update of the step",
        absolute=1e-3,
    ),
    _scored("critic/values_mean", "reward", "mean over tokens of V", absolute=1e-5),
    _scored("critic/returns_mean", "reward", "mean over tokens of R", absolute=1e-5, fixed=True),
    _timed("critic/grad_norm", "", "global norm of the critic's own gradient before clipping"),
    _timed("critic/lr", "", "learning rate of the critic's last optimizer step", "last"),
    _timed("grad_norm", "", "global norm of the gradient before clipping"),
    _followed("lr", "", "learning rate of the round's last optimizer step", "last", relative=1e-6),
    _scored("policy/approxkl_avg", "nats", "mean over tokens of (log ratio of the token)^2 / 2"),
    _scored(
        "policy/clipfrac_avg",
        "fraction",
        "tokens beyond the bound that their advantage drives them to, as in TRL's PPOTrainer; "
        "clip_ratio/region where that counts tokens",
        absolute=1e-3,
    ),
    _scored(
        "clip_ratio/low",
        "fraction",
        "with a negative advantage, ratios below 1 - clip_low (ppo_clip, gspo) or, if it is set, "
        "1 - cispo_clip_low (cispo), probabilities that fell by more than clip_low (dppo); none of "
        "the others, which have no such bound; of tokens at ratio level token, of sequences at the "
        "others",
        absolute=1e-3,
    ),
    _scored(
        "clip_ratio/high",
        "fraction",
        "with a positive advantage, ratios above 1 + clip_high (ppo_clip, gspo, cispo), "
        "probabilities that rose by more than clip_high (dppo); none of reinforce and sapo; "
        "counted as clip_ratio/low",
        absolute=1e-3,
    ),
    _scored("clip_ratio/region", "fraction", "clip_ratio/low + clip_ratio/high", absolute=1e-3),
    _scored("val/ratio", "", "mean importance ratio, at the objective's level, over tokens"),
    _scored("val/ratio_var", "", "variance of the importance ratio"),
    _timed("updates/skipped", "steps", "updates refused because they were not finite", "sum"),
    _followed("updates/steps", "steps", "optimizer steps taken since the run began", "last"),
    # ------------------------------------------------------------ sampler against trainer
    _scored(
        "sampling/logp_difference/mean",
        "nats",
        "mean |trainer - sampler| logprob over tokens, at the round's first step, as all of these",
        over_steps="first",
    ),
    _scored(
        "sampling/logp_difference/max",
        "nats",
        "largest |trainer - sampler| logprob of a token",
        over_steps="first",
    ),
    _scored(
        "sampling/importance_ratio/*",
        "",
        "min, mean and max of exp(trainer - sampler)",
        over_steps="first",
    ),
    _scored(
        "sampling/correction_weight/mean",
        "",
        "mean over tokens of the weight of the importance correction, over all steps; absent "
        "without one",
    ),
    _scored(
        "mismatch_kl",
        "nats",
        "mean over tokens of r - log r - 1, r = exp(trainer - sampler)",
        over_steps="first",
    ),
    _scored(
        "sampling/rejected",
        "fraction",
        "trained tokens that `objective.rejection` gives weight 0, over all steps; absent without",
        absolute=1e-3,
    ),
    _scored(
        "sampling/perplexity/*",
        "",
        "mean over completions of exp(-mean log-probability) by the trainer and by the sampler, "
        "and of the one over the other",
        over_steps="first",
        late=True,
    ),
    _scored(
        "sampling/chi2/*",
        "",
        "chi-square of trainer to sampler, E[r^2] - 1 over what was sampled: of tokens, and of "
        "completions, where r is the product of their tokens'",
        over_steps="first",
        absolute=1e-4,
        late=True,
    ),
    # ------------------------------------------------------------ what it cost
    _followed("eps", "episodes/s", "rollouts of the round / timing_s/round"),
    _timed("timing_s/*", "s", "wall seconds of a stage of the round"),
    _followed("perf/tokens_per_second", "tokens/s", "sampled tokens / timing_s/generate"),
    _timed(
        "perf/mfu",
        "fraction",
        "model FLOPs of the round's updates / (timing_s/train * the devices' peak), FLOPs and "
        "peaks as in marin_rl/training/flops.py; absent where the peak is not known, as on a CPU",
    ),
    _timed("weights/bytes", "bytes", "bytes of the parameters given to servers in the round"),
    _timed("weights/seconds", "s", "wall seconds of giving them, without the proof by canary"),
    _timed(
        "weights/transfers_per_step",
        "transfers/step",
        "times that parameters were given to a server / optimizer steps of the round",
    ),
    _timed(
        "weights/failures",
        "transfers",
        "times that this failed before it succeeded, or the canary contradicted it",
    ),
    _counted("storage/bytes", "bytes", "bytes that the round committed, its manifests aside"),
    _counted("storage/objects", "objects", "objects that the round committed"),
    # ------------------------------------------------------------ held-out and supervised
    _counted("eval/accuracy", "fraction", "held-out rollouts with reward >= pass_threshold"),
    _counted("eval/reward_mean", "reward", "mean reward of held-out rollouts"),
    _counted("eval/mean_length", "tokens", "mean number of sampled tokens of held-out rollouts"),
    _counted("eval/examples", "examples", "held-out examples that were scored"),
    _counted("eval/errors", "fraction", "held-out rollouts with status error"),
    _counted(
        "eval/pass@*",
        "fraction",
        "pass@k: mean over examples of 1 - C(n - c, k) / C(n, k), for n samples of which c are "
        "right (Chen et al. 2021, arXiv:2107.03374, eq. 1); right is reward >= pass_threshold; "
        "`/low` and `/high` of this and the next two are its 95 % interval over examples (Wilson)",
    ),
    _counted(
        "eval/mean@*",
        "fraction",
        "mean@k: mean over examples of the share of right samples in runs of k (n // k of them)",
    ),
    _counted(
        "eval/majority@*",
        "fraction",
        "majority@k: mean over examples, and over runs of k samples, of whether the commonest "
        "answer is right; of equally common ones the one that was given first",
    ),
    _counted("eval/*/pass@*", "fraction", "eval/pass@k over those of one environment, or set"),
    _counted("eval/*/mean@*", "fraction", "eval/mean@k over those of one environment, or set"),
    _counted(
        "eval/*/majority@*", "fraction", "eval/majority@k over those of one environment, or set"
    ),
    _timed("sft/loss", "nats", "mean over answer tokens of the negative log-likelihood"),
    # ------------------------------------------------------------ reward models
    _timed(
        "reward_model/loss",
        "nats",
        "mean over pairs of -log sigmoid(chosen - rejected - margin), of the rewards",
    ),
    _timed("reward_model/accuracy", "fraction", "pairs whose chosen answer has the higher reward"),
    _timed("reward_model/margin", "reward", "mean over pairs of chosen - rejected"),
    _timed("reward_model/held_out_*", "", "the same over at most 1024 held-out pairs"),
)


# Of the sampler, before the first update, where rewards are lowered by KL and where there is none.
KL_OF_REWARDS = ("kl", "objective/kl", "objective/non_score_reward", "objective/rlhf_reward")


@lru_cache(maxsize=4096)
def definition_of(name: str) -> Definition | None:
    """The definition that a metric's name follows: its own before a pattern; None without one."""
    fitting = [found for found in DEFINITIONS if fnmatchcase(name, found.name)]
    return max(fitting, key=lambda found: (found.name == name, len(found.name)), default=None)


def is_defined(name: str) -> bool:
    """True if a metric of this name has a definition."""
    return definition_of(name) is not None


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a round from those of its optimizer steps; none for no steps.

    What compares trainer and sampler means something only before the first update of the round. A
    step that was refused leaves no number in the means unless it has a finite one; where no step
    has, the round has NaN.
    """
    names = sorted({name for step in steps for name in step})
    return {name: _reduced(name, [step[name] for step in steps if name in step]) for name in names}


def _reduced(name: str, values: Sequence[float]) -> float:
    definition = definition_of(name)
    assert definition is not None, f"the training step gives {name}, which is not defined"
    match definition.over_steps:
        case "first":
            return values[0]
        case "last":
            return values[-1]
        case "sum":
            return float(np.sum(values))
        case "mean":
            finite = [value for value in values if np.isfinite(value)]
            return float(np.mean(finite)) if finite else math.nan
