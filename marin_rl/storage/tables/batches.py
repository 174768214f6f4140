"""Training batches and dispositions: written step by step, committed together, read without copies.

A batch part has one row group per optimizer step. Parts are closed when they reach a size, so that
writing never holds more than a part and a step. Their bytes depend on the rollouts and the
configuration alone; only their names carry the attempt.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from marin_rl.errors import CorruptObject
from marin_rl.storage.commits import committed_manifest, count_in, manifest_of
from marin_rl.storage.layout import BATCHES_PREFIX, DISPOSITIONS_PREFIX
from marin_rl.storage.runs import Run, batches_slot
from marin_rl.storage.stores.filesystem import ObjectStore
from marin_rl.storage.tables import parquet
from marin_rl.types import SlotRef, TrainingBatch
from schemas.manifests import Manifest, Part
from schemas.migrations import BATCHES as BATCHES_LADDER
from schemas.migrations import DISPOSITIONS as DISPOSITIONS_LADDER
from schemas.tables import ARRAYS, DISPOSITIONS, TEACHER, batches_schema

LENGTH_MAX = 2**24  # tokens of a padded row: more than any context has
DISPOSITIONS_ROW_GROUP_ROWS = 100_000
MICROBATCH_ROWS = "microbatch_rows"  # of a manifest's totals, where the round chose them
DISTILLED = "distilled"  # of a manifest's extra: its batches have a teacher's log-probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one optimizer step: `arrays` by column, each (B, T); names per row and segment.

    `rollout_ids` and `environments` are Arrow lists of strings, one per row.
    """

    arrays: Mapping[str, np.ndarray]
    rollout_ids: pa.ListArray
    environments: pa.ListArray


class BatchWriter:
    """Streams steps into the batch parts of one slot, all rows padded to `length` tokens."""

    def __init__(
        self,
        store: ObjectStore,
        slot: str,
        attempt: str,
        length: int,
        part_bytes_max: int = parquet.PART_BYTES_MAX,
        *,
        distilled: bool = False,
    ) -> None:
        self.steps = 0
        self._schema = batches_schema(length, distilled=distilled)
        # The lowest version that fits: batches without a teacher stay readable to older readers.
        stamp = {"schema_version": "2" if distilled else "1"}
        self._parts = parquet.PartWriter(
            store,
            slot,
            f"{BATCHES_PREFIX}{attempt}",
            lambda schema: parquet.TableWriter(BATCHES_LADDER, schema, stamp),
            part_bytes_max,
        )

    def write(self, rows: StepRows) -> None:
        count = len(rows.rollout_ids)
        columns = [
            pa.array(np.full(count, self.steps, np.int32)),
            pa.array(np.arange(count, dtype=np.int32)),
            *(self._fixed(name, rows.arrays[name]) for name in _arrays_of(self._schema)),
            rows.rollout_ids.cast(self._schema.field("rollout_ids").type),
            rows.environments.cast(self._schema.field("environments").type),
        ]
        self._parts.write(pa.table(columns, schema=self._schema))
        self.steps += 1

    def close(self) -> tuple[Part, ...]:
        # At least one part, so that readers need no second way for a round without rollouts.
        return self._parts.close(empty=self._schema)

    def _fixed(self, name: str, array_BT: np.ndarray) -> pa.Array:
        kind = self._schema.field(name).type
        # A silent cast would change what is trained on; lengths decide where rows begin.
        assert array_BT.dtype == kind.value_type.to_pandas_dtype(), f"{name} is {array_BT.dtype}"
        assert array_BT.shape[1] == kind.list_size, f"{name} has rows of {array_BT.shape[1]}"
        return pa.FixedSizeListArray.from_arrays(pa.array(array_BT.reshape(-1)), type=kind)


def write_dispositions(store: ObjectStore, slot: str, attempt: str, table: pa.Table) -> Part:
    writer = parquet.TableWriter(DISPOSITIONS_LADDER, DISPOSITIONS, {})
    # At least once: a round without rollouts has a table without rows, and not no part.
    for start in range(0, max(table.num_rows, 1), DISPOSITIONS_ROW_GROUP_ROWS):
        writer.write(table.slice(start, DISPOSITIONS_ROW_GROUP_ROWS))
    data = writer.finish()
    name = f"{DISPOSITIONS_PREFIX}{attempt}.parquet"
    return parquet.put_part(store, slot, name, data, rows=table.num_rows)


def read_batches(run: Run, ref: SlotRef) -> Iterator[TrainingBatch]:
    """The round's optimizer steps, one in memory at a time; arrays are read-only views."""
    manifest = manifest_of(run.store, ref)
    # By the manifest's total: the length of rows is part of their type.
    schema = schema_of(manifest, run.store.url_of(manifest.slot))
    microbatch_rows = None
    if MICROBATCH_ROWS in manifest.totals:
        microbatch_rows = max(count_in(manifest, MICROBATCH_ROWS, manifest.slot), 1)
    for table in _steps(run, manifest, schema):
        # A round without a kept rollout has one empty row group, which is no step.
        if table.num_rows:
            # Over Arrow's own memory, (B, T): a step of batches can be gigabytes.
            chunks = {name: table[name].combine_chunks() for name in _arrays_of(schema)}
            arrays = {
                name: chunk.flatten().to_numpy(zero_copy_only=True).reshape(len(chunk), -1)
                for name, chunk in chunks.items()
            }
            names = tuple(tuple(row) for row in table["rollout_ids"].to_pylist())
            yield TrainingBatch(**arrays, rollout_ids=names, microbatch_rows=microbatch_rows)


def schema_of(manifest: Manifest, source: str) -> pa.Schema:
    length = max(count_in(manifest, "length", source, at_most=LENGTH_MAX), 1)
    return batches_schema(length, distilled=manifest.extra.get(DISTILLED) is True)


def _arrays_of(schema: pa.Schema) -> tuple[str, ...]:
    return (*ARRAYS, TEACHER) if TEACHER in schema.names else ARRAYS


def iter_batch_names(run: Run, manifest: Manifest) -> Iterator[pa.Table]:
    """The columns step, row, rollout_ids and environments of each step, verified."""
    names = ("step", "row", "rollout_ids", "environments")
    full = schema_of(manifest, run.store.url_of(manifest.slot))
    return _steps(run, manifest, parquet.select(full, names))


def _steps(run: Run, manifest: Manifest, schema: pa.Schema) -> Iterator[pa.Table]:
    for part in manifest.parts:
        if part.name.startswith(BATCHES_PREFIX):
            yield from parquet.open_part(run.store, manifest.slot, part, BATCHES_LADDER).groups(
                schema
            )


def read_dispositions(run: Run, round: int) -> pa.Table:
    """Dispositions of a round's rollouts, in their order; ObjectMissing before its batches."""
    return dispositions_of(run, committed_manifest(run.store, batches_slot(round)))


def dispositions_of(run: Run, manifest: Manifest) -> pa.Table:
    """The dispositions that a batches manifest names, verified."""
    parts = [part for part in manifest.parts if part.name.startswith(DISPOSITIONS_PREFIX)]
    if len(parts) != 1:
        raise CorruptObject(
            f"{run.store.url_of(manifest.slot)}: expected one part with dispositions, found "
            f"{len(parts)}"
        )
    return parquet.open_part(run.store, manifest.slot, parts[0], DISPOSITIONS_LADDER).table()
