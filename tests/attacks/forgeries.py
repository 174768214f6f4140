"""Forged run folders, and a program that runs the reading commands over them.

`python tests/support/forgeries.py ORIGIN FOLDER COMMANDS NAME…` copies the run below ORIGIN for
each forgery, with a healthy one next to it, and prints a JSON line per command: exit code, what
ended it, and how large the process is. A line that does not come means that a command hangs.
"""

import hashlib
import json
import os
import re
import resource
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.manifests import sealed_json

HANG_S = 120
ADDRESS_SPACE_BYTES = 24 * 2**30
CHECKPOINT = "checkpoints/round-00002/manifest.json"
ROLLOUTS = "rollouts/round-00001/manifest.json"
BATCHES = "batches/round-00001/manifest.json"
SHARD = "rollouts/round-00001/shard-0000.parquet"
METRICS = "metrics/round-00001.parquet"
DEEP = b"[" * 200_000

QUICK_COMMANDS = ("status", "status of all", "fsck", "audit", "rollouts", "gc beside")
COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("status", "bad"),
    "status of all": ("status",),
    "fsck": ("fsck", "bad"),
    "audit": ("audit", "bad"),
    "rollouts": ("rollouts", "bad"),
    "gc beside": ("gc", "good", "--keep-last", "2"),
    "gc": ("gc", "bad", "--dry-run"),
    "lineage": ("lineage", "bad", "--round", "1"),
    "diff": ("diff", "bad", "good"),
    "export": ("export", "bad", "--all", "-o", "/dev/null/nowhere.tar"),
    "metrics": ("metrics", "verify", "bad"),
    "report": ("report", "bad", "-o", "/dev/null/nowhere.html"),
}

Forge = Callable[[Path], None]


def raw(key: str, data: bytes) -> Forge:
    """The bytes of a file."""
    return lambda folder: void((folder / key).write_bytes(data))


def void(_: object) -> None:
    """Drop a value."""


def sealed(key: str, change: Callable[[dict[str, Any]], object]) -> Forge:
    """A record that was changed and has the right digest."""

    def forge(folder: Path) -> None:
        record = json.loads((folder / key).read_bytes())
        record.pop("digest")
        change(record)
        (folder / key).write_bytes(sealed_json(record))

    return forge


def stuffed(key: str, text: str) -> Forge:
    """A record with one more field, whose value is JSON as it stands: no digest can fit it."""

    def forge(folder: Path) -> None:
        data = (folder / key).read_bytes()
        (folder / key).write_bytes(data[:-1] + f',"more":{text}}}'.encode())

    return forge


def instead(key: str, make: Callable[[Path], object]) -> Forge:
    """Something else in the place of a file or folder."""

    def forge(folder: Path) -> None:
        path = folder / key
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        make(path)

    return forge


def unix_socket(path: Path) -> None:
    """A socket in the place of a file."""
    path.unlink(missing_ok=True)
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bomb(folder: Path) -> None:
    """A shard of some kilobytes whose rows have one text of a megabyte each, 4,000 times."""
    shard = folder / SHARD
    table = pq.read_table(shard).slice(0, 1)
    stamp = pq.read_schema(shard).metadata
    chunk = pa.concat_tables([table] * 100).combine_chunks()
    table = pa.concat_tables([chunk] * 40)
    indices = pa.array(np.zeros(table.num_rows, np.int32))
    long = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 2**20]))
    table = table.set_column(table.schema.get_field_index("answer"), "answer", long)
    with pq.ParquetWriter(
        shard, table.schema, compression="zstd", dictionary_pagesize_limit=2**22, store_schema=False
    ) as writer:
        writer.write_table(table, row_group_size=table.num_rows)
        writer.add_key_value_metadata(stamp)
    _resign(folder)


def _resign(folder: Path) -> None:
    """The manifest of round 1 with the digest of its first shard."""
    data = (folder / SHARD).read_bytes()

    def change(record: dict[str, Any]) -> None:
        record["parts"][0] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    sealed(ROLLOUTS, change)(folder)


def _text_metrics(folder: Path) -> None:
    table = pq.read_table(folder / METRICS)
    index = table.schema.get_field_index("reward")
    table = table.set_column(index, "reward", pa.array(["much"]))
    pq.write_table(table.replace_schema_metadata(pq.read_schema(folder / METRICS).metadata),
                   folder / METRICS)  # fmt: skip


def _ancestors(value: object) -> Forge:
    return sealed("run.json", lambda record: record.update(ancestors=value, version=2))


def _ancestor(run_id: object, through_round: object = 1, **more: object) -> dict[str, object]:
    return {"run_id": run_id, "through_round": through_round, "sha256": "0" * 64, **more}


def _part(key: str, **change: object) -> Forge:
    return sealed(key, lambda record: record["parts"][0].update(change))


def _top(key: str, **change: object) -> Forge:
    return sealed(key, lambda record: record.update(change))


def _without(key: str, name: str) -> Forge:
    return sealed(key, lambda record: record.pop(name))


def _totals(key: str, **change: object) -> Forge:
    return sealed(key, lambda record: record["totals"].update(change))


def _extra(key: str, **change: object) -> Forge:
    return sealed(key, lambda record: record["extra"].update(change))


FORGERIES: dict[str, Forge] = {
    # Bytes that JSON readers choke on.
    "run.json deep": raw("run.json", DEEP),
    "run.json infinite": stuffed("run.json", "1e999"),
    "run.json NaN": stuffed("run.json", "NaN"),
    "run.json surrogate": stuffed("run.json", r'"\ud800"'),
    "run.json digits": stuffed("run.json", "1" * 10_000),
    "run.json empty": raw("run.json", b""),
    "manifest deep": raw(CHECKPOINT, DEEP),
    "manifest infinite": stuffed(ROLLOUTS, "-1e999"),
    "manifest surrogate": stuffed(BATCHES, r'"\udfff"'),
    # Shapes of run.json.
    "ancestors a number": _ancestors(5),
    "ancestors a text": _ancestors("run"),
    "ancestors numbers": _ancestors([1, 2]),
    "ancestors other fields": _ancestors([{"name": "run"}]),
    "ancestor named by a number": _ancestors([_ancestor(5)]),
    "ancestor with NUL": _ancestors([_ancestor("a\0b")]),
    "ancestor elsewhere": _ancestors([_ancestor("../../etc")]),
    "ancestor of a text round": _ancestors([_ancestor("good", "1")]),
    "ancestors without end": _ancestors([_ancestor("good")] * 200_000),
    "ancestors falling": _ancestors([_ancestor("good", 2), _ancestor("good", 1)]),
    "no config": _without("run.json", "config"),
    "config a list": _top("run.json", config=[1]),
    "config of a number": _top("run.json", config={"policy": 5}),
    "config other": _top("run.json", config={"policy": {"checkpoint": {"a": 1}}, "rounds": "x"}),
    "no run_id": _without("run.json", "run_id"),
    "run_id a number": _top("run.json", run_id=5),
    "run_id a path": _top("run.json", run_id="../x"),
    "no attempt": _without("run.json", "attempt"),
    "seeds a number": _top("run.json", seeds=7),
    "code a number": _top("run.json", code={"git": 7}),
    # Shapes of manifests.
    "part named by a number": _part(ROLLOUTS, name=7),
    "part with NUL": _part(ROLLOUTS, name="a\0b"),
    "part elsewhere": _part(ROLLOUTS, name="../../../../etc/hostname"),
    "part absolute": _part(CHECKPOINT, name="/etc/hostname"),
    "part of negative size": _part(BATCHES, bytes=-1),
    "part of a text size": _part(BATCHES, bytes="12"),
    "parts a number": _top(ROLLOUTS, parts=3),
    "parents texts": _top(BATCHES, parents=["rollouts/round-00001"]),
    "length a text": _totals(BATCHES, length="zz"),
    "length huge": _totals(BATCHES, length=10**12),
    "length beyond floats": _totals(BATCHES, length=10**400),
    "steps huge": _totals(BATCHES, steps=10**12),
    "no totals": _top(BATCHES, totals={}),
    "no totals of rollouts": _top(ROLLOUTS, totals={}),
    "totals a text": _top(CHECKPOINT, totals="many"),
    "attempt elsewhere": _top(CHECKPOINT, attempt="../.."),
    "created never": _top(CHECKPOINT, created_at="never"),
    "created nowhere": _top(CHECKPOINT, created_at="2026-01-01T00:00:00"),
    "rounds planned a text": _extra(CHECKPOINT, rounds_planned="many"),
    "retention a number": _extra(CHECKPOINT, retention=5),
    # Files of other kinds.
    "run.json a pipe": instead("run.json", os.mkfifo),
    "run.json a folder": instead("run.json", Path.mkdir),
    "run.json endless": instead("run.json", _endless),
    "run.json all hole": instead("run.json", _holes),
    "manifest a pipe": instead(CHECKPOINT, os.mkfifo),
    "manifest endless": instead(ROLLOUTS, _endless),
    "manifest a folder": instead(BATCHES, Path.mkdir),
    "shard a pipe": instead(SHARD, os.mkfifo),
    "shard a socket": instead(SHARD, unix_socket),
    "shard all hole": instead(SHARD, _holes),
    "metrics a pipe": instead(METRICS, os.mkfifo),
    "metrics of texts": _text_metrics,
    ".lock a pipe": instead(".lock", os.mkfifo),
    "checkpoints a link": instead("checkpoints", lambda path: path.symlink_to("../good/evals")),
    "shard that grows": bomb,
}  # fmt: skip


def forged(origin: Path, root: Path, name: str) -> Path:
    """Make a root with a whole run `good`, and its forged copy `bad`; the folder of the latter."""
    for run_id in ("good", "bad"):
        shutil.copytree(origin / "run", root / run_id)
    FORGERIES[name](root / "bad")
    return root / "bad"


def outcomes(
    origin: Path, folder: Path, names: list[str], commands: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Results of each command on each forgery, from a process of its own."""
    line = [sys.executable, __file__, str(origin), str(folder), ",".join(commands), *names]
    top = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(top.parent), str(top)))}
    with subprocess.Popen(line, stdout=subprocess.PIPE, env=environment, cwd=folder) as process:
        assert process.stdout is not None, "its output is asked for"
        text = b""
        while True:
            ready, _, _ = select.select([process.stdout], [], [], HANG_S)
            if not ready:
                process.kill()
                yield {"hangs_after": text.decode()[-300:]}
                return
            block = os.read(process.stdout.fileno(), 65536)
            if not block:
                break
            *lines, text = (text + block).split(b"\n")
            yield from map(json.loads, lines)
    if process.returncode:
        yield {"died": process.returncode}


def _peak_megabytes() -> float:
    """Peak memory of this process since it began. `ru_maxrss` would have that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def invoke(root: Path, forgery: str, name: str) -> dict[str, Any]:
    """One command in this process, as `marin-rl` would end it."""
    from typer.testing import CliRunner

    from marin_rl.cli import app
    from marin_rl.errors import MarinRLError

    began = time.process_time()
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*COMMANDS[name], "--root", str(root)])
    error = told.exception
    clear = error is None or isinstance(error, SystemExit | MarinRLError | OSError)
    return {
        "forgery": forgery,
        "command": name,
        "code": told.exit_code,
        "traceback": "" if clear else f"{type(error).__name__}: {error}"[:300],
        "text": (told.output + ("" if error is None else str(error)))[-3000:],
        "cpu_s": time.process_time() - began,
        "megabytes": _peak_megabytes(),
    }


def main(origin: str, folder: str, commands: str, *names: str) -> None:
    """Run the commands over every forgery, a line of JSON each."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    for number, name in enumerate(names):
        root = Path(folder, f"root-{number}")
        forged(Path(origin), root, name)
        for command in commands.split(","):
            sys.stdout.write(json.dumps(invoke(root, name, command)) + "\n")
            sys.stdout.flush()
        shutil.rmtree(root)


if __name__ == "__main__":
    main(*sys.argv[1:])
