"""process(round): padded training batches and dispositions of committed rollouts.

Two passes over the shards. The first reads the scalar columns of the whole round (no tokens) and
decides what becomes of every rollout (plan.py). The second streams tokens row group by row group
and scatters them into the rows of one step at a time (packing.py). The result depends on the
committed shards and the configuration alone.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from marin_rl.batching import selection
from marin_rl.batching.dispositions import columns_needed, looks_at_turns, numbers
from marin_rl.batching.packing import Kept, PromptsDiffer, fill_packed
from marin_rl.batching.plan import (
    LENGTHS,
    RoundPlan,
    cut,
    dispositions_table,
    plan_round,
    with_leads,
)
from marin_rl.batching.reuse import RECORD, Groups, iter_sources, reuse_metrics, reuse_of, reused_by
from marin_rl.batching.round_metrics import (
    SCALAR_COLUMNS,
    VERSION_COUNTS,
    round_metrics,
    versions_of,
    with_version_sums,
)
from marin_rl.batching.turns import READ, offsets_of, with_returns, with_turns
from marin_rl.config import Config, fingerprint_fields
from marin_rl.errors import CorruptObject, InputError
from marin_rl.finite import BOUNDS, fit_rewards
from marin_rl.storage.commits import commit_slot, find_commit, fingerprint, new_attempt, parent_of
from marin_rl.storage.runs import Run, batches_slot
from marin_rl.storage.tables.batches import (
    DISTILLED,
    MICROBATCH_ROWS,
    BatchWriter,
    StepRows,
    write_dispositions,
)
from marin_rl.storage.tables.rollouts import manifest_to_be, rollouts_manifest
from marin_rl.types import SlotRef, TrainingBatch
from schemas.manifests import Manifest
from schemas.tables import BATCHES_VERSION, TEACHER

_log = logging.getLogger(__name__)

PROGRAM_VERSION = 4  # counts up when the same rollouts would give other batches

# The fields of the objective that batches depend on; the others are the training step's.
SHAPING = (
    "advantage", "advantage_scale", "pass_k", "success_threshold",
    "overlong", "overlong_buffer", "overlong_penalty",
)  # fmt: skip
TOKENS = ("rollout_id", "token_ids", "loss_mask", "logprobs", LENGTHS)


def build_round(run: Run, round: int, rollouts: SlotRef) -> SlotRef:
    """Commit the training batches and dispositions of a sealed round; free if they are there.

    The summary of the result holds the round's rollout metrics besides rows, steps, length and
    tokens. Raises ConfigError when a kept sequence is longer than the largest bucket,
    CommitConflict when the slot holds something else, CorruptObject, NewerSchema, ObjectMissing.
    """
    reuse = reuse_of(run, round, run.config)
    reused = reuse.groups if reuse is not None else {}
    parents = (parent_of(rollouts), *(reuse.parents if reuse is not None else ()))
    decided = fingerprint("batches", _decisive(run.config), parents, BATCHES_VERSION)
    # Before any work: a retry, and a run that is continued, find what is there.
    existing = find_commit(run.store, batches_slot(round), decided)
    if existing is not None:
        return existing
    manifest = rollouts_manifest(run, round, rollouts)
    scalars = _scalar_columns(run, manifest, run.config, reused)
    _warn_of_rewards(scalars, round)
    # Parts lie under the attempt's own name: a crash before the commit leaves no visible batch.
    attempt, slot = new_attempt(), batches_slot(round)
    distilled = run.config.rollout_teacher is not None

    def written(plan: RoundPlan) -> BatchWriter:
        writer = BatchWriter(run.store, slot, attempt, plan.length, distilled=distilled)
        for rows in _step_rows(plan, scalars, run, manifest, reused):
            writer.write(rows)
        return writer

    plan = plan_round(scalars, run.config, round)
    try:
        writer = written(plan)
    except PromptsDiffer:
        if run.config.batching.layout != "auto":
            raise
        attempt, plan = new_attempt(), plan_round(scalars, run.config, round, alike=False)
        writer = written(plan)
    parts = writer.close()
    table = dispositions_table(plan, scalars)
    return commit_slot(
        run.store,
        slot,
        attempt=attempt,
        fingerprint=decided,
        parents=parents,
        parts=(*parts, write_dispositions(run.store, slot, attempt, table)),
        totals={
            **_totals(plan, scalars, run.config, round, writer.steps),
            **reuse_metrics(round, run.config, reuse, table),
        },
        extra={
            "reasons": plan.reasons_counted(),
            **({} if reuse is None else {RECORD: reuse.record}),
            **({DISTILLED: True} if distilled else {}),
        },
    )


def _warn_of_rewards(scalars: pa.Table, round: int) -> None:
    """Name rollouts with rewards that cannot be trained on, which earlier versions let in."""
    reward_N = numbers(scalars, "reward", np.float64)
    unfit_N = ~np.isnan(reward_N) & ~fit_rewards(reward_N)
    if unfit_N.any():
        names = scalars["rollout_id"].filter(pa.array(unfit_N)).to_pylist()
        _log.warning(
            "round %d: %d rollouts have rewards that cannot be trained on and are left out as "
            "failed (no_reward): expected numbers %s; found %s",
            round,
            len(names),
            BOUNDS,
            ", ".join(f"{x:g} of {n}" for x, n in zip(reward_N[unfit_N][:5], names, strict=False)),
        )


def further_shards(run: Run, round: int, shards: Sequence[SlotRef]) -> list[int]:
    """Numbers of the shards that a round samples in addition to these, which are committed.

    Empty once it has its groups, or is sampled as often as it may be. Raises as `build_round` does.
    """
    if not run.config.samples_on:
        return []
    scalars = _scalar_columns(run, manifest_to_be(run, round, shards), run.config)
    selected = plan_round(scalars, run.config, round).decision.selected
    assert selected is not None, "a run that samples on selects groups"
    return list(selection.shards_missing(selected, len(shards), run.config))


@dataclass(frozen=True, slots=True)
class Preview:
    """Result of processing a round without a commit: the plan, and the batches, made on request."""

    plan: RoundPlan
    rollout_ids: tuple[str, ...]
    batches: Callable[[], Iterator[TrainingBatch]]


def preview_round(
    run: Run, round: int, config: Config, rewards: Mapping[str, float | None] | None = None
) -> Preview:
    """Process a sealed round under another configuration, and other rewards by rollout id.

    Nothing is written. Raises as `build_round` does, and InputError where `rewards` lacks rollouts.
    """
    manifest, reused = rollouts_manifest(run, round), reused_by(run, round)
    scalars = _scalar_columns(run, manifest, config, reused)
    names = tuple(scalars["rollout_id"].to_pylist())
    if rewards is not None:
        scalars = _with_rewards(scalars, round, rewards)
    plan = plan_round(scalars, config, round)

    def batches() -> Iterator[TrainingBatch]:
        for rows in _step_rows(plan, scalars, run, manifest, reused):
            rollout_ids = tuple(tuple(row) for row in rows.rollout_ids.to_pylist())
            yield TrainingBatch(
                **rows.arrays, rollout_ids=rollout_ids, microbatch_rows=plan.microbatch_rows
            )

    return Preview(plan, names, batches)


def _with_rewards(scalars: pa.Table, round: int, rewards: Mapping[str, float | None]) -> pa.Table:
    """Replace the rewards of the round's own rollouts; reused rollouts keep theirs."""
    rows = scalars.select(["rollout_id", "round", "reward"]).to_pylist()
    missing = [
        r["rollout_id"] for r in rows if r["round"] == round and r["rollout_id"] not in rewards
    ]
    if missing:
        raise InputError(
            f"the reward table has no row for {missing[0]} and {len(missing) - 1} more"
        )
    column = scalars.schema.get_field_index("reward")
    values = pa.array(
        [rewards[r["rollout_id"]] if r["round"] == round else r["reward"] for r in rows],
        pa.float64(),
    )
    return scalars.set_column(column, scalars.schema.field(column), values)


def _step_rows(
    plan: RoundPlan, scalars: pa.Table, run: Run, manifest: Manifest, reused: Groups
) -> Iterator[StepRows]:
    distilled = run.config.rollout_teacher is not None
    columns = (*TOKENS, *((TEACHER,) if distilled else ()), *(("turns",) if plan.by_token else ()))
    row_groups = iter_sources(run, manifest, reused, columns)
    if distilled:
        row_groups = map(_with_teacher, row_groups)
    if plan.by_token or plan.decision.turns is not None:
        row_groups = _with_token_values(plan, row_groups)
    parts = plan.segments
    if len(parts.rollout_S) > len(plan.place_N):
        row_groups = map(cut, row_groups)
        # From here on a row of `scalars` is a segment, as a row of a table that was cut.
        scalars = scalars.select(["rollout_id", "environment"]).take(pa.array(parts.rollout_S))
    index_K = np.flatnonzero(plan.kept_N[parts.rollout_S])
    rollout_K, lead_K = parts.rollout_S[index_K], parts.lead_S[index_K]
    kept = Kept(
        index_K=index_K,
        prompt_K=lead_K,
        sampled_K=parts.tokens_S[index_K] - lead_K,
        advantage_K=plan.decision.advantage_N[rollout_K],
        reward_K=plan.decision.reward_N[rollout_K],
        distilled=distilled,
    )
    return fill_packed(plan.packing, kept, plan.length, scalars, row_groups)


def _with_teacher(table: pa.Table) -> pa.Table:
    """A table whose rollouts without a teacher's log-probabilities have NaN for each token."""
    tokens, scores = (table[name].combine_chunks() for name in ("token_ids", TEACHER))
    offsets = offsets_of(tokens)
    values = np.full(int(offsets[-1]), np.nan, np.float32)
    scored = np.repeat(scores.is_valid().to_numpy(zero_copy_only=False), np.diff(offsets))
    given = scores.flatten().to_numpy(zero_copy_only=False)
    if len(given) != scored.sum():
        raise CorruptObject(
            f"rollouts from {table['rollout_id'][0].as_py()} on: expected {scored.sum()} "
            f"{TEACHER}, one for each token, found {len(given)}"
        )
    values[scored] = given
    filled = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
    return table.set_column(table.column_names.index(TEACHER), TEACHER, filled)


def _with_token_values(plan: RoundPlan, row_groups: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Row groups with the rewards to come at each token, or the advantage of each token's turn."""
    start, decision = 0, plan.decision
    for table in row_groups:
        reward_n = decision.reward_N[start : start + table.num_rows]
        if len(reward_n) < table.num_rows:
            yield table  # more rollouts than were decided on: refused where they would be written
        elif plan.by_token or decision.turns is None:
            yield with_returns(table, reward_n)
        else:
            yield decision.turns.spread_over(table, start)
        start += table.num_rows


def _decisive(config: Config) -> dict[str, object]:
    """The part of the configuration that decides what the batches contain."""
    discount, settings = config.objective.turn_discount, config.ahead
    rows = [config.training.microbatch_sequences, config.rollouts.group_size]
    chosen: dict[str, object] = {}
    if settings.selects_groups:
        # Under the names that keys once had: fingerprints of earlier runs stay what they were.
        chosen["selection"] = {
            "dynamic_sampling": "filter" if settings.dynamic_sampling else None,
            "select": settings.select,
            "group_filter": settings.group_filter and settings.group_filter.score,
            "group_filter_min": settings.group_filter and settings.group_filter.min,
            "groups": config.rollouts.groups_per_round,
        }
    if (teacher := config.distillation) is not None:
        # They decide which groups have a signal without any of their rewards.
        teaches = teacher.coefficient > 0
        chosen["distilled"] = {"environments": teacher.environments, "teaches": teaches}
    if (replay := settings.replay) is not None:
        groups = replay.groups or config.rollouts.groups_per_round
        chosen[RECORD] = {**fingerprint_fields(replay), "groups": groups}
    return {
        "program": PROGRAM_VERSION,
        "filters": fingerprint_fields(config.filters),
        "batching": fingerprint_fields(config.batching),
        "objective": {name: getattr(config.objective, name) for name in SHAPING},
        # Keys only where they apply: fingerprints of earlier runs stay what they were.
        **({"regularised": True} if config.objective.regularised else {}),
        **({"turns": True} if config.objective.estimator.by_token else {}),
        **({"trained_tokens": True} if looks_at_turns(config.objective) else {}),
        **({} if discount is None else {"turn_discount": discount}),
        # The length of rows follows from them.
        **({"rows": rows} if config.batching.layout == "auto" else {}),
        # The penalty for length is measured against it.
        "max_tokens": config.sampling.max_tokens,
        # Groups below it are dropped.
        "group_size_min": config.rollouts.group_size_min,
        **chosen,
    }


def _scalar_columns(
    run: Run, manifest: Manifest, config: Config, reused: Groups | None = None
) -> pa.Table:
    columns = (
        *SCALAR_COLUMNS, LENGTHS, *columns_needed(config.objective),
        *selection.columns_needed(config),
    )  # fmt: skip
    by_turn, share = looks_at_turns(config.objective), config.batching.shares_prompts
    read = dict.fromkeys([*(READ if by_turn else ()), *(("loss_mask",) if share else ())])
    scored_by = config.ahead.group_filter
    more = () if scored_by is None else selection.columns_of(scored_by.score)
    versions = versions_of(config)
    names = tuple(dict.fromkeys((*columns, *read, *more, *versions)))
    row_groups = iter_sources(run, manifest, reused or {}, names)
    if versions:
        row_groups = map(with_version_sums, row_groups)
    if scored_by is not None:
        keep = (*columns, *read, *(VERSION_COUNTS if versions else ()))
        row_groups = (selection.with_scores(table, config.ahead, keep) for table in row_groups)
    if share:
        # Before `with_turns`, which drops the mask that leads are read from.
        row_groups = map(with_leads, row_groups)
    if by_turn:
        row_groups = map(with_turns, row_groups)
    elif share or versions:
        row_groups = (table.drop_columns("loss_mask") for table in row_groups)
    table = pa.concat_tables(row_groups).combine_chunks()
    ids = table["rollout_id"]
    # A shard that was sealed twice under two names would train on its rollouts twice.
    if pc.count_distinct(ids).as_py() != len(ids):
        counts = ids.value_counts()
        twice = [item["values"].as_py() for item in counts if item["counts"].as_py() > 1]
        raise CorruptObject(
            f"{run.store.url_of(manifest.slot)}: rollouts occur more than once: {twice[:5]}"
        )
    return table


def _totals(
    plan: RoundPlan, scalars: pa.Table, config: Config, round: int, steps: int
) -> dict[str, float]:
    kept, decision = plan.kept_N, plan.decision
    totals: dict[str, float] = {
        "rows": float(plan.packing.rows),
        "steps": float(steps),
        "length": float(plan.length),
        "tokens": float(plan.tokens_N[kept].sum()),
        **({} if plan.microbatch_rows is None else {MICROBATCH_ROWS: float(plan.microbatch_rows)}),
        **round_metrics(scalars, decision.disposition_N, decision.reason_N, config, round),
    }
    if kept.any():
        totals |= {
            "reward_min": float(decision.reward_N[kept].min()),
            "reward_max": float(decision.reward_N[kept].max()),
            "policy_version_min": float(numbers(scalars, "policy_version_min")[kept].min()),
            "policy_version_max": float(numbers(scalars, "policy_version_max")[kept].max()),
        }
    return totals
