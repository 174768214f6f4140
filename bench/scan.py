"""Latency of queries to a large run, on local files: a point look-up, means, and SQL.

    python bench/scan.py [--rollouts 1000000] [--folder /tmp/scan] [--repeat 5]

Makes a run of synthetic rollouts once (1,000 to a shard, 4 shards to a round, short token lists,
every other column as the sampler writes it) through the same writers and manifests as a real one,
then asks each question several times in one process. Prints the first answer's wall seconds, the
median of all, and the median of CPU seconds. The page cache is warm after the files were made.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from machine import print_head

SHARD_ROWS, SHARDS, GROUP = 1000, 4, 8
TOKENS = 48
REWARD_SEED = 7


def main() -> None:
    options = parse()
    print_head()
    run_id = f"scan-{options.rollouts}"
    made = make_run(options.folder, run_id, options.rollouts)
    if made:
        print(f"made {options.rollouts:,} rollouts in {made:.0f} s", file=sys.stderr)
    rounds = options.rollouts // (SHARD_ROWS * SHARDS)
    for name, ask in questions(str(options.folder), run_id, rounds).items():
        report(name, ask, options.repeat)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/scan"))
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


def questions(root: str, run_id: str, rounds: int) -> dict[str, Callable[[], Any]]:
    """Queries by name."""
    from marin_rl.analysis.query import sql
    from marin_rl.analysis.scan import scan_dispositions, scan_rollouts

    name = f"round-{rounds // 2:05d}/group-00123/004"
    rewards = pl.col("reward").mean()
    mean = "select round, avg(reward) from rollouts group by round"
    look_up = f"select reward, token_ids from rollouts where rollout_id = '{name}'"

    def one(frame: pl.DataFrame) -> None:
        assert frame.height == 1, f"expected one rollout, found {frame.height}"

    def each(frame: pl.DataFrame) -> None:
        assert frame.height == rounds, f"expected {rounds} rounds, found {frame.height}"

    wanted = pl.col("rollout_id") == name
    return {
        "look-up, all columns (Polars)": lambda: one(
            scan_rollouts(root, run_id).filter(wanted).collect()
        ),
        "look-up, two columns (SQL)": lambda: one(sql(root, run_id, look_up)),
        "mean reward per round (Polars)": lambda: each(
            scan_rollouts(root, run_id).group_by("round").agg(rewards).collect()
        ),
        "mean reward per round (SQL)": lambda: each(sql(root, run_id, mean)),
        "rollouts of one round (Polars)": lambda: (
            scan_rollouts(root, run_id).filter(pl.col("round") == rounds - 1).collect()
        ),
        "dispositions, empty (Polars)": lambda: scan_dispositions(root, run_id).collect(),
    }


def report(name: str, ask: Callable[[], Any], repeat: int) -> None:
    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        ask()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    print(
        f"{name:<34} first {walls[0]:6.3f} s  median {statistics.median(walls):6.3f} s  "
        f"CPU {statistics.median(cpus):6.3f} s",
        flush=True,
    )


def make_run(folder: Path, run_id: str, rollouts: int) -> float | None:
    """Seconds that making the run took; None if it is there."""
    from marin_rl.config import parse_config
    from marin_rl.storage.runs import Run, rollouts_slot

    began = time.monotonic()
    tree = {"root": str(folder), "run_id": run_id}
    run = Run.create_or_open(parse_config(tree | {"rollouts": {"shards_per_round": SHARDS}}))
    rounds = rollouts // (SHARD_ROWS * SHARDS)
    if run.store.local_path(f"{rollouts_slot(rounds - 1)}/manifest.json").exists():  # type: ignore[union-attr]
        return None
    template, rng = shard_template(run_id), np.random.default_rng(REWARD_SEED)
    for round in range(rounds):
        commit(run, round, template, rng)
    return time.monotonic() - began


def shard_template(run_id: str) -> pa.Table:
    """A shard's rows, of which `commit` replaces what differs from shard to shard."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.run_factories import group

    from marin_rl.storage.tables.records import rollout_table

    digests = dict.fromkeys(("policy_digest", "tokenizer_digest"), "d" * 64)
    constants = {
        "run_id": run_id,
        "round": 0,
        "shard": 0,
        "attempt": "20260101T000000-0123456789abcdef",
        "replica": "host:1",
        "chat_template_digest": "c" * 64,
        "model": "policy@00000-dddddddd",
        **digests,
    }
    groups = [
        group(f"g{index}", [1.0] * GROUP, completion=range(TOKENS))
        for index in range(SHARD_ROWS // GROUP)
    ]
    return rollout_table(groups, constants)


def commit(run: Any, round: int, template: pa.Table, rng: np.random.Generator) -> None:
    """One sealed round."""
    from marin_rl.storage.commits import commit_manifest, new_attempt, new_manifest, part_of
    from marin_rl.storage.runs import rollouts_slot
    from marin_rl.storage.tables.parquet import TableWriter
    from schemas.migrations import ROLLOUTS as LADDER

    parts = []
    for shard in range(SHARDS):
        table = varied(template, round, shard, rng)
        writer = TableWriter(LADDER, template.schema, {"attempt": "a", "fingerprint": "f"})
        writer.write(table)
        data, name = writer.finish(), f"shard-{shard:04d}.parquet"
        run.store.put_part(f"{rollouts_slot(round)}/{name}", data)
        parts.append(part_of(name, data, rows=table.num_rows))
    slot = rollouts_slot(round)
    manifest = new_manifest(slot, attempt=new_attempt(), fingerprint="f" * 64, parts=parts)
    commit_manifest(run.store, manifest)


def varied(template: pa.Table, round: int, shard: int, rng: np.random.Generator) -> pa.Table:
    """The template with names, rewards, tokens and logprobs of its own."""
    first = shard * SHARD_ROWS // GROUP
    groups = [f"round-{round:05d}/group-{first + i // GROUP:05d}" for i in range(SHARD_ROWS)]
    lengths = np.diff(template["token_ids"].combine_chunks().offsets.to_numpy())
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    total = int(lengths.sum())
    schema = template.schema
    lists = {
        "token_ids": rng.integers(0, 32_000, total, np.int32),
        "logprobs": -rng.exponential(1.0, total).astype(np.float32),
    }
    columns = {
        "round": pa.array(np.full(SHARD_ROWS, round, np.int32)),
        "shard": pa.array(np.full(SHARD_ROWS, shard, np.int32)),
        "group_id": pa.array(groups),
        "rollout_id": pa.array([f"{name}/{i % GROUP:03d}" for i, name in enumerate(groups)]),
        "reward": pa.array(rng.random(SHARD_ROWS)),
        **{
            name: pa.ListArray.from_arrays(offsets, pa.array(values), type=schema.field(name).type)
            for name, values in lists.items()
        },
    }
    for name, column in columns.items():
        template = template.set_column(schema.get_field_index(name), schema.field(name), column)
    return template


if __name__ == "__main__":
    main()
