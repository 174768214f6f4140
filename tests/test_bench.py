"""Benchmarks run: their imports are there, and each mode runs at its smallest size."""

import ast
import importlib
import importlib.util
import re

import pytest
from support.bench_modes import BENCH, MODES, MODES_OF_RUNS, ROOT, check_mode, forked_scripts

SCRIPTS = sorted(BENCH.glob("*.py"))
# Those that are run by themselves; the others are their modules.
SCRIPTS_RUN = {
    "round.py", "packing.py", "mfu.py", "recipes.py", "engine.py", "server.py", "process.py",
    "recovery.py", "scan.py", "orchestration.py", "fsck.py",
    "startup.py", "episodes.py", "sandbox.py", "overlap.py", "lora.py", "lora_curves.py",
    "selection.py", "learning.py", "scale.py", "serve_one.py",
}  # fmt: skip
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


# Options of the README's commands that no mode takes: they only install, or choose another size.
UNTRIED = {"--install-peers"}


@pytest.fixture(scope="module")
def forked(prefect_url, tmp_path_factory):
    with forked_scripts(prefect_url, tmp_path_factory.mktemp("forked") / "said") as forked:
        yield forked


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODES if name not in MODES_OF_RUNS])
def test_a_benchmark_runs_at_its_smallest_size(name, forked, tmp_path):
    """Those of whole runs are in test_bench_runs.py."""
    check_mode(name, forked, tmp_path)


def test_every_command_of_the_readme_is_tried():
    """Each script of a code block, and each of its options, is that of a mode above."""
    readme = (BENCH / "README.md").read_text()
    commands = re.findall(r"^    \S*python bench/(\w+\.py)([^#\n]*)", readme, re.MULTILINE)
    assert {script for script, _ in commands} >= {"round.py", "engine.py", "packing.py", "mfu.py"}
    tried = {script: set[str]() for script in SCRIPTS_RUN}
    for mode in MODES.values():
        script, *options = mode.command
        tried[script] |= {part.partition("=")[0] for part in options if part.startswith("--")}
    table = set(re.findall(r"^\| `(\w+\.py)` \|", readme, re.MULTILINE))
    assert table == SCRIPTS_RUN, "every script stands in the table, and each is run"
    for script, options in commands:
        unknown = set(re.findall(r"--[\w-]+", options)) - tried[script] - UNTRIED
        assert not unknown, f"no mode of {script} takes {sorted(unknown)}"


def test_the_head_names_the_processors_set_and_the_one_that_xla_is_limited_to(monkeypatch):
    from marin_rl import machine

    head = bench_module("machine", monkeypatch)
    monkeypatch.setattr(machine, "_features", lambda: frozenset({"sse4_2", "avx", "avx2"}))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX --other=1")
    assert "AVX2, XLA compiles for AVX, " in head.head()


def test_sizes_are_those_of_the_work(monkeypatch):
    work = bench_module("standard_work", monkeypatch)
    assert work.sized(work.Work(), ["layers=1", "hidden=32"]) == work.Work(layers=1, hidden=32)
    for wrong in ("depth=1", "layers", "layers=x", "learning_rate=1"):
        with pytest.raises(SystemExit, match="expected NAME=NUMBER with one of prompts"):
            work.sized(work.Work(), [wrong])


def bench_module(name, monkeypatch):
    """A module of bench/, whose scripts import each other by plain names."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module(name)
