"""Differences of two runs: settings, curves, and the first round that differs.

Manifests carry times and attempts, so content is compared: digests of what was sampled, of what was
trained on, and of the parameters that came out.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from marin_rl.config import differences, fingerprint_fields
from marin_rl.storage.commits import read_manifest, ref_of
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, rollouts_slot
from marin_rl.storage.tables.batches import read_batches
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import iter_row_groups
from schemas.manifests import Manifest, canonical_json

# Samples and rewards, without requests and times.
SAMPLED = (
    "group_id", "index_in_group", "environment", "example_id", "token_ids", "logprobs", "reward",
    "status",
)  # fmt: skip
TRAINED = ("token_ids", "loss_mask", "positions", "policy_logprobs", "advantages")
CURVES = (
    "reward", "eval/accuracy", "kl", "entropy", "completions/mean_length", "clip_ratio/region",
    "mismatch_kl", "loss", "grad_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Metric of both runs: values at the last round that both have, and the largest gap."""

    metric: str
    round: int
    first: float
    second: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """Differences of two runs. `parts_at` is the first round that differs, in its stage `stage`.

    Both are None where the runs are equal in all `rounds` that both have begun. `settings` has a
    line `key: first -> second` per key; `changed` the differences, as (first, second), in code,
    libraries and machine of the last checkpoints up to the first round that differs.
    """

    settings: tuple[str, ...]
    changed: Mapping[str, tuple[str, str]]
    curves: tuple[Curve, ...]
    rounds: int
    parts_at: int | None
    stage: str | None
    detail: str

    @property
    def message(self) -> str:
        if self.parts_at is None:
            return f"the same in all {self.rounds} rounds that both have begun"
        return f"they part at round {self.parts_at}, in its {self.stage}: {self.detail}"


def compare_runs(first: Run, second: Run) -> RunDifference:
    """Compare two runs. Raises CorruptObject, NewerSchema, ObjectMissing."""
    rounds = sorted(set(progress(first)) & set(progress(second)))
    round, stage, detail = _parting(first, second, rounds) or (None, None, "")
    ours, theirs = (fingerprint_fields(run.config) for run in (first, second))
    return RunDifference(
        settings=tuple(differences(ours, theirs)),
        changed=_changed(first, second, [r for r in rounds if round is None or r <= round]),
        curves=tuple(_curves(first, second)),
        rounds=len(rounds),
        parts_at=round,
        stage=stage,
        detail=detail,
    )


def _changed(first: Run, second: Run, rounds: Sequence[int]) -> Mapping[str, tuple[str, str]]:
    """Differing code, libraries and machine facts of the last round that both have trained in."""
    for round in reversed(rounds):
        ours, theirs = (_written_by(run, round) for run in (first, second))
        if ours and theirs:
            pairs = {n: (ours.get(n, ""), theirs.get(n, "")) for n in sorted({*ours, *theirs})}
            return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {}


def _written_by(run: Run, round: int) -> Mapping[str, str]:
    """Code, libraries and machine of the update that ended a round, else of the one before it."""
    for slot in (checkpoint_slot(round + 1), checkpoint_slot(round)):
        if (committed := read_manifest(run.store, slot)) is not None:
            manifest = committed[0]
            return {**manifest.code, **manifest.libraries, **manifest.extra.get("machine", {})}
    return {}


def _parting(first: Run, second: Run, rounds: Sequence[int]) -> tuple[int, str, str] | None:
    for round in rounds:
        for stage, (slot_of, digest_of) in STAGES.items():
            made = [(run, read_manifest(run.store, slot_of(round))) for run in (first, second)]
            digests = [digest_of(run, item[0]) for run, item in made if item is not None]
            if len(set(digests)) == 2:
                return round, stage, " and ".join(digest[:16] for digest in digests)
    return None


def _sampled(run: Run, manifest: Manifest) -> str:
    """Digest over all rows, independent of shards and row groups."""
    table = pa.concat_tables(iter_row_groups(run, manifest, SAMPLED)).combine_chunks()
    digest = hashlib.sha256()
    for name in SAMPLED:
        digest.update(f"{name} {table.num_rows}\n".encode())
        column = table[name].combine_chunks()
        if pa.types.is_list(column.type):
            digest.update(np.diff(column.offsets.to_numpy()).tobytes())
            digest.update(column.flatten().to_numpy().tobytes())
        elif pa.types.is_string(column.type):
            digest.update(canonical_json(column.to_pylist()))
        else:
            digest.update(column.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def _trained(run: Run, manifest: Manifest) -> str:
    digest = hashlib.sha256()
    for batch in read_batches(run, ref_of(manifest)):
        for name in TRAINED:
            array = getattr(batch, name)
            digest.update(f"{name} {array.shape}\n".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


STAGES: Mapping[str, tuple[Callable[[int], str], Callable[[Run, Manifest], str]]] = {
    "policy": (checkpoint_slot, lambda _, made: str(made.extra.get("parameters_digest"))),
    "rollouts": (rollouts_slot, _sampled),
    "batches": (batches_slot, _trained),
}


def _curves(first: Run, second: Run) -> Iterator[Curve]:
    a, b = ({row["round"]: row for row in read_metrics(run).to_pylist()} for run in (first, second))
    for name in CURVES:
        both = [
            (round, a[round][name], b[round][name])
            for round in sorted(set(a) & set(b))
            if a[round].get(name) is not None and b[round].get(name) is not None
        ]
        if both:
            round, left, right = both[-1]
            largest = max(abs(x - y) for _, x, y in both)
            yield Curve(metric=name, round=round, first=left, second=right, largest=largest)
