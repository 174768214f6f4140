"""Rows, reward functions and classes of tools of TRL, with TRL itself."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from integrations.libraries import interpreter_with, site_packages
from integrations.library_runs import configuration
from support.scripted_policies import record

from marin_rl.config import Config
from marin_rl.environments.tool_class import ToolClass, ToolOptions
from marin_rl.integrations.exchange import export_rollouts
from marin_rl.types import Message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PACKAGES = ("torch==2.13.0", "trl==1.16.0")
CHECKS = Path(__file__).with_name("trl_checks.py")
# TRL's functions as they are; its package is in another environment, which adds nothing else.
REWARDS = """
import sys

sys.path.append({site!r})
from trl.rewards import accuracy_reward, think_format_reward
"""
SHOP = '''
class Shop:
    """An environment as TRL's `environment_factory` takes it."""

    def reset(self, **row) -> str:
        self.spent = 0
        return "Buy an apple."

    def price(self, item: str) -> int:
        """Look a price up.

        Args:
            item: Name of the item.
        """
        return {"apple": 2, "pear": 3}[item]

    def buy(self, item: str, count: int = 1) -> str:
        """Buy something.

        Args:
            item: Name of the item.
            count: How many of it.
        """
        self.spent += count * self.price(item)
        return f"spent {self.spent}"

    def get_reward(self) -> float:
        return float(self.spent == 2)
'''
ANSWERS = (r"<think>2 and 2</think>\boxed{4}", r"\boxed{4}", r"<think>five</think>\boxed{5}")


def say(messages: Sequence[Message], member: int) -> str:
    """An answer for each member."""
    return ANSWERS[member]


REWARD = [
    "trl_rewards.py:accuracy_reward",
    {"function": "trl_rewards.py:think_format_reward", "weight": 0.5},
]


def scored_by_trl(folder: Path, request: pytest.FixtureRequest) -> tuple[Path, Config]:
    """TRL's interpreter, and a run of its rows that its functions score."""
    libraries = Path(request.config.cache.mkdir("libraries"))
    python = interpreter_with(libraries / "trl", *PACKAGES)
    (folder / "trl_rewards.py").write_text(REWARDS.format(site=str(site_packages(python))))
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {n} + {4 - n}?"}], "solution": "$8/2$"}
        for n in range(8)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = str(folder / "rows.jsonl")
    return python, configuration(folder, None, "chat", path=path, reward=REWARD, eval_fraction=0.3)


def test_its_reward_functions_score_its_rows_and_it_reads_what_is_exported(tmp_path, request):
    python, config = scored_by_trl(tmp_path, request)
    recorded, groups = record(config, say)
    for group in groups:
        assert [rollout.reward for rollout in group.rollouts] == [1.5, 1.0, 0.5]
    export_rollouts(recorded, "trl", tmp_path / "out.jsonl")
    (tmp_path / "shop.py").write_text(SHOP)
    done = subprocess.run(
        [python, CHECKS, tmp_path / "out.jsonl", tmp_path / "shop.py"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["conversational"] == [True] * 6
    assert seen["reward"] == [1.5, 1.0, 0.5] * 2
    assert seen["format"] == [1.0, 0.0, 1.0] * 2
    assert all(sampled == logprobs == mask for _, sampled, logprobs, mask in seen["lengths"])
    assert {"prompt", "completion", "prompt_ids", "completion_ids"} <= set(seen["columns"])
    for tool in seen["tools"]:
        del tool["function"]["return"]  # templates of models show it to no model
    assert seen["tools"] == shop_tools()
    assert len(seen["tools"]) == 2


def shop_tools() -> list[Any]:
    """Schemas of the tools of the class, as a run offers them."""
    scope: dict[str, type] = {}
    exec(SHOP, scope)
    kind = ToolClass(kind=scope["Shop"], arguments={}, options=ToolOptions())
    kind.check()
    return sorted(kind.schemas, key=lambda tool: tool["function"]["name"])
