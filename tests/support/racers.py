"""Functions for processes that tests race against each other; importable where they spawn."""

from multiprocessing.synchronize import Barrier
from typing import Any

from marin_rl.storage.commits import commit_manifest, fingerprint, new_attempt, new_manifest
from marin_rl.storage.stores.filesystem import open_store


def commit_slots(url: str, slots: list[str], barrier: Barrier, results: Any) -> None:
    """Commit each slot at the same moment as the others; report (our attempt, the winner's)."""
    store = open_store(url)
    winners = []
    for slot in slots:
        ours = new_manifest(slot, attempt=new_attempt(), fingerprint=fingerprint("race", {}))
        barrier.wait(60)
        winners.append((ours.attempt, commit_manifest(store, ours).attempt))
    results.put(winners)
