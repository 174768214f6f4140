"""Rewards that compare the members of a group by their dialogues, played, replayed and rescored."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from support.scripted_policies import call, record, tool_run

from marin_rl.config import Config
from marin_rl.doctor.data import reward
from marin_rl.environments.checks import environment_of
from marin_rl.rollouts.generate import examples_of
from marin_rl.rollouts.replay import replay_rollouts, rescore_round
from marin_rl.types import Message

PAGE = (Path(__file__).parents[2] / "docs/your-environment.md").read_text(encoding="utf-8")


def configured(folder: Path, environment: str, groups: int) -> Config:
    for name in ("guess.py", "shop.py"):
        text = "".join(re.findall(rf"```python\n# [\w ]*{name}\n(.*?)```", PAGE, re.DOTALL))
        (folder / name).write_text(text)
    return tool_run(folder, yaml.safe_load(environment), groups, 3)


def test_doctor_says_that_groups_are_compared(tmp_path: Path) -> None:
    verdict = reward(configured(tmp_path, "{name: 'guess.py:Race'}", 1)).splitlines()[0]
    assert verdict == (
        "episodes of several turns: score_group compares the finished ones, and none is played here"
    )


def test_members_of_an_environment_of_a_list_are_compared_and_played_again(tmp_path: Path) -> None:
    config = configured(tmp_path, "[{name: echo}, {name: 'guess.py:Race'}]", 2)
    race = next(e for e in examples_of(config, 0, 0) if e.environment == "Race")

    def script(messages: Sequence[Message], member: int) -> str:
        guesses = len(messages) // 2
        if messages[0].content != "1-8":
            return "x"
        return race.answer or "" if guesses or member == 1 else "0"

    run, groups = record(config, script)
    (compared,) = (g for g in groups if g.example.environment == "Race")
    assert [rollout.reward for rollout in compared.rollouts] == [0.0, 1.0, 0.0]
    # three guesses of which none is right, and two that are: the score of a group is not a member's
    assert [len(rollout.turns) for rollout in compared.rollouts] == [4, 2, 4]
    replays = replay_rollouts(run, 0)
    assert replays.equal, replays
    assert replays.changed == {}
    # by itself, a member is scored with its group
    assert replay_rollouts(run, 0, compared.rollouts[0].rollout_id).equal


def test_a_function_in_trls_convention_reads_calls_of_tools(tmp_path, monkeypatch):
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": f"Buy tea {n}."}], "item": "tea"})
        for n in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "rewards.py").write_text(
        "def fewest(completions, **columns):\n"
        "    calls = [sum(len(m.get('tool_calls', ())) for m in c) for c in completions]\n"
        "    plain = all('tool_call' not in (m['content'] or '') for c in completions for m in c)\n"
        "    return [float(n == min(calls) and plain) for n in calls]\n"
    )
    options = f"{{path: {tmp_path / 'rows.jsonl'}, reward: 'rewards.py:fewest'}}"
    environment = f"{{name: 'shop.py:Shop', options: {options}}}"
    config = configured(tmp_path, environment, 1)

    def script(messages: Sequence[Message], member: int) -> str:
        buy = call("buy", item="tea")
        if len(messages) == 1:
            return ["nothing", buy, call("price", item="tea") + "\n" + buy][member]
        return "done"

    run, (group,) = record(config, script)
    assert environment_of(config).name == "Shop"
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0, 1.0]
    parts = [
        {part.name: part.value for part in rollout.reward_components} for rollout in group.rollouts
    ]
    assert parts == [{"steps": 0.0, "reward": 1.0}] + [{"steps": 1.0, "reward": 0.0}] * 2
    assert replay_rollouts(run, 0).equal
    monkeypatch.chdir(tmp_path)
    rescored = rescore_round(run, 0, "rewards.py:fewest", "again")
    assert (rescored.failed, rescored.mean_after) == (0, 1 / 3)
