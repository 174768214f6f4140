"""Ladders climb one pure rung at a time, and refuse what lies above or below them."""

import pyarrow as pa
import pytest

from schemas import Malformed, NewerVersion
from schemas.migrations import BATCHES, DISPOSITIONS, METRICS, ROLLOUTS, SCORES, Ladder
from schemas.tables import batches_schema


def _add(name: str):
    return lambda table: table.append_column(name, pa.nulls(table.num_rows, pa.int32()))


LADDER = Ladder("test/format", 3, {1: _add("second"), 2: _add("third")})


@pytest.mark.parametrize(("version", "added"), [(1, ["second", "third"]), (2, ["third"]), (3, [])])
def test_every_rung_from_the_version_up_is_climbed_once(version: int, added: list[str]) -> None:
    table = pa.table({"first": [1, 2]})
    found = LADDER.upgrade(table, version)
    assert found.column_names == ["first", *added]
    assert table.column_names == ["first"]


def test_newer_versions_are_refused() -> None:
    with pytest.raises(NewerVersion, match="test/format version 4 is newer than 3"):
        LADDER.upgrade(pa.table({}), 4)


def test_versions_below_one_are_malformed() -> None:
    with pytest.raises(Malformed, match="from 1, found 0"):
        LADDER.check(0)


@pytest.mark.parametrize("ladder", [ROLLOUTS, BATCHES, DISPOSITIONS, METRICS, SCORES])
def test_every_ladder_has_a_rung_below_each_newer_version(ladder: Ladder) -> None:
    assert sorted(ladder.rungs) == list(range(1, ladder.newest))


def test_batches_have_one_length() -> None:
    schema = batches_schema(96)
    assert schema.field("token_ids").type.list_size == 96
    assert schema.field("advantages").type.value_type == pa.float32()
    with pytest.raises(ValueError, match="at least 1 token, found 0"):
        batches_schema(0)
