"""Archives that somebody else made: `verify` ends soon, takes little memory, and says `whole` of
none that would be unpacked elsewhere, or is not what it says.
"""

import hashlib
import io
import json
import os
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.run_factories import whole_run
from typer.testing import CliRunner

from marin_rl.cli import app
from marin_rl.errors import InputError, MarinRLError
from marin_rl.storage.upkeep.archive import Entry, root_hash_of, verify_archive, write_archive
from schemas.manifests import sealed_json

MEMORY_BYTES_MAX = 300 * 2**20
HUGE = 7 * 2**30
SHARD = "run/rollouts/round-00000/shard-0000.parquet"
MANIFEST = "run/batches/round-00000/manifest.json"

Entries = dict[str, bytes]


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> Entries:
    """The entries of an archive of a whole run, by name, in their order."""
    folder = tmp_path_factory.mktemp("archives")
    run = whole_run(str(folder / "runs"), 1)
    made = write_archive(run, folder / "run.tar", everything=True)
    with tarfile.open(made.path) as tar:
        return {info.name: _bytes(tar, info) for info in tar}


def _bytes(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info)
    assert file is not None, info.name
    return file.read()


def info_of(name: str, **fields: Any) -> tarfile.TarInfo:
    """A header; `fields` are what it says, whatever its entry is."""
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def header(info: tarfile.TarInfo) -> bytes:
    """The bytes of a header alone."""
    return info.tobuf(tarfile.GNU_FORMAT)


def tar_of(path: Path, entries: Entries, *, first: bytes = b"", last: bytes = b"") -> Path:
    """An archive of the entries, between bytes of headers as they stand."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in entries.items():
            tar.addfile(info_of(name, size=len(data)), io.BytesIO(data))
        end = tar.offset
    path.write_bytes(first + body.getvalue()[:end] + last + b"\0" * 10240)
    return path


def listed(entries: Entries, /, **change: object) -> Entries:
    """The same with contents.json, of the right digest, that lists them as they are."""
    record = json.loads(entries["contents.json"])
    record.pop("digest")
    found = [
        Entry(name, len(data), hashlib.sha256(data).hexdigest())
        for name, data in sorted(entries.items())
        if name != "contents.json"
    ]
    record |= {"entries": [[e.name, e.bytes, e.sha256] for e in found]}
    record |= {"root_hash": root_hash_of(found), **change}
    return {**entries, "contents.json": sealed_json(record)}


def assert_refused(path: Path, words: str) -> None:
    """It says what is wrong, and neither reads nor keeps much to find it."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=words):
            verify_archive(path)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    [
        "../../evil.txt",
        "/etc/evil",
        "run/../../evil",
        "run//evil",
        "run/./evil",
        "run/a\x1b[2J",
        "..",
    ],
)
def test_names_that_lead_elsewhere_are_refused(entries: Entries, tmp_path: Path, name: str) -> None:
    evil = listed({**entries, name: b"evil"})
    assert_refused(tar_of(tmp_path / "a.tar", evil), "expected a relative path like a/b")
    unlisted = tar_of(tmp_path / "b.tar", {**entries, name: b"evil"})
    assert_refused(unlisted, "no relative path like RUN/run.json")
    told = CliRunner().invoke(app, ["verify", str(unlisted)])
    assert isinstance(told.exception, MarinRLError)
    assert "whole\n" not in told.output


def test_long_names_are_read_and_checked(entries: Entries, tmp_path: Path) -> None:
    long = "run/checkpoints/round-00000/" + "/".join(["a" * 100] * 5)
    found = verify_archive(tar_of(tmp_path / "a.tar", listed({**entries, long: b"1"})))
    assert found.faults == ()
    beyond = "run/" + "/".join(["a" * 100] * 20)
    assert_refused(tar_of(tmp_path / "b.tar", {**entries, beyond: b"1"}), "no relative path")


def test_files_of_other_runs_are_not_whole(entries: Entries, tmp_path: Path) -> None:
    other = listed({**entries, "other/run.json": entries["run/run.json"]})
    (fault,) = verify_archive(tar_of(tmp_path / "a.tar", other)).faults
    assert (fault.kind, fault.place) == ("orphan", "other/run.json")
    below = listed({**entries, f"{SHARD}/below": b"1"})
    faults = verify_archive(tar_of(tmp_path / "b.tar", below)).faults
    assert [(fault.kind, fault.place) for fault in faults] == [("orphan", f"{SHARD}/below")]
    moved = {("run/batches/round-00009/manifest.json" if n == MANIFEST else n): d
             for n, d in entries.items()}  # fmt: skip
    faults = verify_archive(tar_of(tmp_path / "c.tar", listed(moved))).faults
    assert ("altered", "run/batches/round-00009/manifest.json") in {
        (f.kind, f.place) for f in faults
    }


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        (tarfile.SYMTYPE, "/etc/passwd"),
        (tarfile.LNKTYPE, "run/run.json"),
        (tarfile.FIFOTYPE, ""),
        (tarfile.CHRTYPE, ""),
        (tarfile.BLKTYPE, ""),
        (tarfile.DIRTYPE, ""),
        (tarfile.CONTTYPE, ""),
        (tarfile.GNUTYPE_SPARSE, ""),
        (tarfile.GNUTYPE_LONGNAME, ""),
        (tarfile.XGLTYPE, ""),
        (b"Z", ""),
    ],
    ids=["link", "hard link", "pipe", "device", "block", "folder", "contiguous", "sparse", "long",
         "global", "unknown"],
)  # fmt: skip
def test_entries_that_are_no_regular_files_are_refused(entries, tmp_path, kind, link):
    entry = header(info_of("run/evil", type=kind, linkname=link))
    assert_refused(tar_of(tmp_path / "a.tar", entries, last=entry), "expected regular files alone")
    assert_refused(tar_of(tmp_path / "b.tar", entries, first=entry), "expected regular files alone")


def sparse(name: str, size: int) -> bytes:
    """An old GNU sparse entry that is all hole: a block that says it has `size` bytes."""
    block = bytearray(header(info_of(name, type=tarfile.GNUTYPE_SPARSE)))
    block[483:495] = b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: dict[str, str], size: int | None = None) -> bytes:
    """An extended header with these records, or that says it has `size` bytes."""
    body = b""
    for key, value in records.items():
        plain = len(key) + len(value.encode()) + 3
        length = plain + len(str(plain + len(str(plain))))
        body += f"{length} {key}={value}\n".encode()
    first = header(info_of("pax", type=tarfile.XHDTYPE, size=len(body) if size is None else size))
    return first + body + b"\0" * (-len(body) % 512)


@pytest.mark.parametrize("name", ["contents.json", MANIFEST, SHARD])
def test_sparse_entries_are_refused(entries: Entries, tmp_path: Path, name: str) -> None:
    assert_refused(
        tar_of(tmp_path / "a.tar", {}, first=sparse(name, HUGE)), "expected regular files alone"
    )
    others = {key: data for key, data in entries.items() if key != name}
    assert_refused(
        tar_of(tmp_path / "b.tar", others, last=sparse(name, HUGE)), "regular files|first entry"
    )
    records = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(HUGE)}
    marked = pax(records) + header(info_of(name, size=0))
    assert_refused(tar_of(tmp_path / "c.tar", {}, first=marked), "expected path and size alone")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (pax({"path": "run/" + "a" * 70_000}), r"extended header of \d{5} bytes"),
        (pax({"size": "-1"}) + header(info_of("run/a")), "extended header with size"),
        (pax({"size": "9" * 30}) + header(info_of("run/a")), "extended header with size"),
        (pax({"size": str(HUGE)}) + header(info_of("run/a")), "more than are left"),
        (pax({"path": "../evil"}) + header(info_of("run/a")), "no relative path"),
        (pax({"linkpath": "/etc"}) + header(info_of("run/a")), "expected path and size alone"),
        (pax({"path": "run/a"}) + pax({"path": "run/b"}), "two extended headers in a row"),
        (pax({"path": "run/a"}), "is of no entry"),
        (pax({}, HUGE), "more than are left"),
        (header(info_of("run/a", size=HUGE)), "more than are left"),
        (header(info_of("run/run.json")), "is there twice"),
        (b"\0" * 512 + header(info_of("run/a")), "nothing after the archive's end"),
        (b"x" * 512, "no whole archive"),
    ],
    ids=["long", "negative", "many digits", "large", "elsewhere", "link", "two", "alone", "empty",
         "size", "twice", "after the end", "noise"],
)  # fmt: skip
def test_headers_that_ask_for_more_are_refused(entries, tmp_path, entry, words):
    assert_refused(tar_of(tmp_path / "a.tar", entries, last=entry), words)


@pytest.mark.parametrize(
    "data",
    [b"[" * 200_000, b"{}", b"", b"null", b'{"format":"marin-rl/export","version":1}', b"1e999"],
    ids=["deep", "empty", "nothing", "null", "no entries", "infinite"],
)
def test_contents_that_are_none_are_refused(entries: Entries, tmp_path: Path, data: bytes) -> None:
    assert_refused(
        tar_of(tmp_path / "a.tar", {**entries, "contents.json": data}), r"contents\.json"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"entries": 5}, {"entries": [["run/a", -1, "0" * 64]]}, {"entries": [["run/a", 1]]},
        {"entries": [["run/a", "1", "0" * 64]]}, {"entries": [["run/a", 1, "0" * 63]]},
        {"entries": [["run/a", 1, "0" * 64]] * 2}, {"entries": [["a", 1, "0" * 64]]},
        {"lineage": []}, {"lineage": {"a": 1}}, {"run_id": "../run"}, {"run_id": 5},
        {"root_hash": None}, {"everything": "yes"},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
def test_contents_of_other_shapes_are_refused(entries, tmp_path, change):
    assert_refused(tar_of(tmp_path / "a.tar", listed(entries, **change)), r"contents\.json")


def test_records_of_more_than_64_megabytes_are_refused(entries: Entries, tmp_path: Path) -> None:
    """A file of holes, so that the archive itself takes no room on the disk of the test."""
    for name in ("contents.json", MANIFEST):
        path = tmp_path / "large.tar"
        others = {} if name == "contents.json" else {**entries}
        others.pop(name, None)
        first = b"" if others else header(info_of(name, size=65 * 2**20))
        last = header(info_of(name, size=65 * 2**20)) if others else b""
        tar_of(path, others, first=first, last=last)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + 70 * 2**20)
        assert_refused(path, "67108864 bytes at most")


def test_a_damaged_manifest_is_a_fault(entries: Entries, tmp_path: Path) -> None:
    for data in (b"[" * 200_000, b'{"a":1e999}', b"", b"null"):
        changed = listed({**entries, MANIFEST: data})
        faults = verify_archive(tar_of(tmp_path / "a.tar", changed)).faults
        assert ("altered", MANIFEST) in {(fault.kind, fault.place) for fault in faults}


def test_a_pipe_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MarinRLError, match="expected a regular file, found a pipe"):
        verify_archive(tmp_path / "pipe")


@pytest.mark.slow
def test_fifty_megabytes_of_headers_end_soon(tmp_path: Path, entries: Entries) -> None:
    """As many entries as fit, none of which is listed: a fault each, and no time lost."""
    many = b"".join(header(info_of(f"run/{number}")) for number in range(100_000))
    found = verify_archive(tar_of(tmp_path / "a.tar", entries, last=many))
    assert len(found.faults) == 100_000
