"""Benchmarks run: their imports are there, and each mode runs at its smallest size."""

import ast
import importlib
import importlib.util
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.forked_commands import ForkedCommands
from support.forked_python import python
from support.quick_programs import quick_programs
from support.sandboxes import reason_to_skip

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"
SCRIPTS = sorted(BENCH.glob("*.py"))
# Those that are run by themselves; the others are their modules.
SCRIPTS_RUN = {
    "round.py", "packing.py", "mfu.py", "recipes.py", "engine.py", "server.py", "process.py",
    "recovery.py", "scan.py", "orchestration.py", "fsck.py",
    "startup.py", "episodes.py", "sandbox.py", "overlap.py", "lora.py", "lora_curves.py",
    "selection.py", "weights.py", "learning.py", "scale.py",
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


# --- every script, in every mode that bench/README.md names, at its smallest size

# A work of two prompts and 8 rows: its programs compile in seconds.
TINY = tuple(
    f"--size={size}"
    for size in (
        "prompts=2", "completions=4", "prompt_tokens=8", "new_tokens=8",
        "hidden=32", "layers=1", "heads=2", "kv_heads=1", "intermediate=64",
    )
)  # fmt: skip
TRL, TUNIX, HF = (BENCH / f".venv-{key}/bin/python" for key in ("trl", "tunix", "hf"))
ROUND = ("round.py", "--rounds", "2", "--skip", "1", "--repeat", "1", "--peer-microbatches", "1")
PACKING = ("packing.py", *TINY, "--prompt", "8", "--completion", "8", "--groups", "2", "--group",
           "2", "--rounds", "1")  # fmt: skip
ENGINE = ("engine.py", *TINY, "--rounds", "1")
SERVER = ("server.py", "--requests", "4", "--concurrency", "2", "--new-tokens", "4", "--slots", "4",
          "--repeat", "1")  # fmt: skip
RECIPES = ("recipes.py", "--add", "--rounds", "1", "--seeds", "0", "--recipes", "grpo", "--set",
           "rollouts.groups_per_round=4", "--set", "sft.steps=2", "--set",
           "sft.steps_per_checkpoint=2", "--set", "evaluation.examples=4", "--picture",
           "{folder}/recipes.svg")  # fmt: skip
# The database of an empty Prefect server and the list of fonts, which take seconds to make.
CACHES = {"XDG_CACHE_HOME": str(Path.home() / ".cache")}
EARLIER = {"recipe": "rloo", "seed": 0, "rewards": [0.25], "before": 0.1, "after": 0.2}
# The scripts that write numbers, and so take the folder for them.
WRITERS = ("round.py", "server.py", "recovery.py", "orchestration.py", "recipes.py",
           "overlap.py", "selection.py", "lora.py", "lora_curves.py", "scale.py")  # fmt: skip


LATENCY = ("--latency", "0.01")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A command line of a benchmark, what its output has in it, and the interpreter it needs."""

    command: tuple[str, ...]
    shows: tuple[str, ...]
    peer: Path | None = None


MODES = {
    "round": Mode(
        command=(*ROUND, *TINY, "--only", "ours", "--set", "training.microbatch_sequences=2"),
        shows=("marin-rl", "completions of 8", "completions of about 3", "no bars"),
    ),
    "round-trl": Mode(
        command=(*ROUND, *TINY, "--only", "trl", "--works", "short"), shows=("TRL 1x8",), peer=TRL
    ),
    "round-tunix": Mode(
        command=(*ROUND, *TINY, "--only", "tunix", "--works", "standard"),
        shows=("tunix 1x8",),
        peer=TUNIX,
    ),
    "packing": Mode(command=PACKING, shows=('"layout": "shared_prompt"', "times_faster_cpu")),
    "packing-mean": Mode(
        command=(*PACKING, "--mean", "3", "--layouts", "sequences"),
        shows=('"layout": "sequences"',),
    ),
    "packing-bucket": Mode(
        command=(*PACKING, "--shortest", "1", "--padded-to", "bucket", "--layouts", "none"),
        shows=('"layout": "none"',),
    ),
    "mfu": Mode(
        command=("mfu.py", "--model", "tiny", "--row", "16", "--rows", "2", "--steps", "1",
                 "--peak-tflops", "0.2"),
        shows=('"mfu": 0.',),
    ),
    # next to a curve of an earlier invocation
    "recipes": Mode(command=RECIPES, shows=("| `grpo` |", "| `rloo` | 0.25 |", "recipes.svg")),
    "engine-peers": Mode(
        command=(*ENGINE, "--peers", "--cores", "1", "--only", "ours,levanter"),
        shows=("levanter", "tokens_per_cpu_second"),
    ),
    "engine-hf": Mode(
        command=(*ENGINE, "--peers", "--only", "hf,ctranslate2"),
        shows=("ctranslate2  ", "hf  "),
        peer=HF,
    ),
    "engine-tunix": Mode(
        command=(*ENGINE, "--peers", "--only", "tunix"), shows=("tunix  ",), peer=TUNIX
    ),
    "engine-modes": Mode(
        command=(*ENGINE, "--prompt-tokens", "8", "--shared-prompt", "--mixed", "--memory",
                 "--swap"),
        shows=('"measure": "shared_prompt"', '"busy_share": ', '"beyond_mb": ', '"median_ms": '),
    ),
    "episodes": Mode(
        command=("episodes.py", *TINY, "--rounds", "1", "--history", "64", "--slots", "8",
                 "--step-s", "0.01"),
        shows=('"measure": "turns"', '"same_bits": true', '"busy_share": ', '"measure": "single"'),
    ),
    "engine-model": Mode(
        command=(*ENGINE, "--model", "tiny", "--dtype", "float32", "--batch", "1,2",
                 "--bandwidth-gb-s", "10"),
        shows=('"batch": 1,', '"batch": 2,', "share_of_bound"),
    ),
    "server": Mode(
        command=(*SERVER, "--samples", "2", "--chunk-steps", "2", "--logprobs"),
        shows=("overhead", "added_cpu"),
    ),
    "process": Mode(
        command=("process.py", "--rollouts", "64", "--tokens", "32", "--group-size", "4",
                 "--shards", "2", "--rows-per-step", "16", "--repeats", "1"),
        shows=("build_round", "ratio (ours / loop)"),
    ),
    "recovery": Mode(
        command=("recovery.py", "--config", "configs/debug.yaml", "--kills", "1", "--life-s",
                 "0.5"),
        shows=("first_commit_s", "operations_per_round"),
    ),
    "scan": Mode(
        command=("scan.py", "--rollouts", "8000", "--folder", "{folder}/scan", "--repeat", "1"),
        shows=("mean reward per round (SQL)",),
    ),
    "orchestration": Mode(command=("orchestration.py", "--rounds", "2"), shows=("files_and_pr",)),
    "overlap": Mode(
        command=("overlap.py", "--rounds", "4", "--groups", "2", "--hidden-size", "32",
                 "--latencies", "0.1"),
        shows=("of_the_longer", "ahead_s"),
    ),
    "lora": Mode(
        command=("lora.py", *TINY, "--parts", "training", "checkpoint", "engine", "--rounds", "2",
                 "--skip", "1", "--repeat", "1", "--no-peer", "--sides", "marin-rl",
                 "marin-rl LoRA on int8", "--commits", "1", "--engine-rounds", "1", "--slots", "8",
                 "--loads", "1"),
        shows=('"measure": "commit, CPU ms"', '"measure": "8 adapters"', "LoRA on int8",
               '"measure": "load while decoding, ms"', "no bars"),
    ),
    "lora-peer": Mode(
        command=("lora.py", *TINY, "--parts", "training", "--rounds", "2", "--skip", "1",
                 "--sides", "marin-rl LoRA", "--peer-microbatches", "1"),
        shows=('"measure": "round / TRL with PEFT"',),
        peer=TRL,
    ),
    "lora-curves": Mode(
        command=("lora_curves.py", "--seeds", "1", "--kinds", "full", "adapter", "--root",
                 "{folder}/runs", "--picture", "{folder}/lora.svg", "--set", "rounds=1", "--set",
                 "rollouts.groups_per_round=4", "--set", "sft.steps=2", "--set",
                 "sft.steps_per_checkpoint=2", "--set", "evaluation.examples=4"),
        shows=("| seed | full | adapter |", "adapter 1: 1 ", "lora.svg"),
    ),
    "weights": Mode(
        command=("weights.py", "--megabytes", "1", "--arrays", "2", "--repeat", "1"),
        shows=("Arrow Flight, read", "files, read"),
    ),
    "selection": Mode(
        command=("selection.py", "--rounds", "1", "--groups", "2"),
        shows=("first_done", "length_bias"),
    ),
    "scale": Mode(
        command=("scale.py", "--groups", "10", "--workers", "5", "--tokens", "4", *LATENCY),
        shows=("the round is sealed", "the intake is decided"),
    ),
    "fsck": Mode(
        command=("fsck.py", "--megabytes", "1", "--files", "2", "--repeat", "1"),
        shows=("MB/s", "SHA-256 alone"),
    ),
    "sandbox": Mode(command=("sandbox.py", "--runs", "2"), shows=("programs run in", "overhead")),
    "sandbox-leftovers": Mode(
        command=("sandbox.py", "--leftovers", "7"), shows=("mounts", "exit status 4")
    ),
    "learning": Mode(
        command=("learning.py", "--only", "repository", "--rounds", "1", "--root",
                 "{folder}", "--set", "sft.steps=2", "--set", "sft.steps_per_checkpoint=2"),
        shows=('"measure": "repository"', '"reward_last": '),
    ),
    "startup": Mode(
        command=("startup.py", "--repeat", "1"),
        shows=("--help  ", "status RUN", "x 'import typer'"),
    ),
}  # fmt: skip
# Processes of these are not forked: they measure a start, or memory, or take Python into a sandbox;
# gRPC, of weights, may wait without end in a fork.
REAL_STARTS = ("startup.py", "process.py", "round.py", "learning.py", "sandbox.py", "weights.py")
# Options of the README's commands that no mode takes: they only install, or choose another size.
UNTRIED = {"--install-peers"}


@pytest.fixture(scope="module")
def forked(prefect_url, tmp_path_factory):
    """Scripts in processes of their own, compiled quickly, which report to one Prefect server."""
    log = tmp_path_factory.mktemp("forked") / "said"
    with quick_programs():
        forked = ForkedCommands(log, **{**CACHES, **os.environ, "PREFECT_API_URL": prefect_url})
    with forked:
        yield forked


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_a_benchmark_runs_at_its_smallest_size(name, forked, tmp_path):
    mode = MODES[name]
    if mode.peer is not None and not mode.peer.is_file():
        pytest.skip(f"{mode.peer.parent.parent.name} is not installed: --install-peers makes it")
    script, *options = (part.format(folder=tmp_path) for part in mode.command)
    if script in ("sandbox.py", "learning.py") and (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    if script == "recipes.py":
        (tmp_path / "recipes.json").write_text(json.dumps([EARLIER]))
    if script in WRITERS:
        options += ["--results", str(tmp_path)]
    output = tmp_path / "printed"
    variables = {"HOME": str(tmp_path)}
    if script not in REAL_STARTS:
        variables["MARIN_RL_TEST_PYTHON"] = python()
    code = forked.run_script(BENCH / script, ROOT, *options, output=output, **variables)
    printed = output.read_text()
    assert code == 0, printed[-4000:] + forked.said()
    assert printed.startswith("machine: "), printed[:200]
    for text in mode.shows:
        assert text in printed, f"expected {text!r} in:\n{printed[-4000:]}"


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
