"""Verification of committed metrics: each is recomputed from the other files, and compared.

Rewards, lengths and dispositions come from shards and dispositions; metrics of tokens from scores
and batches (recompute.py); storage from manifests, evaluations from their rows. Metrics that no
file gives again are reported as unchecked, by `Definition.recomputable`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from marin_rl.analysis.recompute import token_metrics
from marin_rl.batching.reuse import RECORD as REUSED
from marin_rl.batching.reuse import iter_sources, reuse_metrics, reuse_of, reused_in
from marin_rl.batching.round_metrics import (
    columns_read,
    round_metrics,
    versions_of,
    with_version_sums,
)
from marin_rl.config import Config
from marin_rl.errors import CorruptObject, NewerSchema, ObjectMissing
from marin_rl.metrics import KL_OF_REWARDS, LARGEST, Definition, definition_of
from marin_rl.rollouts.curriculum import RECORD, Curriculum, curriculum_metrics, decide
from marin_rl.rollouts.evaluate import evaluation_metrics, extractors_of
from marin_rl.rounds import rates, rlhf_metrics, storage_metrics
from marin_rl.storage.commits import committed_manifest, count_in
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, evals_slot, rollouts_slot
from marin_rl.storage.tables.batches import dispositions_of
from marin_rl.storage.tables.intakes import intake_metrics
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import groups_of, iter_row_groups
from marin_rl.trust import Consent, check_named
from schemas.manifests import Manifest

UNREADABLE = "(unreadable)"
CODE = ("environment", "evaluation")  # sections that name what extracts answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Verdict on a metric of a round: `expected` by the files, and `found` in the metrics row.

    `problem` says what is wrong, `unchecked` why it was not compared; else they are empty.
    """

    round: int
    metric: str
    expected: float | None
    found: float | None
    problem: str = ""
    unchecked: str = ""

    @property
    def message(self) -> str:
        if self.metric == UNREADABLE:
            return f"round {self.round}: {self.problem}"
        values = f"expected {_shown(self.expected)}, found {_shown(self.found)}"
        return f"round {self.round}: {self.metric} {self.problem}: {values}"


def verify_run(run: Run, round: int | None = None, *, trust: bool = False) -> Iterator[Finding]:
    """Check every metric of every closed round, or of `round` alone.

    Files that are missing or damaged are findings. Raises ObjectMissing where no such round is
    closed; ConfigError where another user's run names code that extracts answers, unless `trust`.
    """
    rows = read_metrics(run, None if round is None else [round]).to_pylist()
    if not rows:
        raise ObjectMissing(f"{run.store.url_of('metrics')}: no round has been closed")
    episodes, counted = 0.0, 0
    for row in rows:
        number = row.pop("round")
        recorded = {k: v for k, v in row.items() if k != "run_id" and v is not None}
        try:
            player = run.at_round(number)  # a fork's first rounds are as its parent's settings say
            # Answers are extracted where there is an evaluation; a loss is always computed.
            sections = (*CODE, "objective") if _is_evaluated(recorded) else ("objective",)
            check_named(player, player.config, Consent(trust=trust), sections)
            expected = expected_metrics(player, number, recorded)
            # Of all sealed rounds up to this one; each round's manifest is read once.
            while counted <= number:
                slot = rollouts_slot(counted)
                manifest = committed_manifest(run.store, slot)
                episodes += count_in(manifest, "rows", run.store.url_of(slot))
                counted += 1
            expected["episode"] = episodes
            yield from _compare(player, number, recorded, expected)
        except (CorruptObject, NewerSchema, ObjectMissing) as error:
            yield Finding(
                round=number, metric=UNREADABLE, expected=None, found=None, problem=str(error)
            )


def not_checked(findings: Sequence[Finding]) -> list[str]:
    reasons: dict[str, set[str]] = {}
    for finding in findings:
        if finding.unchecked:
            reasons.setdefault(finding.unchecked, set()).add(finding.metric)
    return [
        f"not checked ({reason}): {', '.join(sorted(names))}" for reason, names in reasons.items()
    ]


def expected_metrics(run: Run, round: int, recorded: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a round, recomputed from its files, and the `scores/*` of `token_metrics`.

    Its row tells seconds, and if it has an evaluation: one that came later is in no row.
    """
    rollouts = committed_manifest(run.store, rollouts_slot(round))
    batches = committed_manifest(run.store, batches_slot(round))
    checkpoint = committed_manifest(run.store, checkpoint_slot(round + 1))
    manifests = [rollouts, batches, checkpoint]
    result = _of_rollouts(run, round, rollouts, batches, recorded)
    result |= token_metrics(run, round, batches, checkpoint)
    result |= rlhf_metrics(result)
    if run.config.windowed:
        result |= intake_metrics(run, round)
    if _is_evaluated(recorded):
        evaluation = committed_manifest(run.store, evals_slot(round))
        manifests.append(evaluation)
        result |= evaluation_of(run, evaluation)
    return result | storage_metrics(manifests)


def evaluation_of(run: Run, manifest: Manifest) -> dict[str, float]:
    # The rows have the shape of rollouts.
    groups = [group for table in iter_row_groups(run, manifest) for group in groups_of(table)]
    return evaluation_metrics(groups, run.config.evaluation, extractors_of(run.config))


def _of_rollouts(
    run: Run, round: int, rollouts: Manifest, batches: Manifest, recorded: Mapping[str, float]
) -> dict[str, float]:
    reused = reused_in(batches, run.store.url_of(batches.slot))
    sources = iter_sources(run, rollouts, reused, columns_read(run.config))
    if versions_of(run.config):
        sources = map(with_version_sums, sources)
    scalars = pa.concat_tables(sources).combine_chunks()
    dispositions = dispositions_of(run, batches)
    if dispositions["rollout_id"].to_pylist() != scalars["rollout_id"].to_pylist():
        raise CorruptObject(
            f"{run.store.url_of(batches.slot)}: the dispositions are not those of the round's "
            "rollouts; `marin-rl audit` names which"
        )
    kinds = dispositions["disposition"].to_numpy(zero_copy_only=False)
    reasons = dispositions["reason"].to_numpy(zero_copy_only=False)
    metrics = round_metrics(scalars, kinds, reasons, run.config, round)
    metrics |= _of_curriculum(run, round, rollouts)
    reuse = reuse_of(run, round, run.config)
    if reuse is not None and dict(reuse.groups) != dict(reused):
        raise CorruptObject(
            f"{run.store.url_of(batches.slot)}: expected to use the groups {reuse.record} again, "
            f"by the dispositions of earlier rounds; found {batches.extra.get(REUSED)}"
        )
    metrics |= reuse_metrics(round, run.config, reuse, dispositions)
    seconds = {name: value for name, value in recorded.items() if name.startswith("timing_s/")}
    metrics |= rates(seconds | metrics, metrics)
    return {name: value for name, value in metrics.items() if definition_of(name) is not None}


def _of_curriculum(run: Run, round: int, rollouts: Manifest) -> dict[str, float]:
    """Metrics of a round's curriculum, decided again out of the rounds that it rests on."""
    record = rollouts.extra.get(RECORD)
    if record is None:
        return {}
    decision = decide(run, round, int(record["policy_version"]))
    if record["kind"] == "weights":  # by hand, in earlier versions: nothing was decided
        decision = Curriculum(
            kind=record["kind"],
            policy_version=record["policy_version"],
            rounds=(),
            weights=record["weights"],
        )
    if decision is None or decision.record != record:
        raise CorruptObject(
            f"{run.store.url_of(rollouts.slot)}: expected the curriculum "
            f"{decision and decision.record}, by the dispositions of earlier rounds; found {record}"
        )
    return curriculum_metrics(run, rollouts, decision)


def _compare(
    run: Run, round: int, recorded: Mapping[str, float], expected: Mapping[str, float]
) -> Iterator[Finding]:
    known = {_generation(name) for name in recorded} | {""}
    for name in sorted({*recorded, *expected}):
        if _generation(name) not in known:
            continue
        finding = partial(Finding, round=round, metric=name)
        value, logged, definition = expected.get(name), recorded.get(name), definition_of(name)
        if name.startswith("scores/"):
            problem = "tokens of the scores contradict the batches" if value else ""
            yield finding(expected=0.0, found=value, problem=problem)
        elif definition and (unchecked := _unchecked(name, definition, run.config, recorded)):
            if logged is not None:
                yield finding(expected=None, found=logged, unchecked=unchecked)
        # No row has a number that is not finite, nor, of earlier versions, this one.
        elif value is None or logged is not None or abs(value) < LARGEST:
            problem = _problem(definition, value, logged)
            yield finding(expected=value, found=logged, problem=problem)


def _is_evaluated(recorded: Mapping[str, float]) -> bool:
    return any(name.startswith("eval/") for name in recorded)


def _generation(name: str) -> str:
    # Rows of earlier versions lack the metrics of a later generation.
    definition = definition_of(name)
    return "" if definition is None else definition.late


def _unchecked(
    name: str, definition: Definition, config: Config, recorded: Mapping[str, float]
) -> str:
    """The reason that a metric cannot be recomputed; empty where it can."""
    if definition.recomputable == "no":
        return "no file gives it again"
    if name == "lr" and recorded.get("updates/skipped"):
        return "an update of the round was refused"
    epochs, objective = config.training.epochs, config.objective
    in_loss = objective.kl_coefficient > 0 and not objective.kl_in_reward
    if definition.recomputable == "yes" or (name in KL_OF_REWARDS and not in_loss):
        return ""
    return "" if epochs == 1 else f"scores are kept of the first of {epochs} passes"


def _problem(definition: Definition | None, expected: float | None, logged: float | None) -> str:
    if definition is None:
        return "is not defined"
    if logged is None:
        return "is missing from the row"
    if expected is None:
        return "is in the row, but no file gives it"
    return "" if definition.allows(expected, logged) else "differs"


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"
