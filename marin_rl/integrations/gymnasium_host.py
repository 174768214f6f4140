"""Episodes of gymnasium, for `host`: observations and actions as JSON."""

from importlib import import_module
from typing import Any

import numpy as np

gymnasium: Any = import_module("gymnasium")

SEED_PERIOD = 2**31


class Library:
    """Makes an environment per episode. Raises what gymnasium raises for one that it lacks."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._name, self._kwargs = options["id"], options["kwargs"]
        environment = self._make()
        space = environment.action_space
        described = {"space": str(space), "kind": type(space).__name__}
        if described["kind"] == "Discrete":
            described |= {"n": int(space.n), "start": int(space.start)}
        self.ready = {"actions": described}
        environment.close()

    def _make(self) -> Any:
        return gymnasium.make(self._name, **self._kwargs)

    def episode(self, row: dict[str, Any], seed: int) -> "Episode":
        return Episode(self._make(), seed % SEED_PERIOD)


begin = Library


class Episode:
    """One environment, from its reset to its end."""

    def __init__(self, environment: Any, seed: int) -> None:
        self._environment, self._seed = environment, seed

    def start(self) -> dict[str, Any]:
        self._environment.action_space.seed(self._seed)
        observation, info = self._environment.reset(seed=self._seed)
        return {"observation": _plain(observation), "info": _plain(info)}

    def step(self, turn: dict[str, Any]) -> dict[str, Any]:
        space = self._environment.action_space
        action = _action(space, turn["action"])
        if not space.contains(action):
            return {"refused": f"{space} has no such action"}
        observation, reward, terminated, truncated, info = self._environment.step(action)
        return {
            "observation": _plain(observation),
            "reward": float(reward),
            "done": bool(terminated or truncated),
            "info": {**_plain(info), "truncated": bool(truncated)},
        }

    def close(self) -> None:
        self._environment.close()


def _action(space: Any, value: Any) -> Any:
    """Convert an action from JSON to the dtype and shape of its space."""
    kind = type(space).__name__
    if kind in ("Text", "Discrete"):
        return value
    if kind == "Tuple" and isinstance(value, list) and len(value) == len(space.spaces):
        return tuple(map(_action, space.spaces, value))
    if kind == "Dict" and isinstance(value, dict):
        return {name: _action(space[name], value[name]) for name in value if name in space.spaces}
    try:
        return np.asarray(value, dtype=space.dtype).reshape(space.shape)
    except (TypeError, ValueError):
        return value


def _plain(value: Any) -> Any:
    """A value as JSON has it; what cannot be, as text."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
