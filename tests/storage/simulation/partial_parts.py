"""Parts of unfinished groups in a simulated world: few bytes, the real chains, and their laws.

A group is sampled in `world.pieces` parts and a last piece. A part says which one it goes on from;
a chain in which that is another one than the last would have been gone on with twice.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from storage.simulation.simulated_process import identify
from support.fakes import served_policy
from support.run_factories import group_of

from marin_rl.rollouts.streaming import group_id_of
from marin_rl.storage.commits import commit_object
from marin_rl.storage.tables.group_log import GroupLog, partials_of_stream
from marin_rl.storage.tables.parquet import load_or_none
from marin_rl.types import RolloutGroup

FIRST = "nothing"  # what the first part goes on from
Append = Callable[["SmallParts", str, bytes], bool]


class SmallParts(GroupLog):
    """Chains whose objects are a few bytes of JSON, read one after the other."""

    def use(self, player: Any, version: int) -> "SmallParts":
        """Append as this process, by this policy."""
        self.player, self.version, self.last = player, version, FIRST
        return self

    def _load(self, keys: Sequence[str]) -> Iterator[pa.Buffer | None]:
        return (load_or_none(self.run.store, key) for key in keys)

    def _decoded(self, key: str, data: bytes | pa.Buffer) -> Sequence[RolloutGroup]:
        part = group_of(key, ())
        return [replace(part, example=replace(part.example, metadata=json.loads(bytes(data))))]

    def _commit(
        self, key: str, groups: Sequence[RolloutGroup]
    ) -> tuple[Sequence[RolloutGroup], bool]:
        attempt = self.player.new_attempt()
        record = {"attempt": attempt, "fingerprint": "stream", "version": self.version}
        data = json.dumps(record | {"after": self.last}).encode()
        ours = self.player.world.append(self, key, data)
        self.last = attempt
        return groups, ours


def appends(parts: SmallParts, key: str, data: bytes) -> bool:
    """Create a part once; False where another was first: the protocol."""
    committed = commit_object(
        parts.run.store, key, data, attempt=json.loads(data)["attempt"], fingerprint="stream",
        identify=identify, **parts.player.patience,
    )  # fmt: skip
    return committed == data


def appends_whatever_is_there(parts: SmallParts, key: str, data: bytes) -> bool:
    """Wrong: the part of another process is not noticed, and gone on with as if it were one's own.

    What is appended next goes on from a part that is in no chain.
    """
    appends(parts, key, data)
    return True


def writes_over_parts(parts: SmallParts, key: str, data: bytes) -> bool:
    """Wrong: the last process that samples a part decides what it is."""
    parts.run.store.put_part(key, data)
    return True


def sampled_in_pieces(player: Any, number: int, version: int) -> list[int]:
    """Versions of the pieces of a group, from what is committed of it on."""
    world, name = player.world, group_id_of(number)
    if not world.pieces:
        return [version]
    made = partials_of_stream(player.run, "stream", served_policy("", "policy"), "w")
    parts = SmallParts(
        run=made.run, policy=made.policy, fingerprint="stream", key=made.key, round=0
    ).use(player, version)
    chain = [part.example.metadata for part in parts.read([name]).get(name, [])]
    versions = [part["version"] for part in chain]
    if chain:
        parts.last = chain[-1]["attempt"]
    while len(versions) < world.pieces:
        parts.go_on(name, group_of(name, ()))
        versions.append(version)
    return [*versions, version]


def check_part(objects: Mapping[str, bytes], key: str, data: bytes) -> None:
    """Check that a part never changes, and goes on from the one before it."""
    before = objects.get(key)
    assert before in (None, data), f"a part changed: {key}"
    stem, number = key[: -len("-00.parquet")], int(key[-len("00.parquet") : -len(".parquet")])
    previous = objects.get(f"{stem}-{number - 1:02d}.parquet")
    if number == 0:
        expected = FIRST
    elif previous is None:
        return  # gc took it: the group is settled
    else:
        expected = json.loads(previous)["attempt"]
    after = json.loads(data)["after"]
    assert after == expected, f"{key} goes on from {after}, and the chain has {expected}"


def check_group(key: str, data: bytes) -> None:
    """Check that a group is as old as its oldest piece."""
    record = json.loads(data)
    assert record["version"] == min(record["versions"]), f"{key} says that it is younger than it is"
