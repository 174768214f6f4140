"""Tokens per second of the embedded engine on the standard work, next to its rivals.

    python bench/engine.py [--peers] [--install-peers] [--cores 1,2] [--rounds 5]
    python bench/engine.py --shared-prompt | --mixed | --memory | --swap
    python bench/engine.py --model 0.5b --dtype bfloat16 --batch 1,32,256 --bandwidth-gb-s 4800

The standard work: a Llama of 3.2M parameters (see standard_work.py), float32; 16 prompts of 32
tokens (`--prompt-tokens`), 8 samples of 64 new tokens each. Every side is a program of its own
(engine_sides.py) over the same model folder, pinned to as many cores as are asked for; rounds take
turns, the first one of each side does not count, and the table shows medians. tunix runs the
prompts of all 128 samples, as many tokens as it samples; the others run each prompt once. What only
our engine has is measured by engine_own.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import head, machine
from peer_venvs import HF, TUNIX, install
from standard_work import Work, add_size_option, sized, write_work

HERE = Path(__file__).parent
# Threads of torch and CTranslate2 that wait would otherwise spin, and eat the CPU-seconds of all.
PASSIVE = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive", "OMP_DYNAMIC": "false"}
# What marin_rl.compilation.keep_freed_memory sets in a run: without it each side hands large blocks
# back to the kernel and pays for their pages again at each step.
MALLOC = {
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.mmap_threshold=1073741824",
            "glibc.malloc.trim_threshold=2147483647",
            "glibc.malloc.top_pad=67108864",
            "glibc.malloc.arena_max=1",
        )
    )
}
MODES = ("shared_prompt", "mixed", "memory", "swap")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", default="1", help="numbers of cores, one table each: 1,2")
    parser.add_argument("--peers", action="store_true", help="measure the rivals too")
    parser.add_argument("--install-peers", action="store_true")
    parser.add_argument("--only", default="", help="names of the sides to run, by comma")
    parser.add_argument("--model", choices=("0.5b", "tiny"), default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", default="1,32,256")
    parser.add_argument("--bandwidth-gb-s", type=float, default=0.0)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    add_size_option(parser)
    for mode in MODES:
        parser.add_argument(f"--{mode.replace('_', '-')}", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run what is asked for."""
    options = parse()
    if options.install_peers:
        install(HF)
        install(TUNIX)
    say(head())
    work = sized(Work(prompt_tokens=options.prompt_tokens), options.sizes)
    modes = [mode for mode in MODES if getattr(options, mode)]
    if modes or options.model:
        sys.path.insert(0, str(HERE.parent))  # this checkout, whatever is installed
        import engine_own

        engine_own.run(modes, work, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_work(Path(folder), work, 1)
        for cores in map(int, options.cores.split(",")):
            compare(sides_of(options), Path(folder), cores, options.rounds)


def sides_of(options: argparse.Namespace) -> dict[str, str]:
    """Name and interpreter of every side that can run here; says which cannot."""
    sides = {"ours": sys.executable}
    if options.peers:
        sides["levanter"] = sys.executable
        if HF.python.is_file():
            sides |= dict.fromkeys(("hf", "ctranslate2"), str(HF.python))
        else:
            say("skipped hf and ctranslate2: not installed; --install-peers does it")
        if TUNIX.python.is_file():
            sides["tunix"] = str(TUNIX.python)
        else:
            say("skipped tunix: not installed; --install-peers does it")
    chosen = [name for name in options.only.split(",") if name] or list(sides)
    return {name: python for name, python in sides.items() if name in chosen}


def compare(sides: dict[str, str], folder: Path, cores: int, rounds: int) -> None:
    """Let the sides take turns; a table, and the same as JSON."""
    processes = {name: start(name, python, folder, cores) for name, python in sides.items()}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, process in list(processes.items()):
            answer = ask(process)
            if answer is None:
                say(f"{name} ended early and is left out")
                processes.pop(name)
            else:
                results[name].append(answer)
    for process in processes.values():
        process.communicate()
    report({name: results[name][1:] for name in processes}, cores)


def start(name: str, python: str, folder: Path, cores: int) -> "subprocess.Popen[str]":
    """A side as a program that plays a round for every line it is given."""
    command = [python, HERE / "engine_sides.py", name, "--work", folder, "--cores", str(cores)]
    return subprocess.Popen(
        [str(part) for part in command],
        env={
            **os.environ,
            **PASSIVE,
            **MALLOC,
            "OMP_NUM_THREADS": str(cores),
            # the checkout that this file stands in, whatever is installed
            "PYTHONPATH": str(HERE.parent),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process: "subprocess.Popen[str]") -> dict[str, float] | None:
    """One round; None if the side is gone. Other output of the side is skipped."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    return None


def report(results: dict[str, list[dict[str, float]]], cores: int) -> None:
    """Medians of all rounds: tokens/s, tokens per CPU-second, both against ours, peak memory."""
    rows = {name: summary(rounds) for name, rounds in results.items() if rounds}
    own = rows.get("ours")
    say(f"\n{cores} core(s), load average {os.getloadavg()[0]:.1f}")
    say(f"{'':12} {'tokens/s':>9} {'ratio':>6} {'per CPU-s':>10} {'ratio':>6} {'peak MB':>8}")
    for name, row in rows.items():
        wall, cpu = row["tokens_per_second"], row["tokens_per_cpu_second"]
        base = own or row
        say(
            f"{name:12} {wall:9,.0f} {wall / base['tokens_per_second']:6.2f} {cpu:10,.0f} "
            f"{cpu / base['tokens_per_cpu_second']:6.2f} {row['peak_rss_mb']:8,.0f}"
        )
    say(json.dumps({**machine(), "cores": cores, "sides": rows}))


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians of one side."""
    tokens = rounds[0]["tokens"]
    return {
        "tokens_per_second": tokens / statistics.median(r["wall_s"] for r in rounds),
        "tokens_per_second_best": tokens / min(r["wall_s"] for r in rounds),
        "tokens_per_cpu_second": tokens / statistics.median(r["cpu_s"] for r in rounds),
        "tokens_per_cpu_second_best": tokens / min(r["cpu_s"] for r in rounds),
        "peak_rss_mb": max(r["peak_rss_bytes"] for r in rounds) / 2**20,
    }


def say(text: str) -> None:
    """A line on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
