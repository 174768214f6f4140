"""Reward tables for a round's rollouts: versioned, committed by one create, never changed.

`rewards/round-00003/NAME-v0001.parquet` is by the first version of the function NAME. Another one
under the name gets the next version; the footer has digests of function and rollouts.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

import pyarrow as pa

from marin_rl.errors import CommitConflict, ConfigError, ObjectMissing
from marin_rl.storage.commits import fingerprint, new_attempt
from marin_rl.storage.layout import round_name
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.parquet import TableReader, TableWriter, commit_table, digest_of, load
from schemas.migrations import REWARDS as LADDER
from schemas.tables import REWARDS

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,59}")
_TABLE = re.compile(rf"(?P<name>{NAME.pattern})-v(?P<version>\d{{4}})\.parquet")
VERSIONS_MAX = 9999  # four digits, so that the order of names is that of versions


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSource:
    """Sources of a reward table: the function, the digest of its source, the sealed rollouts."""

    function: str
    source_sha256: str
    rollouts_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTable:
    key: str
    version: int
    sha256: str
    reused: bool


def commit_rewards(
    run: Run, round: int, name: str, source: RewardSource, table: pa.Table
) -> RewardTable:
    """Commit a table under the first version of `name` that is free, or is the same already.

    Raises ConfigError for a name that is none, CommitUnknown, StorageError.
    """
    _check_name(name)
    stamp = {"attempt": new_attempt(), "fingerprint": _fingerprint(source), **asdict(source)}
    writer = TableWriter(LADDER, REWARDS, stamp)
    writer.write(table)
    data = writer.finish()
    # Nothing is overwritten: a function that changed gets the next version of the name.
    for version in range(1, VERSIONS_MAX + 1):
        key = f"{_folder(round)}/{name}-v{version:04d}.parquet"
        with suppress(CommitConflict):  # another function had this name before
            committed, ours = commit_table(run.store, key, data, LADDER)
            digest = digest_of(committed)
            return RewardTable(key=key, version=version, sha256=digest, reused=not ours)
    raise ConfigError(f"all {VERSIONS_MAX} versions of {name!r} are taken: choose another name")


def committed_rewards(
    run: Run, round: int, name: str, source: RewardSource
) -> tuple[RewardTable, pa.Table] | None:
    """The table that `source` gave under `name`, and its rows, or None. Raises ConfigError."""
    _check_name(name)
    decided = _fingerprint(source)
    for item in _versions(run, round, name):
        key = f"{_folder(round)}/{item}.parquet"
        data = load(run.store, key)
        reader = TableReader(data, run.store.url_of(key), LADDER)
        if reader.stamp.get("fingerprint") == decided:
            version = int(item.rpartition("-v")[2])
            existing = RewardTable(key=key, version=version, sha256=digest_of(data), reused=True)
            return existing, reader.table()
    return None


def read_rewards(run: Run, round: int, name: str) -> Mapping[str, float | None]:
    """The rewards of the newest version of a table, or of `NAME-v0002`, by rollout id.

    Raises ObjectMissing naming the tables there are, CorruptObject, NewerSchema.
    """
    there = _there(run, round)
    versions = [name] if name in there else _versions(run, round, name)
    if not versions:
        raise ObjectMissing(
            f"{run.store.url_of(_folder(round))}: no reward table {name!r}; found "
            f"{', '.join(there) or 'none'}; `marin-rl rescore` makes one"
        )
    key = f"{_folder(round)}/{versions[-1]}.parquet"
    table = TableReader(load(run.store, key), run.store.url_of(key), LADDER).table()
    # By name and not by position: the table names its rollouts.
    names, rewards = (table[column].to_pylist() for column in ("rollout_id", "reward"))
    return dict(zip(names, rewards, strict=True))


def name_of_table(key: str) -> tuple[str, int] | None:
    """Return name and version of a table by its key or file name; None where it is none."""
    match = _TABLE.fullmatch(key.rpartition("/")[2])
    return None if match is None else (match["name"], int(match["version"]))


def _fingerprint(source: RewardSource) -> str:
    content = {"function": source.function, "source": source.source_sha256}
    return fingerprint("rewards", {**content, "rollouts": source.rollouts_sha256})


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"expected a name like lengths-2 (a-z, 0-9, _ . -), found {name!r}")


def _versions(run: Run, round: int, name: str) -> list[str]:
    """`NAME-v0001` and the like that are there, ascending."""
    pattern = re.compile(rf"{re.escape(name)}-v\d{{4}}")
    return sorted(item for item in _there(run, round) if pattern.fullmatch(item))


def _there(run: Run, round: int) -> list[str]:
    return [item.removesuffix(".parquet") for item in run.store.children(_folder(round))]


def _folder(round: int) -> str:
    return f"rewards/{round_name(round)}"
