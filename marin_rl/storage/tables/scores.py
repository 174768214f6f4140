"""Per-token scores of a trained round: written step by step during training, read by step.

They are parts of the checkpoint that the round ended in: the one create of its manifest commits
both, so that there is never a trained round without its scores, nor scores of another attempt's
parameters. Encoding and writing happen in a thread, while the device takes the next step. Of
several epochs, the scores are those of the first pass over each token.

Axes: B rows of a step, T positions, N trained tokens, S segments.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int32

from marin_rl.storage.layout import SCORES_PREFIX
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.parquet import PART_BYTES_MAX, PartWriter, TableWriter, open_part
from schemas.manifests import Manifest, Part
from schemas.migrations import SCORES as LADDER
from schemas.tables import FLOATS, NULLABLE, SCORES, SCORES_V1, SCORES_V2, VALUED, WEIGHED

STEPS_WAITING_MAX = 2
EOS_STAMP = "eos_token_id"
VERSIONS = {1: SCORES_V1, 2: SCORES_V2, 3: SCORES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """Scores of the tokens of one optimizer step: arrays (B, T), read where `mask` is True.

    `floats` holds the columns `schemas.tables.FLOATS`, of a critic `VALUED` and of an optimal token
    baseline `WEIGHED`; None where null. `rollout_ids[b]` names the segments of row b.
    """

    rollout_ids: tuple[tuple[str, ...], ...]
    mask: Bool[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    clipped: Bool[np.ndarray, "B T"]
    floats: Mapping[str, np.ndarray | None]


class ScoresWriter:
    """Streams the steps of a round into the score parts of a slot, from one thread.

    `parts` waits for what is still being written; leaving the block without it writes no more.
    """

    def __init__(self, run: Run, round: int, attempt: str, eos_token_id: int | None) -> None:
        stamp = {"attempt": attempt, EOS_STAMP: str(eos_token_id)}
        self._round = round
        self._parts = PartWriter(
            run.store,
            checkpoint_slot(round + 1),
            f"{SCORES_PREFIX}{attempt}",
            partial(scores_writer, stamp=stamp),
            PART_BYTES_MAX,
        )
        self._steps = 0
        self._waiting: list[Future[None]] = []
        # One thread: steps are appended in order, and compression overlaps with the next update.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="scores")

    def __enter__(self) -> "ScoresWriter":
        return self

    def __exit__(self, *_: object) -> None:
        # Waits: a thread that writes on would use arrays of the next round, and its store.
        self._pool.shutdown(wait=True, cancel_futures=True)

    def write(self, scored: ScoredStep) -> None:
        """Append the next step as one row group. Raises what writing an earlier step raised."""
        # A bound on memory: scores of a step are as large as its batch.
        while len(self._waiting) >= STEPS_WAITING_MAX:
            self._waiting.pop(0).result()
        step = self._steps
        self._waiting.append(
            self._pool.submit(lambda: self._parts.write(score_table(self._round, step, scored)))
        )
        self._steps += 1

    def parts(self) -> tuple[Part, ...]:
        """The parts in order, all of them durable; none for a round without steps."""
        # Queued behind the steps, on the same thread: the last part is closed after all of them.
        closing = self._pool.submit(self._parts.close)
        # Results are asked for, since an error of the thread would otherwise be lost.
        while self._waiting:
            self._waiting.pop(0).result()
        return closing.result()


def scores_writer(schema: pa.Schema, stamp: Mapping[str, str]) -> TableWriter:
    # The lowest version that fits: parts without a critic stay readable to older readers.
    version = next(number for number, known in VERSIONS.items() if schema.equals(known))
    return TableWriter(LADDER, schema, {**stamp, "schema_version": str(version)})


def score_table(round: int, step: int, scored: ScoredStep) -> pa.Table:
    """Scores of a step, a row per segment, in the order of rows and segments.

    Of version 1 where the step has no critic and no optimal token baseline.
    """
    schema = SCORES_V1 if scored.floats.get("values") is None else SCORES_V2
    if scored.floats.get("squared_score_norms") is not None:
        schema = SCORES
    optional = [name for name in (*VALUED, *WEIGHED) if name in schema.names]
    names = [name for row in scored.rollout_ids for name in row]
    n_segments = np.array([len(row) for row in scored.rollout_ids], np.int32)
    rows = np.repeat(np.arange(len(n_segments), dtype=np.int32), n_segments)  # [S]
    first = np.cumsum(n_segments) - n_segments  # [B] names before each row
    places = np.arange(len(names), dtype=np.int32) - np.repeat(first, n_segments).astype(np.int32)
    row_N, position_N = np.nonzero(scored.mask)
    segment_N = scored.segment_ids[row_N, position_N] - 1  # they count from 1, 0 is padding
    assert (segment_N < n_segments[row_N]).all(), "every trained segment has a name"
    # `nonzero` goes row by row, so values of a segment are side by side and offsets are enough.
    assert (np.diff(first[row_N] + segment_N) >= 0).all(), "segments lie in the order of names"
    counts = np.bincount(first[row_N] + segment_N, minlength=len(names))  # [S]
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))

    def listed(name: str, array_BT: np.ndarray | None) -> pa.Array:
        kind = schema.field(name).type
        # Nulls and not zeros: a reader must tell what was not computed from what was 0.
        if array_BT is None:
            return pa.nulls(len(names), kind)
        # Trained tokens alone: scores of prompts and padding would be most of the file.
        values = np.ascontiguousarray(array_BT[row_N, position_N])
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type), type=kind)

    columns: dict[str, Any] = {
        "round": pa.array(np.full(len(names), round, np.int32)),
        "rollout_id": pa.array(names, pa.string()),
        "step": pa.array(np.full(len(names), step, np.int32)),
        "row": pa.array(rows),
        "segment": pa.array(places + 1),
        "positions": listed("positions", scored.positions),
        "clipped": listed("clipped", scored.clipped),
        **{name: listed(name, scored.floats[name]) for name in FLOATS},
        **{name: listed(name, scored.floats.get(name)) for name in optional},
    }
    return pa.table([columns[name] for name in schema.names], schema=schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """The scores of one optimizer step, flat: N tokens, the S segments' counts and places.

    `floats` has an array (N) per column, or None where it is null; `eos_token_id` is the trainer's.
    """

    step: int
    rollout_ids: tuple[str, ...]
    counts: Int32[np.ndarray, " S"]
    positions: Int32[np.ndarray, " N"]
    clipped: Bool[np.ndarray, " N"]
    floats: Mapping[str, np.ndarray | None]
    eos_token_id: int | None


def iter_scores(run: Run, manifest: Manifest) -> Iterator[StepScores]:
    """The scores that a checkpoint's manifest names, verified, a step at a time."""
    for part in manifest.parts:
        if part.name.startswith(SCORES_PREFIX):
            reader = open_part(run.store, manifest.slot, part, LADDER)
            eos = reader.stamp.get(EOS_STAMP, "None")
            for table in reader.groups():
                lists = table["positions"].combine_chunks()
                yield StepScores(
                    step=table["step"][0].as_py(),
                    rollout_ids=tuple(table["rollout_id"].to_pylist()),
                    counts=np.diff(lists.offsets.to_numpy()).astype(np.int32),
                    positions=lists.flatten().to_numpy(),
                    clipped=_flat(table["clipped"]),
                    floats={
                        name: None
                        if table[name].null_count and name in NULLABLE
                        else _flat(table[name])
                        for name in (*FLOATS, *VALUED, *WEIGHED)
                    },
                    eos_token_id=None if eos == "None" else int(eos),
                )


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
