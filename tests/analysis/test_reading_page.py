"""Every snippet of docs/reading-runs.md runs, in order, over a run named as there."""

import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.run_factories import shown_run

from marin_rl.analysis import sql

PAGE = Path(__file__).parents[2] / "docs" / "reading-runs.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shown_run(tmp_path / "runs", run_id="demo")
    return tmp_path


def test_python(folder: Path) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["longest"].height == 5
    assert names["frame"]["round"].to_list() == [0, 1, 2]
    assert names["learned"].height == 0  # there is no round 3


def test_sql(folder: Path) -> None:
    blocks = re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL)
    queries = [query.strip() for block in blocks for query in block.split(";") if query.strip()]
    assert len(queries) >= 5
    for query in queries:
        found = sql("runs", "demo", query)
        assert isinstance(found, pl.DataFrame)
