"""process(round): committed rollouts to padded training batches, with a word on every rollout.

Two passes over the shards. The first reads the light columns of the whole round (no tokens) and
decides: what is dropped and why, the advantages, the padded length, every rollout's step and row.
The second streams tokens row group by row group and scatters them into the rows of one step at a
time. The result depends on the committed shards and the configuration alone.

A rollout is a candidate in the round it was generated in and in no other: it leaves that round
consumed or dropped for a reason, so it can be trained on at most once. What staleness bounds is the
age of the policy that sampled it, which is above 0 when generation runs ahead of training.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float64, Int64

from marin_rl.batching.advantages import group_statistics, round_advantages
from marin_rl.config import BatchingConfig, Config, content
from marin_rl.errors import ConfigError, CorruptObject
from marin_rl.metrics import rollout_metrics
from marin_rl.rollouts import filters
from marin_rl.storage.batches import (
    BatchWriter,
    StepRows,
    commit_batches,
    write_dispositions,
)
from marin_rl.storage.commits import committed_as, fingerprint, new_attempt, parent_of
from marin_rl.storage.rollouts import iter_row_groups, rollouts_manifest
from marin_rl.storage.runs import Run, batches_slot
from marin_rl.types import SlotRef
from schemas.batches import ARRAYS, DISPOSITION_KINDS, DISPOSITIONS, INTEGER_ARRAYS, SCHEMA_VERSION
from schemas.manifests import Manifest

SHORTEST_BUCKET = 32
PROGRAM_VERSION = 1  # counts up when the same rollouts would give other batches

LIGHT = (
    "rollout_id", "group_id", "environment", "round", "policy_version_min", "policy_version_max",
    "reward", "reward_components", "status", "n_prompt_tokens", "n_completion_tokens",
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
    found = committed_as(run.store, batches_slot(round), decided)
    if found is not None:
        return found
    manifest = rollouts_manifest(run, round, rollouts)
    light = _light(run, manifest)
    plan = plan_round(light, run.config, round)
    attempt, slot = new_attempt(), batches_slot(round)
    writer = BatchWriter(run.store, slot, attempt, plan.length)
    for rows in fill_steps(plan, light, iter_row_groups(run, manifest, TOKENS)):
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


def bucket(longest: int, config: BatchingConfig) -> int:
    """The padded length: the smallest bucket of at least `longest` tokens.

    Raises ConfigError where the configured buckets end below it.
    """
    if not config.length_buckets:
        return max(SHORTEST_BUCKET, 1 << max(longest - 1, 0).bit_length())
    for length in config.length_buckets:
        if length >= longest:
            return length
    raise ConfigError(
        f"batching.length_buckets end at {config.length_buckets[-1]}, but a sequence of "
        f"{longest} tokens is to be trained on: add a bucket of at least that, or lower "
        "sampling.max_tokens"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What becomes of each of the N rollouts of a round, in shard order.

    `reason_N` is "" for the kept, whose disposition is "consumed"; `place_N` is their row in the
    round (step * rows_per_step + row), -1 for others; `length` the padded length in tokens.
    """

    disposition_N: np.ndarray
    reason_N: np.ndarray
    reward_N: Float64[np.ndarray, " N"]
    advantage_N: Float64[np.ndarray, " N"]
    tokens_N: Int64[np.ndarray, " N"]
    place_N: Int64[np.ndarray, " N"]
    length: int
    rows_per_step: int

    @property
    def kept_N(self) -> Bool[np.ndarray, " N"]:
        """The rollouts that are trained on."""
        return self.place_N >= 0

    def reasons_counted(self) -> dict[str, int]:
        """How many rollouts were dropped, by `disposition/reason`, sorted."""
        dropped = ~self.kept_N
        names, counts = np.unique(
            [
                f"{kind}/{reason}"
                for kind, reason in zip(
                    self.disposition_N[dropped], self.reason_N[dropped], strict=True
                )
            ],
            return_counts=True,
        )
        return dict(zip(names.tolist(), counts.tolist(), strict=True))


def plan_round(light: pa.Table, config: Config, round: int) -> RoundPlan:
    """Decide, from the light columns of all rollouts of a round. Raises as `bucket` does."""
    reward_N = _numbers(light, "reward", np.float64)
    tokens_N = _numbers(light, "n_prompt_tokens") + _numbers(light, "n_completion_tokens")
    group_N, groups = _groups(light)
    disposition_N, reason_N = _before_groups(light, reward_N, config, round)
    eligible_N = np.where(disposition_N == "", reward_N, np.nan)
    statistics = group_statistics(eligible_N, group_N, groups)
    short_P = filters.short(statistics.count, config.rollouts.group_size_min)
    _drop(disposition_N, reason_N, short_P[group_N], "filtered", "short_group")
    if config.filters.zero_signal:
        flat_P = filters.zero_signal(statistics.spread)
        _drop(disposition_N, reason_N, flat_P[group_N], "filtered", "zero_signal")
    kept_N = disposition_N == ""
    disposition_N[kept_N] = "consumed"
    advantage_N = round_advantages(eligible_N, group_N, groups, config.objective.advantage)
    kept = int(kept_N.sum())
    return RoundPlan(
        disposition_N=disposition_N,
        reason_N=reason_N,
        reward_N=reward_N,
        advantage_N=np.where(kept_N, advantage_N, 0.0),
        tokens_N=tokens_N,
        place_N=np.where(kept_N, np.cumsum(kept_N) - 1, -1),
        length=bucket(int(tokens_N[kept_N].max(initial=1)), config.batching),
        rows_per_step=config.batching.sequences_per_step or max(kept, 1),
    )


def fill_steps(
    plan: RoundPlan, light: pa.Table, row_groups: Iterator[pa.Table]
) -> Iterator[StepRows]:
    """The rows of each step in turn, out of row groups with the columns `TOKENS`.

    Raises CorruptObject when the row groups are not those the plan was made from.
    """
    names = light["rollout_id"].combine_chunks(), light["environment"].combine_chunks()
    kept = np.flatnonzero(plan.kept_N)
    step = _Step(plan, min(plan.rows_per_step, len(kept)))
    start = 0
    for table in row_groups:
        chunk = _Chunk(plan, start, table)
        start += table.num_rows
        taken = 0
        while taken < chunk.rows:
            taken += step.take(chunk, taken)
            if step.full:
                yield step.rows(kept, names)
                step = _Step(plan, min(plan.rows_per_step, len(kept) - step.end), step.end)
    if start != len(plan.place_N):
        raise CorruptObject(f"expected {len(plan.place_N)} rollouts, found {start} in the shards")


def dispositions_table(plan: RoundPlan, light: pa.Table) -> pa.Table:
    """One row per rollout of the round, in shard order."""
    dropped = ~plan.kept_N
    columns = {
        "rollout_id": light["rollout_id"],
        "group_id": light["group_id"],
        "round_generated": light["round"],
        "environment": light["environment"],
        "policy_version_min": light["policy_version_min"],
        "policy_version_max": light["policy_version_max"],
        "n_tokens": pa.array(plan.tokens_N.astype(np.int32)),
        "disposition": pa.array(plan.disposition_N, pa.string()),
        "reason": pa.array(plan.reason_N, pa.string(), mask=~dropped),
        "step": _places(plan.place_N // plan.rows_per_step, dropped),
        "row": _places(plan.place_N % plan.rows_per_step, dropped),
        "segment": _places(np.ones_like(plan.place_N), dropped),
        "advantage": pa.array(plan.advantage_N, mask=dropped),
        "reward": light["reward"],
    }
    return pa.table([columns[name] for name in DISPOSITIONS.names], schema=DISPOSITIONS)


class _Chunk:
    """The kept sequences of one row group, padded: arrays (rows, T)."""

    def __init__(self, plan: RoundPlan, start: int, table: pa.Table) -> None:
        here = slice(start, start + table.num_rows)
        kept_N, tokens_N = plan.kept_N[here], plan.tokens_N[here]
        if len(kept_N) != table.num_rows:
            raise CorruptObject(f"expected {len(plan.place_N)} rollouts, found more in the shards")
        self.rows = int(kept_N.sum())
        lengths = tokens_N[kept_N].astype(np.int32)
        positions = np.arange(plan.length, dtype=np.int32)
        valid = positions < lengths[:, None]
        keep = None if kept_N.all() else np.flatnonzero(kept_N)
        mask = _padded(table, "loss_mask", keep, valid, np.int32)
        on = mask.astype(np.float32)
        self.arrays = {
            "token_ids": _padded(table, "token_ids", keep, valid, np.int32),
            "loss_mask": mask,
            "segment_ids": valid.astype(np.int32),
            "positions": positions * valid,
            "policy_logprobs": _padded(table, "logprobs", keep, valid, np.float32) * on,
            "advantages": on * plan.advantage_N[here][kept_N, None].astype(np.float32),
            "returns": on * plan.reward_N[here][kept_N, None].astype(np.float32),
        }


class _Step:
    """The rows of one optimizer step while they are being filled."""

    def __init__(self, plan: RoundPlan, rows: int, start: int = 0) -> None:
        self.start, self.end, self._filled = start, start + rows, 0
        shape = rows, plan.length
        self._arrays = {
            name: np.empty(shape, np.int32 if name in INTEGER_ARRAYS else np.float32)
            for name in ARRAYS
        }

    @property
    def full(self) -> bool:
        return self._filled == self.end - self.start

    def take(self, chunk: _Chunk, taken: int) -> int:
        """Copy what fits of `chunk` after its first `taken` rows; how many rows that was."""
        count = min(chunk.rows - taken, self.end - self.start - self._filled)
        for name, array in self._arrays.items():
            source = chunk.arrays[name][taken : taken + count]
            array[self._filled : self._filled + count] = source
        self._filled += count
        return count

    def rows(self, kept: np.ndarray, names: tuple[pa.Array, pa.Array]) -> StepRows:
        """What is written; `kept` are the indices of the kept rollouts of the round."""
        rollout_ids, environments = (_singletons(n, kept[self.start : self.end]) for n in names)
        return StepRows(arrays=self._arrays, rollout_ids=rollout_ids, environments=environments)


def _decisive(config: Config) -> dict[str, object]:
    """The part of the configuration that decides what the batches contain."""
    return {
        "program": PROGRAM_VERSION,
        "filters": content(config.filters),
        "batching": content(config.batching),
        "advantage": config.objective.advantage,
        "group_size_min": config.rollouts.group_size_min,
    }


def _light(run: Run, manifest: Manifest) -> pa.Table:
    table = pa.concat_tables(iter_row_groups(run, manifest, LIGHT)).combine_chunks()
    ids = table["rollout_id"]
    if pc.count_distinct(ids).as_py() != len(ids):
        counts = ids.value_counts()
        twice = [item["values"].as_py() for item in counts if item["counts"].as_py() > 1]
        raise CorruptObject(
            f"{run.store.url_of(manifest.slot)}: rollouts occur more than once: {twice[:5]}"
        )
    return table


def _before_groups(
    light: pa.Table, reward_N: np.ndarray, config: Config, round: int
) -> tuple[np.ndarray, np.ndarray]:
    """(disposition, reason) of what is dropped for its own sake; "" where nothing speaks so far."""
    status_N = light["status"].to_numpy(zero_copy_only=False)
    sampled_N = _numbers(light, "n_completion_tokens")
    disposition_N = np.full(len(reward_N), "", dtype=object)
    reason_N = disposition_N.copy()
    failed_N = filters.failed(status_N, reward_N, sampled_N)
    broken_N = (status_N == "error") | (status_N == "aborted")
    reason_N[failed_N] = np.where(sampled_N == 0, "no_tokens", "no_reward")[failed_N]
    reason_N[broken_N] = status_N[broken_N]
    disposition_N[failed_N] = "failed"
    versions_N = _numbers(light, "policy_version_min")
    old_N = filters.stale(versions_N, round, config.batching.staleness_rounds_max)
    _drop(disposition_N, reason_N, old_N, "stale", "policy_age")
    if config.filters.truncated:
        _drop(disposition_N, reason_N, filters.truncated(status_N), "filtered", "truncated")
    return disposition_N, reason_N


def _drop(
    disposition_N: np.ndarray, reason_N: np.ndarray, mask_N: np.ndarray, kind: str, reason: str
) -> None:
    """Mark, in place, what the mask holds for and nothing has dropped before."""
    newly_N = mask_N & (disposition_N == "")
    disposition_N[newly_N] = kind
    reason_N[newly_N] = reason


def _groups(light: pa.Table) -> tuple[Int64[np.ndarray, " N"], int]:
    """Group numbers in order of appearance, and how many groups there are."""
    encoded = light["group_id"].combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)


def _numbers(table: pa.Table, name: str, dtype: type = np.int64) -> np.ndarray:
    """A column as numbers; null becomes NaN."""
    return table[name].to_numpy(zero_copy_only=False).astype(dtype)


def _padded(
    table: pa.Table, name: str, keep: np.ndarray | None, valid: np.ndarray, dtype: type
) -> np.ndarray:
    """The lists of the kept rows as one zero-padded array; `valid` marks their tokens."""
    column = table[name].combine_chunks()
    column = column if keep is None else column.take(pa.array(keep))
    values = column.flatten().to_numpy(zero_copy_only=True)
    if len(values) != np.count_nonzero(valid):
        raise CorruptObject(
            f"rollouts {table['rollout_id'][0].as_py()} and following: {len(values)} {name}, but "
            f"{np.count_nonzero(valid)} tokens are counted in n_prompt_tokens and "
            "n_completion_tokens"
        )
    padded = np.zeros(valid.shape, dtype)
    padded[valid] = values
    return padded


def _singletons(names: pa.Array, indices: np.ndarray) -> pa.ListArray:
    """One list of one name per index: a padded row holds one sequence."""
    offsets = pa.array(np.arange(len(indices) + 1, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, names.take(pa.array(indices)))


def _places(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    return pa.array(values.astype(np.int32), mask=missing)


def _totals(plan: RoundPlan, light: pa.Table, round: int, steps: int) -> dict[str, float]:
    """What the manifest sums up: sizes, and the metrics of the round's rollouts."""
    kept = plan.kept_N
    totals: dict[str, float] = {
        "rows": float(kept.sum()),
        "steps": float(steps),
        "length": float(plan.length),
        "tokens": float(plan.tokens_N[kept].sum()),
        **_metrics(plan, light),
    }
    for kind in DISPOSITION_KINDS:
        totals[f"rollouts/{kind}"] = float((plan.disposition_N == kind).sum())
    if kept.any():
        oldest = _numbers(light, "policy_version_min")[kept]
        newest = _numbers(light, "policy_version_max")[kept]
        age = round - oldest
        totals |= {"staleness/mean": float(age.mean()), "staleness/max": float(age.max())}
        totals |= {
            "reward_min": float(plan.reward_N[kept].min()),
            "reward_max": float(plan.reward_N[kept].max()),
            "policy_version_min": float(oldest.min()),
            "policy_version_max": float(newest.max()),
        }
    return totals


def _metrics(plan: RoundPlan, light: pa.Table) -> dict[str, float]:
    group_N, _ = _groups(light)
    lists = light["reward_components"].combine_chunks().flatten()
    names, values = (lists.field(name).to_numpy(zero_copy_only=False) for name in ("name", "value"))
    return rollout_metrics(
        rewards=np.where(np.isfinite(plan.reward_N), plan.reward_N, np.nan),
        groups=group_N,
        lengths=_numbers(light, "n_completion_tokens"),
        statuses=light["status"].to_pylist(),
        components={str(name): values[names == name] for name in np.unique(names.astype(str))},
    )
