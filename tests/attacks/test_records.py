"""Run folders that somebody else wrote: every command that reads them ends, in words.

Each forgery is a change of a whole run, sealed again where it is of a record, so that its shape
alone is wrong. A reading command may answer or refuse; it may not hang, end in a traceback, grow
without end, or hide the run next to it.
"""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attacks.forgeries import (
    COMMANDS,
    DEEP,
    FORGERIES,
    METRICS,
    QUICK_COMMANDS,
    SHARD,
    bomb,
    forged,
    invoke,
    outcomes,
    sealed,
)
from support.cases import printed_seed
from support.run_factories import whole_run

from marin_rl.analysis.status import RunStatus, Unreadable, each_run, run_status
from marin_rl.errors import ConfigError, CorruptObject
from marin_rl.storage.runs import Run, check_run_id
from marin_rl.storage.stores.filesystem import open_store
from marin_rl.storage.tables.decoded_size import check_decoded, open_parquet
from marin_rl.storage.tables.parquet import corruption_named
from marin_rl.storage.tables.rollouts import decode_shard
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect, rule_of
from schemas import Malformed
from schemas.manifests import Manifest, open_sealed_json
from tasks.train import prune_old

GREW_MB_MAX = 1500  # of a process that has all libraries of reading; a bomb takes 4,000 and more
QUICK = 6
SLOW = min(int(os.environ.get("MARIN_RL_FORGERIES") or 10**6), len(FORGERIES))
FORGED_RECORDS = ("run.json deep", "ancestors numbers", "no config", "run.json a pipe")


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the whole run `run` of two rounds."""
    root = tmp_path_factory.mktemp("origin")
    whole_run(str(root), 2)
    return root


def check_outcomes(origin: Path, folder: Path, names: list[str], commands: tuple[str, ...]) -> None:
    """Run the commands over the forgeries; all of them must end, in words."""
    seen = list(outcomes(origin, folder, names, commands))
    ended = [item for item in seen if "forgery" in item]
    assert len(ended) == len(seen) == len(names) * len(commands), seen[-1]
    grown = [item for item in ended if item["megabytes"] > GREW_MB_MAX]
    assert not grown, grown[:3]
    check_ended(ended)


def check_ended(ended: Sequence[Mapping[str, Any]]) -> None:
    """Commands over forgeries ended in words, and hid no neighbour."""
    wrong = [item for item in ended if item["traceback"]]
    assert not wrong, wrong[:3]
    for item in ended:
        if item["command"] == "status of all":
            assert "good" in item["text"], item
        if item["command"] == "gc beside" and item["code"]:
            assert "bad/run.json" in item["text"], item
        if item["command"] == "fsck" and item["forgery"] not in OPAQUE:
            assert item["code"] == 1, item


# What a checkpoint's `extra` holds is its own: `status` and `gc` refuse it where they need it.
OPAQUE = ("rounds planned a text", "retention a number")


def test_forged_runs_are_answered_or_refused(origin: Path, tmp_path: Path) -> None:
    """Some of them in this process, which has the libraries; all in one of their own, slowly."""
    for name in random.Random(printed_seed()).sample(sorted(FORGERIES), QUICK):
        root = tmp_path / name
        forged(origin, root, name)
        check_ended([invoke(root, name, command) for command in QUICK_COMMANDS])


@pytest.mark.slow
def test_every_command_answers_or_refuses_every_forged_run(origin: Path, tmp_path: Path) -> None:
    names = random.Random(printed_seed()).sample(sorted(FORGERIES), SLOW)
    check_outcomes(origin, tmp_path, names, tuple(COMMANDS))


@pytest.mark.parametrize("name", FORGED_RECORDS)
def test_a_bad_folder_hides_and_ends_no_neighbour(origin, tmp_path, name, caplog):
    forged(origin, tmp_path, name)
    looks = each_run(str(tmp_path), lambda run_id: run_status(str(tmp_path), run_id))
    seen = {item.run_id: item for item in looks}
    assert isinstance(seen["good"], RunStatus)
    assert isinstance(seen["bad"], Unreadable)
    good = Run.open(str(tmp_path), "good")
    late = f"batches/round-00001/batches-20250101T000000-{'a' * 16}.parquet"
    good.store.put_part(late, b"1")
    found = collect(good, rule_of(good, 2, None))
    assert [(item.reason, item.key) for item in found.garbage] == [("unreferenced", late)]
    assert "bad/run.json" in found.unread
    tight = good.config.model_copy(update={"retention": rule_of(good, 2, None)})
    prune_old(replace(good, config=tight))  # as a run does after every round
    assert "bad/run.json" in caplog.text
    assert check_run(str(tmp_path), "good").whole


def test_any_violation_in_a_record_is_one_error() -> None:
    for data in (DEEP, b'{"a":' * 100_000, b"1e999", b"\xff", b"[" + b"1," * 10**6 * 5):
        for record in (data, b'{"format":"f","version":1,"more":' + data + b"}"):
            with pytest.raises(Malformed):
                open_sealed_json(record, format="f", version=1)
            with pytest.raises(Malformed):
                Manifest.from_json(record)
    with pytest.raises(Malformed, match="67108864 bytes at most"):
        open_sealed_json(b" " * (64 * 2**20 + 1), format="f", version=1)


def test_records_keep_fields_that_they_do_not_know(origin: Path, tmp_path: Path) -> None:
    shutil.copytree(origin / "run", tmp_path / "run")
    sealed("run.json", lambda record: record.update(later={"a": [1]}))(tmp_path / "run")
    assert run_status(str(tmp_path), "run").trained == 2
    assert check_run(str(tmp_path), "run").whole


OUTSIDE = """
import sys
from marin_rl.errors import CorruptObject
from marin_rl.storage.stores.filesystem import open_store

store = open_store(sys.argv[1])
for key in ("../secret", "a/../../secret", "/etc/hostname", "a\\0b"):
    for act in (store.read, store.delete, store.size, store.list, store.children, store.at):
        try:
            act(key)
        except CorruptObject:
            continue
        sys.exit(f"{act.__name__} of {key!r} was let through")
"""


def test_keys_stay_below_their_store_without_asserts(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("kept")
    environment = {**os.environ, "PYTHONOPTIMIZE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", OUTSIDE, str(tmp_path / "root")],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    assert (tmp_path / "secret").read_text() == "kept"


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\x1b[2J", "a/b", "..", "x" * 300, ""])
def test_a_name_that_can_be_no_folder_is_no_run(name: str) -> None:
    with pytest.raises(ConfigError, match="id of a run"):
        check_run_id(name)


def test_a_shard_that_would_grow_is_refused_before_it_does(origin: Path, tmp_path: Path) -> None:
    folder = forged(origin, tmp_path, "shard that grows")
    shard = folder / SHARD
    assert shard.stat().st_size < 100_000
    with pytest.raises(CorruptObject, match="made to grow"):
        decode_shard(shard.read_bytes())
    faults = check_run(str(tmp_path), "bad").faults
    assert bomb is FORGERIES["shard that grows"]
    assert not [fault for fault in faults if fault.kind == "missing"]


def test_text_that_is_worth_its_size_is_read(origin: Path) -> None:
    """The bound that footers give is too wide for much repeated text; its lengths decide."""
    texts = [["a" * 200_000, "b"], []] * 100 + [[str(n)] for n in range(1000)]
    table = pa.table({"texts": texts, "other": ["c" * 1000] * len(texts)})
    buffer = parquet(table)
    check_decoded(open_parquet(buffer), buffer, [0], ["texts", "other"])
    buffer = parquet(pa.concat_tables([table] * 10), compression="zstd")
    with pytest.raises(Malformed, match="made to grow"):
        check_decoded(open_parquet(buffer), buffer, [0], ["texts"])
    check_decoded(open_parquet(buffer), buffer, [0], ["other"])


def parquet(table: pa.Table, **options: Any) -> pa.Buffer:
    """The file of a table."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def test_a_damaged_footer_is_read_or_refused() -> None:
    """Arrow ends the process where it is asked about a chunk whose histograms are wrong."""
    rows = 12_345
    turns = [[{"role": "user", "start": n}] * (n % 3) for n in range(rows)]
    table = pa.table({"number": np.arange(rows), "turns": turns})
    whole = parquet(table, row_group_size=rows).to_pybytes()
    body = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    levels = b"\x26\x00\xf2\xc0\x01"  # a list of two numbers, 0 and 12,345
    damaged = [whole[:body] + whole[body:].replace(levels, b"\x36\x00\x00\xf2\x40")]  # of three
    choose = random.Random(printed_seed())
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(choose.choice((1, 1, 1, 8))):
            data[choose.randrange(body, len(data) - 8)] ^= 1 << choose.randrange(8)
        damaged.append(bytes(data))
    reasons = list[str]()
    for data in damaged:
        with suppress(CorruptObject), corruption_named("x"):
            try:
                file = open_parquet(buffer := pa.py_buffer(data))
                groups = range(file.num_row_groups)
                check_decoded(file, buffer, groups, file.schema_arrow.names)
            except OSError as error:
                reasons.append(str(error))
                raise
    assert "Definition level histogram size mismatch" in reasons[0]


def test_metrics_of_the_last_round_are_missed(origin: Path, tmp_path: Path) -> None:
    shutil.copytree(origin / "run", tmp_path / "run")
    (tmp_path / "run" / METRICS).unlink()
    (fault,) = check_run(str(tmp_path), "run").faults
    assert (fault.kind, fault.place) == ("missing", str(tmp_path / "run" / METRICS))
    assert "metrics.jsonl" in fault.detail


def _flip(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


def _cut(data: bytes) -> bytes:
    first, second = data.splitlines(keepends=True)
    return first[:100] + first[200:] + second


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (_flip, "altered"),
        (_cut, "altered"),
        (lambda data: data + b"hello\n", "altered"),
        (lambda data: data.replace(b'"round": 1', b'"round": 0'), "altered"),
        (lambda data: b"\xff\xfe" + data, "altered"),
        (lambda data: data[:-50], "whole"),  # a process that was killed as it wrote
        (lambda data: data[:900] + b"\n" + data, "whole"),  # and one that went on after it
        (lambda data: b"", "whole"),
        (lambda data: data, "whole"),
    ],
    ids=["bit", "cut", "more", "renamed", "bytes", "torn", "torn and again", "empty", "as it was"],
)
def test_damage_of_the_lines_is_named(origin, tmp_path, change, verdict):
    shutil.copytree(origin / "run", tmp_path / "run")
    lines = tmp_path / "run/metrics.jsonl"
    lines.write_bytes(change(lines.read_bytes()))
    checked = check_run(str(tmp_path), "run")
    found = {(fault.kind, fault.place) for fault in checked.faults}
    assert found == (set() if verdict == "whole" else {(verdict, str(lines))})


def test_a_neighbour_with_a_strange_name_is_named(origin: Path, tmp_path: Path) -> None:
    for name in ("good", "bad\nname"):
        shutil.copytree(origin / "run", tmp_path / name)
    seen = each_run(str(tmp_path), lambda name: run_status(str(tmp_path), name))
    assert [type(item).__name__ for item in seen] == ["Unreadable", "RunStatus"]
    assert open_store(str(tmp_path)).children() == ["bad\nname", "good"]
