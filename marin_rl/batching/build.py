"""process(round): committed rollouts to padded training batches, with a word on every rollout.

Two passes over the shards. The first reads the light columns of the whole round (no tokens) and
decides what becomes of every rollout (plan.py). The second streams tokens row group by row group
and scatters them into the rows of one step at a time (filling.py, packing.py). The result depends
on the committed shards and the configuration alone.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from marin_rl.batching.packing import Kept, fill_packed
from marin_rl.batching.padding import fill_steps
from marin_rl.batching.plan import (
    RoundPlan,
    columns_needed,
    dispositions_table,
    looks_at_turns,
    numbers,
    plan_round,
)
from marin_rl.batching.scalar_columns import SCALAR_COLUMNS, scalar_metrics
from marin_rl.batching.turns import READ, TurnAdvantages, with_returns, with_turns
from marin_rl.config import Config, ObjectiveConfig, fingerprint_fields
from marin_rl.errors import CorruptObject, InputError
from marin_rl.storage.commits import find_commit, fingerprint, new_attempt, parent_of
from marin_rl.storage.runs import Run, batches_slot
from marin_rl.storage.tables.batches import (
    BatchWriter,
    StepRows,
    commit_batches,
    write_dispositions,
)
from marin_rl.storage.tables.rollouts import iter_row_groups, rollouts_manifest
from marin_rl.types import SlotRef, TrainingBatch
from schemas.batches import SCHEMA_VERSION
from schemas.manifests import Manifest

PROGRAM_VERSION = 4  # counts up when the same rollouts would give other batches

# The fields of the objective that batches depend on; the others are the training step's.
SHAPING = (
    "advantage", "advantage_scale", "pass_k", "success_threshold",
    "overlong", "overlong_buffer", "overlong_penalty",
)  # fmt: skip
TOKENS = ("rollout_id", "token_ids", "loss_mask", "logprobs")


def build_round(run: Run, round: int, rollouts: SlotRef) -> SlotRef:
    """Commit the training batches and dispositions of a sealed round; free if they are there.

    The summary of the result holds the round's rollout metrics besides rows, steps, length and
    tokens. Raises ConfigError when a kept sequence is longer than the largest bucket,
    CommitConflict when the slot holds something else, CorruptObject, NewerSchema, ObjectMissing.
    """
    parents = (parent_of(rollouts),)
    decided = fingerprint("batches", _decisive(run.config), parents, SCHEMA_VERSION)
    found = find_commit(run.store, batches_slot(round), decided)
    if found is not None:
        return found
    manifest = rollouts_manifest(run, round, rollouts)
    light = _light(run, manifest, run.config.objective)
    plan = plan_round(light, run.config, round)
    attempt, slot = new_attempt(), batches_slot(round)
    writer = BatchWriter(run.store, slot, attempt, plan.length)
    for rows in _filled(plan, light, run, manifest):
        writer.write(rows)
    parts = writer.close()
    table = dispositions_table(plan, light)
    return commit_batches(
        run,
        round,
        attempt=attempt,
        fingerprint=decided,
        parents=parents,
        parts=(*parts, write_dispositions(run.store, slot, attempt, table)),
        totals=_totals(plan, light, round, writer.steps),
        extra={"reasons": plan.reasons_counted()},
    )


@dataclass(frozen=True, slots=True)
class Preview:
    """Result of processing a round without a commit: the plan, and the batches, made on request."""

    plan: "RoundPlan"
    rollout_ids: tuple[str, ...]
    batches: Callable[[], Iterator[TrainingBatch]]


def preview_round(
    run: Run, round: int, config: Config, rewards: Mapping[str, float | None] | None = None
) -> Preview:
    """Process a sealed round under another configuration, and other rewards by rollout id.

    Nothing is written. Raises as `build_round` does, and InputError where `rewards` lacks rollouts.
    """
    manifest = rollouts_manifest(run, round)
    light = _light(run, manifest, config.objective)
    names = tuple(light["rollout_id"].to_pylist())
    if rewards is not None:
        light = _with_rewards(light, names, rewards)
    plan = plan_round(light, config, round)

    def batches() -> Iterator[TrainingBatch]:
        for rows in _filled(plan, light, run, manifest):
            rollout_ids = tuple(tuple(row) for row in rows.rollout_ids.to_pylist())
            yield TrainingBatch(**rows.arrays, rollout_ids=rollout_ids)

    return Preview(plan, names, batches)


def _with_rewards(
    light: pa.Table, names: Sequence[str], rewards: Mapping[str, float | None]
) -> pa.Table:
    missing = [name for name in names if name not in rewards]
    if missing:
        raise InputError(
            f"the reward table has no row for {missing[0]} and {len(missing) - 1} more"
        )
    column = light.schema.get_field_index("reward")
    values = pa.array([rewards[name] for name in names], pa.float64())
    return light.set_column(column, light.schema.field(column), values)


def _filled(plan: RoundPlan, light: pa.Table, run: Run, manifest: Manifest) -> Iterator[StepRows]:
    """The rows of each step in turn, tokens read as they are needed."""
    row_groups = iter_row_groups(run, manifest, TOKENS)
    if plan.by_token:
        row_groups = _with_returns(plan, iter_row_groups(run, manifest, (*TOKENS, "turns")))
    elif plan.turns is not None:
        row_groups = _with_advantages(plan.turns, row_groups)
    if plan.packing is None:
        return fill_steps(plan, light, row_groups)
    index_K = np.flatnonzero(plan.kept_N)
    kept = Kept(
        index_K=index_K,
        prompt_K=numbers(light, "n_prompt_tokens")[index_K],
        sampled_K=numbers(light, "n_completion_tokens")[index_K],
        advantage_K=plan.advantage_N[index_K],
        reward_K=plan.reward_N[index_K],
    )
    return fill_packed(plan.packing, kept, plan.length, light, row_groups)


def _with_returns(plan: RoundPlan, row_groups: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Row groups with what each token still has to come, by the rewards of turns."""
    start = 0
    for table in row_groups:
        reward_n = plan.reward_N[start : start + table.num_rows]
        # more rollouts than were decided on are refused where they would be written
        yield table if len(reward_n) < table.num_rows else with_returns(table, reward_n)
        start += table.num_rows


def _with_advantages(turns: TurnAdvantages, row_groups: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Row groups with the advantage of each token's turn."""
    start, end = 0, len(turns.turns.early_n)
    for table in row_groups:
        beyond = start + table.num_rows > end  # refused where they would be written, as above
        yield table if beyond else turns.spread_over(table, start)
        start += table.num_rows


def _decisive(config: Config) -> dict[str, object]:
    """The part of the configuration that decides what the batches contain."""
    discount = config.objective.turn_discount
    return {
        "program": PROGRAM_VERSION,
        "filters": fingerprint_fields(config.filters),
        "batching": fingerprint_fields(config.batching),
        "objective": {name: getattr(config.objective, name) for name in SHAPING},
        **({"regularised": True} if config.objective.regularised else {}),
        **({"turns": True} if config.objective.estimator.by_token else {}),
        **({"trained_tokens": True} if looks_at_turns(config.objective) else {}),
        **({} if discount is None else {"turn_discount": discount}),
        "max_tokens": config.sampling.max_tokens,
        "group_size_min": config.rollouts.group_size_min,
    }


def _light(run: Run, manifest: Manifest, objective: ObjectiveConfig) -> pa.Table:
    columns = (*SCALAR_COLUMNS, *columns_needed(objective))
    if looks_at_turns(objective):
        row_groups = map(with_turns, iter_row_groups(run, manifest, (*columns, *READ)))
    else:
        row_groups = iter_row_groups(run, manifest, columns)
    table = pa.concat_tables(row_groups).combine_chunks()
    ids = table["rollout_id"]
    if pc.count_distinct(ids).as_py() != len(ids):
        counts = ids.value_counts()
        twice = [item["values"].as_py() for item in counts if item["counts"].as_py() > 1]
        raise CorruptObject(
            f"{run.store.url_of(manifest.slot)}: rollouts occur more than once: {twice[:5]}"
        )
    return table


def _totals(plan: RoundPlan, light: pa.Table, round: int, steps: int) -> dict[str, float]:
    """Totals for the manifest: sizes, and the metrics of the round's rollouts."""
    kept = plan.kept_N
    totals: dict[str, float] = {
        "rows": float(plan.rows),
        "steps": float(steps),
        "length": float(plan.length),
        "tokens": float(plan.tokens_N[kept].sum()),
        **scalar_metrics(light, plan.disposition_N, round),
    }
    if kept.any():
        totals |= {
            "reward_min": float(plan.reward_N[kept].min()),
            "reward_max": float(plan.reward_N[kept].max()),
            "policy_version_min": float(numbers(light, "policy_version_min")[kept].min()),
            "policy_version_max": float(numbers(light, "policy_version_max")[kept].max()),
        }
    return totals
