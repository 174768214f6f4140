"""`reward.custom_reward_function` of verl: the reward of an environment of marin-rl."""

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = str(Path(__file__).resolve().parent)
if FOLDER not in sys.path:  # verl loads this file by its path
    sys.path.insert(0, FOLDER)

from marin_rl_relay import relay  # noqa: E402 - its folder is on the path since the line above


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """The reward of a completion; a fault of the reward function counts 0, and is counted.

    The row's example says what is scored: the other arguments are those that verl passes.
    """
    scored = relay().score(json.loads(extra_info["example"]), solution_str)
    if scored["fault"] is not None:
        sys.stderr.write(f"marin-rl: {data_source}: {scored['fault']}\n")
    return {"score": scored["reward"], "fault": float(scored["fault"] is not None)}
