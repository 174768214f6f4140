"""Speed of `marin-rl fsck`: bytes a second, over files that lie in the page cache.

A run of made-up slots (checkpoints of a few large files, shards of many rollouts) is written below
--folder, checked --repeat times, and removed. The best and the median are printed, with what the
machine's SHA-256 alone does on one core, which is the limit.
"""

import argparse
import hashlib
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from machine import print_head
from support.run_factories import configuration, play

from marin_rl.storage.commits import (
    commit_manifest,
    fingerprint,
    new_attempt,
    new_manifest,
    part_of,
    ref_of,
)
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.upkeep.fsck import check_run


def make(folder: str, megabytes: int, files: int) -> None:
    """A run of one closed round whose first checkpoint has `megabytes` of arrays."""
    run = Run.create_or_open(configuration(folder, shards=2, groups=2))
    attempt, slot, parts = new_attempt(), checkpoint_slot(0), []
    block = np.random.default_rng(0).bytes(megabytes * 10**6 // files)
    for number in range(files):
        name = f"{attempt}/d/{number}"
        run.store.put_part(f"{slot}/{name}", block)
        parts.append(part_of(name, block))
    decided = fingerprint("checkpoint", {"round": 0})
    manifest = new_manifest(slot, attempt=attempt, fingerprint=decided, parts=parts)
    play(run, 0, ref_of(commit_manifest(run.store, manifest)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    chosen = parser.parse_args()
    print_head()
    folder = tempfile.mkdtemp(prefix="marin-rl-fsck-", dir=chosen.folder)
    try:
        make(folder, chosen.megabytes, chosen.files)
        rates = []
        for _ in range(chosen.repeat):
            checked = check_run(folder, "run")
            assert checked.whole, checked.faults
            rates.append(checked.bytes / checked.seconds / 1e6)
        block = bytes(64 * 2**20)
        alone = 0.0
        for _ in range(chosen.repeat):
            began = time.perf_counter()
            hashlib.sha256(block).hexdigest()
            alone = max(alone, len(block) / (time.perf_counter() - began) / 1e6)
    finally:
        shutil.rmtree(folder)
    print(f"{checked.objects} objects, {checked.bytes / 1e6:.0f} MB")
    print(f"fsck: median {statistics.median(rates):.0f} MB/s, best {max(rates):.0f} MB/s")
    print(f"SHA-256 alone, one core: {alone:.0f} MB/s")


if __name__ == "__main__":
    main()
