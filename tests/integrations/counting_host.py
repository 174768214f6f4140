"""A library for tests of the host, as its adapter: an option or an action is what happens."""

import asyncio
import os
import random
import sys
import time
from importlib import import_module
from typing import Any


def begin(options: dict[str, Any]) -> "Library":
    if options.get("refuse"):
        raise ValueError("no such game")
    if options.get("quit"):
        sys.exit(3)
    os.write(1, b"a library that prints\n")
    return Library()


class Library:
    """Has a row for each number, and episodes that do what they are asked to."""

    def __init__(self) -> None:
        ours = [name for name in sys.modules if "marin" in name]
        self.ready = {"sizes": {"train": 3}, "packages": ours}

    def row(self, split: str, index: int) -> dict[str, Any]:
        return {"split": split, "index": index}

    def episode(self, row: dict[str, Any], seed: int) -> "Episode":
        return Episode(row)

    def score(self, episodes: "list[Episode]") -> list[dict[str, Any]]:
        """Compare the members of a group: the one that counted furthest is the best."""
        most = max(episode.counted for episode in episodes)
        return [
            {"reward": float(e.counted == most), "metrics": {"counted": float(e.counted)}}
            for e in episodes
        ]


class Episode:
    """A turn names one of the methods below."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._row = row
        self.counted = 0

    def start(self) -> Any:
        return self._row

    def step(self, turn: dict[str, Any]) -> Any:
        return getattr(self, turn["do"].replace(" ", "_"))()

    def close(self) -> None:
        return None

    def count(self) -> int:
        self.counted += 1
        return self.counted

    async def draw(self) -> float:
        return random.random()

    async def draw_later(self) -> list[float]:
        first = random.random()
        await asyncio.sleep(0.02)
        return [first, await asyncio.ensure_future(self.draw())]

    def bars(self) -> bool:
        return not import_module("datasets").are_progress_bars_disabled()

    def fail(self) -> None:
        raise ValueError("no such move") from KeyError("left")

    def infinite(self) -> float:
        return float("nan")

    def object(self) -> Any:
        return object()

    def exit(self) -> None:
        sys.exit("given up")

    def end(self) -> None:
        os._exit(7)

    def block(self) -> None:
        time.sleep(1000)

    async def wait(self) -> None:
        await asyncio.sleep(1000)
