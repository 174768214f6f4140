"""Requests and CPU seconds of a round's records at 1,000 workers and 100,000 groups.

Counts what each step asks of a store, over a store in memory, and how much CPU it takes; a small
sample stands for steps that are alike for every group or shard, and the listing and the intake are
of the full size. Groups of a window lie in two objects a chunk and take turns there, so that ranges
are as short as they get. Seconds of waiting are computed: requests, by the number under way at
once, times the latency of the store. No request is really slow, so that a busy machine changes
nothing of them.

    python bench/scale.py --groups 100000 --workers 1000 --latency 0.05
"""

import argparse
import json
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from machine import print_head

from marin_rl.batching.build import build_round
from marin_rl.config import Config
from marin_rl.rollouts.streaming import CHUNK, Claimant, group_id_of, now_utc, open_chunks
from marin_rl.storage.layout import STREAM, claim_key, pack_key, pack_of
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import MemoryStore
from marin_rl.storage.tables.group_log import groups_of_chunk
from marin_rl.storage.tables.intakes import (
    Settled,
    collect_shard,
    commit_intake,
    decide,
    read_intake,
)
from marin_rl.storage.tables.parquet import FETCHES_MAX, PARTS_MAX, fetches_at_once, in_order
from marin_rl.storage.tables.rollouts import commit_shard, rollouts_manifest, seal_round
from marin_rl.storage.tables.stream import GroupStream, StreamedGroup

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.run_factories import CHECKPOINT, checkpoint, configuration, group, policy

RESULTS = Path(__file__).resolve().parent / "results"
PAGE_KEYS = 1000  # of a listing in a bucket
METHODS = ("put_if_absent", "read", "put_part", "delete", "size")
LISTINGS = ("list", "children")
SHARDS_IN_FLIGHT = 64  # flow.shards_in_flight_max


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count requests of the stores in memory by method; listings by their pages."""
    counts, lock = Counter[str](), threading.Lock()
    originals = {name: getattr(MemoryStore, name) for name in (*METHODS, *LISTINGS)}

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: MemoryStore, *arguments: Any) -> Any:
            result = original(store, *arguments)
            with lock:
                pages = -(-max(len(result), 1) // PAGE_KEYS) if name in LISTINGS else 1
                counts[name] += pages
            return result

        return call

    try:
        for name, original in originals.items():
            setattr(MemoryStore, name, counting(name, original))
        yield counts
    finally:
        for name, original in originals.items():
            setattr(MemoryStore, name, original)


class Table:
    """Steps with their requests, CPU seconds and seconds of waiting."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self.rows: list[dict[str, Any]] = []

    def measure(
        self, step: str, work: Callable[[], Any], *, times: float = 1, at_once: int = 1
    ) -> Any:
        """Do the work of a sample; `times` as much is done, with `at_once` requests under way."""
        with counted() as counts:
            began = time.process_time()
            result = work()
            cpu_s = (time.process_time() - began) * times
        requests = counts.total() * times
        waits_s = requests * self._latency_s / at_once
        row = {"step": step, "requests": requests, "cpu_s": cpu_s, "waits_s": waits_s}
        self.rows.append(row)
        print(f"{step:48} {requests:>11,.0f} {cpu_s:>10.1f} {waits_s:>10.1f}", flush=True)
        return result


def settings(options: argparse.Namespace, **asynchrony: Any) -> Config:
    """A round of the full size, in the memory of this process."""
    return configuration(
        f"memory://{uuid.uuid4().hex}",
        groups=options.groups,
        shards=options.workers,
        rollouts={"group_size": options.group_size},
        asynchrony=asynchrony or None,
    )


def sampled_group(options: argparse.Namespace, name: str) -> Any:
    """A group with as many tokens as the options say."""
    rewards = [float(n % 2) for n in range(options.group_size)]
    return group(name, rewards, completion=range(options.tokens))


def warm_run() -> Run:
    """A run for what a process does once, such as imports."""
    return Run.create_or_open(configuration(f"memory://{uuid.uuid4().hex}"))


def with_shards_given_out(table: Table, options: argparse.Namespace) -> None:
    """Steps of a round whose shards are given out: a few shards stand for all."""
    few, size = 5, options.groups // options.workers
    small = argparse.Namespace(**{**vars(options), "groups": few * size, "workers": few})
    run = Run.create_or_open(settings(small))
    names = [[f"round-00000/group-{s * size + n:05d}" for n in range(size)] for s in range(few)]
    groups = [[sampled_group(options, name) for name in each] for each in names]
    times = options.workers / few

    def commit() -> list[Any]:
        return [
            commit_shard(run, 0, shard, each, "f" * 64, policy(0))
            for shard, each in enumerate(groups)
        ]

    refs = table.measure(
        "workers commit their shards", commit, times=times, at_once=options.workers
    )
    sealed = table.measure(
        "the round is sealed",
        lambda: seal_round(run, 0, refs, [CHECKPOINT]),
        times=times,
        at_once=PARTS_MAX,
    )
    largest = max(part.bytes for part in rollouts_manifest(run, 0).parts)
    table.measure(
        "batches, dispositions and metrics",
        lambda: build_round(run, 0, sealed),
        times=times,
        at_once=fetches_at_once(largest),
    )


def windowed(table: Table, options: argparse.Namespace) -> None:
    """Steps of a round that takes groups of a stream."""
    config = settings(options, max_staleness=1, sampler="windowed")
    run = Run.create_or_open(config)
    checkpoint(run, 0)
    sampling(table, options)
    stream = full_stream(run, options)
    table.measure("windowed: one listing of the stream", stream.look)
    claimant = Claimant(worker="w", most=2 * options.groups, now=now_utc())
    table.measure(
        "windowed: workers are given their chunks",
        lambda: [next(open_chunks(stream, Settled(), claimant), None) for _ in range(10)],
        times=options.workers / 10,
    )
    groups = [finished(options, number) for number in range(options.groups)]
    intake = table.measure(
        "windowed: the intake is decided", lambda: decide(0, groups, Settled(), run.config)
    )
    table.measure("windowed: the intake is committed", lambda: commit_intake(run, intake))
    table.measure("windowed: the intake is read", lambda: read_intake(run, 0))
    table.measure(
        "windowed: groups of the sealed round are deleted",
        lambda: list(in_order(run.store, run.store.delete, run.store.list(STREAM))),
        at_once=FETCHES_MAX,
    )


def finished(options: argparse.Namespace, number: int) -> StreamedGroup:
    """A group as the stream's reader gives it; half of a chunk ended before the other half."""
    chunk, place = divmod(number, options.groups // options.workers)
    key = pack_key(chunk_of(options, chunk), place % 2)
    return StreamedGroup(
        number=number,
        sha256=f"{chunk * 2 + place % 2:064x}",
        version=0,
        rollouts=options.group_size,
        differs=True,
        pack=key.rpartition("/")[2],
    )


def chunk_of(options: argparse.Namespace, chunk: int) -> range:
    """Numbers of the groups of a worker."""
    size = options.groups // options.workers
    return range(chunk * size, (chunk + 1) * size)


def sampling(table: Table, options: argparse.Namespace) -> None:
    """Steps that are done with each object of groups, measured on the groups of four chunks."""
    size, chunks = options.groups // options.workers, 4
    small = argparse.Namespace(**{**vars(options), "groups": chunks * size, "workers": chunks})
    run = Run.create_or_open(settings(small, max_staleness=1, sampler="windowed"))
    checkpoint(run, 0)
    stream = GroupStream(run, fingerprint="f" * 64)
    groups = [sampled_group(options, group_id_of(number)) for number in range(chunks * size)]
    times = options.workers / chunks

    def commit() -> None:
        for chunk in range(chunks):
            numbers = chunk_of(options, chunk)
            log = groups_of_chunk(run, numbers, "f" * 64, policy(0), "w")
            log.read([CHUNK])
            for half in (numbers[::2], numbers[1::2]):
                log.complete(CHUNK, [groups[number] for number in half])

    table.measure(
        "windowed: workers commit their groups", commit, times=times, at_once=options.workers
    )
    table.measure(
        "windowed: groups are read as they come", stream.look, times=times, at_once=PARTS_MAX
    )
    intake = decide(0, stream.groups.values(), Settled(), run.config)
    assert intake is not None, "all groups are there"
    taken = commit_intake(run, intake)
    table.measure(
        "windowed: shards are made of the groups",
        lambda: [collect_shard(run, 0, shard, taken) for shard in range(chunks)],
        times=times,
        at_once=min(SHARDS_IN_FLIGHT * 4, FETCHES_MAX * SHARDS_IN_FLIGHT),
    )


class FullStream(GroupStream):
    """A stream whose packs are named, and not read: reading them is measured by a sample."""

    options: argparse.Namespace

    def _load(self, keys: Sequence[str]) -> Iterator[pa.Buffer | None]:
        return (pa.py_buffer(b"") for _ in keys)

    def _decoded(self, key: str, data: pa.Buffer) -> tuple[StreamedGroup, ...]:
        numbers, half = pack_of(key), int(key[-len("0.parquet") :][0])
        assert numbers is not None, "other objects are no groups"
        return tuple(finished(self.options, number) for number in numbers[half::2])


def full_stream(run: Run, options: argparse.Namespace) -> GroupStream:
    """A stream with the keys of all groups and claims."""
    stream = FullStream(run)
    stream.options = options
    now = datetime.now(UTC)
    for chunk in range(options.workers):
        stream.claim(chunk, f"w{chunk}", 0, now)
        for half in (0, 1):
            run.store.put_part(pack_key(chunk_of(options, chunk), half), b"")
    assert run.store.read(claim_key(0, 0))
    return stream


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=100_000, help="groups of a round")
    parser.add_argument("--workers", type=int, default=1000, help="shards, or workers, of a round")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of a request")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    options = parser.parse_args()
    print_head()
    table = Table(options.latency)
    print(f"{'step':48} {'requests':>11} {'CPU s':>10} {'waits s':>10}")
    commit_shard(warm_run(), 0, 0, [sampled_group(options, "g")], "f" * 64, policy(0))
    with_shards_given_out(table, options)
    windowed(table, options)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "scale.json"
    path.write_text(json.dumps(table.rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
