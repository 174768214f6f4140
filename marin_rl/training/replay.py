"""A recorded update, done again: is checkpoint N + 1 what checkpoint N and its batches make?

The round is trained from the committed files by the code that is here now, and compared with what
was committed then, array by array. Nothing is written. With the recorded libraries, processor,
instruction set and size of XLA's thread pool every bit is the same; elsewhere the largest
difference says how far apart they are, and the facts that differ are named.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from marin_rl.machine import changed_facts, request_threads
from marin_rl.storage.checkpoints import Tree, restore_checkpoint
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.provenance import code_version, library_versions
from marin_rl.storage.run_progress import optimizer_round
from marin_rl.storage.runs import Run, checkpoint_slot, committed
from marin_rl.storage.tables.tombstones import pruned_parts
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.loop import Trainer, trained_from
from marin_rl.training.state import tree_of
from marin_rl.trust import Consent, check_named, code_of_updates
from schemas.manifests import Manifest

# A record from elsewhere may ask for no more threads than this.
THREADS_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayDifference:
    """Largest difference of one array from the recorded one, and the largest recorded value."""

    name: str
    largest: float
    recorded_largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The outcome. Digests are of the parameters; `metrics` are (recorded, now) where they differ.

    `compared` counts arrays that were compared bit by bit: none where retention has
    pruned the recorded ones, and only the digest decides. `changed` are the parts of code and
    libraries and the facts of the machine that are others now than when the checkpoint was made, as
    (recorded, now).
    """

    round: int
    recorded_digest: str
    digest: str
    compared: int
    differing: tuple[ArrayDifference, ...]
    metrics: Mapping[str, tuple[float | None, float | None]]
    changed: Mapping[str, tuple[str, str]]

    @property
    def equal(self) -> bool:
        return self.digest == self.recorded_digest and not self.differing


def replay_round(run: Run, round: int, *, trust: bool = False) -> Replay:
    """Train round `round` again from its checkpoint and batches.

    Where JAX has not started yet, it starts with as many threads as the recorded update had.
    Raises ObjectMissing when the round was not trained, or retention has pruned the arrays of its
    first checkpoint; CorruptObject when the committed slots are not those that were trained on;
    ConfigError where another user's run names a loss, unless `trust`.
    """
    player = run.at_round(round)
    check_named(player, player.config, Consent(trust=trust), code_of_updates(player.config))
    hint = f"expected a trained round; `marin-rl status {player.run_id}` shows which there are"
    recorded = committed_manifest(player.store, checkpoint_slot(round + 1), hint)
    start, batches = trained_from(player, recorded, round)
    # Before JAX starts: sums of another thread pool differ in their last bits.
    # Another size than the recorded one stays where JAX has started; `changed` names it then.
    threads = str(recorded.extra.get("machine", {}).get("threads", ""))
    if threads.isascii() and threads.isdigit() and 0 < int(threads) <= THREADS_MAX:
        request_threads(int(threads))
    trainer = Trainer(player, tokenizer_for(player.config.policy))
    state, metrics = trainer.replay_round(round, batches, start)
    whole = optimizer_round(recorded) is None
    tree = jax.tree.map(np.asarray, tree_of(state, whole=whole))
    # Where retention took the arrays, the digest of the parameters still decides.
    differing, compared = (), 0
    if not pruned_parts(player.store, recorded.slot):
        ref = committed(player, recorded.slot)
        assert ref is not None, "its manifest was read"
        differing = _differences(restore_checkpoint(player, ref, tree), tree)
        compared = len(jax.tree.leaves(tree))
    # As they were committed: a manifest has only finite numbers.
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return Replay(
        round=round,
        recorded_digest=str(recorded.extra["parameters_digest"]),
        digest=trainer.identity_of(state).parameters_digest,
        compared=compared,
        differing=differing,
        metrics=_apart(recorded.totals, finite),
        changed=_changed(recorded, trainer.layout.facts),
    )


def _differences(recorded: Tree, now: Tree) -> tuple[ArrayDifference, ...]:
    """Arrays that are not the same bits."""
    named = jax.tree_util.tree_flatten_with_path(dict(recorded))[0]
    others = jax.tree.leaves(dict(now))
    differences: list[ArrayDifference] = []
    for (path, old), new in zip(named, others, strict=True):
        old, new = np.asarray(old), np.asarray(new)
        # Bytes and not values: NaN equals itself, and 0 is not -0.
        if old.tobytes() != new.tobytes():
            apart = np.abs(old.astype(np.float64) - new.astype(np.float64))
            differences.append(
                ArrayDifference(
                    name="/".join(str(part.key) for part in path),
                    largest=float(apart.max()),
                    recorded_largest=float(np.abs(old.astype(np.float64)).max()),
                )
            )
    return tuple(differences)


def _apart(
    recorded: Mapping[str, float], now: Mapping[str, float]
) -> dict[str, tuple[float | None, float | None]]:
    pairs = {name: (recorded.get(name), now.get(name)) for name in sorted({*recorded, *now})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _changed(recorded: Manifest, layout: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    then = {**recorded.code, **recorded.libraries}
    now = {**code_version(), **library_versions()}
    names = sorted({*then, *now})
    pairs = {name: (str(then.get(name, "")), str(now.get(name, ""))) for name in names}
    others = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return others | changed_facts(recorded.extra.get("machine", {}), layout)
