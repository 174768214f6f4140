"""Process a sampled round under other settings and compare. Nothing is written.

The same shards are processed twice, as the run's configuration says and as the other one does; the
disposition of each rollout, the advantages and the gradient at the round's checkpoint are compared.
Only the gradient needs JAX.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from marin_rl.batching.build import Preview, preview_round
from marin_rl.config import (
    Config,
    differences,
    fingerprint_fields,
    override,
    parse_config,
    pin_files,
)
from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.storage.run_records import refuse_withdrawn
from marin_rl.storage.runs import Run, checkpoint_slot, committed_checkpoint
from marin_rl.storage.tables.rewards import read_rewards
from marin_rl.trust import Consent, check_named, code_of_updates
from schemas.tables import DISPOSITION_KINDS

# What may change without sampling anything again.
CHANGEABLE = (
    "objective", "filters", "batching", "training", "rollouts.group_size_min",
    "asynchrony.over_sampling.select", "asynchrony.group_filter", "distillation.coefficient",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """The size of a round's batches, and how many rollouts went where."""

    steps: int
    rows: int
    length: int
    rollouts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageDifference:
    """The advantages of the rollouts that both keep.

    `correlation` is Pearson's, None where one of them is constant; `signs` counts rollouts that
    one encourages and the other discourages.
    """

    rollouts: int
    correlation: float | None
    mean: float
    largest: float
    signs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDifference:
    """Norms of the gradients, and the cosine between them; None where one of them is 0."""

    norm_before: float
    norm_after: float
    cosine: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reprocessed:
    """Differences of a round. `moved` counts rollouts by `disposition -> disposition` with reasons.

    `advantages` is None where the training stage makes them, token by token.
    """

    round: int
    settings: tuple[str, ...]
    rewards: str | None
    before: Batched
    after: Batched
    moved: Mapping[str, int]
    advantages: AdvantageDifference | None
    gradient: GradientDifference | None


def reprocess_round(
    run: Run,
    round: int,
    overrides: Sequence[str],
    rewards: str | None = None,
    *,
    gradient: bool = True,
    trust: bool = False,
) -> Reprocessed:
    """Compare a round with what `overrides`, or the reward table `rewards`, would make of it.

    Raises ConfigError for settings that samples depend on, ObjectMissing, CorruptObject; InputError
    where the reward table lacks rollouts; ConfigError where another user's run names a filter of
    groups, or a loss, for the gradient, unless `trust`.
    """
    player = run.at_round(round)
    refuse_withdrawn(player.folder)
    config = _changed(player.config, overrides)
    sections = ("asynchrony", *(code_of_updates(config) if gradient else ()))
    check_named(player, player.config, Consent(trust=trust), sections)
    other = None if rewards is None else read_rewards(run, round, rewards)
    # Planned again and not read: both sides are then of the code that runs now.
    before = preview_round(player, round, player.config)
    after = preview_round(player, round, config, other)
    fates = zip(_fates(before), _fates(after), strict=True)
    return Reprocessed(
        round=round,
        settings=tuple(differences(fingerprint_fields(player.config), fingerprint_fields(config))),
        rewards=rewards,
        before=_batched(before),
        after=_batched(after),
        moved=dict(sorted(Counter(f"{a} -> {b}" for a, b in fates if a != b).items())),
        advantages=_advantages(before, after),
        gradient=_gradients(player, config, round, before, after) if gradient else None,
    )


def _changed(config: Config, overrides: Sequence[str]) -> Config:
    tree = config.model_dump(mode="json")
    changed = parse_config(pin_files(override(tree, overrides)), "reprocess")
    lines = differences(fingerprint_fields(config), fingerprint_fields(changed))
    refused = [
        line
        for line in lines
        if not line.startswith(CHANGEABLE) or line.startswith("training.critic")
    ]
    # The average is part of every checkpoint: it cannot begin, or end, in the middle of a run.
    if "average" in (config.objective.reference, changed.objective.reference):
        refused += [line for line in lines if line.startswith("objective.reference:")]
    if refused:
        raise ConfigError(
            "what was sampled depends on these, or checkpoints do:\n  "
            + "\n  ".join(refused)
            + f"\nExpected changes of {', '.join(CHANGEABLE)} alone; fork the run to sample again"
        )
    return changed


def _batched(preview: Preview) -> Batched:
    plan = preview.plan
    counts = Counter(plan.decision.disposition_N.tolist())
    return Batched(
        steps=plan.packing.steps,
        rows=plan.packing.rows,
        length=plan.length,
        rollouts={kind: counts.get(kind, 0) for kind in DISPOSITION_KINDS},
    )


def _fates(preview: Preview) -> list[str]:
    decision = preview.plan.decision
    return [
        f"{kind} ({reason})" if reason else str(kind)
        for kind, reason in zip(decision.disposition_N, decision.reason_N, strict=True)
    ]


def _advantages(before: Preview, after: Preview) -> AdvantageDifference | None:
    if before.plan.by_token or after.plan.by_token:
        return None
    both = before.plan.kept_N & after.plan.kept_N
    a, b = (each.plan.decision.advantage_N[both] for each in (before, after))
    apart = np.abs(a - b)
    varies = len(a) > 1 and np.ptp(a) > 0 and np.ptp(b) > 0
    return AdvantageDifference(
        rollouts=len(a),
        correlation=float(np.corrcoef(a, b)[0, 1]) if varies else None,
        mean=float(apart.mean()) if len(a) else 0.0,
        largest=float(apart.max(initial=0.0)),
        signs=int((np.sign(a) * np.sign(b) < 0).sum()),
    )


def _gradients(
    run: Run, config: Config, round: int, before: Preview, after: Preview
) -> GradientDifference:
    from marin_rl.tokenizers import tokenizer_for
    from marin_rl.training.loop import Trainer

    checkpoint = committed_checkpoint(run, round)
    if checkpoint is None:
        raise ObjectMissing(f"{run.store.url_of(checkpoint_slot(round))} is not committed")
    tokenizer = tokenizer_for(run.config.policy)
    first = Trainer(run, tokenizer).gradient(round, before.batches, checkpoint)
    changed = replace(run, config=config)
    second = Trainer(changed, tokenizer).gradient(round, after.batches, checkpoint)
    dot, a, b = (
        sum(
            # In float64: the cosine of two similar gradients is a difference in late digits.
            float(np.vdot(x[name].astype(np.float64), y[name].astype(np.float64)))
            for name in first
        )
        for x, y in ((first, second), (first, first), (second, second))
    )
    norms = a**0.5, b**0.5
    cosine = dot / (norms[0] * norms[1]) if min(norms) > 0 else None
    return GradientDifference(norm_before=norms[0], norm_after=norms[1], cosine=cosine)
