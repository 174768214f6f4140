"""A deferred package costs nothing until it is used, and then is the package itself."""

import subprocess
import sys

import pytest
from support.run_factories import whole_run

from marin_rl.deferred import defer

PROGRAM = """
import sys
from marin_rl.deferred import defer
sys.path.insert(0, {folder!r})
defer("heavy")
import heavy
import heavy as again
print(hasattr(heavy, "__warningregistry__"), "heavy.inner" in sys.modules)
print({use})
print(sys.modules["heavy"].answer, heavy.answer, again.answer, "heavy.inner" in sys.modules)
"""


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("heavy.answer", "42"),
        ("__import__('heavy.inner', fromlist=['x']).x", "6"),
        ("__import__('heavy', fromlist=['answer']).answer", "42"),
    ],
)
def test_it_is_loaded_by_its_first_use_alone(tmp_path, use, expected):
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy/__init__.py").write_text("from heavy.inner import x\nanswer = 7 * x\n")
    (tmp_path / "heavy/inner.py").write_text("x = 6\n")
    program = PROGRAM.format(folder=str(tmp_path), use=use)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split("\n")[:3] == ["False False", expected, "42 42 42 True"]


def test_loaded_and_absent_packages_are_left_alone():
    before = sys.modules["pytest"]
    defer("pytest", "no_such_package_anywhere")
    assert sys.modules["pytest"] is before
    assert "no_such_package_anywhere" not in sys.modules


@pytest.mark.slow
def test_loading_a_model_brings_no_pandas_along():
    looked_for = {"pandas", "datasets.load", "wandb.sdk"}
    program = f"import sys, marin_rl.training.loop; print(bool({looked_for} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "False"


def test_help_imports_no_markdown():
    program = (
        "import sys; sys.argv = ['marin-rl', '--help']\nfrom marin_rl.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([n for n in ('rich.markdown', 'markdown_it', 'rich.traceback') if n in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "reward-model" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    whole_run(str(root := tmp_path_factory.mktemp("runs")), 1)
    return str(root)


@pytest.mark.slow
@pytest.mark.parametrize("command", [("status",), ("rollouts",)])
def test_commands_that_read_a_run_import_little(root, command):
    name, *options = command
    line = ["marin-rl", name, "run", *options, "--root", root]
    spared = ["pandas", "polars", "pyarrow.compute", "fsspec", "transformers", "prefect"]
    program = (
        f"import sys; sys.argv = {line!r}\nfrom marin_rl.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {spared!r} if sys.modules.get(name)])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("audit", "run"),
        ("diff", "run", "run"),
        ("report", "run", "-o", "page.html"),
        ("sql", "run", "select * from rollouts, metrics"),
    ],
)
def test_no_reader_imports_pandas(root, command, tmp_path):
    line = ["marin-rl", *command, "--root", root]
    program = (
        f"import sys; sys.argv = {line!r}\nfrom marin_rl.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in sys.modules if name.startswith('pandas')])"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_readers_do_without_pandas_and_have_all_of_the_rest() -> None:
    program = (
        "from marin_rl.deferred import withhold\n"
        "withhold('pandas')\n"
        "import pyarrow as pa, polars as pl\n"
        "import pyarrow.compute as pc\n"
        "assert pc.less(pa.array([1]), 2).to_pylist() == [True]\n"
        "print(pa.array([1, None]).to_pylist(), pl.DataFrame({'a': [1]}).to_dicts())\n"
        "import transformers  # asks whether it is installed\n"
        "try:\n    import pandas\nexcept ModuleNotFoundError as error:\n    print(error.name)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == ["[1, None] [{'a': 1}]", "pandas"]
