"""Cost of a crash: seconds to new work, and work lost; bytes on disk and operations by round.

    python bench/recovery.py --kills 8

Starts a run as a person would, kills it at random instants with SIGKILL and starts it again. All
numbers come from the run's files: when the first new commit was made, how long before the kill the
last one was, and which shards were being sampled. Prints a table and writes
bench/results/recovery.json.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import print_head

from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import (
    Run,
    batches_slot,
    checkpoint_slot,
    latest_checkpoint,
    metrics_key,
    rollouts_slot,
    round_of,
    shard_key,
)
from marin_rl.storage.tables.rollouts import decode_shard

POLL_S = 0.01
START_S_MAX = 240.0
# Operations are counted from the end of one round to that of another, so two rounds must end.
LOGGED_ROUNDS = 3
TESTS = Path(__file__).resolve().parents[1] / "tests"
MAIN = "from marin_rl.cli import main; main()"
# The same command, which writes a line to a file for each operation on the store.
LOGGED = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
from support.fault_injection import Operations, inject_faults

class Logged(Operations):
    def next(self, name, url):
        with open({{log!r}}, "a", encoding="utf-8") as file:
            file.write(f"{{{{name}}}} {{{{url}}}}\\n")

with inject_faults(Logged()):
    {MAIN}
"""
COMMITS = ("*/*/manifest.json", "rollouts/*/shard-*.parquet", "metrics/*.parquet")
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Crash:
    """A start that ended in a kill.

    `first_commit_s` from the start to its first commit; `lost_s` from its last commit to the kill:
    more work than that cannot be lost. `sampling` are the shards that were not yet committed while
    the round was sampled.
    """

    first_commit_s: float
    lost_s: float
    sampling: tuple[str, ...]


class Lives:
    """Starts and kills one run."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self._root, self._run_id, self._folder = root, options.run_id, root / options.run_id
        named = ("--run-id", options.run_id, "--root", str(root))
        self._words = ("run", options.config, *named, "--rounds", "100000")
        self._choices, self._life_s = random.Random(options.seed), options.life_s

    def live(self, rounds: int = 0, program: str = MAIN) -> Crash:
        """One start, killed at a random instant after its first commit and the end of `rounds`."""
        before, began, ends = self._commits(), time.time(), self._ends()
        process = subprocess.Popen(
            (sys.executable, "-c", program, *self._words),
            env={**os.environ, "PREFECT_API_URL": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not (new := self._commits().keys() - before.keys()) or self._ends() < ends + rounds:
            assert process.poll() is None, f"it ended with exit code {process.returncode}"
            assert time.time() - began < START_S_MAX, "it commits nothing, or ends no round"
            time.sleep(POLL_S)
        first = min(self._commits()[key] for key in new)
        time.sleep(self._choices.uniform(0, self._life_s))
        process.send_signal(signal.SIGKILL)
        ended = time.time()
        process.wait()
        return Crash(first - began, ended - max(self._commits().values()), self._sampling())

    def _commits(self) -> dict[Path, float]:
        """When each commit was made, in seconds since the epoch."""
        found = (path for pattern in COMMITS for path in self._folder.glob(pattern))
        return {path: path.stat().st_mtime for path in found}

    def _ends(self) -> int:
        """Rounds whose last file is committed."""
        return len(list(self._folder.glob("metrics/*.parquet")))

    def _sampling(self) -> tuple[str, ...]:
        run = Run.open(str(self._root), self._run_id)
        checkpoint = latest_checkpoint(run)
        round = -1 if checkpoint is None else round_of(checkpoint.slot.rpartition("/")[2]) or 0
        keys = [shard_key(round, n) for n in range(run.config.rollouts.shards_per_round)]
        there = set(run.store.list(rollouts_slot(round))) if round >= 0 else set(keys)
        closed = round <= 0 or (self._folder / metrics_key(round - 1)).exists()
        return tuple(key for key in keys if key not in there) if closed else ()


def tokens(run: Run, keys: tuple[str, ...]) -> int:
    """Completion tokens of shards, all of which are committed by now."""
    columns = ("n_completion_tokens",)
    tables = (decode_shard(run.store.read(key), columns, source=key) for key in keys)
    return sum(sum(table["n_completion_tokens"].to_pylist()) for table in tables)


def bytes_per_1000_rollouts(run: Run) -> dict[str, float]:
    """Bytes committed for every thousand rollouts, by kind; a checkpoint's by itself."""
    sizes, rollouts, rounds = Counter[str](), 0, 0
    while (sealed := read_manifest(run.store, rollouts_slot(rounds))) is not None:
        slots = rollouts_slot(rounds), batches_slot(rounds), checkpoint_slot(rounds + 1)
        found = [read_manifest(run.store, slot) for slot in slots]
        if None in found:
            break
        rollouts += int(sealed[0].totals["rows"])
        for item in (item for item in found if item is not None):
            for part in item[0].parts:
                scores = part.name.startswith("scores-")
                kind = "scores" if scores else item[0].slot.partition("/")[0]
                sizes[kind] += part.bytes
        rounds += 1
    per_round = {"one checkpoint": sizes.pop("checkpoints") / rounds}
    return {kind: 1000 * size / rollouts for kind, size in sizes.items()} | per_round


def operations_per_round(log: Path) -> dict[str, float]:
    """Operations on the store in the rounds that a start played whole, by kind, per round."""
    lines = [line.split() for line in log.read_text(encoding="utf-8").splitlines()]
    ends = [i for i, (name, url) in enumerate(lines) if name == "create" and "/metrics/" in url]
    assert len(ends) > 1, f"expected a start that plays two rounds, found {len(ends)}"
    counted = Counter(name for name, _ in lines[ends[0] + 1 : ends[-1] + 1])
    return {name: count / (len(ends) - 1) for name, count in sorted(counted.items())}


def measured(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """All numbers, as they are written down."""
    lives = Lives(options, root)
    lives.live()  # compiles what the others find in the cache
    crashes = [lives.live() for _ in range(options.kills)]
    log = root / "operations.log"
    lives.live(LOGGED_ROUNDS, LOGGED.format(log=str(log)))
    run = Run.open(str(root), options.run_id)
    lost = [tokens(run, crash.sampling) for crash in crashes]
    rows = [asdict(crash) | {"lost_tokens_max": n} for crash, n in zip(crashes, lost, strict=True)]
    names = ("first_commit_s", "lost_s", "lost_tokens_max")
    return {
        "config": options.config,
        "seed": options.seed,
        "median": {name: statistics.median(row[name] for row in rows) for name in names},
        "largest": {name: max(row[name] for row in rows) for name in names},
        "bytes_per_1000_rollouts": bytes_per_1000_rollouts(run),
        "operations_per_round": operations_per_round(log),
        "crashes": rows,
    }


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--root", type=Path, help="go on with the run below this folder, if any")
    parser.add_argument("--run-id", default="recovery")
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    parser.add_argument("--life-s", type=float, default=6.0, help="at most, after a first commit")
    options = parser.parse_args()
    print_head()
    with tempfile.TemporaryDirectory(prefix="marin-rl-recovery-") as name:
        found = measured(options, options.root or Path(name))
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "recovery.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in found.items() if key != "crashes"}, indent=2))


if __name__ == "__main__":
    main()
