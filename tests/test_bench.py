"""Benchmarks run: their imports are there, and each mode runs at its smallest size."""

import ast
import importlib
import importlib.util

import pytest
from bench_modes import BENCH, MODES, MODES_OF_RUNS, ROOT, check_mode, forked_scripts

SCRIPTS = sorted(BENCH.glob("*.py"))
OURS = ("marin_rl", "flows", "tasks", "schemas")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_imports_of_benchmarks_exist_in_the_library(script):
    """Imports within functions too, which no start of the program would miss."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            module = importlib.import_module(node.module or "")
            missing = [
                name.name
                for name in node.names
                if name.name not in vars(module)
                and importlib.util.find_spec(f"{module.__name__}.{name.name}") is None
            ]
            assert not missing, f"{script.name}:{node.lineno}: {node.module} has no {missing}"


def test_a_round_of_the_benchmark_misses_by_ratio_or_memory_never_by_seconds(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    report = importlib.import_module("round_report")

    def missed(peak_bytes, ratio_wall):
        ours = {"wall_s": 99.0, "peak_bytes": peak_bytes}
        standard = {"sides": {report.OURS: ours}, "ratio_wall": ratio_wall}
        return [bar.name for bar in report.missed({"standard": standard})]

    assert missed(1.2e9, 0.6) == []
    assert missed(1.3e9, 0.6) == ["peak of the main process, bytes"]
    assert missed(1.2e9, 0.7) == ["round, ours / TRL"]


@pytest.fixture(scope="module")
def forked(prefect_url, tmp_path_factory):
    with forked_scripts(prefect_url, tmp_path_factory.mktemp("forked") / "said") as forked:
        yield forked


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODES if name not in MODES_OF_RUNS])
def test_a_benchmark_runs_at_its_smallest_size(name, forked, tmp_path):
    """Those of whole runs are in test_bench_runs.py."""
    check_mode(name, forked, tmp_path)
