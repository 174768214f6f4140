"""MB/s of weights from a trainer to a server that follows: by Arrow Flight, and from files.

A trainer in a process of its own hands out arrays by Flight; the same arrays are committed as a
checkpoint on a local disk, in the page cache. Both ways take turns in this process, digest
included. Prints the median and the best of --repeat.

    python bench/weights.py --megabytes 100
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
from machine import print_head

from marin_rl.config import parse_config
from marin_rl.digests import digest_of
from marin_rl.serving.weights.flight import WeightServer, fetch
from marin_rl.storage.checkpoints import commit_checkpoint, restore_checkpoint
from marin_rl.storage.runs import Run, checkpoint_slot

TOKEN = "of-the-benchmark"


def arrays(megabytes: int, count: int) -> dict[str, np.ndarray]:
    """`count` float32 arrays of `megabytes` in all."""
    random = np.random.default_rng(0)
    shape = (megabytes * 10**6 // 4 // count,)
    return {f"p{n}": random.standard_normal(shape, np.float32) for n in range(count)}


def trainer(pipe: Connection, megabytes: int, count: int) -> None:
    """Hand the arrays out until this process is ended."""
    parameters = arrays(megabytes, count)
    server = WeightServer("grpc://127.0.0.1:0", TOKEN)
    server.offer(digest_of(parameters), parameters)
    pipe.send(server.url)
    pipe.recv()


def timed(read: Callable[[], dict[str, np.ndarray]], digest: str) -> float:
    """Seconds of a read and the check of its digest."""
    began = time.perf_counter()
    assert digest_of(read()) == digest
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--arrays", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=6)
    chosen = parser.parse_args()
    print_head()
    expected = arrays(chosen.megabytes, chosen.arrays)
    digest, shapes = digest_of(expected), {name: array.shape for name, array in expected.items()}
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=trainer, args=(theirs, chosen.megabytes, chosen.arrays))
    process.start()
    try:
        with tempfile.TemporaryDirectory(prefix="marin-rl-weights-") as folder:
            run = Run.create_or_open(parse_config({"run_id": "weights", "root": folder}))
            began = time.perf_counter()
            none: dict[str, float] = {}
            ref = commit_checkpoint(
                run,
                checkpoint_slot(0),
                {"p": expected},
                content=none,
                parents=(),
                totals=none,
                extra=none,
            )
            wrote_s = time.perf_counter() - began
            url = ours.recv()
            ways: dict[str, Callable[[], dict[str, np.ndarray]]] = {
                "Arrow Flight": lambda: fetch(url, digest, shapes, TOKEN),
                "files": lambda: restore_checkpoint(run, ref, {"p": expected})["p"],
            }
            seconds = {name: list[float]() for name in ways}
            for _ in range(chosen.repeat):
                for name, read in ways.items():
                    seconds[name].append(timed(read, digest))
    finally:
        process.terminate()
        process.join()
    print(f"files, written once, durably: {chosen.megabytes / wrote_s:.0f} MB/s")
    for name, times in seconds.items():
        median = chosen.megabytes / statistics.median(times)
        print(f"{name}, read: {median:.0f} MB/s, best {chosen.megabytes / min(times):.0f} MB/s")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
