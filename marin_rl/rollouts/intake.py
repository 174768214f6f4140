"""Intake of a round: look at the stream, decide, commit (`asynchrony.sampler: windowed`)."""

from marin_rl.environments.checks import environment_of
from marin_rl.rollouts.streaming import now_utc, under_way
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.intakes import (
    Intake,
    Seen,
    commit_intake,
    decide,
    intake_ref,
    settled_before,
)
from marin_rl.storage.tables.stream import GroupStream, stream_fingerprint
from marin_rl.types import SlotRef

_streams: dict[str, GroupStream] = {}  # by run: what was read of its stream is not read again


def is_ready(run: Run, round: int, *, ended: bool = False) -> bool:
    """True if a round can take its groups now. Raises as `take_groups`."""
    return intake_ref(run, round) is not None or _decided(run, round, ended=ended) is not None


def take_groups(run: Run, round: int, *, ended: bool = False) -> SlotRef | None:
    """The committed intake of a round; None where there are too few groups to decide it.

    With `ended`, no further groups are sampled, and none under way is waited for. Raises
    CommitConflict for groups of a worker with other settings, CorruptObject, StorageError.
    """
    existing = intake_ref(run, round)
    if existing is not None:
        return existing
    intake = _decided(run, round, ended=ended)
    return None if intake is None else commit_intake(run, intake)


def _decided(run: Run, round: int, *, ended: bool) -> Intake | None:
    stream, settled = _stream_of(run), settled_before(run, round)
    stream.look()
    stream.read(settled)
    on_the_way = under_way(stream, settled, now_utc())
    seen = Seen(groups=stream.groups.values(), under_way=on_the_way)
    return decide(round, seen, settled, run.config, ended=ended)


def _stream_of(run: Run) -> GroupStream:
    """This process's view of a run's stream."""
    if run.folder.url not in _streams:
        names = committed_manifest(run.store, checkpoint_slot(0)).extra
        _streams[run.folder.url] = GroupStream(
            run,
            fingerprint=stream_fingerprint(
                run.config,
                environment_of(run.config).version,
                str(names["tokenizer_digest"]),
                str(names["chat_template_digest"]),
            ),
        )
    return _streams[run.folder.url]
