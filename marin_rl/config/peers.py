"""Keys of TRL, verl, prime-rl and OpenRLHF with those that do the same here, from peers.csv.

The tables of docs/coming-from-trl-verl.md are this one; errors answer with it. `closest` suggests a
name for a mistyped one, and none that says something else.
"""

import csv
import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PAGE = "docs/coming-from-trl-verl.md"
SHOWN_MAX = 8

_NAME = re.compile(r"`(?:--)?([A-Za-z]\w*(?:\.\w+)*)(?:: ([^`]+))?`")
# Words of names that are close as texts, and say something else.
_APART = frozenset(
    ("min", "max", "low", "high", "beta1", "beta2", "first", "last", "positive", "negative")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKey:
    """A key of another library, its value if only one counts, and our key for it."""

    library: str
    key: str
    value: str | None
    here: str

    @property
    def is_key(self) -> bool:
        return self.here.startswith("`")


def peer_rows() -> list[dict[str, str]]:
    """Return the rows of the table: library, theirs, here, note, as Markdown."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def peer_keys() -> tuple[PeerKey, ...]:
    return tuple(key for row in peer_rows() for key in _keys_of(row))


def _keys_of(row: Mapping[str, str]) -> Iterator[PeerKey]:
    # Of a product or a sum, the factor that has no row of its own comes first.
    names, here = _NAME.findall(re.split(r" [\u00d7+] ", row["theirs"])[0]), row["here"]
    separate = here.split(", ")
    # Side by side where both lists are as long.
    each = separate if len(separate) == len(names) else [here] * len(names)
    for (name, value), own in zip(names, each, strict=True):
        yield PeerKey(library=row["library"], key=name, value=value or None, here=own)


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
    return f"{key} is {here} here ({PAGE})" if best[0].is_key else f"{key}: {here} ({PAGE})"


def _matches(key: str, value: Any) -> list[PeerKey]:
    """Keys of the table that end as `key` does, in as many parts as any: all values of one."""
    parts = key.split(".")
    shared = {peer: _shared(parts, peer.key.split(".")) for peer in peer_keys()}
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


def _shared(first: list[str], second: list[str]) -> int:
    count = 0
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            break
        count += 1
    return count


def closest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that a mistyped one may mean, if there is one."""
    for close in difflib.get_close_matches(name, known, n=3, cutoff=0.7):
        if _apart(name) == _apart(close):
            return close
    return None


def _apart(name: str) -> list[str]:
    return [word for word in name.split("_") if word in _APART]
