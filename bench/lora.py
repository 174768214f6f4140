"""LoRA against full training and the base alone: rounds, checkpoints, quantised bases, the engine.

    python bench/lora.py [--parts training checkpoint engine] [--rounds 6] [--repeat 1]

Everything is on the standard work, with adapters of rank 8 on all linear layers. **training**: the
rounds of round.py with all parameters, with an adapter, with adapters on quantised bases, and those
of TRL with PEFT where that is installed. **checkpoint**: CPU time of a commit, and bytes of
optimizer and checkpoint. **engine**: lora_engine.py. Each measurement is one line of JSON with the
number that is asked for; the exit code is 1 where one is missed.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from engine_own import model_of, standard
from lora_engine import loading, throughput
from lora_report import Report
from machine import print_head
from peer_venvs import TRL, install
from round import our_config, run_ours, run_peer
from round_report import Measured, print_summary, side_summary, write_results
from standard_work import Work, add_size_option, sized, write_work

RESULTS = Path(__file__).resolve().parent / "results"
FULL, ADAPTER = "marin-rl", "marin-rl LoRA"
PEFT = replace(TRL, name="TRL with PEFT")
RANK = 8
LORA = f"policy.lora.rank={RANK}"
SIDES = {
    FULL: (),
    ADAPTER: (LORA,),
    f"{ADAPTER} on int8": (LORA, "policy.quantize_base=int8"),
    f"{ADAPTER} on nf4": (LORA, "policy.quantize_base=nf4"),
}
PARTS = "training", "checkpoint", "engine"

# What is asked for. Seconds are CPU-seconds: others may keep the machine busy meanwhile.
ROUND_RATIO_MAX = 0.9
PEER_RATIO_MAX = 0.5
COMMIT_MS_MAX = 20.0
BYTES_RATIO_MAX = 0.05


def main() -> None:
    """Measure what the options ask for; exit code 1 where a number is missed."""
    options = parse_arguments()
    if options.install_peers:
        install(TRL)
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: options.cores]))
    print_head()
    work, report = sized(Work(), options.sizes), Report()
    options.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.results) as scratch:
        folder = Path(scratch)
        write_work(folder, work, options.rounds)
        if "training" in options.parts:
            training(folder, work, options, report)
        if "checkpoint" in options.parts:
            checkpoints(folder, work, options.commits, report)
    if "engine" in options.parts:
        model = model_of(*standard(work))
        throughput(model, work, options.slots, options.engine_rounds, report)
        loading(model, work, options.slots, options.loads, report)
    if options.sizes:
        print("no bars: they are for the standard sizes")
        return
    if report.missed:
        sys.exit(f"missed: {', '.join(report.missed)}")


def parse_arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each program")
    parser.add_argument("--skip", type=int, default=2, help="first rounds that do not count")
    parser.add_argument("--repeat", type=int, default=1, help="times that all sides are run")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--no-peer", action="store_true", help="leave out TRL with PEFT")
    parser.add_argument("--install-peers", action="store_true", help="first install TRL and PEFT")
    parser.add_argument("--peer-microbatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--commits", type=int, default=9, help="commits that are timed")
    parser.add_argument("--engine-rounds", type=int, default=11)
    parser.add_argument("--slots", type=int, default=64, help="slots of the engine")
    parser.add_argument("--loads", type=int, default=10, help="adapters loaded in the engine")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    add_size_option(parser)
    options = parser.parse_args()
    options.overrides = []  # run_ours adds them to each side's own
    if options.skip >= options.rounds:
        parser.error(f"--rounds must exceed --skip: found {options.rounds} and {options.skip}")
    return options


# ---------------------------------------------------------------- rounds


def training(folder: Path, work: Work, options: argparse.Namespace, report: Report) -> None:
    """Rounds of all sides in turns, a table, and the ratios of CPU-seconds."""
    measured = Measured()
    for repeat in range(options.repeat):
        for side in options.sides:
            run_ours(measured, folder, work, repeat, options, side=side, own=SIDES[side])
        for microbatches in options.peer_microbatches if with_peer(options) else ():
            adapter = "--lora-rank", str(RANK)
            run_peer(measured, folder, work, repeat, PEFT, microbatches, options, adapter)
    names = dict.fromkeys(row.side for row in measured.rounds)
    sides = {side: side_summary(measured, side, options.skip) for side in names}
    write_results(options.results, measured, {"sides": sides}, work, vars(options), "lora")
    print_summary({"sides": sides}, work)
    seconds = {side: row["cpu_s"] for side, row in sides.items()}
    own = seconds.get(ADAPTER)
    if own is None:
        return
    if FULL in seconds:
        report.add("round / full round", own / seconds[FULL], at_most=ROUND_RATIO_MAX)
    peers = [value for side, value in seconds.items() if side.startswith(PEFT.name)]
    if peers:
        report.add("round / TRL with PEFT", own / min(peers), at_most=PEER_RATIO_MAX)
    for side in (side for side in seconds if side.startswith(f"{ADAPTER} on ")):
        report.add(f"round {side.removeprefix(ADAPTER).strip()} / round", seconds[side] / own)


def with_peer(options: argparse.Namespace) -> bool:
    """True if TRL with PEFT is to be measured, and installed."""
    if options.no_peer:
        return False
    if not TRL.python.is_file():
        print("skipped TRL with PEFT: not installed; --install-peers does it")
        return False
    return True


# ---------------------------------------------------------------- checkpoints


def checkpoints(folder: Path, work: Work, commits: int, report: Report) -> None:
    """CPU time of an adapter's commit; its bytes, and its optimizer's, next to full training's."""
    file = folder / "commits.yaml"
    file.write_text(yaml.safe_dump(our_config(folder, work, 1), sort_keys=False))
    full = committed(file, "commits-full", (), commits)
    adapter = committed(file, "commits-lora", (LORA,), commits)
    report.add(
        "commit, CPU ms",
        adapter["commit_cpu_ms"],
        at_most=COMMIT_MS_MAX,
        full=full["commit_cpu_ms"],
        wall_ms=adapter["commit_wall_ms"],
    )
    for name in ("optimizer_bytes", "checkpoint_bytes"):
        ratio = adapter[name] / full[name]
        report.add(
            f"{name} / full", ratio, at_most=BYTES_RATIO_MAX, adapter=adapter[name], full=full[name]
        )


def committed(file: Path, run_id: str, overrides: Sequence[str], commits: int) -> dict[str, Any]:
    """Cost and bytes of the first state of a run, committed again and again."""
    import jax

    from marin_rl.config import load_config
    from marin_rl.storage.commits import manifest_of
    from marin_rl.storage.runs import Run, checkpoint_slot
    from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for
    from marin_rl.training.compiled_step import compiled_step_of, policy_settings
    from marin_rl.training.loop import Trainer
    from marin_rl.training.optimizer import policy_adamw
    from marin_rl.training.state import CheckpointSlot, identity_of, restore_state

    run = Run.create_or_open(load_config(file, [f"run_id={run_id}", *overrides]))
    tokenizer = tokenizer_for(run.config.policy)
    first, names = Trainer(run, tokenizer).init_policy(), TokenizerIdentity.of(tokenizer)
    adamw = policy_adamw(run.config.training)
    program = compiled_step_of(run.config, tokenizer, adamw, policy_settings(run.config))
    state = restore_state(run, first, program.like, names)
    wall, cpu, parts = list[float](), list[float](), ()
    for number in range(1, commits + 1):
        slot = CheckpointSlot(
            run=run, slot=checkpoint_slot(number), tokenizer=names, content={"number": number},
            parents=(first,), adapter=identity_of(run, first).adapter,
        )  # fmt: skip
        began, used = time.perf_counter(), time.process_time()
        ref = slot.commit(state, {})
        wall.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (time.process_time() - used))
        parts = manifest_of(run.store, ref).parts
    return {
        "commit_cpu_ms": statistics.median(cpu),
        "commit_wall_ms": statistics.median(wall),
        "optimizer_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer)),
        "checkpoint_bytes": sum(part.bytes for part in parts),
    }


if __name__ == "__main__":
    main()
