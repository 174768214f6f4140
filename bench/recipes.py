"""Learning curves of every shipped recipe: a table and a picture, from one warm start.

    python bench/recipes.py [--rounds 10] [--seeds 0 1 2] [--recipes grpo gspo …] [--add]

The task is that of configs/demo.yaml made small (`SMALLER`): words of three letters are
spelled backward, and the reward pays for the bare word alone, while six in ten demonstrations of
the warm start put it in quotation marks. All recipes begin at the same checkpoint; a seed decides
which examples a run meets and what it samples. Rounds go through the library as the flow's tasks
call it, without an orchestrator. tests/training/test_recipes.py plays the same with one seed.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import print_head

REPOSITORY = Path(__file__).resolve().parents[1]
DEMO = REPOSITORY / "configs/demo.yaml"
SHIPPED = REPOSITORY / "marin_rl/config/recipes"
RECIPES = tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
PICTURE = REPOSITORY / "docs/images/recipes.svg"
RESULTS = REPOSITORY / "bench/results"

SMALLER = (
    "policy.model.hidden_size=64", "policy.model.layers=2", "policy.model.intermediate_size=160",
    "environment.options.config={min_word_len: 3, max_word_len: 3}", "sampling.max_tokens=8",
    "rollouts.groups_per_round=32", "rollouts.shards_per_round=1",
    "inference.engine={slots: 256, chunk_steps: 8, prefill_rows: 32}",
    "sft.steps=300", "sft.steps_per_checkpoint=300",
    "training.learning_rate=3e-4", "training.warmup_steps=0", "evaluation.examples=256",
)  # fmt: skip
COLOURS = (
    "#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2", "#4b5563", "#ca8a04",
    "#db2777", "#0f766e",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One recipe with one seed: mean reward by round, evaluation accuracy before and after."""

    recipe: str
    seed: int
    rewards: tuple[float, ...]
    before: float
    after: float


def main() -> None:
    """Play, print the table, draw the picture, keep the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--add", action="store_true", help="keep the curves of earlier invocations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    print_head()
    with tempfile.TemporaryDirectory() as folder:
        begun = warm_start(Path(folder), [*SMALLER, *options.overrides])
        curves = [
            learn(Path(folder), begun, recipe, seed, options.rounds, options.overrides)
            for recipe in options.recipes
            for seed in options.seeds
        ]
    options.results.mkdir(parents=True, exist_ok=True)
    kept = options.results / "recipes.json"
    if options.add and kept.is_file():
        curves += [Curve(**one) for one in json.loads(kept.read_text())]
        curves.sort(key=lambda curve: (curve.recipe, curve.seed))
    kept.write_text(json.dumps([asdict(curve) for curve in curves], indent=1))
    print(table(curves))
    options.picture.write_bytes(picture(curves))
    print(f"wrote {kept} and {options.picture}")


def warm_start(root: Path, overrides: Sequence[str]) -> str:
    """Play the demo's warm start, with changes; returns what `policy.checkpoint` takes."""
    from marin_rl.config import load_config
    from marin_rl.runtime import RunRuntime
    from marin_rl.storage.runs import Run

    config = load_config(DEMO, [f"root={root}", "run_id=warm", *overrides])
    runtime = RunRuntime(Run.create_or_open(config))
    try:
        for step in range(0, config.sft.steps, config.sft.steps_per_checkpoint):
            runtime.run_sft_segment(step)
        return f"{root}/warm/{runtime.init_policy().slot}"
    finally:
        runtime.close()


def learn(
    root: Path, begun: str, recipe: str, seed: int, rounds: int, overrides: Sequence[str] = ()
) -> Curve:
    """Play a recipe for some rounds from the warm start; raises what the stages raise."""
    from marin_rl.config import load_config
    from marin_rl.runtime import RunRuntime
    from marin_rl.storage.runs import Run

    names = (
        f"root={root}",
        f"run_id={recipe}-{seed}",
        f"seed={seed}",
        f"recipe={recipe}",
    )
    start = ("policy.init=checkpoint", f"policy.checkpoint={begun}")
    run = Run.create_or_open(load_config(DEMO, [*names, *SMALLER, *start, *overrides]))
    runtime = RunRuntime(run)
    try:
        checkpoint = runtime.init_policy()
        before = evaluated(run, 0, runtime.serve(checkpoint))
        rewards = []
        for round in range(rounds):
            checkpoint, reward = play(runtime, run, round, checkpoint)
            rewards.append(reward)
        after = evaluated(run, rounds, runtime.serve(checkpoint))
    finally:
        runtime.close()
    return Curve(recipe=recipe, seed=seed, rewards=tuple(rewards), before=before, after=after)


def play(runtime: Any, run: Any, round: int, checkpoint: Any) -> tuple[Any, float]:
    """One round as the flow plays it: the next checkpoint, and the mean reward of its samples."""
    from marin_rl.batching.build import build_round
    from marin_rl.rollouts.generate import generate_shard
    from marin_rl.storage.tables.rollouts import seal_round

    policy = runtime.serve(checkpoint)
    part = asyncio.run(generate_shard(run, round, 0, policy))
    batches = build_round(run, round, seal_round(run, round, [part], (checkpoint,)))
    trained = runtime.train_round(round, batches, checkpoint)
    return trained, float(batches.summary["reward"])


def evaluated(run: Any, round: int, policy: Any) -> float:
    """Evaluation accuracy of the served policy."""
    from marin_rl.rollouts.evaluate import evaluate_round

    return float(asyncio.run(evaluate_round(run, round, policy)).summary["eval/accuracy"])


# ---------------------------------------------------------------- results


def of_recipe(curves: Sequence[Curve]) -> Mapping[str, list[Curve]]:
    """The curves by recipe, in order."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.recipe, []).append(curve)
    return found


def table(curves: Sequence[Curve]) -> str:
    """Markdown: per recipe the median over seeds, and the range where there are several."""
    lines = [
        "| recipe | reward, first round | reward, last three | held-out before | held-out after |",
        "|---|---|---|---|---|",
    ]
    for recipe, found in of_recipe(curves).items():
        columns = [
            [curve.rewards[0] for curve in found],
            [statistics.mean(curve.rewards[-3:]) for curve in found],
            [curve.before for curve in found],
            [curve.after for curve in found],
        ]
        cells = " | ".join(shown(column) for column in columns)
        lines.append(f"| `{recipe}` | {cells} |")
    return "\n".join(lines)


def shown(values: Sequence[float]) -> str:
    """A median, and how far apart the values are."""
    middle = f"{statistics.median(values):.2f}"
    apart = f"{min(values):.2f} to {max(values):.2f}"
    return middle if min(values) == max(values) else f"{middle} ({apart})"


def picture(curves: Sequence[Curve]) -> bytes:
    """The median reward over seeds by round and the range around it, one panel, as SVG."""
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "recipes"
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for colour, (recipe, found) in zip(COLOURS, of_recipe(curves).items(), strict=False):
        rounds = range(len(found[0].rewards))
        by_round = list(zip(*(curve.rewards for curve in found), strict=True))
        axes.fill_between(
            rounds,
            [min(v) for v in by_round],
            [max(v) for v in by_round],
            color=colour,
            alpha=0.08,
            linewidth=0,
        )
        axes.plot(rounds, [statistics.median(v) for v in by_round], color=colour, label=recipe)
    seeds = len({curve.seed for curve in curves})
    axes.set(xlabel="round", ylabel="reward", title=f"median and range of {seeds} seeds")
    axes.set_ylim(0, 1.02)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, ncols=2)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


if __name__ == "__main__":
    main()
