"""The DuckDB databases behind `sql`: one that reads the runs' files alone, and one without limits.

DuckDB's own settings keep a query away from other files, extensions and settings, and they are
locked. They cannot tell reading from writing, so statements that write files are refused before
they run, by DuckDB's parser. Leaves out the views of runs (scan.py).
"""

import os
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from marin_rl.errors import InputError
from marin_rl.machine import cores

if TYPE_CHECKING:
    import duckdb

# Statements that work in memory. COPY, ATTACH, EXPORT and LOAD reach files, SET and PRAGMA
# settings, CALL either of them; COMMIT would leave tables behind for the next query, and EXECUTE
# hides what it runs.
STATEMENTS = (
    "SELECT", "EXPLAIN", "CREATE", "INSERT", "UPDATE", "DELETE", "MERGE_INTO", "ALTER", "DROP",
    "MULTI",
)  # fmt: skip
WRITES_FILES = "copy"  # DuckDB runs it inside WITH and EXPLAIN ANALYZE too

UNSAFE = (
    "a query reads the run's own files and writes none; `--unsafe` (in Python `unsafe=True`) lets "
    "it read, write, attach and install whatever you may"
)
_REFUSED = re.compile(r"configuration has been locked|Table with name \S*/")  # a path, in FROM


def check_statements(query: str) -> None:
    """Raise InputError for statements that would reach beyond memory and the runs' files.

    Raises duckdb.Error for what DuckDB cannot parse.
    """
    import duckdb

    for statement in duckdb.extract_statements(query):
        if (kind := statement.type.name) not in STATEMENTS:
            words = {"MULTI": "PIVOT", "CREATE_FUNC": "CREATE MACRO"}.get(kind, kind)
            raise InputError(f"DuckDB's {words.replace('_', ' ')} statement is refused: {UNSAFE}")
    tokens = duckdb.tokenize(query)
    ends = [start for start, _ in tokens[1:]] + [len(query.encode())]
    data = query.encode()
    for (start, kind), end in zip(tokens, ends, strict=True):
        word = data[start:end].split(maxsplit=1)
        if kind.name == "keyword" and word and word[0].lower() == WRITES_FILES.encode():
            raise InputError(f'COPY is refused (a column of that name is written "copy"): {UNSAFE}')


def explained(error: "duckdb.Error") -> str:
    """DuckDB's words, with the remedy where its settings refuse."""
    import duckdb

    refused = isinstance(error, duckdb.PermissionException) or _REFUSED.search(str(error))
    return f"{error}; {UNSAFE}" if refused else str(error)


@lru_cache(maxsize=8)
def restricted_database(
    process: int, runs: frozenset[str], folders: frozenset[str]
) -> "duckdb.DuckDBPyConnection":
    """An empty database in memory for these runs, which remembers the footers that it has read.

    It opens files below `folders` alone. Of a query over many files most of the time goes into
    footers, and files of a run never change. Other runs have a database of their own, for DuckDB
    takes a file that has the name and the time of one before it for the same. So has a forked
    process.
    """
    del process, runs  # are the key
    database = _connected(
        memory_limit=f"{_memory_bytes() // 2}B",
        temp_directory="",  # no spilling: it writes files
        allow_community_extensions=False,
        autoinstall_known_extensions=False,
        autoload_known_extensions=False,
    )
    database.execute("set global allowed_directories = ?", [sorted(folders)])
    database.execute("set global enable_external_access = false")
    database.execute("set global lock_configuration = true")
    return database


def connect_unsafe() -> "duckdb.DuckDBPyConnection":
    """An empty database in memory that may do whatever its user may; nothing of it is kept."""
    return _connected()


def _connected(**settings: str | bool) -> "duckdb.DuckDBPyConnection":
    import duckdb

    # The system has pages of local files in its memory; a second copy costs more than it spares.
    # DuckDB would count all cores of the machine, not those of this process.
    chosen = {"threads": cores(), "enable_external_file_cache": False, **settings}
    database = duckdb.connect(config=chosen)
    database.execute("set global parquet_metadata_cache = true")
    return database


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
