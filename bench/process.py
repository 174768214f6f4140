"""Benchmark of process(round): tokens per second and memory, next to a loop over rollouts.

`python bench/process.py` writes 20,000 rollouts of 512 tokens in groups of 16 to a temporary
folder, then times our `build_round` and a straightforward reader and batcher (one Python iteration
per rollout) over the same committed shards, each in a process of its own, on one core.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from machine import print_head

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_NUM_THREADS", "MKL_NUM_THREADS")

# Below this many tokens a process's start decides its speed.
BAR_TOKENS_MIN = 1_000_000


def main() -> None:
    """Parse the command line; run everything, or one side in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rows-per-step", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=("write", "ours", "loop"), help="used by itself")
    parser.add_argument("--root", help="used by itself")
    arguments = parser.parse_args()
    if arguments.side is None:
        compare(arguments)
        return
    side = {"write": write, "ours": ours, "loop": loop}[arguments.side]
    print(json.dumps(side(arguments)))


def compare(arguments: argparse.Namespace) -> None:
    """Run both sides in turn on one core and print the table."""
    print_head()
    tokens = arguments.rollouts * arguments.tokens
    with tempfile.TemporaryDirectory(prefix="bench-process-") as root:
        _run_side(arguments, "write", root)
        results: dict[str, list[dict[str, float]]] = {"ours": [], "loop": []}
        for _ in range(arguments.repeats):
            for side, found in results.items():
                found.append(_run_side(arguments, side, root))
    best = {side: min(found, key=lambda r: r["seconds"]) for side, found in results.items()}
    ours, loop = best["ours"], best["loop"]
    print(f"{arguments.rollouts} rollouts x {arguments.tokens} tokens, one core, ", end="")
    print(f"best of {arguments.repeats}; steps of {arguments.rows_per_step} rows")
    print(f"{'':32}{'seconds':>9}{'CPU-s':>8}{'M tokens/s':>12}{'peak RSS':>11}{'above start':>13}")
    for name, found in (("build_round", ours), ("loop over rollouts (NumPy)", loop)):
        speed = tokens / found["seconds"] / 1e6
        print(
            f"{name:32}{found['seconds']:9.2f}{found['cpu']:8.2f}{speed:12.2f}"
            f"{found['peak'] / 2**20:8.0f} MB{(found['peak'] - found['start']) / 2**20:10.0f} MB"
        )
    print(
        f"ratio (ours / loop): time {ours['seconds'] / loop['seconds']:.2f}, memory above start "
        f"{(ours['peak'] - ours['start']) / (loop['peak'] - loop['start']):.2f}"
    )
    if tokens < BAR_TOKENS_MIN:
        print("no bar: too few tokens to tell a speed")
        return
    passed = tokens / ours["seconds"] >= 1e6
    print(f"at least 1 M tokens/s: {'yes' if passed else 'NO'}")
    sys.exit(0 if passed else 1)


def _run_side(arguments: argparse.Namespace, side: str, root: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--root", root]
    for name in ("rollouts", "tokens", "group_size", "shards", "rows_per_step"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    repository = str(Path(__file__).parents[1])
    environment = {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": repository}
    core = {max(os.sched_getaffinity(0))}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    )
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _config(arguments: argparse.Namespace):
    from marin_rl.config import parse_config

    groups = arguments.rollouts // arguments.group_size
    return parse_config(
        {
            "root": arguments.root,
            "run_id": "bench",
            "rollouts": {
                "groups_per_round": groups,
                "group_size": arguments.group_size,
                "shards_per_round": arguments.shards,
            },
            "batching": {"sequences_per_step": arguments.rows_per_step},
        }
    )


def write(arguments: argparse.Namespace) -> dict[str, float]:
    """Commit the shards of round 0 and seal it."""
    import numpy as np

    from marin_rl.storage.runs import Run
    from marin_rl.storage.tables.rollouts import commit_shard, seal_round
    from marin_rl.types import ServedPolicy, SlotRef

    run = Run.create_or_open(_config(arguments))
    checkpoint = SlotRef(slot="checkpoints/round-00000", sha256="0" * 64)
    policy = ServedPolicy(
        endpoints=(),
        model="policy@00000-00000000",
        weight_version=0,
        parameters_digest="0" * 64,
        tokenizer_digest="0" * 64,
        chat_template_digest="0" * 64,
        checkpoint=checkpoint,
    )
    random = np.random.default_rng(0)
    groups = run.config.rollouts.groups_per_round
    cuts = [groups * i // arguments.shards for i in range(arguments.shards + 1)]
    refs = []
    for shard in range(arguments.shards):
        part = [_group(random, g, arguments) for g in range(cuts[shard], cuts[shard + 1])]
        refs.append(commit_shard(run, 0, shard, part, "bench", policy))
    seal_round(run, 0, refs, [checkpoint])
    return {}


def _group(random, index: int, arguments: argparse.Namespace):
    import numpy as np

    from marin_rl import types

    length, prompt = arguments.tokens, arguments.tokens // 8
    now = datetime.now(UTC)
    mask = (np.arange(length) >= prompt).astype(np.int32)
    sampling = types.Sampling(max_tokens=length - prompt)
    metadata = types.InferenceMetadata(model="policy", weight_version=0, sampling=sampling)
    message = types.Message(role="user", content=f"question {index}")
    turn = types.Turn(
        role="assistant",
        content="answer " * 64,
        start=prompt,
        end=length,
        inference_metadata=metadata,
    )
    rollouts = tuple(
        types.Rollout(
            rollout_id=f"bench/00000/{index:06d}/{i:03d}",
            index_in_group=i,
            status="complete",
            reward=float(random.integers(0, 2)),
            token_ids=random.integers(0, 150_000, length, dtype=np.int32),
            loss_mask=mask,
            logprobs=(-random.exponential(0.5, length) * mask).astype(np.float32),
            policy_version_min=0,
            policy_version_max=0,
            n_prompt_tokens=prompt,
            n_completion_tokens=length - prompt,
            sampling=sampling,
            turns=(types.Turn(role="user", content=message.content), turn),
            timing=types.Timing(started_at=now, finished_at=now),
        )
        for i in range(arguments.group_size)
    )
    example = types.Example(
        environment="bench",
        environment_version="1",
        example_id=f"bench-{index}",
        split="train",
        seed=index,
        messages=(message,),
    )
    return types.RolloutGroup(
        group_id=f"bench/00000/{index:06d}",
        example=example,
        rollouts=rollouts,
        group_size=arguments.group_size,
    )


def ours(arguments: argparse.Namespace) -> dict[str, float]:
    """Time `build_round` on the sealed round; what it commits is removed first."""
    import shutil

    from marin_rl.batching.build import build_round
    from marin_rl.storage.runs import Run, committed, rollouts_slot

    run = Run.open(arguments.root, "bench")
    shutil.rmtree(Path(arguments.root, "bench", "batches"), ignore_errors=True)
    sealed = committed(run, rollouts_slot(0))
    assert sealed is not None
    return _measured(lambda: build_round(run, 0, sealed))


def loop(arguments: argparse.Namespace) -> dict[str, float]:
    """The same batches the plain way: read everything, then one iteration per rollout."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    shards = sorted(Path(arguments.root, "bench", "rollouts", "round-00000").glob("shard-*"))
    columns = ["rollout_id", "group_id", "reward", "token_ids", "loss_mask", "logprobs"]
    target = Path(arguments.root, "loop.parquet")
    names = ("token_ids", "loss_mask", "segment_ids", "positions")
    floats = ("policy_logprobs", "advantages", "returns")

    def work() -> None:
        table = pa.concat_tables(pq.read_table(path, columns=columns) for path in shards)
        groups: dict[str, list[float]] = {}
        ids, rewards = table["group_id"].to_pylist(), table["reward"].to_pylist()
        for group, reward in zip(ids, rewards, strict=True):
            groups.setdefault(group, []).append(reward)
        arrays: dict[str, list[np.ndarray]] = {name: [] for name in (*names, *floats)}
        length = max(len(row) for row in table["token_ids"])
        for i in range(table.num_rows):
            others = groups[ids[i]]
            if len(set(others)) == 1:
                continue
            baseline = (sum(others) - rewards[i]) / (len(others) - 1)
            values = {
                name: table[column][i].values.to_numpy()
                for name, column in (
                    ("token_ids", "token_ids"),
                    ("loss_mask", "loss_mask"),
                    ("policy_logprobs", "logprobs"),
                )
            }
            count = len(values["token_ids"])
            values["segment_ids"] = np.ones(count)
            values["positions"] = np.arange(count)
            values["advantages"] = values["loss_mask"] * (rewards[i] - baseline)
            values["returns"] = values["loss_mask"] * rewards[i]
            for name, array in arrays.items():
                dtype = np.float32 if name in floats else np.int32
                row = np.zeros(length, dtype)
                row[:count] = values[name]
                array.append(row)
        stacked = {
            name: pa.FixedSizeListArray.from_arrays(pa.array(np.stack(rows).reshape(-1)), length)
            for name, rows in arrays.items()
        }
        pq.write_table(pa.table(stacked), target, compression="zstd", row_group_size=1024)

    result = _measured(work)
    target.unlink()
    return result


def _measured(work) -> dict[str, float]:
    """Seconds and CPU-seconds of `work`, peak bytes of the process, and those at its start."""
    start = _resident()
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return {
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "start": start,
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
