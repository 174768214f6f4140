"""Learning curves of the demo with an adapter next to full training: a table and a picture.

    python bench/lora_curves.py [--rank 8] [--seeds 0 100000000 200000000] [--add]

configs/demo.yaml as it stands, and with `policy.lora.rank`, from one warm start for each seed: the
seed decides the warm start, the adapter's first values, which examples a run meets and what it
samples. Rounds go through the library as the flow's tasks call it, without an orchestrator.
Asked for is that an adapter ends at no less than `ENOUGH` of full training's held-out accuracy.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import print_head
from recipes import DEMO, REPOSITORY, RESULTS, evaluated

PICTURE = REPOSITORY / "docs/images/lora.svg"
ENOUGH = 0.95
KINDS = {"full": "#2563eb", "adapter": "#ea580c"}


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out accuracy of one run by the number of rounds that it was trained for."""

    kind: str
    seed: int
    rank: int
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    cpu_s: float


def main() -> None:
    """Play, print the table, draw the picture, keep the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 100_000_000, 200_000_000])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--add", action="store_true", help="keep the curves of earlier invocations")
    parser.add_argument(
        "--root", type=Path, help="folder that keeps the runs: to go on after an end"
    )
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    print_head()
    kept = options.results / "lora_curves.json"
    curves = [HeldOut(**one) for one in json.loads(kept.read_text())] if options.add else []
    options.results.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.root or Path(temporary)) / str(seed)
            begun = warm_start(folder, seed)
            for kind in options.kinds:
                rank = options.rank if kind == "adapter" else 0
                curves.append(learn(folder, begun, seed, rank, options.overrides))
                curves.sort(key=lambda curve: (curve.seed, -len(curve.kind)))
                kept.write_text(json.dumps([asdict(curve) for curve in curves], indent=1))
    print(table(curves))
    options.picture.write_bytes(picture(curves))
    print(f"wrote {kept} and {options.picture}")


def warm_start(root: Path, seed: int) -> str:
    """Play the warm start of a seed; returns what `policy.checkpoint` takes."""
    from marin_rl.config import load_config
    from marin_rl.runtime import RunRuntime
    from marin_rl.storage.runs import Run

    config = load_config(DEMO, [f"root={root}", "run_id=warm", f"seed={seed}"])
    runtime = RunRuntime(Run.create_or_open(config))
    try:
        for step in range(0, config.sft.steps, config.sft.steps_per_checkpoint):
            runtime.run_sft_segment(step)
        return f"{root}/warm/{runtime.init_policy().slot}"
    finally:
        runtime.close()


def learn(root: Path, begun: str, seed: int, rank: int, overrides: Sequence[str]) -> HeldOut:
    """Play the demo from a warm start, with an adapter of this rank, or 0: of all parameters."""
    from marin_rl.config import load_config
    from marin_rl.runtime import RunRuntime
    from marin_rl.storage.runs import Run

    began = time.process_time()
    kind = "adapter" if rank else "full"
    names = [f"root={root}", f"run_id={kind}-{seed}", f"seed={seed}"]
    start = ["policy.init=checkpoint", f"policy.checkpoint={begun}"]
    lora = [f"policy.lora.rank={rank}"] if rank else []
    run = Run.create_or_open(load_config(DEMO, [*names, *start, *lora, *overrides]))
    runtime, rounds, accuracy = RunRuntime(run), list[int](), list[float]()
    try:
        checkpoint = runtime.init_policy()
        for round in range(run.config.rounds + 1):
            policy = runtime.serve(checkpoint)
            if round % run.config.evaluation.every_rounds == 0 or round == run.config.rounds:
                rounds.append(round)
                accuracy.append(evaluated(run, round, policy))
                print(f"{kind} {seed}: {round} {accuracy[-1]:.4f}", flush=True)
            if round < run.config.rounds:
                checkpoint = trained(runtime, run, round, checkpoint, policy)
    finally:
        runtime.close()
    return HeldOut(
        kind=kind,
        seed=seed,
        rank=rank,
        rounds=tuple(rounds),
        accuracy=tuple(accuracy),
        cpu_s=time.process_time() - began,
    )


def trained(runtime: Any, run: Any, round: int, checkpoint: Any, policy: Any) -> Any:
    """The checkpoint after a round as the flow plays it."""
    import asyncio

    from marin_rl.batching.build import build_round
    from marin_rl.rollouts.generate import generate_shard
    from marin_rl.storage.tables.rollouts import seal_round

    shards = range(run.config.rollouts.shards_per_round)
    parts = [asyncio.run(generate_shard(run, round, shard, policy)) for shard in shards]
    batches = build_round(run, round, seal_round(run, round, parts, (checkpoint,)))
    return runtime.train_round(round, batches, checkpoint)


# ---------------------------------------------------------------- results


def pairs(curves: Sequence[HeldOut]) -> dict[int, dict[str, HeldOut]]:
    """The curves by seed and kind."""
    by_seed: dict[int, dict[str, HeldOut]] = {}
    for curve in curves:
        by_seed.setdefault(curve.seed, {})[curve.kind] = curve
    return by_seed


def table(curves: Sequence[HeldOut]) -> str:
    """Markdown: final held-out accuracy of both by seed, and their ratio."""
    lines = ["| seed | full | adapter | adapter / full |", "|---|---|---|---|"]
    for seed, both in pairs(curves).items():
        last = {kind: curve.accuracy[-1] for kind, curve in both.items()}
        if len(last) < len(KINDS):
            continue
        ratio = last["adapter"] / last["full"]
        verdict = "" if ratio >= ENOUGH else f" (below {ENOUGH:g})"
        cells = f"{last['full']:.1%} | {last['adapter']:.1%} | {ratio:.3f}{verdict}"
        lines.append(f"| {seed:,} | {cells} |")
    return "\n".join(lines)


def picture(curves: Sequence[HeldOut]) -> bytes:
    """Held-out accuracy by round, one panel for each seed, as SVG."""
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "lora"
    by_seed = pairs(curves)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(by_seed), sharey=True, squeeze=False)[0]
    for axes, (seed, both) in zip(panels, by_seed.items(), strict=True):
        for kind, curve in sorted(both.items()):
            label = f"adapter of rank {curve.rank}" if curve.rank else "all parameters"
            axes.plot(curve.rounds, curve.accuracy, color=KINDS[kind], label=label)
        axes.set(xlabel="round", title=f"seed {seed:,}", ylim=(0, 1.02))
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out accuracy")
    panels[0].legend(loc="lower right", frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


if __name__ == "__main__":
    main()
