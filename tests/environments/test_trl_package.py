"""Rows, reward functions and classes of tools of TRL, with TRL itself."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from environments.test_libraries import configuration
from environments.test_tool_class import SHOP
from support.libraries import interpreter_with, site_packages
from support.scripted_policies import record

from marin_rl import run, scan_rollouts
from marin_rl.environments.tool_class import ToolClass, ToolOptions
from marin_rl.rollouts.exchange import export_rollouts
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
ANSWERS = (r"<think>2 and 2</think>\boxed{4}", r"\boxed{4}", r"<think>five</think>\boxed{5}")


def say(messages: Sequence[Message], member: int) -> str:
    """An answer for each member."""
    return ANSWERS[member]


def test_its_reward_functions_score_its_rows_and_it_reads_what_is_exported(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    libraries = Path(request.config.cache.mkdir("libraries"))
    python = interpreter_with(libraries / "trl", *PACKAGES)
    (tmp_path / "trl_rewards.py").write_text(REWARDS.format(site=str(site_packages(python))))
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    rows = [{"prompt": question, "solution": r"$\frac{8}{2}$", "n": n} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reward = [
        "trl_rewards.py:accuracy_reward",
        {"function": "trl_rewards.py:think_format_reward", "weight": 0.5},
    ]
    config = configuration(
        tmp_path, None, "chat", path=str(tmp_path / "rows.jsonl"), reward=reward, eval_fraction=0.3
    )
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
    assert seen["tools"] == shop_tools()
    assert len(seen["tools"]) > 0
    trained = configuration(
        tmp_path / "trained", None, "chat", path=str(tmp_path / "rows.jsonl"),
        reward=[f"{tmp_path}/{reward[0]}"], eval_fraction=0.3,
    )  # fmt: skip
    with run(trained) as training:
        (round_of,) = training
    assert round_of.metrics["completions/mean_length"] > 0
    rollouts = scan_rollouts(trained.root).collect()
    assert rollouts["reward"].to_list() == [0.0] * 6


def shop_tools() -> list[object]:
    """Schemas of the tools of the class, as a run offers them."""
    scope: dict[str, type] = {}
    exec(SHOP, scope)  # noqa: S102 - the page's own code
    kind = ToolClass(
        kind=scope["Shop"], arguments={}, options=ToolOptions(), turns_max=3, characters_max=1000
    )
    kind.check()
    return sorted(kind.schemas, key=lambda tool: tool["function"]["name"])
