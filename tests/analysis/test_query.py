"""Rows of `marin-rl sql` are those of a frame."""

from pathlib import Path

import pytest
from support.run_factories import configuration, sampled_pair, whole_run

from marin_rl.analysis.query import answer_rows, sql, tables
from marin_rl.analysis.scan import TABLES
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.pairs import commit_pairs

VALUES = (
    "1::tinyint", "1::ubigint", "null", "0.1::float", "'nan'::double", "1.50::decimal(9, 2)",
    "true", "'é'", "'ab'::blob", "'a'::enum('a', 'b')", "[0.1::float]", "[null, 'a']", "{'a': 1}",
    "[{'a': 1}]", "map {'a': 1}", "date '2024-01-02'", "time '01:02:03'",
    "timestamp '2024-01-02 03:04:05'", "timestamptz '2024-01-02 03:04:05+00'", "[1, 2]::int[2]",
    "uuid '11111111-1111-1111-1111-111111111111'", "interval 1 month",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run without a model."""
    return whole_run(str(tmp_path_factory.mktemp("runs")))


def test_values_of_rows_are_those_of_a_frame(run: Run) -> None:
    for value in VALUES:
        query = f"select {value} as value, 1 as one"
        frame = sql(run.config.root, run.run_id, query)
        answer = answer_rows(run.config.root, run.run_id, query)
        assert list(answer.columns) == frame.columns
        assert [repr(row) for row in answer.rows] == [repr(row) for row in frame.rows()], value


def test_sums_of_integers_are_integers_and_columns_of_one_name_are_kept_apart(run: Run) -> None:
    answer = answer_rows(run.config.root, run.run_id, "select sum(2) as a, 1 as a")
    assert (list(answer.columns), [tuple(row) for row in answer.rows]) == (["a", "a_1"], [(2, 1)])
    (row,) = answer_rows(run.config.root, run.run_id, "select sum(2) as a").rows
    assert (row[0], type(row[0])) == (2, int)


def test_tables_have_the_names_of_the_frames(run: Run) -> None:
    assert list(TABLES) == list(tables(run.config.root, run.run_id))


def test_columns_of_tables_are_those_that_a_query_has(run: Run) -> None:
    for name, columns in tables(run.config.root, run.run_id).items():
        described = answer_rows(run.config.root, run.run_id, f"describe {name}").rows
        assert list(columns.items()) == [(row[0], row[1]) for row in described], name


def test_pairs_of_a_run_are_a_table(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    commit_pairs(run, [sampled_pair()], decided="f" * 64, extra={})
    query = "select run_id, id, chosen, margin, chosen_token_ids, label from pairs"
    (row,) = answer_rows(run.config.root, run.run_id, query).rows
    assert list(row) == ["run", "run/round-00000/group-00001", "yes", 0.5, [3, 4], None]
