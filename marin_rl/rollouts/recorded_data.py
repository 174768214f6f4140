"""Digests of the rows that a run reads, next to its run.json: recorded at first, then compared.

A file of rows may change between two starts of a run, which would go on with other examples in
another order. Runs from before this record go on and record what they find. Leaves out code of the
user, which the configuration names by digest (`config.code`).
"""

from collections.abc import Iterator
from functools import partial

from marin_rl.config import Config, EnvironmentConfig
from marin_rl.environments.base import ReadsRows
from marin_rl.environments.registry import loaded_environment
from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.rollouts.data_warnings import GENERATORS, training_environments
from marin_rl.storage.commits import commit_object, new_attempt, record_errors
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore, open_store
from schemas.manifests import open_record, sealed_json
from schemas.records import RowsRecord

FORMAT, VERSION = "marin-rl/rows", 1


def refuse_other_rows(config: Config) -> None:
    """Raise ConfigError where a file has other rows than the run began with. Writes nothing."""
    _check(config, open_store(config.root, config.storage_options).at(config.run_id))


def record_rows(run: Run) -> None:
    """Record the digests of rows that the run reads for the first time. Raises ConfigError."""
    for key, path, digest in _check(run.config, run.folder):
        record = {
            "format": FORMAT,
            "version": VERSION,
            "attempt": new_attempt(),
            "path": path,
            "rows_digest": digest,
        }
        name = _name(key)
        commit_object(
            run.folder,
            name,
            sealed_json(record),
            attempt=str(record["attempt"]),
            fingerprint=digest,
            identify=partial(_identified, source=run.folder.url_of(name)),
        )


def _check(config: Config, store: ObjectStore) -> list[tuple[str, str, str]]:
    """Return key, path and digest of rows without a record. Raises ConfigError for changed ones."""
    new, changed = list[tuple[str, str, str]](), list[str]()
    for key, path, digest in _rows_read(config):
        try:
            data = store.read(_name(key))
        except ObjectMissing:
            new.append((key, path, digest))
            continue
        _, recorded = _identified(data, source=store.url_of(_name(key)))
        if recorded != digest:
            changed.append(f"{key}: {path} had the digest {recorded}, and has {digest}")
    if changed:
        raise ConfigError(
            f"run {config.run_id!r} was started with other rows ({store.url_of('data')}):\n  "
            + "\n  ".join(changed)
            + "\nFor a run with the changed file choose another --run-id, or fork this one. To go "
            "on with this one, put the file back as it was: added rows change the order of all."
        )
    return new


def _rows_read(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield key, path and digest of each environment that reads rows from files."""
    sets = config.evaluation.sets or {}
    chosen: dict[str, EnvironmentConfig] = {
        **training_environments(config),
        **{f"evaluation.sets.{name}": one for name, one in sets.items()},
    }
    if config.policy.init == "sft" and config.sft.environment is not None:
        chosen["sft.environment"] = config.sft.environment
    for key, one in chosen.items():
        if one.name not in GENERATORS:
            environment = loaded_environment(one)
            if isinstance(environment, ReadsRows) and environment.rows_digest is not None:
                yield key, str(one.options.get("path") or environment.name), environment.rows_digest


def _name(key: str) -> str:
    return f"data/{key}.json"


def _identified(data: bytes, source: str) -> tuple[str, str]:
    """Attempt and digest of a record. Raises CorruptObject, NewerSchema."""
    with record_errors(source):
        record = open_record(data, RowsRecord, format=FORMAT, version=VERSION)
    return str(record["attempt"]), str(record["rows_digest"])
