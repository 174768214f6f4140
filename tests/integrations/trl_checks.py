"""Checks of exported rollouts by TRL's own code; run by an interpreter that has TRL.

Arguments: a file of exported rollouts, and one with a class of tools, if any. Prints a line of
JSON: what TRL's data checks, reward function and schemas of tools made of them.
"""

import importlib.util
import inspect
import json
import sys
from typing import Any

from datasets import load_dataset
from transformers.utils import get_json_schema
from trl.data_utils import is_conversational
from trl.rewards import think_format_reward


def main() -> None:
    """Check, and print."""
    rows = load_dataset("json", data_files=sys.argv[1], split="train")
    found = {
        "columns": sorted(rows.column_names),
        "conversational": [is_conversational(row) for row in rows],
        "format": think_format_reward(completions=list(rows["completion"])),
        "reward": list(rows["reward"]),
        # As a `rollout_func` gives them to GRPOTrainer.
        "lengths": [
            [len(row[name]) for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")]
            for row in rows
        ],
        "tools": [get_json_schema(method) for path in sys.argv[2:] for method in tools_of(path)],
    }
    print(json.dumps(found))


def tools_of(path: str) -> list[Any]:
    """The methods that GRPOTrainer offers as tools of an environment class."""
    spec = importlib.util.spec_from_file_location("shop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    members = inspect.getmembers(module.Shop(), predicate=inspect.ismethod)
    hidden = ("reset", "get_reward")
    return [method for name, method in members if name[0] != "_" and name not in hidden]


main()
