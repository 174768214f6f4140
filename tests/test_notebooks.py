"""The notebooks of the docs: what is stored in them, and that they still run."""

import re
from pathlib import Path

import nbformat
import pytest
from notebook_runs import FOLDER, NOTEBOOKS, executed
from support.imports import missing_imports

BYTES_MAX = 30_000
MACHINE = re.compile(r"/(?:home|root|tmp|work|usr|Users|mnt|opt)/|127\.0\.0\.1|localhost")


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_all_notebooks_are_tested():
    assert sorted(path.name for path in FOLDER.glob("*.ipynb")) == sorted(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_stored_notebook_is_executed_small_and_of_no_machine(name):
    text = (FOLDER / name).read_text("utf-8")
    assert len(text) < BYTES_MAX
    assert not MACHINE.findall(text), "run `make notebooks`"
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    assert not any(item.output_type == "error" for cell in cells for item in cell.outputs)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_imports_of_a_notebook_exist(name):
    for cell in code_cells(nbformat.read(FOLDER / name, as_version=4)):
        assert missing_imports(cell.source) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_notebooks_run_next_to_files_with_names_of_our_packages(tmp_path: Path):
    for name in ("tasks", "flows", "schemas", "errors"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    for name in NOTEBOOKS:
        stored = nbformat.read(FOLDER / name, as_version=4)
        again = executed(name, tmp_path)  # raises what a cell raises
        kinds = [
            [[item.output_type for item in cell.outputs] for cell in code_cells(notebook)]
            for notebook in (stored, again)
        ]
        assert kinds[0] == kinds[1], name
