"""Games of TextArena: the view that its adapter gives, and the policy as the other player."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from integrations.chat_stand_in import chat_stand_in

from marin_rl.errors import EndpointUnavailable, RewardFault
from marin_rl.integrations.textarena import PolicyPlayer
from marin_rl.types import Example, Message, Sampling

HOST = "marin_rl.integrations.textarena_host"


class Env:
    """A game of TextArena: its observation is that of its state."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(current_player_id=0)

    def reset(self, num_players: int, seed: int) -> None:
        """Begin."""

    def get_observation(self) -> tuple[int, list[tuple[int, str, int]]]:
        return self.state.current_player_id, [(-1, "rules", 0), (0, "own move", 1), (1, "hello", 2)]


class Rounds(Env):
    """A game that adds to its state's observation, as TwoDollar does."""

    def get_observation(self) -> tuple[int, list[tuple[int, str, int]]]:
        player, messages = super().get_observation()
        return player, [*messages, (-1, "=== ROUND 1 of 20 ===", 4)]


class Wrapper(Env):
    """A wrapper that joins what it wraps to one text, as TextArena's do."""

    def __init__(self, env: Env) -> None:
        self.env = env

    def get_observation(self) -> Any:
        return 0, "one text"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package: Any = ModuleType("textarena")
    package.Wrapper = Wrapper
    package.make = lambda name: {"Plain": Env(), "Rounds": Wrapper(Wrapper(Rounds()))}[name]
    monkeypatch.setitem(sys.modules, "textarena", package)
    monkeypatch.delitem(sys.modules, HOST, raising=False)
    yield importlib.import_module(HOST)
    sys.modules.pop(HOST, None)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("Plain", "rules\n\nhello"), ("Rounds", "rules\n\nhello\n\n=== ROUND 1 of 20 ===")],
)
def test_the_model_reads_what_the_game_itself_observes(host: Any, name: str, shown: str) -> None:
    library = host.begin({"id": name, "kwargs": {}, "players": 2})
    first = library.episode({}, 3).start()
    assert first == {"player": 0, "observation": shown, "done": False}


def example(url: str | None) -> Example:
    """An example as the driver gives it to an episode; None: as it is stored."""
    sampling = asdict(Sampling(temperature=0.5, max_tokens=9, seed=4))
    policy = {"endpoints": [url], "model": "m", "sampling": sampling}
    return Example(
        environment="textarena",
        environment_version="1",
        example_id="train-0-3",
        split="train",
        seed=3,
        messages=(Message(role="user", content="play"),),
        answer=None,
        metadata={} if url is None else {"policy": policy},
    )


def moves(url: str, *texts: str) -> list[str]:
    """Moves of a player that reads the texts in order."""

    async def played() -> list[str]:
        player = PolicyPlayer(example(url), None)
        return [await player.move(text) for text in texts]

    return asyncio.run(asyncio.wait_for(played(), 60))


def test_it_keeps_a_dialogue_of_its_own_and_repeats_its_seeds() -> None:
    requests: list[list[dict[str, Any]]] = []
    for _ in range(2):
        with chat_stand_in("[1]", "[2]") as (url, bodies):
            assert moves(url, "your turn", "again") == ["[1]", "[2]"]
        requests.append(bodies)
    assert requests[0] == requests[1]
    first, second = requests[0]
    assert [first[name] for name in ("model", "temperature", "max_tokens")] == ["m", 0.5, 9]
    assert [(m["role"], m["content"]) for m in second["messages"]] == [
        ("user", "your turn"),
        ("assistant", "[1]"),
        ("user", "again"),
    ]
    assert first["seed"] != second["seed"]


def test_an_endpoint_that_fails_is_named_and_a_policy_is_needed() -> None:
    with chat_stand_in() as (url, _), pytest.raises(EndpointUnavailable, match="status 500"):
        moves(url, "your turn")
    with pytest.raises(EndpointUnavailable, match="the other player"):
        moves("http://127.0.0.1:1/v1", "your turn")
    with pytest.raises(RewardFault, match="such a game is played by a run, which has one"):
        PolicyPlayer(example(None), None)
