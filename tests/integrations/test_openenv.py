"""Environments on servers that speak OpenEnv's protocol, against a small one."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from integrations.openenv_server import CALL, LOOK, NUMBER, OpenEnvServer, openenv_server

from marin_rl.config import EnvironmentConfig, pin_code
from marin_rl.environments.episode import StepResult
from marin_rl.environments.episode_pool import open_episodes
from marin_rl.environments.registry import construct
from marin_rl.errors import ConfigError, EndpointUnavailable, InputError, RewardFault
from marin_rl.integrations.openenv import OpenEnv
from marin_rl.types import ToolCall, Turn

T = TypeVar("T")


def environment_at(url: Any, **options: Any) -> OpenEnv:
    """The environment, with what its server says."""
    made = construct(EnvironmentConfig(name="openenv", options={"url": url, **options}))
    assert isinstance(made, OpenEnv)
    made.load_examples()
    return made


def said(text: str) -> Turn:
    """A turn of the model."""
    return Turn(role="assistant", content=text)


def called(name: str, arguments: str) -> Turn:
    """A turn that calls a tool."""
    call = ToolCall(id="c1", name=name, arguments=arguments)
    return Turn(role="assistant", content="", tool_calls=(call,))


async def played(environment: OpenEnv, *turns: Turn, seed: int = 3) -> tuple[str, list[StepResult]]:
    """The first message of an episode, and the answers to its turns."""
    episode = environment.episode(environment.example(seed, 0, "train"))
    try:
        messages, _ = await episode.start()
        return messages[-1].content, [await episode.step(turn) for turn in turns]
    finally:
        await episode.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result, within the time of a test."""
    return asyncio.run(asyncio.wait_for(work, 60))


def test_a_completion_is_the_only_text_of_an_action():
    with openenv_server() as server:
        environment = environment_at(f"{server.url}/", instructions="Guess.")
        first, answers = run(played(environment, said("1"), said("x"), said("3")))
    assert first == "Guess.\n\ngame 3"
    assert environment.version == "1+openenv.guess.1.2"
    assert environment.tools_offered() == []
    words = [answer.messages[0].content for answer in answers[:2]]
    assert words == ["higher", "no action: message: expected digits"]
    assert [answer.reward for answer in answers] == [None, 0.0, 1.0]
    assert [answer.done for answer in answers] == [False, False, True]


def test_another_action_is_a_call_of_a_tool():
    with openenv_server(action=NUMBER) as server:
        environment = environment_at(server.url)
        (tool,) = environment.tools_offered()
        turns = [said("3"), called("act", '{"number": 1}'), called("go", "{}")]
        turns += [called("act", "[1]"), called("act", '{"number": 3}')]
        _, answers = run(played(environment, *turns))
    assert tool["function"]["name"] == "act"
    assert tool["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}
    assert [answer.messages[0].content for answer in answers[:4]] == [
        "expected a call of act",
        "higher",
        "error: there is no tool go: there are act",
        "error: expected arguments by name, found [1]",
    ]
    assert answers[1].messages[0].tool_call_id == "c1"
    assert (answers[4].done, answers[4].reward) == (True, 1.0)


def test_tools_of_mcp_are_offered_and_called():
    with openenv_server(tools=(LOOK,)) as server:
        environment = environment_at(server.url)
        assert environment.tools_offered()[0]["function"] == {
            "name": "look",
            "description": "Look.",
            "parameters": LOOK["inputSchema"],
        }
        _, answers = run(played(environment, called("look", '{"far": true}'), said("3")))
        assert answers[0].messages[0].content == "near 3"
        assert (answers[0].reward, answers[1].reward) == (None, 1.0)


def test_an_environment_of_tools_alone_steps_by_them():
    with openenv_server(action=CALL, tools=(LOOK,)) as server:
        environment = environment_at(server.url)
        _, answers = run(played(environment, called("look", "{}"), said("done")))
    assert answers[0].messages[0].content == "3"
    assert [(answer.reward, answer.done) for answer in answers] == [(1.0, False), (None, True)]


def test_rows_are_arguments_of_reset(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"low": {n}}}\n' for n in range(4)))
    with openenv_server() as server:
        environment = environment_at(server.url, path=str(rows), reset={"level": 2})
        assert (environment.size, environment.eval_size) == (3, 1)
        run(played(environment, seed=4))
        assert server.resets == [{"seed": 4, "level": 2, "low": 1}]
        held_out = environment.example(7, 0, "eval")
        assert held_out.metadata["reset"] == {"level": 2, "low": 3}
        seeds = environment_at(server.url, seeds=2)
        assert seeds.example(0, 0, "train") == seeds.example(0, 2, "train")


def group(server: OpenEnvServer, *, size: int, **options: Any) -> list[float | None]:
    """Rewards of a group whose members all start before any of them acts."""

    async def played_out() -> list[float | None]:
        environment = environment_at(server.url, **options)
        episodes = [environment.episode(environment.example(3, 0, "train")) for _ in range(size)]

        async def member(number: int) -> float | None:
            try:
                await episodes[number].step(said("1"))
                return (await episodes[number].step(said("3"))).received
            finally:
                await episodes[number].close()

        await asyncio.gather(*(episode.start() for episode in episodes))
        return await asyncio.gather(*map(member, range(size)))

    return run(played_out())


def test_members_wait_for_a_server_with_fewer_sessions():
    with openenv_server(sessions_max=2) as server:
        assert group(server, size=6) == [1.0] * 6
        assert server.most == 2
        assert server.refused > 0


def test_servers_share_the_episodes():
    with openenv_server() as first, openenv_server() as second:
        environment = environment_at([first.url, second.url])
        for seed in range(4):
            run(played(environment, seed=seed))
        assert [len(server.resets) for server in (first, second)] == [2, 2]


def test_a_server_that_stays_full_is_no_fault_of_the_model():
    with openenv_server(sessions_max=0) as server:
        environment = environment_at(server.url, capacity_wait_s=0.2)
        with pytest.raises(
            EndpointUnavailable, match=r"had room for an episode in 0\.2 s.*raise its"
        ):
            run(played(environment))


def test_an_environment_without_seeds_cannot_be_compared():
    with (
        openenv_server(sessions_max=9, seeded=False) as server,
        pytest.raises(RewardFault, match="expected an environment whose reset takes `seed`"),
    ):
        group(server, size=2)


def test_an_error_of_the_environment_ends_the_episode():
    with openenv_server() as server:
        environment = environment_at(server.url)
        with pytest.raises(RewardFault, match="step: EXECUTION_ERROR: out of order"):
            run(played(environment, said("raise")))
        assert server.live == 0


def test_a_server_that_is_gone_is_named():
    with openenv_server() as server:
        environment = environment_at(server.url)
    with pytest.raises(InputError, match=r"no OpenEnv server answers at .*; start it"):
        environment_at(server.url)
    with pytest.raises(EndpointUnavailable, match="cannot be reached"):
        run(played(environment))


@pytest.mark.slow
def test_waiting_for_room_takes_no_time_of_a_step(tmp_path: Path):
    """A session is free later than a step may take, where a function of the user has a process."""
    (tmp_path / "text.py").write_text("def text(observation, info):\n    return 'at ' + str(1)\n")
    limit_s = 3.0
    with openenv_server(sessions_max=1) as server:
        options = {"url": server.url, "to_text": "text.py:text"}
        tree = pin_code({"environment": {"name": "openenv", "options": options}}, tmp_path)
        config = EnvironmentConfig(**tree["environment"], step_timeout_s=limit_s)
        environment = construct(config)
        environment.load_examples()
        examples = [environment.example(seed, 0, "train") for seed in (3, 4)]
        first, second = (open_episodes(environment, config, e, 1)[0] for e in examples)

        async def play() -> float | None:
            await first.start()
            began = time.monotonic()
            waiting = asyncio.create_task(second.start())
            while time.monotonic() - began < 1.5 * limit_s or not server.refused:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # time passes, and sets no event
            assert not waiting.done()
            await first.close()
            await waiting
            result = await second.step(said("4"))
            await second.close()
            return result.received

        assert run(play()) == 1.0


def test_another_server_is_refused():
    with openenv_server() as server, openenv_server(action=NUMBER) as other:
        with pytest.raises(ConfigError, match="expected servers of one environment"):
            environment_at([server.url, other.url])
        with pytest.raises(ConfigError, match=r"action of guess \(message\), found 'number'"):
            environment_at(server.url, action_field="number")
    with pytest.raises(ConfigError, match="expected http://HOST"):
        environment_at("localhost:8000")
