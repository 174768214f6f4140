"""Packs of groups in a simulated world: few bytes, the real chains, and their laws.

A pack says which groups it has, and the policies of their pieces. No group is in two packs, unless
a sealed round has it.
"""

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from storage.simulation.partial_parts import sampled_in_pieces
from storage.simulation.simulated_process import identify
from support.fakes import served_policy
from support.run_factories import group_of

from marin_rl.config import RetentionConfig
from marin_rl.rollouts.streaming import CHUNK, group_id_of
from marin_rl.storage.commits import commit_object
from marin_rl.storage.layout import STREAM, pack_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.group_log import GroupLog, groups_of_chunk
from marin_rl.storage.tables.intakes import intake_in
from marin_rl.storage.tables.parquet import load_or_none
from marin_rl.storage.tables.stream import numbers_of
from marin_rl.storage.upkeep.gc import Collection
from marin_rl.storage.upkeep.inventory import take_inventory
from marin_rl.storage.upkeep.streams import collected_keys
from marin_rl.types import RolloutGroup

Versions = dict[int, list[int]]  # of the pieces of groups, by their numbers
CommitPack = Callable[["SmallChain", str, bytes], bytes]


class SmallChain(GroupLog):
    """A chain whose objects are a few bytes of JSON, read one after the other."""

    def use(self, player: Any) -> "SmallChain":
        """Append as this process."""
        self.player = player
        self.versions: Versions = {}
        return self

    def _load(self, keys: Sequence[str]) -> Iterator[pa.Buffer | None]:
        return (load_or_none(self.run.store, key) for key in keys)

    def _decoded(self, key: str, data: bytes | pa.Buffer) -> Sequence[RolloutGroup]:
        return [group_of(group_id_of(number), ()) for number in groups_of_pack(bytes(data))]

    def _commit(
        self, key: str, groups: Sequence[RolloutGroup]
    ) -> tuple[Sequence[RolloutGroup], bool]:
        numbers = [int(group.group_id.rpartition("-")[2]) for group in groups]
        versions = {number: self.versions[number] for number in numbers}
        record = {
            "attempt": self.player.new_attempt(),
            "fingerprint": "stream",
            "groups": {number: min(each) for number, each in versions.items()},
            "versions": versions,
        }
        data = json.dumps(record).encode()
        committed = self.player.world.commit_pack(self, key, data)
        return self._decoded(key, committed), committed == data


def commits_pack(chain: SmallChain, key: str, data: bytes) -> bytes:
    """Create a pack once; what is committed there: the protocol."""
    return commit_object(
        chain.run.store, key, data, attempt=json.loads(data)["attempt"], fingerprint="stream",
        identify=identify, **chain.player.patience,
    )  # fmt: skip


def samples_packs(player: Any, chunk: int, left: Sequence[int], version: int) -> None:
    """Sample groups of a chunk, and commit those that end together as a pack."""
    world = player.world
    numbers = numbers_of(player.run.config, chunk)
    made = groups_of_chunk(player.run, numbers, "stream", served_policy("", "policy"), "w")
    chain = SmallChain(
        run=made.run, policy=made.policy, fingerprint="stream", key=made.key, round=0
    ).use(player)
    world.read_packs(chain)
    finished = chain.group_ids.get(CHUNK, ())
    left = [number for number in left if group_id_of(number) not in finished]
    for first in range(0, len(left), world.packs):
        ended = left[first : first + world.packs]
        chain.versions |= {n: sampled_in_pieces(player, n, version) for n in ended}
        chain.complete(CHUNK, [group_of(group_id_of(number), ()) for number in ended])


def groups_of_pack(data: bytes) -> dict[int, int]:
    """Policy version of each group of a pack."""
    return {int(number): version for number, version in json.loads(data)["groups"].items()}


def check_pack(
    objects: Mapping[str, bytes], key: str, data: bytes, settled: Container[int]
) -> None:
    """Check that a pack never changes, is as old as its pieces, and has no group of another."""
    assert objects.get(key) in (None, data), f"a pack changed: {key}"
    record, numbers = json.loads(data), pack_of(key)
    assert record["groups"] == {name: min(each) for name, each in record["versions"].items()}
    others = [other for other in objects if pack_of(other) == numbers and other != key]
    for number in groups_of_pack(data):
        twice = any(number in groups_of_pack(objects[other]) for other in others)
        assert number in settled or not twice, f"group {number} is in two packs"


def reads_packs(chain: SmallChain) -> None:
    """Read which groups are committed: the protocol."""
    chain.read([CHUNK])


def reads_no_packs(chain: SmallChain) -> None:
    """Wrong: goes on behind the packs of others without a look at their groups."""
    while load_or_none(chain.run.store, chain._next_key(CHUNK)) is not None:
        chain.lengths[CHUNK] += 1


def writes_over_packs(chain: SmallChain, key: str, data: bytes) -> bytes:
    """Wrong: the last worker that commits a pack decides what it has."""
    chain.run.store.put_part(key, data)
    return data


def gc_of_packs_in_use(run: Run, _rule: RetentionConfig, **_: Any) -> Collection:
    """Wrong: deletes a pack as soon as a sealed round has one of its groups."""
    inventory = take_inventory(run.folder)
    taken = {*collected_keys(run.config, inventory)}
    sealed = {slot.number for slot in inventory.of_kind("rollouts") if slot.manifest is not None}
    for slot in inventory.of_kind("intakes"):
        if slot.manifest is not None and slot.number in sealed:
            taken |= {entry.key for entry in intake_in(slot.manifest).groups}
    for key in run.folder.list(STREAM):
        if key in taken:
            run.folder.delete(key)
    return Collection(garbage=(), live=False, skipped=(), deleted=True)
