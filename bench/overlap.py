"""Seconds a round with sampling during training (asynchrony.max_staleness) and without.

Two processes: an endpoint (`marin-rl serve`) samples, a trainer plays the run; each has a core of
its own where there are two. The same run is played in turn (max_staleness 0) and ahead (1), one
after the other, with environments that take 0, 5, … seconds to score a group. What overlap can
reach is the longer of sampling and training, which are those of the run in turn. Prints a table of
medians over the rounds after the second.

    python bench/overlap.py --latencies 0 5
"""

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from machine import print_head

from marin_rl.storage.runs import Run
from marin_rl.storage.tables.metrics import read_metrics

RESULTS = Path(__file__).resolve().parent / "results"
MARIN_RL = (sys.executable, "-m", "marin_rl")
SAMPLING = ("serve", "generate", "seal")
TRAINING = ("process", "train")
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}

REWARD = """
import time


def score(prompts, completions, **columns):
    time.sleep({latency} if any(completions) else 0)  # not in the trial before a run
    return [float(len(completion) % 7) for completion in completions]
"""


def configuration(folder: Path, options: argparse.Namespace, latency: float) -> Path:
    """Write a configuration with its reward function and prompts."""
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARD.format(latency=latency), encoding="utf-8")
    rows = (json.dumps({"prompt": f"say {number}"}) for number in range(256))
    (folder / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    tree = {
        "rounds": options.rounds,
        "root": str(folder / "runs"),
        "policy": {
            "init": "random",
            "context_length": 96,
            "model": {
                "hidden_size": options.hidden_size,
                "layers": 4,
                "heads": 4,
                "kv_heads": 2,
                "intermediate_size": 2 * options.hidden_size,
            },
        },
        "environment": {
            "name": "chat",
            "reward_timeout_s": latency + 60,
            "options": {
                "path": str(folder / "prompts.jsonl"),
                "reward": "rewards.py:score",
                "reward_workers": options.groups,
            },
        },
        "sampling": {"max_tokens": 64},
        "rollouts": {"groups_per_round": options.groups, "group_size": 8, "shards_per_round": 1},
        "batching": {"length_buckets": [96]},
        "training": {"microbatch_sequences": 16, "learning_rate": 1e-4},
        "evaluation": {"every_rounds": 1000, "examples": 1},
        "inference": {"engine": {"slots": 64}},
    }
    path = folder / "overlap.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def on_core(number: int) -> dict[str, Any]:
    """Options of a process that has one core of its own, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = {cores[number % len(cores)]} if len(cores) > 1 else set(cores)
    return {"preexec_fn": lambda: os.sched_setaffinity(0, chosen)}


@contextmanager
def endpoint(config: Path, folder: Path) -> Iterator[str]:
    """An endpoint of a process of its own that serves the policy of round 0; its URL."""
    first = [*MARIN_RL, "run", str(config), "--run-id", "first", "--rounds", "1"]
    done = subprocess.run(first, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    command = [
        *MARIN_RL, "serve", "first", "--root", str(config.parent / "runs"), "--port", "0", "--json",
        "--config", str(config), "--set", f"inference.server.update_roots=[{folder}]",
    ]  # fmt: skip
    with subprocess.Popen(command, text=True, **PIPES, **on_core(0)) as server:
        assert server.stdout is not None
        try:
            ready = next(json.loads(line) for line in server.stdout if '"ready"' in line)
            yield ready["url"]
        finally:
            server.terminate()


def played(config: Path, name: str, *changes: str) -> list[dict[str, Any]]:
    """Play a run in a process of its own; the metrics of its rounds."""
    command = [*MARIN_RL, "run", str(config), "--run-id", name]
    for change in changes:
        command += ["--set", change]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **on_core(1))
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return read_metrics(Run.open(str(config.parent / "runs"), name)).to_pylist()


def median(rounds: Sequence[dict[str, Any]], *stages: str) -> float:
    """Median over rounds of the seconds of some stages together."""
    return statistics.median(sum(row[f"timing_s/{stage}"] for stage in stages) for row in rounds)


def measured(options: argparse.Namespace, folder: Path, latency: float) -> dict[str, float]:
    """Seconds of both ways with scoring that takes `latency` seconds a group."""
    config, weights = configuration(folder, options, latency), folder / "weights"
    weights.mkdir()
    with endpoint(config, weights) as url:
        remote = (
            f"inference.endpoints=[{url}]",
            "inference.publish=update_weights_from_disk",
            f"inference.publish_root={weights}",
        )
        in_turn = played(config, "in-turn", *remote)[2:]
        ahead = played(config, "ahead", *remote, "asynchrony.max_staleness=1")[2:]
    sampling, training = median(in_turn, *SAMPLING), median(in_turn, *TRAINING)
    seconds = median(ahead, "round")
    return {
        "latency_s": latency,
        "sampling_s": sampling,
        "training_s": training,
        "in_turn_s": median(in_turn, "round"),
        "ahead_s": seconds,
        "of_the_longer": seconds / max(sampling, training),
        "of_in_turn": seconds / median(in_turn, "round"),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 rollouts a round")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 5.0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    options = parser.parse_args()
    print_head()
    os.environ.setdefault("MARIN_RL_ADMIN_KEY", secrets.token_hex())  # of endpoint and trainer
    results: list[dict[str, float]] = []
    for number, latency in enumerate(options.latencies):
        root = Path(tempfile.mkdtemp(prefix="overlap-"))
        try:
            results.append(measured(options, root / str(number), latency))
        finally:
            shutil.rmtree(root)
        print({name: round(value, 3) for name, value in results[-1].items()}, flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "overlap.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
