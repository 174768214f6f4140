"""The DuckDB databases behind `sql`: one that reads the runs' files alone, and one without limits.

DuckDB's own settings, which are locked, keep a query away from other files, extensions and
settings. They do not separate reading from writing, so statements that write files are refused
before they run, by DuckDB's parser. The views of runs are made in scan.py.
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
# settings, CALL either of them; COMMIT would leave tables for the next query, and EXECUTE hides its
# statement.
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
    """Raise InputError for statements that reach beyond memory and the runs' files.

    Raises duckdb.Error where DuckDB cannot parse the query.
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
    """DuckDB's message, with the remedy where its settings refuse."""
    import duckdb

    refused = isinstance(error, duckdb.PermissionException) or _REFUSED.search(str(error))
    return f"{error}; {UNSAFE}" if refused else str(error)


@lru_cache(maxsize=8)
def restricted_database(
    process: int, runs: frozenset[str], folders: frozenset[str]
) -> "duckdb.DuckDBPyConnection":
    """An empty database in memory that caches Parquet footers and opens files in `folders` alone.

    Footers take most of the time of a query over many files, and files of a run never change. Other
    runs have a database of their own, for DuckDB takes a file with the name and time of an earlier
    one for the same; so has a forked process.
    """
    del process, runs  # are the cache's key
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    database = _connected(
        memory_limit=f"{memory_bytes // 2}B",
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
    """An empty database in memory without restrictions; nothing of it is cached."""
    return _connected()


def _connected(**settings: str | bool) -> "duckdb.DuckDBPyConnection":
    import duckdb

    # The system has pages of local files in its memory; a second copy costs more than it spares.
    # DuckDB would count all cores of the machine, not those of this process.
    chosen = {"threads": cores(), "enable_external_file_cache": False, **settings}
    database = duckdb.connect(config=chosen)
    database.execute("set global parquet_metadata_cache = true")
    return database
