"""Seconds per round of the standard works: ours, TRL's RLOOTrainer and tunix's GRPOLearner.

Runs the sides one after the other, over and over (A B A B), each as a program of its own: peers by
peers/*_round.py in environments of their own, ours as `marin-rl run` with every file committed and
Prefect in between. That twice: with completions of 64 tokens, and of about 3; or once, with a model
folder. Prints tables, and how the numbers stand to their bars, and keeps every number in
bench/results/. How to read it and what was measured stands in bench/README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from machine import print_head
from peer_venvs import TRL, TUNIX, Peer, install
from rich.console import Console
from round_report import (
    OURS,
    Measured,
    Round,
    missed,
    print_bars,
    print_summary,
    summarise,
    write_results,
)
from standard_work import Work, add_size_option, real_work, short_work, sized, write_work
from watch import Watch

from marin_rl.storage.runs import Run, metrics_key
from marin_rl.storage.tables.metrics import read_metrics

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
PEERS = TRL, TUNIX

# OpenMP threads of torch spin while they wait, which on a shared machine eats the cores they need.
PEER_THREADS = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """End of a round, as a side reports it: when, and where the time went."""

    at: float
    phases_s: Mapping[str, float]
    reward: float
    tokens_mean: float


def main() -> None:
    """Measure, print, write; exit code 1 if a ratio to a peer, or memory, misses its bar."""
    options = parse_arguments()
    for peer in PEERS:
        if peer.key in options.install_peers:
            install(peer)
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: options.cores]))
    print_head()
    works = {
        "standard": Work(prompt_tokens=options.prompt_tokens),
        "short": short_work(prompt_tokens=options.prompt_tokens),
    }
    if options.model is not None:
        works, options.works = {"real": real_work(options.model)}, ["real"]
    summaries = {
        name: measure(sized(works[name], options.sizes), options) for name in options.works
    }
    if options.sizes:
        print("no bars: they are for the standard sizes")
        return
    print_bars(summaries)
    sys.exit(bool(missed(summaries)))


def measure(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """All sides on one work, over and over; prints and keeps the numbers, returns the summary."""
    measured, peers = Measured(), peers_of(options)
    with tempfile.TemporaryDirectory(dir=work_root(options)) as scratch:
        folder = Path(scratch)
        write_work(folder, work, options.rounds)
        for repeat in range(options.repeat):
            for microbatches in options.microbatches:
                for peer in peers:
                    run_peer(measured, folder, work, repeat, peer, microbatches, options)
                    if peer is TRL and options.peer_bf16:
                        run_peer(
                            measured, folder, work, repeat, peer, microbatches, options, ["--bf16"]
                        )
                if options.only in (None, "ours"):
                    run_ours(measured, folder, work, repeat, options)
    summary = summarise(measured, options.skip)
    path = write_results(options.results, measured, summary, work, vars(options))
    Console().print(f"wrote {path}")
    print_summary(summary, work)
    return summary


def parse_arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each program")
    parser.add_argument("--skip", type=int, default=2, help="first rounds that do not count")
    parser.add_argument("--repeat", type=int, default=2, help="times that all sides are run")
    parser.add_argument("--cores", type=int, default=2, help="cores that both sides may use")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of a prompt")
    parser.add_argument(
        "--works",
        nargs="+",
        choices=("standard", "short"),
        default=["standard", "short"],
        help="completions of 64 tokens, of about 3, or both",
    )
    parser.add_argument("--model", type=Path, help="folder of a chat model, in place of --works")
    parser.add_argument("--peer-bf16", action="store_true", help="TRL in bfloat16 too")
    parser.add_argument("--only", choices=("trl", "tunix", "ours"), help="one side alone")
    parser.add_argument(
        "--peer-microbatches",
        dest="microbatches",
        type=int,
        nargs="+",
        default=[1, 4],
        help="of which the best counts",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override of our configuration; repeatable",
    )
    add_size_option(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    parser.add_argument("--scratch", type=Path, help="folder for runs; default: that of --results")
    parser.add_argument(
        "--install-peers",
        nargs="*",
        choices=[peer.key for peer in PEERS],
        default=[],
        help="first install these in bench/.venv-*; without a name, TRL",
    )
    options = parser.parse_args()
    if "--install-peers" in sys.argv and not options.install_peers:
        options.install_peers = [TRL.key]
    if options.skip >= options.rounds:
        parser.error(f"--rounds must exceed --skip: found {options.rounds} and {options.skip}")
    return options


def work_root(options: argparse.Namespace) -> Path:
    """Folder of the measured runs: a real disk, as a user's."""
    root = options.scratch or options.results
    root.mkdir(parents=True, exist_ok=True)
    return root


# ---------------------------------------------------------------- peers


def peers_of(options: argparse.Namespace) -> list[Peer]:
    """The peers to run. Raises SystemExit where TRL is to be and is not installed."""
    # tunix's model is built of the standard work's sizes.
    able = PEERS if options.model is None else (TRL,)
    asked = [peer for peer in able if options.only in (None, peer.key)]
    missing = [peer for peer in asked if not peer.python.is_file()]
    for peer in missing:
        if peer is TRL or options.only:
            raise SystemExit(
                f"no {peer.python}: run bench/round.py with --install-peers {peer.key}"
            )
        Console().print(f"skipped {peer.name}: not installed; --install-peers {peer.key} does it")
    return [peer for peer in asked if peer not in missing]


def run_peer(
    measured: Measured,
    folder: Path,
    work: Work,
    repeat: int,
    peer: Peer,
    microbatches: int,
    options: argparse.Namespace,
    arguments: Sequence[str] = (),
) -> None:
    """One run of a peer's trainer; its rounds are appended to `measured`."""
    command = [
        str(peer.python), str(BENCH / f"peers/{peer.key}_round.py"), "--work", str(folder),
        "--rounds", str(options.rounds), "--microbatches", str(microbatches),
        "--threads", str(options.cores), *arguments,
    ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(options.cores), **PEER_THREADS}
    started, watch, output = run_program(command, threads, folder / f"{peer.key}.log")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"event"')]
    ended = [peer_round(peer, line, work) for line in lines if line["event"] == "round"]
    side = f"{peer.name} {microbatches}x{work.rows // microbatches}"
    side += " bf16" if "--bf16" in arguments else ""
    record(measured, side, repeat, started, watch, ended)


def peer_round(peer: Peer, line: Mapping[str, Any], work: Work) -> Ended:
    """A line of a peer's program, checked to be the standard work."""
    check_tokens(peer.name, line["tokens_min"], line["tokens_max"], work)
    return Ended(
        at=line["ended_at"],
        phases_s=line["phases_s"],
        reward=line["reward"],
        tokens_mean=line["tokens_mean"],
    )


def check_tokens(side: str, shortest: float, longest: float, work: Work) -> None:
    """A side that samples fewer tokens than the work asks for is not measured."""
    if work.ends_early:
        return
    if not shortest == longest == work.new_tokens:
        raise SystemExit(
            f"{side}: expected completions of {work.new_tokens} tokens, "
            f"found {shortest} to {longest}"
        )


# ---------------------------------------------------------------- ours


def run_ours(
    measured: Measured,
    folder: Path,
    work: Work,
    repeat: int,
    options: argparse.Namespace,
    side: str = OURS,
    own: Sequence[str] = (),
) -> None:
    """One run of our main job, from nothing; its rounds are appended to `measured`.

    `own` are overrides in addition to those of the options, of a side that begins with `OURS`.
    """
    run_id = f"bench-{len(list((folder / 'runs').glob('*')))}"
    config = folder / "round.yaml"
    config.write_text(yaml.safe_dump(our_config(folder, work, options.rounds), sort_keys=False))
    overrides = [part for item in (*options.overrides, *own) for part in ("--set", item)]
    command = [sys.executable, "-m", "marin_rl", "run", str(config), "--run-id", run_id, *overrides]
    # An orchestrator of its own: its CPU time counts as ours, and no other server is disturbed.
    orchestrator = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": ""}
    started, watch, _ = run_program(command, orchestrator, folder / f"{run_id}.log")
    ended = our_rounds(Run.open(str(folder / "runs"), run_id), work, options.rounds)
    record(measured, side, repeat, started, watch, ended)


def our_config(folder: Path, work: Work, rounds: int) -> dict[str, Any]:
    """The standard work as a configuration of the main job; nothing is filtered or evaluated."""
    length = work.prompt_tokens + work.new_tokens
    group = work.prompt_tokens + work.completions * work.new_tokens
    return {
        "root": str(folder / "runs"),
        "rounds": rounds,
        "seed": work.seed,
        "policy": {"init": "hf", "hf_path": str(folder / "model"), "context_length": length},
        "environment": {
            "name": "chat",
            "options": {"path": str(folder / "prompts.jsonl"), "reward": "standard_work:reward"},
        },
        "sampling": {"max_tokens": work.new_tokens, "temperature": 1.0},
        "rollouts": {"groups_per_round": work.prompts, "group_size": work.completions},
        "inference": {
            "engine": {
                "slots": work.rows,
                "chunk_steps": work.new_tokens,
                "prefill_rows": work.prompts,
            }
        },
        "filters": {"zero_signal": False},
        # A real model's completions differ in length: rows as new runs have them by default.
        "batching": {} if work.model else {"packing": "shared_prompt", "row_tokens": group},
        "objective": {
            "advantage": "rloo",
            "surrogate": "ppo_clip",
            "ratio_level": "sequence",
            "aggregation": "sequence_mean_token_sum",
        },
        "training": {
            "learning_rate": work.learning_rate,
            "warmup_steps": 0,
            # of a real model a whole group, whose prompt is then computed once
            "microbatch_sequences": 1 if work.model is None else 4,
        },
        "evaluation": {"every_rounds": 1_000_000, "examples": 1},
    }


def our_rounds(run: Run, work: Work, rounds: int) -> list[Ended]:
    """When each round's last file was committed, and what the committed metrics say of it."""
    rows = sorted(read_metrics(run).to_pylist(), key=lambda row: row["round"])
    if [row["round"] for row in rows] != list(range(rounds)):
        raise SystemExit(f"{OURS}: expected metrics of {rounds} rounds, found {len(rows)}")
    ended = []
    for row in rows:
        check_tokens(OURS, row["completions/min_length"], row["completions/max_length"], work)
        if row["rollouts/consumed"] != work.rows:
            raise SystemExit(
                f"{OURS}: expected {work.rows} trained rollouts, found {row['rollouts/consumed']}"
            )
        phases = {
            name.removeprefix("timing_s/"): value
            for name, value in row.items()
            if name.startswith("timing_s/") and value is not None
        }
        path = run.store.local_path(metrics_key(row["round"]))
        assert path is not None, "runs of the benchmark lie on a local disk"
        ended.append(
            Ended(
                at=path.stat().st_mtime,
                phases_s=phases,
                reward=row["reward"],
                tokens_mean=row["completions/mean_length"],
            )
        )
    return ended


# ---------------------------------------------------------------- measuring


def run_program(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> tuple[float, Watch, str]:
    """Run a program to its end under a watch: when it started, the watch, what it printed.

    Raises SystemExit with the end of its output when it fails.
    """
    paths = [str(BENCH), os.environ.get("PYTHONPATH", "")]
    full = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    output = log.with_suffix(".out")
    with output.open("w") as stdout, log.open("w") as stderr:
        started = time.time()
        process = subprocess.Popen(command, env=full, stdout=stdout, stderr=stderr)
        watch = Watch(process.pid).start()
        code = process.wait()
        watch.stop()
    if code:
        tail = (output.read_text() + log.read_text())[-3000:]
        raise SystemExit(f"{' '.join(command)}\nended with code {code}:\n{tail}")
    return started, watch, output.read_text()


def record(
    measured: Measured, side: str, repeat: int, started: float, watch: Watch, ended: Sequence[Ended]
) -> None:
    """Turn the ends of rounds into rounds: each lasts from the end of the one before."""
    begin = started
    for index, end in enumerate(ended):
        measured.rounds.append(
            Round(
                side=side,
                repeat=repeat,
                round=index,
                wall_s=end.at - begin,
                cpu_s=watch.cpu_s(begin, end.at),
                other_cores=watch.other_cores(begin, end.at),
                phases_s=end.phases_s,
                reward=end.reward,
                tokens_mean=end.tokens_mean,
            )
        )
        begin = end.at
    measured.add_peaks(side, watch.peak_bytes, watch.peak_tree_bytes)


if __name__ == "__main__":
    main()
