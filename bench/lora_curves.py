"""Learning curves of the demo with an adapter next to full training: a table and a picture.

    python bench/lora_curves.py [--seeds 0 100000000 200000000] [--kinds full adapter int8 nf4]

configs/demo.yaml as it stands, with an adapter of rank 8, and with that adapter on a base that lies
quantised, from one warm start for each seed: the seed decides the warm start, the adapter's first
values, which examples a run meets and what it samples. Rounds go through the library as the flow's
tasks call it, without an orchestrator. Asked for is that an adapter ends at no less than `ENOUGH`
of full training's held-out accuracy. Curves of earlier invocations are kept in `--results`, and the
same ones replaced; a run that was interrupted continues with the same `--root`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import print_head
from recipes import DEMO, REPOSITORY, RESULTS, evaluated, warm_start

PICTURE = REPOSITORY / "docs/images/lora.svg"
ENOUGH = 0.95


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to train the demo: its overrides, and how the picture shows it."""

    overrides: tuple[str, ...]
    label: str
    colour: str


LORA = "policy.lora.rank=8"
KINDS: Mapping[str, Kind] = {
    "full": Kind(overrides=(), label="all parameters", colour="#2563eb"),
    "adapter": Kind(overrides=(LORA,), label="adapter of rank 8", colour="#ea580c"),
    "int8": Kind(overrides=(LORA, "policy.quantize_base=int8"), label="on int8", colour="#16a34a"),
    "nf4": Kind(overrides=(LORA, "policy.quantize_base=nf4"), label="on NF4", colour="#9333ea"),
}


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out accuracy of one run by the number of rounds that it was trained for."""

    kind: str
    seed: int
    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]


def main() -> None:
    """Play, print the table, draw the picture, keep the numbers."""
    options = parse_arguments()
    print_head()
    options.results.mkdir(parents=True, exist_ok=True)
    kept = options.results / "lora_curves.json"
    curves = read_curves(kept)
    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            folder = (options.root or Path(temporary)) / str(seed)
            begun = warm_start(folder, [f"seed={seed}", *options.overrides])
            for kind in options.kinds:
                curves[seed, kind] = learn(folder, begun, seed, kind, options.overrides)
                kept.write_text(json.dumps([asdict(one) for one in curves.values()], indent=1))
    print(table(curves))
    options.picture.write_bytes(picture(curves))
    print(f"wrote {kept} and {options.picture}")


def parse_arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 100_000_000, 200_000_000])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["full", "adapter"])
    parser.add_argument("--root", type=Path, help="folder that keeps the runs")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    return parser.parse_args()


Curves = dict[tuple[int, str], HeldOut]


def read_curves(path: Path) -> Curves:
    """Curves of earlier invocations, by seed and kind."""
    curves = [HeldOut(**one) for one in json.loads(path.read_text())] if path.is_file() else []
    return {(curve.seed, curve.kind): curve for curve in curves}


def learn(root: Path, begun: str, seed: int, kind: str, overrides: Sequence[str]) -> HeldOut:
    """Play the demo from a warm start; raises what the stages raise."""
    from marin_rl.config import load_config
    from marin_rl.runtime import RunRuntime
    from marin_rl.storage.runs import Run

    names = f"root={root}", f"run_id={kind}", f"seed={seed}"
    start = "policy.init=checkpoint", f"policy.checkpoint={begun}"
    own = KINDS[kind].overrides
    run = Run.create_or_open(load_config(DEMO, [*names, *start, *own, *overrides]))
    runtime, accuracy, began = RunRuntime(run), dict[int, float](), time.process_time()
    every, last = run.config.evaluation.every_rounds, run.config.rounds
    try:
        checkpoint = runtime.init_policy()
        for round in range(last + 1):
            policy = runtime.serve(checkpoint)
            if round % every == 0 or round == last:
                accuracy[round] = evaluated(run, round, policy)
                print(f"{kind} {seed}: {round} {accuracy[round]:.4f}", flush=True)
            if round < last:
                checkpoint = trained(runtime, run, round, checkpoint, policy)
    finally:
        runtime.close()
    print(f"{kind} {seed}: {time.process_time() - began:.0f} CPU-s", flush=True)
    return HeldOut(kind=kind, seed=seed, rounds=tuple(accuracy), accuracy=tuple(accuracy.values()))


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


def table(curves: Curves) -> str:
    """Markdown: final held-out accuracy by seed and kind, and each adapter's part of full's."""
    kinds = [kind for kind in KINDS if any(kind == own for _, own in curves)]
    lines = ["| seed | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for seed in sorted({seed for seed, _ in curves}):
        cells = [cell(curves, seed, kind) for kind in kinds]
        lines.append(f"| {seed:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(curves: Curves, seed: int, kind: str) -> str:
    """Final accuracy of a run, next to full training's of the seed where that was played."""
    own, full = curves.get((seed, kind)), curves.get((seed, "full"))
    if own is None:
        return ""
    if full is None or kind == "full":
        return f"{own.accuracy[-1]:.1%}"
    part = own.accuracy[-1] / full.accuracy[-1] if full.accuracy[-1] else 1.0
    return f"{own.accuracy[-1]:.1%} ({part:.3f}{'' if part >= ENOUGH else ', missed'})"


def picture(curves: Curves) -> bytes:
    """Held-out accuracy by round, one panel for each seed, as SVG."""
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "lora"
    seeds = sorted({seed for seed, _ in curves})
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(seeds), sharey=True, squeeze=False)[0]
    for axes, seed in zip(panels, seeds, strict=True):
        for name, kind in KINDS.items():
            curve = curves.get((seed, name))
            if curve is not None:
                axes.plot(curve.rounds, curve.accuracy, color=kind.colour, label=kind.label)
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
