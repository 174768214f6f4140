"""The page's class of tools and its Episode, played by a tiny policy and played again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.scripted_policies import call, record, tool_run

from marin_rl.config import Config
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.types import Message

PAGE = (Path(__file__).parents[2] / "docs/your-environment.md").read_text(encoding="utf-8")


def configured(folder: Path, file: str, kind: str, code: str = "", **options: Any) -> Config:
    """A run of the page's file, or of `code` in it."""
    text = code or PAGE.partition(f"# {file}\n")[2].partition("```")[0]
    (folder / file).write_text(text)
    settings = {"name": f"{file}:{kind}", "turns_max": 3, "reward_timeout_s": 60}
    return tool_run(folder, settings | {"options": options}, 1, 2)


def test_the_episode_of_the_page_has_tools_and_is_played_again(tmp_path: Path) -> None:
    def script(messages: Sequence[Message], member: int) -> str:
        if len(messages) > 1:
            return messages[-1].content
        item = messages[0].content.removeprefix("What is ").removesuffix("?")
        return "nothing" if member else call("price", item=item)

    run, (group,) = record(configured(tmp_path, "store.py", "Store"), script)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
    roles = ["user", "assistant", "tool", "assistant"]
    assert [turn.role for turn in group.rollouts[0].turns] == roles
    assert replay_rollouts(run, 0).equal


@pytest.mark.slow
def test_a_tool_that_answers_otherwise_is_named_with_its_message(tmp_path: Path) -> None:
    """A price in a file outside of the run changes after the round."""
    rows, price = tmp_path / "rows.jsonl", tmp_path / "price"
    lines = [json.dumps({"prompt": f"Buy tea {n}.", "item": "tea"}) for n in range(20)]
    rows.write_text("\n".join(lines))
    price.write_text("3")
    code = PAGE.partition("# shop.py\n")[2].partition("```")[0]
    code = code.replace("return len(item)", f"return int(open({str(price)!r}).read())")

    def script(messages: Sequence[Message], member: int) -> str:
        if len(messages) == 1 and member == 0:
            return call("price", item="tea") + "\n" + call("buy", item="tea")
        return "done"

    config = configured(tmp_path, "shop.py", "Shop", code, path=str(rows))
    run, (group,) = record(config, script)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]
    assert [turn.content for turn in group.rollouts[0].turns][2:4] == ["3", "bought 1 tea"]
    assert replay_rollouts(run, 0).equal
    price.write_text("4")
    replays = replay_rollouts(run, 0)
    asked, quiet = replays.episodes
    assert (replays.equal, quiet.equal) == (False, True)
    assert [turn.difference for turn in asked.turns] == [
        None,
        "message 1: tool '3' then, tool '4' now",
    ]
