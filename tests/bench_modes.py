"""Modes of the benchmarks at their smallest size, but for those that need an installed peer."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_commands import ForkedCommands
from support.forked_python import python
from support.quick_programs import quick_programs
from support.sandboxes import reason_to_skip

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"

# A work of two prompts and 8 rows: its programs compile in seconds.
TINY = tuple(
    f"--size={size}"
    for size in (
        "prompts=2", "completions=4", "prompt_tokens=8", "new_tokens=8",
        "hidden=32", "layers=1", "heads=2", "kv_heads=1", "intermediate=64",
    )
)  # fmt: skip
ROUND = ("round.py", "--rounds", "2", "--skip", "1", "--repeat", "1", "--peer-microbatches", "1")
PACKING = ("packing.py", *TINY, "--prompt", "8", "--completion", "8", "--groups", "2", "--group",
           "2", "--rounds", "1")  # fmt: skip
ENGINE = ("engine.py", *TINY, "--rounds", "1")
SERVER = ("server.py", "--requests", "4", "--concurrency", "2", "--new-tokens", "4", "--slots", "4",
          "--repeat", "1")  # fmt: skip
# Changes to a shipped configuration: few rows of a model of one layer.
SMALL = tuple(
    f"--set={change}"
    for change in (
        "policy.model.layers=1", "rollouts.groups_per_round=2", "rollouts.group_size=4",
        "sft.steps=2", "sft.steps_per_checkpoint=2", "sft.sequences_per_step=4",
        "sft.microbatch_sequences=4", "training.microbatch_sequences=8", "evaluation.examples=4",
        "inference.engine.slots=16",
    )
)  # fmt: skip
RECIPES = ("recipes.py", "--add", "--rounds", "1", "--seeds", "0", "--recipes", "grpo", *SMALL,
           "--picture", "{folder}/recipes.svg")  # fmt: skip
# The list of fonts, which takes seconds to make.
CACHES = {"XDG_CACHE_HOME": str(Path.home() / ".cache")}
EARLIER = {"recipe": "rloo", "seed": 0, "rewards": [0.25], "before": 0.1, "after": 0.2}
# The scripts that write numbers, and so take the folder for them.
WRITERS = ("round.py", "server.py", "recovery.py", "orchestration.py", "recipes.py",
           "overlap.py", "selection.py", "lora.py", "lora_curves.py", "scale.py",
           "serve_one.py", "preference.py")  # fmt: skip

LATENCY = ("--latency", "0.01")


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A command line of a benchmark, and what its output has in it."""

    command: tuple[str, ...]
    shows: tuple[str, ...]


MODES = {
    "round": Mode(
        command=(*ROUND, *TINY, "--only", "ours", "--set", "training.microbatch_sequences=2"),
        shows=("marin-rl", "completions of 8", "completions of about 3", "no bars"),
    ),
    "packing": Mode(command=PACKING, shows=('"layout": "shared_prompt"', "times_faster_cpu")),
    "mfu": Mode(
        command=("mfu.py", "--model", "tiny", "--row", "16", "--rows", "2", "--steps", "1",
                 "--peak-tflops", "0.2"),
        shows=('"mfu": 0.',),
    ),
    "scaling": Mode(
        command=("scaling.py", "--paper"),
        shows=("| H100 | 91% | 90% | 89% | 89% |",),
    ),
    "gpu": Mode(
        command=("gpu.py", "--tiny", "--only", "roofs,bits,decode,cold", "--output", "{folder}"),
        shows=('"copy_gb_s": ', '"form": "one block"', "share of the bandwidth roof",
               '"kernel_difference": ', '"programs": '),
    ),
    # next to a curve of an earlier invocation
    "recipes": Mode(command=RECIPES, shows=("| `grpo` |", "| `rloo` | 0.25 |", "recipes.svg")),
    "serve-one": Mode(
        command=("serve_one.py", "--streams", "1,2", "--new-tokens", "4", "--slots", "2",
                 "--context", "128"),
        shows=('"streams": 2, "tokens": 8',),
    ),
    "preference": Mode(
        command=("preference.py", "--pairs", "4", "--words", "2", "--step", "2"),
        shows=('"side": "ours"', '"loss"'),
    ),
    "distillation": Mode(
        command=("distillation.py", "--rows", "2", "--completion", "8", "--repeat", "1"),
        shows=("with its 64 likeliest tokens: ", "with all tokens: ", "% of a step"),
    ),
    "engine-peers": Mode(
        command=(*ENGINE, "--peers", "--cores", "1", "--only", "ours,levanter"),
        shows=("levanter", "tokens_per_cpu_second"),
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
        command=("overlap.py", "--rounds", "3", "--groups", "2", "--hidden-size", "32",
                 "--latencies", "0.1"),
        shows=("of_the_longer", "ahead_s"),
    ),
    "lora": Mode(
        command=("lora.py", *TINY, "--parts", "training", "checkpoint", "engine", "--rounds", "2",
                 "--skip", "1", "--repeat", "1", "--no-peer", "--sides",
                 "marin-rl LoRA on int8", "--commits", "1", "--engine-rounds", "1", "--slots", "8",
                 "--loads", "1"),
        shows=('"measure": "commit, CPU ms"', '"measure": "8 adapters"', "LoRA on int8",
               '"measure": "load while decoding, ms"', "no bars"),
    ),
    "lora-curves": Mode(
        command=("lora_curves.py", "--seeds", "1", "--kinds", "full", "adapter", "--root",
                 "{folder}/runs", "--picture", "{folder}/lora.svg", "--set", "rounds=1", *SMALL),
        shows=("| seed | full | adapter |", "adapter 1: 1 ", "lora.svg"),
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
    "agents": Mode(
        command=("agents.py", "--sessions", "3", "--calls", "2", "--requests", "8"),
        shows=('"measure": "gateway", "api": "responses"', '"measure": "server"'),
    ),
    "sandbox": Mode(command=("sandbox.py", "--runs", "2"), shows=("programs run in", "overhead")),
    "learning": Mode(
        command=("learning.py", "--only", "repository", "--rounds", "1", "--root",
                 "{folder}", *SMALL),
        shows=('"measure": "repository"', '"reward_last": '),
    ),
    "startup": Mode(
        command=("startup.py", "--repeat", "1", "--uncounted", "0"),
        shows=("--help  ", "status RUN", "x 'import typer'"),
    ),
}  # fmt: skip
# Processes of these are not forked: they measure a start, or memory, or take Python into a sandbox;
# gRPC, of weights, may wait without end in a fork.
REAL_STARTS = ("startup.py", "process.py", "round.py", "learning.py", "sandbox.py")
# Scripts that play whole runs. Their modes are a file of tests of their own, which another process
# may take.
OF_RUNS = {
    "round.py", "recipes.py", "recovery.py", "orchestration.py", "overlap.py", "lora.py",
    "lora_curves.py", "learning.py", "selection.py",
}  # fmt: skip
MODES_OF_RUNS = [name for name, mode in MODES.items() if mode.command[0] in OF_RUNS]


@contextmanager
def forked_scripts(prefect_url: str, log: Path) -> Iterator[ForkedCommands]:
    """Scripts in processes of their own, compiled quickly, which report to one Prefect server."""
    with quick_programs():
        forked = ForkedCommands(log, **{**CACHES, **os.environ, "PREFECT_API_URL": prefect_url})
    with forked:
        yield forked


def check_mode(name: str, forked: ForkedCommands, folder: Path) -> None:
    """Run a benchmark in a mode; it prints where it runs, and what the mode shows."""
    mode = MODES[name]
    script, *options = (part.format(folder=folder) for part in mode.command)
    if script in ("sandbox.py", "learning.py") and (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    if script == "recipes.py":
        (folder / "recipes.json").write_text(json.dumps([EARLIER]))
    if script in WRITERS:
        options += ["--results", str(folder)]
    output = folder / "printed"
    variables = {"HOME": str(folder)}
    if script not in REAL_STARTS:
        variables["MARIN_RL_TEST_PYTHON"] = python()
    code = forked.run_script(BENCH / script, ROOT, *options, output=output, **variables)
    printed = output.read_text()
    assert code == 0, printed[-4000:] + forked.said()
    assert printed.startswith("machine: "), printed[:200]
    for text in mode.shows:
        assert text in printed, f"expected {text!r} in:\n{printed[-4000:]}"
