"""A simulated world for streams of groups: workers, a trainer and gc on one bucket.

Workers and trainer run the real code of claims, intakes, parts of unfinished groups, and gc; a
group is a few bytes in place of a Parquet file. The bucket checks the laws of the stream at every
write and delete, the world the conservation of groups at the end.

python tests/storage/simulation/windowed_world.py 7 10000     # schedules 7 to 10006
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from random import Random
from typing import Any

import pyarrow as pa
from storage.simulation.partial_parts import (
    Append,
    appends,
    check_group,
    check_part,
    sampled_in_pieces,
)
from storage.simulation.schedules import COLLECTED, Scheduler, play
from storage.simulation.simulated_process import Bucket, Player, identify
from storage.simulation.simulator import Process, Shape, World
from storage.simulation.small_packs import (
    CommitPack,
    SmallChain,
    check_pack,
    commits_pack,
    groups_of_pack,
    reads_packs,
    samples_packs,
)

from marin_rl.config import RetentionConfig, parse_config
from marin_rl.errors import ObjectMissing
from marin_rl.rollouts.streaming import Claimant, is_finished, open_chunks, under_way
from marin_rl.storage.commits import (
    commit_object,
    fingerprint,
    manifest_key,
    parent_of,
    part_of,
    read_manifest,
    ref_of,
)
from marin_rl.storage.layout import (
    STREAM,
    intake_slot,
    pack_of,
    partial_of,
    rollouts_slot,
    round_of,
    shard_key,
    stream_group_of,
    stream_key,
)
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.intakes import (
    Entry,
    Intake,
    Settled,
    decide,
    intake_in,
    intake_manifest,
    settled_before,
)
from marin_rl.storage.tables.parquet import load_or_none
from marin_rl.storage.tables.stream import GroupStream, StreamedGroup, numbers_of
from marin_rl.storage.upkeep.gc import Collection as Collected
from marin_rl.storage.upkeep.inventory import take_inventory
from marin_rl.types import SlotRef
from schemas.manifests import Manifest, sha256_of

GROUPS, STALENESS = 2, 1  # groups of a chunk
CHUNKS_MAX = 3  # of a worker


class WindowedBucket(Bucket):
    """A bucket that also keeps the laws of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.generated: dict[int, str] = {}
        self.settled: dict[int, int] = {}
        self.needed: dict[str, int] = {}  # groups of the stream by key, and the round

    def write(self, key: str, data: bytes) -> None:
        """Write; a group of the stream never changes, unless gc deleted it."""
        number, before = stream_group_of(key), self.objects.get(key)
        if number is not None:
            assert before in (None, data), f"a group changed: {key}"
            check_group(key, data)
            self.generated.setdefault(number, sha256_of(data))
        if pack_of(key) is not None:
            check_pack(self.objects, key, data, self.settled)
            for packed in groups_of_pack(data):
                self.generated.setdefault(packed, sha256_of(data))
        if partial_of(key) is not None:
            check_part(self.objects, key, data)
        super().write(key, data)

    def delete(self, key: str) -> None:
        """Remove; a group that an intake names stays until its round is sealed."""
        number = stream_group_of(key)
        number = partial_of(key) if number is None else number
        numbers = pack_of(key) or () if number is None else (number,)
        for number in numbers:
            assert number in self.settled, f"a group vanished that no round has: {key}"
            sealed = manifest_key(rollouts_slot(self.settled[number])) in self.objects
            assert sealed, f"a group vanished before its round was sealed: {key}"
        super().delete(key)

    def _note(self, key: str, data: bytes) -> None:
        super()._note(key, data)
        manifest = Manifest.from_json(data)
        if manifest.slot.startswith("intakes/"):
            self._note_intake(intake_in(manifest))

    def _note_intake(self, intake: Intake) -> None:
        for entry in intake.groups:
            number, sha256, version, reason, _ = entry
            assert number not in self.settled, f"group {number} is in two rounds"
            assert self.generated.get(number) is not None, f"group {number} was never there"
            stored = self.objects.get(entry.key)
            assert stored is not None, f"group {number} is gone already"
            assert sha256_of(stored) == sha256, f"group {number} is another"
            assert not entry.pack or number in groups_of_pack(stored), f"{number} is elsewhere"
            age = intake.round - version
            assert (age > STALENESS) == bool(reason), f"group {number} is {age} rounds old"
            self.settled[number] = intake.round
        order = [(version, number) for number, _, version, *_ in intake.taken]
        assert order == sorted(order), "groups are not in the order of their policies"


class SmallStream(GroupStream):
    """A stream whose groups are a few bytes of JSON, read one after the other."""

    def _load(self, keys: Sequence[str]) -> Iterator[pa.Buffer | None]:
        return (load_or_none(self.run.store, key) for key in keys)

    def _decoded(self, key: str, data: Any) -> tuple[StreamedGroup, ...]:
        raw, number = data.to_pybytes(), stream_group_of(key)
        record = json.loads(raw)
        versions = record["groups"] if number is None else {number: record["version"]}
        return tuple(
            StreamedGroup(
                number=int(name),
                sha256=sha256_of(raw),
                version=version,
                rollouts=2,
                differs=True,
                pack="" if number is not None else key.rpartition("/")[2],
            )
            for name, version in versions.items()
        )


Take = Callable[["WindowedPlayer", int], SlotRef | None]


def takes(player: "WindowedPlayer", round: int) -> SlotRef | None:
    """Look, decide, commit the intake: the protocol."""
    run = player.run
    existing = read_manifest(player.store, intake_slot(round))
    if existing is not None:
        return ref_of(existing[0], reused=True)
    settled = settled_before(run, round)
    stream = player.stream()
    claims = under_way(stream, settled, player.world.clock) if player.world.waits else ()
    intake = decide(round, stream.groups.values(), settled, run.config, under_way=claims)
    if intake is None:
        return None
    manifest = intake_manifest(run, intake, player.new_attempt())
    winner = player.world.commit(player.store, manifest, **player.patience)
    return ref_of(winner)


class WindowedPlayer(Player):
    """A process that samples chunks, or takes and trains rounds."""

    world: "WindowedWorld"

    @property
    def run(self) -> Run:
        """The run, on this process's store."""
        config = self.world.config
        return Run(config=config, run_id=config.run_id, store=self.store)

    @property
    def patience(self) -> dict[str, Any]:
        """Deadline of commits, and no pauses."""
        return {"deadline_s": self.process.deadline_s, "sleep": lambda _: None}

    def new_attempt(self) -> str:
        """The name of a further attempt."""
        return self._attempt()

    def play(self) -> SlotRef:
        """Train all rounds, and sample what is missing for them; the last checkpoint."""
        checkpoint = self.slot("checkpoints/round-00000", (), {"arrays": {}})
        for round in range(self.world.shape.rounds):
            checkpoint = self.train(round, checkpoint)
        return checkpoint

    def train(self, round: int, checkpoint: SlotRef) -> SlotRef:
        """Take and train one round; its checkpoint."""
        while (intake := self.world.take(self, round)) is None:
            self.sample(round, must=True)
        self.world.acknowledge(intake)
        sealed = self.collected(round, intake)
        batches = self.batches(f"batches/round-{round:05d}", sealed)
        parts = {"arrays": {"round": round}, "more/scores": {}}
        above = (checkpoint, batches)
        return self.slot(checkpoint_slot(round + 1), above, parts, reads=checkpoint)

    def work(self) -> SlotRef:
        """Sample some chunks, as long as there is room."""
        version = self.latest()  # once: its weights may be old by the time that it samples
        for _ in range(CHUNKS_MAX):
            if version is None or not self.sample(version):
                break
        return SlotRef(slot="rollouts/.stream", sha256="")

    def latest(self) -> int | None:
        """The version of the latest checkpoint."""
        names = (round_of(name) for name in self.store.children("checkpoints"))
        numbers = sorted((n for n in names if n is not None), reverse=True)
        committed = (n for n in numbers if read_manifest(self.store, checkpoint_slot(n)))
        return next(committed, None)

    def sample(self, version: int, *, must: bool = False) -> bool:
        """Claim and sample a chunk; False where there is none. With `must`, live claims are not
        waited for: who claimed may be gone.
        """
        stream, settled = self.stream(), self._settled(version)
        config, now = self.run.config, self.world.clock
        claimant = Claimant(worker=self.process.name, most=config.inflight_groups_max, now=now)
        chunk = next(open_chunks(stream, settled, claimant), None)
        if chunk is None and must:
            chunks = range(settled.floor // GROUPS, settled.floor + 100)
            chunk = next(c for c in chunks if not is_finished(stream, settled, c))
        if chunk is None:
            return False
        if not (stream.claim(chunk, self.process.name, version, now) or must):
            return False
        numbers = numbers_of(config, chunk)
        left = [n for n in numbers if n not in settled and not stream.has({n})]
        if self.world.packs:
            samples_packs(self, chunk, left, version)
        else:
            for number in left:
                self.world.commit_group(self, number, version)
        return True

    def stream(self) -> SmallStream:
        """The stream as this process sees it now."""
        stream = SmallStream(self.run, patience=self.patience)
        stream.look()
        return stream

    def seen(self, settled: Settled) -> list[StreamedGroup]:
        """Groups that may be taken now."""
        return [g for n, g in self.stream().groups.items() if n not in settled]

    def _settled(self, version: int) -> Settled:
        """Numbers that are settled as far as a process that has this checkpoint can know."""
        for round in (version, version - 1):
            if round >= 0 and (known := read_manifest(self.store, intake_slot(round))):
                return intake_in(known[0]).settled
        return Settled()

    def collected(self, round: int, intake: SlotRef) -> SlotRef:
        """Commit the shard of the groups that an intake names, and seal it."""
        key = shard_key(round, 0)
        decided = fingerprint("collected", {"key": key}, (parent_of(intake),))
        attempt = self._attempt()
        data = self._committed(key)
        if data is None:
            try:
                data = json.dumps(self._shard(key, attempt, decided, round)).encode()
            except ObjectMissing:  # another process sealed the round, and gc took the groups
                data = self._committed(key)
                assert data is not None, "a group is gone, and no round has it"
        committed = commit_object(
            self.store, key, data, attempt=attempt, fingerprint=decided,
            identify=identify, **self.patience,
        )  # fmt: skip
        ref = SlotRef(slot=key, sha256=sha256_of(committed))
        self.world.acknowledge(ref)
        parts = [part_of(key.rpartition("/")[2], committed)]
        return self._commit(rollouts_slot(round), (intake,), parts, self._attempt())

    def _committed(self, key: str) -> bytes | None:
        try:
            return self.store.read(key)
        except ObjectMissing:
            return None

    def _shard(self, key: str, attempt: str, decided: str, round: int) -> dict[str, Any]:
        manifest = read_manifest(self.store, intake_slot(round))
        assert manifest is not None, "it was committed before"
        groups: list[str] = []
        for entry in intake_in(manifest[0]).groups:
            number, sha256 = entry.number, entry.sha256
            data = self.store.read(entry.key)
            assert sha256_of(data) == sha256, f"group {number} is not the one that was taken"
            groups.append(f"{number} {sha256}")
        return {"key": key, "attempt": attempt, "fingerprint": decided, "groups": groups}


def commits_group(player: WindowedPlayer, number: int, version: int) -> None:
    """Create a group of the stream once: the protocol."""
    versions = sampled_in_pieces(player, number, version)
    _create_group(player, number, versions, min(versions))


def _create_group(
    player: WindowedPlayer, number: int, versions: Sequence[int], version: int
) -> None:
    """Create a group once; `version` is how old it says that it is."""
    attempt = player.new_attempt()
    record = {"attempt": attempt, "fingerprint": "stream", "versions": list(versions)}
    data = json.dumps(record | {"version": version}).encode()
    commit_object(
        player.store, stream_key(number), data, attempt=attempt, fingerprint="stream",
        identify=identify, **player.patience,
    )  # fmt: skip


CommitGroup = Callable[[WindowedPlayer, int, int], None]


class WindowedWorld(World):
    """A world whose rounds take groups of a stream."""

    bucket: WindowedBucket
    bucket_type = WindowedBucket
    player_type = WindowedPlayer

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        take: Take = takes,
        commit_group: CommitGroup = commits_group,
        append: Append = appends,
        pieces: int = 0,
        packs: int = 0,
        commit_pack: CommitPack = commits_pack,
        read_packs: Callable[[SmallChain], None] = reads_packs,
        waits: bool = False,
        **protocol: Any,
    ) -> None:
        super().__init__(shape, **protocol)
        self.take, self.commit_group, self.waits = take, commit_group, waits
        self.append, self.pieces = append, pieces
        self.packs, self.commit_pack, self.read_packs = packs, commit_pack, read_packs
        window = {"sampler": "windowed", "max_staleness": STALENESS}
        self.config = parse_config(
            {
                "root": "memory://a-world-has-one-run",
                "run_id": "run",
                # With packs, rounds that take a part of a chunk.
                "rollouts": {"groups_per_round": 3, "shards_per_round": 2}
                if packs
                else {"groups_per_round": GROUPS, "shards_per_round": 1},
                "asynchrony": window | ({"sampler": "windowed_wait"} if waits else {}),
            }
        )

    def _complete(self) -> None:
        """Generated = consumed + stale + waiting, each group once."""
        bucket = self.bucket
        shards = [data for key, data in bucket.objects.items() if "/shard-" in key]
        assert len(shards) == self.shape.rounds
        sealed = Counter(group for shard in shards for group in json.loads(shard)["groups"])
        assert all(count == 1 for count in sealed.values()), "a group is in two shards"
        waiting = {
            f"{number} {sha256_of(data)}"
            for key, data in bucket.objects.items()
            for number in _numbers_in(key, data)
            if number not in bucket.settled
        }
        generated = {f"{number} {digest}" for number, digest in bucket.generated.items()}
        assert generated <= set(sealed) | waiting, "a group was lost"
        assert len(bucket.settled) == len(sealed)


def _numbers_in(key: str, data: bytes) -> Collection[int]:
    """Numbers of the finished groups of an object."""
    number = stream_group_of(key)
    if number is not None:
        return (number,)
    return groups_of_pack(data) if pack_of(key) is not None else ()


class WindowedScheduler(Scheduler):
    """Schedules of five workers, a trainer that may be followed by another, and gc."""

    processes_max = 10
    stays = 0.8

    def __init__(self, seed: int, **world: Any) -> None:
        super().__init__(seed)
        waits = self.choices.random() < 0.3
        shape = Shape(rounds=self.choices.choice((1, 2, 3, 4)))
        # Numbers of its own: schedules of groups in one piece stay what they were.
        pieces = Random(f"pieces {seed}").choice((0, 0, 1, 2))
        packs = Random(f"packs {seed}").choice((0, 1, 2))
        drawn = {"waits": waits, "pieces": pieces, "packs": packs}
        self.world = WindowedWorld(shape, **{**drawn, **world})

    def _newcomer(self) -> Process:
        world, roll = self.world, self.choices.random()
        patient = self.choices.random() < 0.5
        if not world.processes or roll < 0.25:
            return world.start(patient=patient)
        if roll < 0.5:
            return world.collect(keep=self.choices.choice((None, 2)))
        return world.start(WindowedPlayer.work, patient=patient)  # pyright: ignore


def takes_without_record(player: WindowedPlayer, round: int) -> SlotRef | None:
    """Wrong: writes over the intake of another process, which it did not see when it looked."""
    settled = settled_before(player.run, round)
    intake = decide(round, player.seen(settled), settled, player.run.config)
    if intake is None:
        return None
    manifest = intake_manifest(player.run, intake, player.new_attempt())
    player.store.put_part(manifest_key(manifest.slot), manifest.to_json())
    return ref_of(manifest)


def forgets_what_is_settled(player: WindowedPlayer, round: int) -> SlotRef | None:
    """Wrong: takes whatever lies in the stream, also what an earlier round took."""
    existing = read_manifest(player.store, intake_slot(round))
    if existing is not None:
        return ref_of(existing[0], reused=True)
    intake = decide(round, player.seen(Settled()), Settled(), player.run.config)
    if intake is None:
        return None
    manifest = intake_manifest(player.run, intake, player.new_attempt())
    return ref_of(player.world.commit(player.store, manifest, **player.patience))


def takes_any_age(player: WindowedPlayer, round: int) -> SlotRef | None:
    """Wrong: takes by number, however old the policy."""
    existing = read_manifest(player.store, intake_slot(round))
    if existing is not None:
        return ref_of(existing[0], reused=True)
    settled = settled_before(player.run, round)
    seen = sorted(player.seen(settled), key=lambda group: group.number)[:GROUPS]
    if len(seen) < GROUPS:
        return None
    entries = tuple(Entry(group.number, group.sha256, group.version) for group in seen)
    taken = Intake(
        round=round, groups=entries, settled=settled.with_numbers(entry[0] for entry in entries)
    )
    manifest = intake_manifest(player.run, taken, player.new_attempt())
    return ref_of(player.world.commit(player.store, manifest, **player.patience))


def writes_over_groups(player: WindowedPlayer, number: int, version: int) -> None:
    """Wrong: the last worker that samples a group decides what it is."""
    attempt = player.new_attempt()
    record = {"attempt": attempt, "fingerprint": "stream", "version": version}
    data = json.dumps(record | {"versions": [version]}).encode()
    player.store.put_part(stream_key(number), data)


def forgets_older_parts(player: WindowedPlayer, number: int, version: int) -> None:
    """Wrong: a group is as old as its last piece."""
    versions = sampled_in_pieces(player, number, version)
    _create_group(player, number, versions, max(versions))


def gc_of_parts(run: Run, _rule: RetentionConfig, **_: Any) -> Collected:
    """Wrong: takes parts of unfinished groups for leftovers."""
    for key in run.folder.list(STREAM):
        if partial_of(key) is not None:
            run.folder.delete(key)
    return COLLECTED


def gc_of_what_is_taken(run: Run, _rule: RetentionConfig, **_: Any) -> Collected:
    """Wrong: deletes groups as soon as an intake names them, before the round has them."""
    for slot in take_inventory(run.folder).of_kind("intakes"):
        for number, *_rest in intake_in(slot.manifest).groups if slot.manifest else ():
            run.folder.delete(stream_key(number))
    return COLLECTED


def gc_of_the_stream(run: Run, _rule: RetentionConfig, **_: Any) -> Collected:
    """Wrong: takes groups that no round has named for leftovers."""
    for key in run.folder.list(STREAM):
        run.folder.delete(key)
    return COLLECTED


def main() -> None:
    """Play schedules FIRST to FIRST + COUNT - 1, and print how their processes ended."""
    # Processes are threads that take turns: on one core they hand over without waking another.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ends = play(int(sys.argv[1]), int(sys.argv[2]), WindowedScheduler)
    for name, number in sorted(ends.items()):
        print(name, number)


if __name__ == "__main__":
    main()
