"""Episodes in processes: what hangs, dies or lies costs its own episode, and no one else's time."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cases import others_slow

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.checks import make_environment
from marin_rl.environments.episode import StepResult
from marin_rl.environments.episode_pool import EpisodePool, PlayedEpisode
from marin_rl.errors import EnvironmentTimeout, InputError, RewardFault, ToolFault
from marin_rl.types import Example, Message, Turn

ENVIRONMENT = """
import asyncio, os, random, re, signal, threading, time
import numpy as np
from marin_rl.isolated.worker import uncharged
from marin_rl.environments.base_environment import BaseEnvironment
from marin_rl.environments.episode import StepResult
from marin_rl.errors import RewardFault, ToolFault
from marin_rl.types import Message, RewardComponent

GATES = {}

class Talk(BaseEnvironment):
    def example(self, seed, index, split):
        return self.make_example("say", "x", seed=seed, index=index, split=split)

    def score(self, example, completion):
        return (RewardComponent(name="none", value=0.0),)

    def episode(self, example):
        return Talking(example)

class Forked(Talk):
    replayable = False

class Broken(Talk):
    def load_scorer(self):
        raise ImportError("no such library")

def say(text, **more):
    return StepResult(messages=(Message(role="user", content=str(text)),), **more)

class Unreadable(Exception):
    def __str__(self): raise ValueError

class OwnFault(RewardFault):
    def __init__(self, one, two): super().__init__(f"of {one} and {two}")

class Talking:
    def __init__(self, example):
        self.example, self.turns = example, 0

    def start(self):
        return self.example.messages, ()

    async def step(self, turn):
        self.turns += 1
        word, _, rest = turn.content.partition(" ")
        match word:
            case "raise": raise KeyError("who knows")
            case "tool": raise ToolFault("the calculator is gone")
            case "hang": time.sleep(3600)
            case "hang in C": re.match(r"(a+)+$", "a" * 60 + "b")
            case "stubborn":
                while True:
                    try:
                        await asyncio.sleep(3600)
                    except asyncio.CancelledError:
                        pass
            case "wait": await asyncio.sleep(float(rest))
            case "child":
                async def sleeper(): time.sleep(3600)
                await asyncio.gather(sleeper())
            case "block" if rest != "freely": time.sleep(float(rest))
            case "die": os.kill(os.getpid(), 9)
            case "exit": os._exit(3)
            case "leave": raise SystemExit(1)
            case "surrogate": raise RuntimeError("\\ud800")
            case "unreadable": raise Unreadable
            case "misfit": raise OwnFault(1, 2)
            case "base": raise BaseException("of all")
            case "generator": raise GeneratorExit
            case "cancelled": raise asyncio.CancelledError("by itself")
            case "interrupt": raise KeyboardInterrupt
            case "signal": signal.raise_signal(signal.SIGINT)
            case "task":
                async def interrupted(): raise KeyboardInterrupt
                await asyncio.gather(interrupted())
            case "close": os.closerange(3, 4096)
            case "stop": asyncio.get_running_loop().stop()
            case "memory": return say(len(bytes(2**34)))
            case "large": return say("x" * (5 << 20))
            case "pid": return say(os.getpid())
            case "print": print("no answer", flush=True)
            case "seed":
                random.seed(0)
                np.random.seed(0)
            case "fork":
                child = os.fork()
                if child == 0:
                    print("a child", flush=True)
                    os._exit(0)
                os.waitpid(child, 0)
            case "split": os.fork()  # and the child goes on as if it were the process
            case "callback":
                asyncio.get_running_loop().call_soon(time.sleep, 3600)
                await asyncio.sleep(3600)
            case "free":
                with uncharged():
                    await asyncio.sleep(float(rest))
            case "block" if rest == "freely":
                with uncharged():
                    time.sleep(3600)
            case "draw": return say(f"{random.random()} {np.random.rand()}")
            case "slow draw":
                await asyncio.sleep(0.001)
                return say(random.random())
            case "odd": return say("x", info={"thing": object()})
            case "nothing": return None
            case "logprobs": return say(turn.logprobs)
            case "meet":  # waits until as many episodes are here
                gate = GATES.setdefault(rest, [asyncio.Event(), 0])
                gate[1] += 1
                if gate[1] == int(rest):
                    gate[0].set()
                await gate[0].wait()
            case "clock": return say(time.time())
        return say(f"{self.turns} {turn.content}", reward=0.5)

    async def close(self):
        pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("talk")
    (folder / "talk_environment.py").write_text(ENVIRONMENT)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def config_of(name: str = "Talk", **settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig(name=f"talk_environment:{name}", **settings)


def pool_of(config: EnvironmentConfig) -> EpisodePool:
    return EpisodePool(make_environment(config), config)


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[EpisodePool]:
    """A pool whose time limit no busy machine reaches."""
    pool = pool_of(config_of(step_timeout_s=300.0))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def impatient(folder: Path) -> Iterator[EpisodePool]:
    """A pool with a short time limit, for what never ends."""
    pool = pool_of(config_of(step_timeout_s=2.0))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def example(folder: Path) -> Example:
    return make_environment(config_of()).example(7, 0, "train")


def turn(text: str, **more: Any) -> Turn:
    return Turn(role="assistant", content=text, **more)


async def say(episode: PlayedEpisode, *texts: str) -> list[str | RewardFault]:
    """Replies of an episode, up to the first fault, which is the last of them."""
    replies: list[str | RewardFault] = []
    for text in texts:
        try:
            result = await episode.step(turn(text))
        except RewardFault as fault:
            return [*replies, fault]
        replies.append(result.messages[0].content)
    return replies


async def kill_workers(pool: EpisodePool) -> None:
    """SIGKILL from outside, which no episode is to blame for."""
    for process_id in pool.process_ids:
        os.kill(process_id, signal.SIGKILL)
    while pool.process_ids:  # noqa: ASYNC110 - the end of a process sets no event
        await asyncio.sleep(0.01)


async def talk(pool: EpisodePool, example: Example, *texts: str) -> list[str | RewardFault]:
    episode = pool.open(example)
    await episode.start()
    replies = await say(episode, *texts)
    try:
        await episode.close()
    except RewardFault as fault:
        replies.append(fault)
    return replies


def talks(pool: EpisodePool, example: Example, *dialogues: str) -> list[list[str | RewardFault]]:
    """Replies to dialogues that go on side by side; turns are parted by bars."""

    async def all_of() -> list[list[str | RewardFault]]:
        return await asyncio.gather(*(talk(pool, example, *d.split("|")) for d in dialogues))

    return asyncio.run(all_of())


def test_an_episode_answers_from_another_process(pool: EpisodePool, example: Example) -> None:
    async def play() -> None:
        episode = pool.open(example)
        start = await episode.start()
        assert (start.messages, start.tools) == (example.messages, ())
        said = await episode.step(turn("hello"))
        expected = Message(role="user", content="1 hello")
        assert said == StepResult(messages=(expected,), reward=0.5)
        assert await say(episode, "pid") != [str(os.getpid())]
        await episode.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ("raise", RewardFault, "KeyError: 'who knows' (talk_environment.py, line "),
        ("tool", ToolFault, "the calculator is gone"),
        ("leave", RewardFault, "SystemExit: 1"),
        ("surrogate", RewardFault, r"RuntimeError: \ud800 (talk_environment.py"),
        ("unreadable", RewardFault, "Unreadable: a text that cannot be read (ValueError)"),
        ("misfit", RewardFault, "of 1 and 2"),
        ("base", RewardFault, "BaseException: of all"),
        ("generator", RewardFault, "GeneratorExit: "),
        ("cancelled", RewardFault, "CancelledError: by itself"),
        ("interrupt", RewardFault, "KeyboardInterrupt: "),
        ("signal", RewardFault, "KeyboardInterrupt: "),
        ("task", RewardFault, "RuntimeError: KeyboardInterrupt in a task"),
        ("odd", RewardFault, "TypeError: "),
        ("nothing", RewardFault, "ValueError: expected a StepResult of a step, found None"),
        ("large", RewardFault, "cannot be sent: an answer over 4194304 bytes"),
    ],
)
def test_a_fault_costs_its_own_episode(pool, example, said, kind, message):
    before = pool.process_ids
    (replies,) = talks(pool, example, f"hello|{said}|more")
    assert replies[0] == "1 hello"
    assert type(replies[1]) is kind
    assert message in str(replies[1])
    assert before in ([], pool.process_ids)


@pytest.mark.parametrize(
    ("said", "message"),
    others_slow(
        [
            ("die", "the step of an episode ended its process (signal 9)"),
            ("exit", "ended its process (exit status 3)"),
            ("close", "ended its process (exit status 1)"),
            ("memory", "ended its process (over 8192 MiB of memory)"),
        ],
        first=1,
        several=True,
    ),
)
def test_a_dead_process_is_replaced_and_its_other_episodes_go_on(pool, example, said, message):
    """The third waits inside a step meanwhile; it is replayed, too, and meets no one."""

    async def play() -> None:
        one, other, waiting = (pool.open(example) for _ in range(3))
        for episode in (one, other, waiting):
            await episode.start()
        (first, drawn), _ = await asyncio.gather(say(other, "hello", "draw"), say(one, "hello"))
        step = asyncio.create_task(say(waiting, "hello", "wait 0.5"))
        (fault,) = await say(one, said)
        assert isinstance(fault, RewardFault)
        assert message in str(fault)
        assert (first, await say(other, "again")) == ("1 hello", ["3 again"])
        assert await step == ["1 hello", "2 wait 0.5"]
        again = pool.open(example)
        await again.start()
        assert await say(again, "hello", "draw") == ["1 hello", drawn]
        for episode in (one, other, waiting, again):
            await episode.close()

    asyncio.run(play())


@pytest.mark.slow
@pytest.mark.parametrize(
    "said", others_slow(["hang in C", "child", "stubborn", "wait 3600"], "hang in C")
)
def test_a_hanging_step_is_a_timeout_for_itself_alone(impatient, example, said):
    hanging, other = talks(impatient, example, f"hello|{said}", "hello|wait 0.1|bye")
    assert isinstance(hanging[1], EnvironmentTimeout)
    assert str(hanging[1]) == "the step of an episode took longer than 2 s"
    assert other == ["1 hello", "2 wait 0.1", "3 bye"]


@pytest.mark.slow
def test_the_time_of_others_is_not_charged(impatient: EpisodePool, example: Example) -> None:
    """Six slices of half a second each, in one process, while one waits for a moment."""
    began = time.monotonic()
    *_, waiting = talks(impatient, example, *["block 0.5"] * 6, "wait 0.1")
    assert time.monotonic() - began > 3.0
    assert waiting == ["1 wait 0.1"]


@pytest.mark.slow
def test_waiting_for_others_is_not_charged_and_blocking_is(impatient, example):
    waiting, blocking = talks(
        impatient, example, "free 7|hello", "freely"
    )  # with nothing else to run
    assert waiting == ["1 free 7", "2 hello"]
    assert blocking == ["1 freely"]
    for said in ("block freely", "callback"):  # the latter blocks the event loop by itself
        (blocked,) = talks(impatient, example, said)
        assert isinstance(blocked[0], EnvironmentTimeout)


def test_prints_children_and_a_stopped_loop_are_no_answers(pool, example):
    replies = talks(pool, example, "print|fork|split|stop|bye", "hello|fork")
    assert replies == [["1 print", "2 fork", "3 split", "4 stop", "5 bye"], ["1 hello", "2 fork"]]


def test_a_seed_of_the_global_generator_is_no_other_episodes(pool, example):
    seeding, drawing = talks(pool, example, "seed|draw|draw", "hello|draw|draw")
    assert drawing == talks(pool, example, "hello|draw|draw")[0]
    assert seeding[1:] == talks(pool, example, "seed|draw|draw")[0][1:]
    assert seeding[1:] != drawing[1:]


@pytest.mark.parametrize(
    ("environment", "before", "reply"),
    [
        ("Talk", ("hello", "draw", "again"), "4 more"),
        ("Talk", ("hello", "clock"), "replayed it answers turn 2 otherwise"),
        ("Forked", (), "it cannot be replayed, as its environment says"),
    ],
    ids=["costs nothing", "answers otherwise", "has effects outside"],
)
def test_an_episode_whose_process_is_killed_from_outside_begins_again(
    folder: Path, example: Example, environment: str, before: tuple[str, ...], reply: str
) -> None:
    pool = pool_of(config_of(environment, step_timeout_s=300.0))

    async def play() -> None:
        episode = pool.open(example)
        await episode.start()
        assert len(await say(episode, *before)) == len(before)
        await kill_workers(pool)
        (answer,) = await say(episode, "more")
        assert reply in str(answer)
        await episode.close()

    asyncio.run(play())
    pool.close()


def test_global_random_numbers_are_the_episodes_own(pool: EpisodePool, example: Example) -> None:
    """However many draw, and whenever they wait: members of a group draw alike."""
    alone, *side_by_side = talks(pool, example, *["draw|slow draw|draw|slow draw"] * 20)
    assert len(set(map(str, alone))) == 4
    assert all(drawn == alone for drawn in side_by_side)


def test_many_episodes_wait_in_one_process(pool: EpisodePool, example: Example) -> None:
    """None gets further before all of them have come."""
    replies = talks(pool, example, *["meet 100|pid"] * 100)
    assert all(reply[0] == "1 meet 100" for reply in replies)
    assert len({reply[1] for reply in replies}) == 1


def test_an_environment_that_does_not_load_is_named(folder: Path, example: Example) -> None:
    pool = pool_of(config_of("Broken"))
    with pytest.raises(InputError, match="cannot play episodes: ImportError: no such library"):
        talks(pool, example, "hello")
    pool.close()
