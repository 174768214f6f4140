"""Recorded episodes against the environment as it is now: equal, or the first difference."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollouts.scripted_pieces import TALKS
from support.fakes import FakePolicyServer, bridge, served_policy
from support.scripted_policies import call, record, tool_run
from typer.testing import CliRunner, Result

from marin_rl.cli import app
from marin_rl.config import Config, load_config
from marin_rl.environments.checks import environment_of
from marin_rl.errors import InputError
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.clients import policy_client
from marin_rl.rollouts.generate import SamplingJob, sample_groups, shard_requests
from marin_rl.rollouts.replay import replay_rollouts, round_of_rollout
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import commit_shard, seal_round
from marin_rl.types import Message, RolloutGroup, ServedPolicy

DIGEST = "ab" * 32
MODEL = served_model_id("policy", 0, DIGEST)
ENVIRONMENT = (
    TALKS
    + """
        if self.turns == 3:
            return StepResult(done=True, **({"reward": 1.0} if "1" in turn.content else {}))
        if self.turns == 2 and "?" in turn.content and self.example.seed % 2:
            raise KeyError("who knows")
        return StepResult(messages=(Message(role="user", content=f"again {turn.content}"),))
"""
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "words.py").write_text(ENVIRONMENT)
    (folder / "run.yaml").write_text(
        "run_id: words\nrounds: 1\nroot: " + str(folder / "runs") + "\n"
        "environment: {name: words.py:Talks}\n"
        "policy: {init: random, context_length: 4096}\n"
        "batching: {length_buckets: [4096]}\n"
        "rollouts: {groups_per_round: 4, group_size: 3, shards_per_round: 1}\n"
        "sampling: {max_tokens: 64}\nevaluation: {examples: 1}\n"
    )
    return load_config(str(folder / "run.yaml"))


@pytest.fixture(scope="module")
def played(config: Config) -> tuple[Run, ServedPolicy, list[RolloutGroup]]:
    """Groups of a round, sampled from a scripted server."""
    run = Run.create_or_open(config)
    with FakePolicyServer(MODEL) as server:
        policy = served_policy(server.url, MODEL, parameters_digest=DIGEST)
        environment = environment_of(config)
        progress = ProgressEvent(run_id="words", stage="generate", round=0)
        job = SamplingJob(
            config=config, policy=policy, environment=environment, progress=progress, bridge=bridge
        )
        requests = shard_requests(run, 0, 0, environment)
        groups = asyncio.run(sample_groups(job, requests, policy_client(config, policy)))
    return run, policy, groups


@pytest.fixture
def sealed(
    played: tuple[Run, ServedPolicy, list[RolloutGroup]], tmp_path: Path
) -> tuple[Run, ServedPolicy, list[RolloutGroup]]:
    """A run of this test alone, whose round is not committed yet."""
    run, policy, groups = played
    config = run.config.model_copy(update={"root": str(tmp_path / "runs")})
    return Run.create_or_open(config), policy, groups


def command(run: Run, *arguments: str) -> Result:
    environment = {"COLUMNS": "200"}
    return CliRunner(env=environment).invoke(
        app, ["replay-episode", "words", *arguments, "--trust", "--root", run.config.root]
    )


def seal(run: Run, policy: ServedPolicy, groups: list[RolloutGroup]) -> None:
    ref = commit_shard(run, 0, 0, groups, "f", policy)
    seal_round(run, 0, [ref], [policy.checkpoint])


def test_a_recorded_round_is_played_again(sealed):
    run, policy, groups = sealed
    seal(run, policy, groups)
    reasons = {r.finish_reason for group in groups for r in group.rollouts}
    assert reasons >= {"stop"}
    replays = replay_rollouts(run, 0)
    assert replays.equal
    assert replays.changed == {}
    assert len(replays.episodes) == 12
    assert {len(e.turns) for e in replays.episodes if e.finish_reason == "stop"} <= {4, 5}
    one = command(run, groups[1].rollouts[2].rollout_id)
    assert (one.exit_code, "1 of 1 episodes are equal" in one.output) == (0, True), one.output
    every = command(run, "--round", "0", "--json")
    report = json.loads(every.stdout)
    assert (every.exit_code, report["equal"], len(report["episodes"])) == (0, True, 12)


@pytest.mark.parametrize("what", ["message", "reward", "end", "score"])
def test_the_first_difference_is_named(sealed, what):
    """Records that are altered stand for an environment that answers otherwise now."""
    run, policy, groups = sealed
    by_step = what != "score"
    places = [
        (g, i)
        for g, group in enumerate(groups)
        for i, r in enumerate(group.rollouts)
        if r.status == "complete" and ("steps" in {c.name for c in r.reward_components}) == by_step
    ]
    g, i = places[0]
    rollout = groups[g].rollouts[i]
    turns = list(rollout.turns)
    if what == "message":
        turns[2] = replace(turns[2], content="another")
        expected = "message 1: user 'another' then, user 'again"
    elif what == "reward":
        turns[-1] = replace(turns[-1], reward=0.25)
        expected = "reward 0.25 then, 1.0 now"
    elif what == "end":
        rollout = replace(rollout, finish_reason="max_turns", status="truncated")
        expected = "done False then, True now"
    else:
        (component,) = rollout.reward_components
        changed = replace(component, value=component.value + 1)
        rollout = replace(rollout, reward_components=(changed,))
        expected = f"reward length: {changed.value!r} then, {component.value!r} now"
    members = list(groups[g].rollouts)
    members[i] = replace(rollout, turns=tuple(turns))
    altered = [*groups]
    altered[g] = replace(groups[g], rollouts=tuple(members))
    seal(run, policy, altered)
    replays = replay_rollouts(run, 0)
    (different,) = [episode for episode in replays.episodes if not episode.equal]
    assert different.rollout_id == rollout.rollout_id
    assert str(different.turns[-1].difference).startswith(expected)
    shown = command(run, "--round", "0")
    assert (shown.exit_code, "11 of 12 episodes are equal" in shown.output) == (1, True)


def test_an_environment_of_another_version_is_named(sealed):
    run, policy, groups = sealed
    older = [
        replace(group, example=replace(group.example, environment_version="0")) for group in groups
    ]
    seal(run, policy, older)
    assert replay_rollouts(run, 0).changed == {"environment version": ("0", "1")}


def test_ids_that_are_none_are_refused(sealed):
    run, policy, groups = sealed
    seal(run, policy, groups)
    with pytest.raises(InputError, match="expected the id of a rollout, such as"):
        round_of_rollout("rollout 7")
    with pytest.raises(InputError, match="has no rollout round-00000/group-00009/000"):
        replay_rollouts(run, 0, "round-00000/group-00009/000")


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
