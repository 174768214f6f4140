"""The same rows from every kind of file and folder, and errors that name the right one."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marin_rl.environments.prompt_files import ArrowRows, JsonLines, Rows, open_rows
from marin_rl.errors import InputError

ROWS = [{"prompt": f"{number}?", "info": {"n": number}} for number in range(10)]


def write_arrow(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the layout of `datasets.save_to_disk`: Arrow streams and a state.json."""
    folder.mkdir(parents=True)
    names = [f"data-0000{part}-of-00002.arrow" for part in range(2)]
    for part, name in enumerate(names):
        table = pa.Table.from_pylist(rows[part * 5 : part * 5 + 5])
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as s,
        ):
            s.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )


def write_parquet(folder: Path, rows: list[dict[str, Any]], stem: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(2):
        table = pa.Table.from_pylist(rows[part * 5 : part * 5 + 5])
        pq.write_table(table, folder / f"{stem}-0000{part}-of-00002.parquet")


def opened(tmp_path: Path, kind: str) -> Rows:
    if kind == "lines":
        (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)))
        return open_rows(str(tmp_path / "rows.jsonl"))
    if kind == "saved":
        write_arrow(tmp_path / "saved", ROWS)
        return open_rows(str(tmp_path / "saved"))
    write_parquet(tmp_path / "folder", ROWS)
    if kind == "pattern":
        write_parquet(tmp_path / "folder", ROWS, "test")
        return open_rows(str(tmp_path / "folder" / "train-*.parquet"))
    return open_rows(str(tmp_path / "folder"))


@pytest.mark.parametrize("kind", ["lines", "saved", "folder", "pattern"])
def test_the_same_rows_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    rows = opened(tmp_path, kind)
    assert isinstance(rows, JsonLines if kind == "lines" else ArrowRows)
    assert len(rows) == 10
    assert [rows.row(index) for index in range(10)] == ROWS
    scanned = list(rows.scan({"prompt", "absent"}))
    assert [row["prompt"] for row in scanned] == [row["prompt"] for row in ROWS]
    assert len(list(rows.scan({"absent"}))) == 10


def test_places_name_the_file_and_the_row_in_it(tmp_path: Path) -> None:
    assert opened(tmp_path, "lines").place(2).endswith("rows.jsonl, line 5")
    assert opened(tmp_path, "folder").place(7).endswith("train-00001-of-00002.parquet, row 2")


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"), num_shards=2)
    assert [open_rows(str(tmp_path / "one")).row(index) for index in (0, 9)] == [ROWS[0], ROWS[9]]
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(InputError, match=r"holds the splits train, test.*two/train"):
        open_rows(str(tmp_path / "two"))
    assert len(open_rows(str(tmp_path / "two" / "test"))) == 10


def test_a_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a", ROWS)
    write_parquet(tmp_path / "b", [*ROWS[:9], {**ROWS[9], "prompt": "another"}])
    digests = [open_rows(str(tmp_path / name)).digest for name in ("a", "b", "a")]
    assert digests[0] == digests[2] != digests[1]


def test_folders_that_leave_a_choice_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "both", ROWS)
    write_parquet(tmp_path / "both", ROWS, "test")
    with pytest.raises(InputError, match=r"splits test, train: .*both/train\*\.parquet"):
        open_rows(str(tmp_path / "both"))
    write_parquet(tmp_path / "outer" / "data", ROWS)
    with pytest.raises(InputError, match=r"has no \*\.parquet.*outer/data has some"):
        open_rows(str(tmp_path / "outer"))
    with pytest.raises(InputError, match=r"no file fits .*\*\.parquet"):
        open_rows(str(tmp_path / "outer" / "*.parquet"))


def test_a_missing_file_is_named_with_its_folder_and_a_close_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    relative = f"no file promts.jsonl in {tmp_path}; a relative path begins next to the YAML"
    with pytest.raises(InputError, match=f"{relative}.*did you mean prompts.jsonl"):
        open_rows("promts.jsonl")
    with pytest.raises(InputError, match=f"no file x.parquet in {tmp_path}/nowhere$"):
        open_rows(f"{tmp_path}/nowhere/x.parquet")


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(InputError, match="as Parquet"):
        open_rows(str(tmp_path / "p.parquet"))


def test_files_whose_columns_do_not_fit_are_refused(tmp_path: Path) -> None:
    for number, value in enumerate([["a"], "a"]):
        table = pa.Table.from_pylist([{"prompt": value}])
        pq.write_table(table, tmp_path / f"part-{number}.parquet")
    with pytest.raises(InputError, match=r"columns of part-0\.parquet, part-1\.parquet do not"):
        open_rows(str(tmp_path))


def test_lines_nested_too_deeply_are_refused_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"prompt": "a", "deep": ' + "[" * 400 + "]" * 400 + "}")
    with pytest.raises(InputError, match="line 1 is not JSON: expected at most 200 levels"):
        list(open_rows(str(path)).scan({"prompt"}))


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_file_that_is_one_array_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n" + json.dumps(ROWS, indent=1))
    with pytest.raises(InputError, match=rf"{name} begins with '\[': expected JSON Lines.*jq -c"):
        open_rows(str(tmp_path / name))
