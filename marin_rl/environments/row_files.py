"""Rows of files: JSON lines, CSV, Parquet, folders of it, and folders saved by `datasets`.

Rows stay as the file has them, as lines or Arrow columns, and become Python objects one at a time,
so that many rows take about the memory of their file. Leaves out the meaning of a row
(`prompt_files`).
"""

import csv
import difflib
import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.dataset
import pyarrow.ipc

from marin_rl.config.files import MARK
from marin_rl.errors import InputError
from marin_rl.plain_files import check_regular, read_object, read_regular
from schemas import Malformed
from schemas.strict_json import parse_json

KEY = "environment.options.path"
ROWS_PER_BATCH = 4096
DIGEST_CHARACTERS = 12
SPLITS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})

Row = dict[str, Any]


class TextRows:
    """Rows of JSON lines, a JSON array, or a CSV file, also of several; blank lines are skipped.

    A CSV file that does not begin with the names of its columns has those of `header`. `.gz` is
    unpacked. `sha256` changes with any byte of a file. Raises InputError.
    """

    def __init__(self, paths: Sequence[Path], header: Sequence[str] = ()) -> None:
        self._paths, digests, numbers = paths, list[str](), list[int]()
        self._lines, ends = list[bytes](), list[int]()
        for path in paths:
            data = _bytes_of(path)
            digests.append(hashlib.sha256(data).hexdigest())
            for number, line in _lines_of(path, data, header):
                self._lines.append(line)
                numbers.append(number)
            ends.append(len(self._lines))
        self._numbers, self._ends = np.array(numbers, np.int64), np.array(ends, np.int64)
        self.sha256 = _joined(digests)
        self.digest = self.sha256[:DIGEST_CHARACTERS]

    def __len__(self) -> int:
        return len(self._lines)

    def path(self, index: int) -> Path:
        return self._paths[int(np.searchsorted(self._ends, index, side="right"))]

    def place(self, index: int) -> str:
        number = int(self._numbers[index])
        words = f"line {number + 1}" if number >= 0 else f"element {-number} of its array"
        return f"{self.path(index)}, {words}"

    def row(self, index: int) -> Any:
        try:
            return parse_json(self._lines[index])
        except Malformed as error:
            raise InputError(f"{self.place(index)} is not JSON: {error}") from None

    def scan(self, columns: Collection[str]) -> Iterator[Any]:
        """Yield every parsed line, whole. Raises InputError."""
        return map(self.row, range(len(self)))


def _lines_of(path: Path, data: bytes, header: Sequence[str]) -> list[tuple[int, bytes]]:
    """Rows of a text file as JSON, each with its line, from 0; below 0 an array's elements."""
    name = path.name
    if path.suffix == ".gz":
        name = path.stem
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{KEY}: cannot unpack {path}: {error}") from None
    if name.endswith(".csv"):
        return _csv_lines(path, data, header)
    if data.lstrip()[:1] == b"[":
        try:
            elements = enumerate(parse_json(data), 1)
        except Malformed as error:
            raise InputError(f"{path} begins with '[' and is no JSON array: {error}") from None
        return [(-number, orjson.dumps(element)) for number, element in elements]
    return [pair for pair in enumerate(data.splitlines()) if pair[1].strip()]


def _csv_lines(path: Path, data: bytes, header: Sequence[str]) -> list[tuple[int, bytes]]:
    csv.field_size_limit(sys.maxsize)  # the default refuses texts of 128 KiB
    lines, number, names = list[tuple[int, bytes]](), 0, list[str]()
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        for fields in reader:
            if fields and not names and (not header or header[0] in fields):
                names = fields
            elif fields:
                names = names or [*header]
                if len(fields) != len(names):
                    raise ValueError(f"expected {len(names)} fields, found {len(fields)}")
                lines.append((number, orjson.dumps(dict(zip(names, fields, strict=True)))))
            number = reader.line_num
    except (ValueError, csv.Error) as error:
        if isinstance(error, UnicodeDecodeError):
            number = data.count(b"\n", 0, error.start)
        raise InputError(f"{path}, line {number + 1}: cannot be read as CSV: {error}") from None
    return lines


class ArrowRows:
    """Rows of Arrow tables, one per file. A column that is null in a row is not in that row.

    `sha256` covers all files. Raises InputError for files with incompatible columns.
    """

    def __init__(self, tables: Sequence[tuple[Path, Any]], sha256: str) -> None:
        self.sha256, self.digest = sha256, sha256[:DIGEST_CHARACTERS]
        self._paths = [path for path, _ in tables]
        self._ends = np.cumsum([table.num_rows for _, table in tables])
        try:
            self._table = pa.concat_tables(
                [table for _, table in tables], promote_options="permissive"
            )
        except pa.ArrowException as error:
            names = ", ".join(path.name for path in self._paths[:4])
            raise InputError(f"{KEY}: the columns of {names} do not fit: {error}") from error

    def __len__(self) -> int:
        return self._table.num_rows

    def path(self, index: int) -> Path:
        return self._paths[int(np.searchsorted(self._ends, index, side="right"))]

    def place(self, index: int) -> str:
        file = int(np.searchsorted(self._ends, index, side="right"))
        return f"{self._paths[file]}, row {index - (self._ends[file - 1] if file else 0)}"

    def row(self, index: int) -> Row:
        return _without_nulls(self._table.slice(index, 1).to_pylist()[0])

    def scan(self, columns: Collection[str]) -> Iterator[Row]:
        """Yield the chosen columns of every row, decoded in batches."""
        names = [name for name in self._table.column_names if name in columns]
        chosen = self._table.select(names)
        if not names:  # a table without columns forgets how many rows it has
            yield from ({} for _ in range(len(self)))
            return
        for start in range(0, len(self), ROWS_PER_BATCH):
            yield from map(_without_nulls, chosen.slice(start, ROWS_PER_BATCH).to_pylist())


Rows = TextRows | ArrowRows


def open_rows(path: str) -> Rows:
    """Open a file, a folder of Parquet files, or a pattern such as `data/train-*.parquet`.

    Raises InputError.
    """
    place = Path(path)
    if "*" in place.name:
        files = sorted(place.parent.glob(place.name))
        if not files:
            raise InputError(f"{KEY}: no file fits {path}")
        return rows_of(files)
    if place.is_dir():
        return _arrow_rows(_files_of_folder(place))
    if not place.exists():
        raise missing(place, path)
    return rows_of([place])


def rows_of(files: Sequence[Path], header: Sequence[str] = ()) -> Rows:
    """Rows of files of one kind; those that do not end in `.parquet` or `.arrow` are texts."""
    if files and all(file.suffix in (".parquet", ".arrow") for file in files):
        return _arrow_rows(files)
    return TextRows(files, header)


def missing(path: Path, text: str) -> InputError:
    """Return the error for a file that is not there, with the folder that it was sought in."""
    folder = path.parent.absolute()
    names = [other.name for other in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean {path.with_name(close[0])}?" if close else ""
    relative = MARK in text or not path.is_absolute()
    start = "; a relative path begins next to the YAML file that names it" if relative else ""
    return InputError(f"{KEY}: no file {path.name} in {folder}{start}{hint}")


def _files_of_folder(folder: Path) -> list[Path]:
    """Return the data files of a folder. Raises InputError where it is not clear which."""
    if (folder / "dataset_dict.json").exists():
        splits = _list_in(folder / "dataset_dict.json", "splits")
        raise InputError(
            f"{KEY}: {folder} holds the splits {', '.join(map(str, splits))}: set it to one of them"
            f", such as {folder / str(splits[0] if splits else 'train')}"
        )
    if (folder / "state.json").exists():
        file = folder / "state.json"
        entries = _list_in(file, "_data_files")
        if not all(isinstance(entry, dict) and "filename" in entry for entry in entries):
            raise InputError(f"{file}: expected _data_files with a filename each")
        return [folder / Path(str(entry["filename"])).name for entry in entries]
    files = sorted(folder.glob("*.parquet"))
    if not files:
        inner = sorted({file.parent for file in folder.rglob("*.parquet")})
        hint = f"; {inner[0]} has some" if inner else ""
        raise InputError(
            f"{KEY}: {folder} has no *.parquet and was not saved by datasets.save_to_disk{hint}"
        )
    splits = sorted({file.stem.partition("-")[0] for file in files} & SPLITS)
    if len(splits) > 1:
        raise InputError(
            f"{KEY}: {folder} holds files of the splits {', '.join(splits)}: set it to one of them"
            f", such as {folder / splits[-1]}*.parquet"
        )
    return files


def _arrow_rows(files: Sequence[Path]) -> ArrowRows:
    """Read Parquet files; Arrow files are mapped into memory."""
    tables: list[tuple[Path, Any]] = []
    digests: list[str] = []
    for file in files:
        digests.append(_digest_of(file))
        kind = "an Arrow stream" if file.suffix == ".arrow" else "Parquet"
        try:
            if file.suffix == ".arrow":
                table = pyarrow.ipc.open_stream(pa.memory_map(str(file))).read_all()
            else:
                table = pyarrow.dataset.dataset(file, format="parquet").to_table()
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{file} cannot be read as {kind}: {error}") from error
        tables.append((file, table))
    return ArrowRows(tables, _joined(digests))


def _joined(digests: Sequence[str]) -> str:
    """The digest of one file, or of those of several."""
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )


def _digest_of(file: Path) -> str:
    try:
        check_regular(file, file.stat())
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{KEY}: cannot read {file}: {error}") from None


def _bytes_of(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise InputError(f"{KEY}: cannot read {path}: {error}") from None


def _list_in(file: Path, name: str) -> list[Any]:
    entries = read_object(file).get(name, [])
    if not isinstance(entries, list):
        raise InputError(f"{file}: expected a list as {name}, found {entries!r:.80}")
    return entries


def _without_nulls(row: Row) -> Row:
    return {key: value for key, value in row.items() if value is not None}
