"""Numbers and texts as people read them; leaves out tables, and needs no library."""

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

TEXT_MAX = 4000  # characters of a cell or of a line

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0, width: int = 40) -> str:
    """The last `width` values as block characters between `low` and `high`."""
    span = (high - low) or 1.0
    scaled = [min(max((value - low) / span, 0.0), 1.0) for value in values[-width:]]
    return "".join(SPARKS[round(value * (len(SPARKS) - 1))] for value in scaled)


def duration(seconds: float | int) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest_s} s"
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    step = (len(items) - 1) / (count - 1)
    return [items[round(index * step)] for index in range(count)]


def size(n_bytes: float | int) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 1000 or unit == "TB":
            return f"{n_bytes:,.0f} {unit}" if unit == "B" else f"{n_bytes:,.1f} {unit}"
        n_bytes /= 1000
    raise AssertionError("unreachable")


def printable(text: str) -> str:
    """Replace control characters: models write escape sequences too, and terminals obey them."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


def shortened(text: str) -> str:
    """The printable text, cut after TEXT_MAX characters: a completion may be a megabyte."""
    left = len(text) - TEXT_MAX
    if left <= 0:
        return printable(text)
    return f"{printable(text[:TEXT_MAX])}… ({left:,} characters more: --json has them)"
