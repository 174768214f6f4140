"""Episodes of TextArena, for `host`: the texts that a player reads and writes."""

from importlib import import_module
from typing import Any

textarena: Any = import_module("textarena")


class Library:
    """Makes a game per episode. Raises what TextArena raises for one that it lacks."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._name, self._kwargs = options["id"], options["kwargs"]
        self._players = options["players"]
        self._make().reset(num_players=self._players, seed=0)  # some need downloaded files
        self.ready: dict[str, Any] = {}

    def _make(self) -> Any:
        return textarena.make(self._name, **self._kwargs)

    def episode(self, row: dict[str, Any], seed: int) -> "Episode":
        return Episode(self._make(), self._players, seed)


begin = Library


class Episode:
    """One game. Its steps say whose turn it is, and what that player reads."""

    def __init__(self, game: Any, players: int, seed: int) -> None:
        self._game, self._players, self._seed = game, players, seed

    def start(self) -> dict[str, Any]:
        self._game.reset(num_players=self._players, seed=self._seed)
        return self._observed()

    def step(self, turn: dict[str, Any]) -> dict[str, Any]:
        done, info = self._game.step(action=turn["action"])
        if not done:
            return self._observed()
        rewards, game_info = self._game.close()
        return {
            "done": True,
            "rewards": {str(player): float(reward) for player, reward in rewards.items()},
            "info": {"step": str(info), "game": {str(k): str(v) for k, v in game_info.items()}},
            "observation": "",
            "player": -1,
        }

    def _observed(self) -> dict[str, Any]:
        """New text for the player whose turn it is; its own moves are left out."""
        # Of the game itself: some add to what the state has, and wrappers join it to one text.
        game = self._game
        while isinstance(game, textarena.Wrapper):
            game = game.env
        player, new = game.get_observation()
        texts = [text for sender, text, _ in new if sender != player]
        return {"player": player, "observation": "\n\n".join(texts), "done": False}

    def close(self) -> None:
        """Release nothing."""
