"""A round that is trained on rows as other libraries publish them, from every kind of file."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.flow_runs import DEBUG

from flows.rl_loop import start
from marin_rl.config import load_config
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.batches import read_dispositions
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.upkeep.audit import audit_run

GROUP_SIZE = 4
SUMS = [(a, b) for a in range(5) for b in range(5)]
# Ends in an AssertionError, which fails the run, unless it is called as its library calls it.
REWARDS = """
def ours(example, completion):
    assert int(example.answer) < 10
    return float(len(completion))

def trl(completions, solution, **columns):
    assert len(solution) == len(completions) and isinstance(completions[0], str)
    return [float(len(text)) for text in completions]

def trl_messages(prompts, completions, ground_truth, **columns):
    assert prompts[0][0]["role"] == "user" and completions[0][0]["role"] == "assistant"
    return [float(len(messages[0]["content"])) for messages in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and int(ground_truth) < 10 and extra_info["split"] == "train"
    return {"score": float(len(solution_str))}
"""


def row(name: str, a: int, b: int) -> dict[str, Any]:
    question, answer = f"{a} plus {b} for {name}", str(a + b)
    messages = [{"role": "user", "content": question}]
    return {
        "trl": {"prompt": question, "solution": answer, "level": 1},
        "trl_messages": {"prompt": messages, "ground_truth": answer},
        "verl": {
            "data_source": "sums", "prompt": messages, "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": a},
        },
        "verifiers": {"question": question, "answer": answer, "info": {"level": 1}},
        "openrlhf": {"input": question, "label": answer},
        "open_instruct": {"messages": messages, "ground_truth": [answer], "dataset": ["sums"]},
    }[name]  # fmt: skip


def lines(folder: Path, name: str) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row(name, a, b)) + "\n" for a, b in SUMS))
    return path


def parquet(folder: Path, name: str) -> Path:
    path = folder / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist([row(name, a, b) for a, b in SUMS]), path)
    return path


def parquet_folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    for part in range(2):
        rows = [row(name, a, b) for a, b in SUMS[part::2]]
        pq.write_table(pa.Table.from_pylist(rows), folder / name / f"train-0000{part}.parquet")
    return folder / name


def saved(folder: Path, name: str) -> Path:
    datasets.Dataset.from_list([row(name, a, b) for a, b in SUMS]).save_to_disk(folder / name)
    return folder / name


FORMATS = {
    "trl": (lines, "trl"),
    "trl_messages": (parquet_folder, "trl_messages"),
    "verl": (parquet, "compute_score"),
    "verifiers": (saved, "ours"),
    "openrlhf": (lines, "ours"),
    "open_instruct": (saved, "ours"),
}


@pytest.mark.slow
def test_rows_of_every_library_are_trained_on(api: str, tmp_path: Path) -> None:
    """One run over six environments, a format each: all of their rollouts are in its batches."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    tree = yaml.safe_load(DEBUG.read_text())
    tree["environment"] = [
        {
            "name": "chat",
            "label": name,
            "options": {"path": str(write(tmp_path, name)), "reward": f"rewards.py:{function}"},
            "train_seed": 1000 * place,
            "eval_seed": 1000 * place + 500,
        }
        for place, (name, (write, function)) in enumerate(FORMATS.items())
    ]
    tree |= {"root": str(tmp_path / "runs"), "run_id": "rows", "rounds": 1}
    tree |= {"rollouts": {"groups_per_round": len(FORMATS), "group_size": GROUP_SIZE}}
    tree |= {"filters": {"zero_signal": False}, "evaluation": {"examples": 1}}
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump(tree))
    start(load_config(tmp_path / "rows.yaml"))
    run = Run.open(tree["root"], "rows")
    rows = read_dispositions(run, 0).to_pylist()
    consumed = Counter(r["environment"] for r in rows if r["disposition"] == "consumed")
    assert consumed == dict.fromkeys(FORMATS, GROUP_SIZE)
    for table in iter_shards(run, 0, ("turns", "reward")):
        for rollout in table.to_pylist():
            assert rollout["reward"] == len(rollout["turns"][-1]["content"])
    assert [report.problems for report in audit_run(run)] == [()]
