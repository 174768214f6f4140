"""A deferred package costs nothing until it is used, and then is the package itself."""

import subprocess
import sys

import pytest

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


def test_loading_a_model_brings_no_pandas_along():
    looked_for = {"pandas", "datasets.load", "wandb.sdk"}
    program = f"import sys, marin_rl.training.loop; print(bool({looked_for} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "False"
