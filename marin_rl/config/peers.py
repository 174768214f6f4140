"""Keys of TRL, verl, prime-rl and OpenRLHF with those that do the same here, from peers.csv.

The tables of docs/coming-from-trl-verl.md are this one; errors answer with it. `closest` suggests a
name for a mistyped one, and none that says something else.
"""

import csv
import difflib
import re
from collections.abc import Collection, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

PAGE = "docs/coming-from-trl-verl.md"
SHOWN_MAX = 8

_NAME = re.compile(r"`(?:--)?([A-Za-z]\w*(?:\.\w+)*)(?:: ([^`]+))?`")
# Words of names that are close as texts, and say something else.
_APART = frozenset(
    ("min", "max", "low", "high", "beta1", "beta2", "first", "last", "positive", "negative")
)


class PeerKey(NamedTuple):
    """A key of another library, its value if only one counts, and our key for it."""

    key: str
    value: str
    here: str


def peer_rows() -> list[dict[str, str]]:
    """Return the rows of the table: library, theirs, here, note, as Markdown."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def _peer_keys() -> tuple[PeerKey, ...]:
    keys: list[PeerKey] = []
    for row in peer_rows():
        # Of a product or a sum, the factor that has no row of its own comes first.
        names, here = _NAME.findall(re.split(r" [\u00d7+] ", row["theirs"])[0]), row["here"]
        separate = here.split(", ")
        # Side by side where both lists are as long.
        each = separate if len(separate) == len(names) else [here] * len(names)
        keys += (PeerKey(name, value, own) for (name, value), own in zip(names, each, strict=True))
    return tuple(keys)


def peer_hint(key: str, value: Any) -> str:
    """Return what an unknown key, or each key of an unknown section, is here; else nothing."""
    if isinstance(value, Mapping) and value:
        hints = [peer_hint(f"{key}.{name}", each) for name, each in value.items()]
        return "; ".join([hint for hint in hints if hint][:SHOWN_MAX])
    best = _matches(key, value)
    if not best:
        return ""
    here = " or ".join(dict.fromkeys(match.here.replace("`", "") for match in best))
    if here.rpartition(".")[2] == key.rpartition(".")[2]:
        return f"did you mean {here}?"
    is_key = best[0].here.startswith("`")
    return f"{key} is {here} here ({PAGE})" if is_key else f"{key}: {here} ({PAGE})"


def _matches(key: str, value: Any) -> list[PeerKey]:
    """Keys of the table that end as `key` does, in as many parts as any: all values of one."""
    parts = key.split(".")
    shared: dict[PeerKey, int] = {}
    for peer in _peer_keys():
        pairs = zip(reversed(parts), reversed(peer.key.split(".")), strict=False)
        shared[peer] = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    longest = max(shared.values())
    best = [peer for peer, count in shared.items() if count == longest > 0]
    # A section of ours with a name of theirs: the one that is in that section here.
    for end in range(1, len(parts)):
        best = [p for p in best if p.here.startswith(f"`{'.'.join(parts[:end])}.")] or best
    if not best:
        return []
    first = min(best, key=lambda peer: peer.key.count("."))
    values = [peer for peer in best if peer.key == first.key]
    return [peer for peer in values if peer.value == str(value)] or values


def closest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that a mistyped one may mean, if there is one."""

    def apart(text: str) -> list[str]:
        return [word for word in text.split("_") if word in _APART]

    close = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    return next((each for each in close if apart(each) == apart(name)), None)
