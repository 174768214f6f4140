"""Runs that are complete by every rule of storage, made in a second and without JAX.

Rounds of rollouts by hand, real batches, real metrics; checkpoints have files and scores where
Orbax would put them, but cannot be restored.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from support.builders import FINGERPRINT, configuration, group, policy

from marin_rl.batching.build import build_round
from marin_rl.rounds import close_round
from marin_rl.storage.commits import (
    commit_manifest,
    fingerprint,
    new_attempt,
    new_manifest,
    parent_of,
    part_of,
    ref_of,
)
from marin_rl.storage.runs import Run, checkpoint_slot, evals_slot
from marin_rl.storage.tables.batches import read_batches
from marin_rl.storage.tables.rollouts import commit_shard, encode_shard, seal_round
from marin_rl.storage.tables.scores import ScoredStep, ScoresWriter
from marin_rl.types import SlotRef, TrainingBatch
from schemas.manifests import Part
from schemas.scores import FLOATS

FILES = ("_METADATA", "manifest.ocdbt", "d/array")


def checkpoint(
    run: Run,
    round: int,
    parents: tuple[SlotRef, ...] = (),
    scores: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> SlotRef:
    """Commit an imitation of a round's checkpoint; `scores` writes the scores next to it."""
    attempt, slot = new_attempt(), checkpoint_slot(round)
    parts = []
    for name in FILES:
        data = np.random.default_rng([round, len(name)]).bytes(1000 + round)
        run.store.put_part(f"{slot}/{attempt}/{name}", data)
        parts.append(part_of(f"{attempt}/{name}", data))
    if scores is not None:
        parts += scores(attempt)
    above = [parent_of(parent) for parent in parents]
    decided = fingerprint("checkpoint", {"round": round}, above)
    manifest = new_manifest(
        slot,
        attempt=attempt,
        fingerprint=decided,
        parents=above,
        parts=parts,
        extra=extra or {},
    )
    winner = commit_manifest(run.store, manifest)
    return ref_of(winner, reused=winner.attempt != attempt)


def sample(run: Run, round: int, shard: int, start: SlotRef) -> SlotRef:
    """One shard of a round, of one group."""
    name = f"{run.run_id}/round-{round:05d}/group-{shard}"
    groups = [group(name, [0.0, 1.0, 1.0, 0.5], version=round)]
    served = replace(policy(round), checkpoint=start)
    return commit_shard(run, round, shard, groups, FINGERPRINT, served)


def evaluate(run: Run, round: int, start: SlotRef) -> None:
    """Commit the evaluation of a checkpoint."""
    attempt, slot = new_attempt(), evals_slot(round)
    data = encode_shard(
        [group(f"eval/{round}", [0.0, 1.0], version=round)],
        run_id=run.run_id,
        round=round,
        shard=0,
        attempt=attempt,
        replica="host:1",
        fingerprint=FINGERPRINT,
        policy=replace(policy(round), checkpoint=start),
    )
    name = f"evals-{attempt}.parquet"
    run.store.put_part(f"{slot}/{name}", data)
    manifest = new_manifest(
        slot,
        attempt=attempt,
        fingerprint=FINGERPRINT,
        parents=[parent_of(start)],
        parts=[part_of(name, data)],
        totals={"eval/accuracy": 0.5},
    )
    commit_manifest(run.store, manifest)


def play(
    run: Run, round: int, start: SlotRef, shards: int = 2, *, evaluated: bool = False
) -> SlotRef:
    """One round from a checkpoint to the next, all of it committed."""
    if evaluated:
        evaluate(run, round, start)
    refs = [sample(run, round, shard, start) for shard in range(shards)]
    batches = build_round(run, round, seal_round(run, round, refs, [start]))

    def scores(attempt: str) -> tuple[Part, ...]:
        with ScoresWriter(run, round, attempt, 1) as writer:
            for batch in read_batches(run, batches):
                writer.write(scored(batch))
            return writer.parts()

    trained = checkpoint(run, round + 1, (start, batches), scores)
    close_round(run, round, {"timing_s/round": 1.0})
    return trained


def scored(batch: TrainingBatch) -> ScoredStep:
    """Scores of a step that mean nothing."""
    values = np.zeros(batch.token_ids.shape, np.float32)
    return ScoredStep(
        rollout_ids=batch.rollout_ids,
        mask=batch.loss_mask > 0,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        clipped=np.zeros(batch.token_ids.shape, np.bool_),
        floats=dict.fromkeys(FLOATS, values),
    )


def whole_run(
    root: str, rounds: int = 3, shards: int = 2, *, evaluated: Collection[int] = (), **sections: Any
) -> Run:
    """A run of `rounds` closed rounds, the first `evaluated` of which began with an evaluation."""
    run = Run.create_or_open(configuration(root, shards=shards, groups=shards, **sections))
    start = checkpoint(run, 0)
    for round in range(rounds):
        start = play(run, round, start, shards, evaluated=round in evaluated)
    return run
