"""Execution of the notebooks of docs/notebooks, for their test and for `make notebooks`."""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
# In this order: a later one reads the run that the first one trains.
NOTEBOOKS = (
    "training.ipynb", "reading.ipynb", "learning.ipynb", "own-loop.ipynb", "sampling.ipynb"
)  # fmt: skip
CELL_TIMEOUT_S = 500


def executed(name: str, workplace: Path) -> nbformat.NotebookNode:
    """The notebook, executed by a new kernel in the folder `workplace`; raises what a cell raises.

    What goes to standard error, such as logs, is left out of its outputs, and so are the times and
    machine of the execution.
    """
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(workplace)}},
        record_timing=False,
    )
    client.execute(env={**os.environ, "JAX_PLATFORMS": "cpu"})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [item for item in cell.outputs if item.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return notebook


def main() -> None:
    """Execute all notebooks in an empty folder, and write them with their outputs."""
    with tempfile.TemporaryDirectory() as workplace:
        for name in NOTEBOOKS:
            nbformat.write(executed(name, Path(workplace)), FOLDER / name)
            sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
