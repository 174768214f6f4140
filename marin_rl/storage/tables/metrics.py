"""A round's metrics: one Parquet row per round, and one line of metrics.jsonl for `tail`.

The first process that finishes a round commits the row. metrics.jsonl is a convenience of local
roots, which only `fsck` compares. Names without a definition in `marin_rl.metrics` are refused.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from marin_rl.errors import CorruptObject, ObjectMissing
from marin_rl.metrics import is_defined
from marin_rl.storage.commits import fingerprint, new_attempt
from marin_rl.storage.runs import Run, metrics_key, rounds_in
from marin_rl.storage.stores.local import explained, open_regular
from marin_rl.storage.tables import parquet
from marin_rl.types import SlotRef
from schemas.migrations import METRICS as LADDER
from schemas.tables import METRICS_IDENTITY

JSONL_KEY = "metrics.jsonl"
COLUMNS_MAX = 10_000
FLOAT = pa.float64()


def write_round_metrics(run: Run, round: int, metrics: Mapping[str, float]) -> SlotRef:
    """Commit a round's metrics, the first attempt's if there were several.

    Raises ValueError naming metrics without a definition, CommitUnknown, StorageError.
    """
    undefined = sorted(name for name in metrics if not is_defined(name))
    if undefined:
        raise ValueError(
            f"expected metrics that are defined in marin_rl.metrics, found {', '.join(undefined)}"
        )
    key = metrics_key(round)
    # Not of the values: durations differ from attempt to attempt, and the first ones stay.
    decided = fingerprint("metrics", {"run_id": run.run_id, "round": round})
    # By name: the bytes depend on the values alone, not on who measured first.
    named = {name: pa.array(np.array([metrics[name]], np.float64)) for name in sorted(metrics)}
    identity = [pa.array([run.run_id]), pa.array(np.array([round], np.int32))]
    schema = pa.schema([*METRICS_IDENTITY, *(pa.field(name, FLOAT) for name in named)])
    writer = parquet.TableWriter(LADDER, schema, {"attempt": new_attempt(), "fingerprint": decided})
    writer.write(pa.table([*identity, *named.values()], schema=schema))
    committed, ours = parquet.commit_table(run.store, key, writer.finish(), LADDER)
    reader = parquet.TableReader(committed, JSONL_KEY, LADDER)
    (row,) = reader.table(reader.schema).to_pylist()
    path = run.store.local_path(JSONL_KEY)
    # The committed row. Another attempt that committed it may have been killed before the line.
    if run.config.trackers.jsonl and path is not None and (ours or not _has_line(path, round)):
        line, flags = json_line(row), os.O_RDWR | os.O_APPEND | os.O_CREAT
        with explained(path, len(line)), os.fdopen(open_regular(path, flags), "ab+") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
            # A line that was cut stays apart, so that it spoils itself alone.
            torn = file.read() not in (b"", b"\n")
            file.write((b"\n" if torn else b"") + line + b"\n")
    summary = {name: value for name, value in row.items() if name not in METRICS_IDENTITY.names}
    return SlotRef(slot=key, sha256=parquet.digest_of(committed), reused=not ours, summary=summary)


def read_metrics(run: Run, rounds: Iterable[int] | None = None) -> pa.Table:
    """Metrics of committed rounds, ascending: run_id, round, and a float64 column per metric.

    Only `rounds` where given, which spares the listing. A metric that a round lacks is null.
    """
    if rounds is None:
        rounds = rounds_in(run.store, "metrics")
    tables = [pa.Table.from_batches([], METRICS_IDENTITY)]  # `empty_table` imports pandas
    keys = [metrics_key(round) for round in sorted(rounds)]
    loaded = parquet.in_order(run.store, lambda key: parquet.load(run.store, key), keys)
    for key, data in zip(keys, loaded, strict=True):
        reader = parquet.TableReader(data, run.store.url_of(key), LADDER)
        check_metrics(reader)
        tables.append(reader.table(reader.schema))
    return pa.concat_tables(tables, promote_options="default")


def check_metrics(reader: parquet.TableReader) -> None:
    """Raise CorruptObject unless a file is one row of numbers that says of which round it is."""
    schema = reader.schema
    inside, identity = dict(zip(schema.names, schema.types, strict=True)), METRICS_IDENTITY.names
    wrong = [name for name, kind in inside.items() if name not in identity and kind != FLOAT]
    wrong += [field.name for field in METRICS_IDENTITY if inside.get(field.name) != field.type]
    if wrong or reader.rows != 1 or len(schema.names) > COLUMNS_MAX:
        raise CorruptObject(
            f"{reader.source}: expected one row of run_id, round and numbers, found {reader.rows} "
            f"rows, {len(schema.names)} columns, of them wrong: {', '.join(wrong[:5]) or 'none'}"
        )


def json_line(row: Mapping[str, Any]) -> bytes:
    """The line of metrics.jsonl for a round's row, without its end."""
    return json.dumps({"round": row["round"], **row}).encode()


def _has_line(path: Path, round: int) -> bool:
    with suppress(ObjectMissing), explained(path), os.fdopen(open_regular(path), "rb") as file:
        # The key comes first (`json_line`), so no line has to be parsed.
        start = f'{{"round": {round}, '.encode()
        return any(line.startswith(start) and line.endswith(b"}\n") for line in file)
    return False
