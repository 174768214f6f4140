"""The view of a game that the adapter of TextArena gives, by a stand-in for the package."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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
