"""Length bias of `asynchrony.over_sampling.select`: completions that index and first_done train on.

One untrained model samples twice as many groups as a round takes; lengths differ by chance alone,
and the reward does not look at them. Prints for each way the mean length of what is trained on, of
all that was finished, and the share of sampled tokens that is not trained on.

    python bench/selection.py --rounds 4
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from machine import print_head

from flows.rl_loop import start
from flows.server import prefect_api
from marin_rl.config import load_config
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.metrics import read_metrics

RESULTS = Path(__file__).resolve().parent / "results"
WAYS = ("index", "first_done")
REWARD = """
import zlib


def score(example, completion):
    return float(zlib.crc32(completion.encode()) % 2)
"""


def configuration(folder: Path, options: argparse.Namespace) -> Path:
    """Write a configuration with its reward function and prompts."""
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    rows = (json.dumps({"prompt": f"say {number}"}) for number in range(256))
    (folder / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    model = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate_size": 64}
    tree = {
        "rounds": options.rounds,
        "root": str(folder / "runs"),
        "policy": {"init": "random", "context_length": 224, "model": model},
        "environment": {
            "name": "chat",
            "options": {"path": str(folder / "prompts.jsonl"), "reward": "rewards.py:score"},
        },
        "sampling": {"max_tokens": 192},
        "rollouts": {"groups_per_round": options.groups, "group_size": 4},
        "inference": {"engine": {"slots": 32, "chunk_steps": 8}},
        "batching": {"length_buckets": [224]},
        "training": {"learning_rate": 1e-6},
        "evaluation": {"every_rounds": 1000, "examples": 1},
        "asynchrony": {"over_sampling": {"factor": options.factor}},
    }
    path = folder / "selection.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def played(config: Path, way: str) -> list[dict[str, Any]]:
    """Play a run that selects in one way; the metrics of its rounds."""
    start(load_config(config, [f"run_id={way}", f"asynchrony.over_sampling.select={way}"]))
    return read_metrics(Run.open(str(config.parent / "runs"), way)).to_pylist()


def measured(way: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the rounds of a run."""
    trained = mean(row["train/output_length"] for row in rows)
    wasted = sum(v or 0.0 for row in rows for k, v in row.items() if k.startswith("tokens/wasted"))
    consumed = sum(row["train/output_length"] * row["rollouts/consumed"] for row in rows)
    return {
        "select": way,
        "length_trained": trained,
        "length_finished": trained - mean(row["selection/length_bias"] for row in rows),
        "length_bias": mean(row["selection/length_bias"] for row in rows),
        "tokens_wasted": wasted / (wasted + consumed),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--groups", type=int, default=16, help="groups of 4 rollouts a round")
    parser.add_argument("--factor", type=float, default=2.0, help="groups sampled for each taken")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    options = parser.parse_args()
    print_head()
    folder = Path(tempfile.mkdtemp(prefix="selection-"))
    try:
        config = configuration(folder, options)
        with prefect_api():
            results = [measured(way, played(config, way)) for way in WAYS]
    finally:
        shutil.rmtree(folder)
    for result in results:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()})
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "selection.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
