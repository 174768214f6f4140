"""DPO on a model folder, side by side with TRL's DPOTrainer: CPU seconds, wall seconds, memory.

    python bench/preference.py --model path/to/hf-folder [--pairs 64] [--words 40]
    python bench/preference.py --install-peers            # makes TRL's environment, and measures

Both sides read one file of pairs in TRL's rows, tokenize it by the folder's chat template, and take
one pass of steps of `--step` pairs in float32 with the sigmoid loss. Each is a process of its own;
its first step, in which ours compiles, is told apart. TRL keeps the reference as a second model, as
by default; ours scores all pairs before the first step (`prepare`).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SPINNING = "TRL, threads spinning"
WORDS = (
    "sea", "deep", "small", "boat", "home", "night", "salt", "old", "rope", "wind", "sand",
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: a tiny one")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--words", type=int, default=32, help="words of a prompt, and of an answer")
    parser.add_argument("--step", type=int, default=8, help="pairs of an optimizer step")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--install-peers", action="store_true", help="make TRL's environment first")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--role", choices=("ours",), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.role:
        ours(options)
        return
    from machine import machine, print_head
    from peer_venvs import TRL, install
    from serve_one import tiny_model

    print_head()
    if options.install_peers:
        install(TRL)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = (options.model or tiny_model(folder / "tiny")).resolve()
        (folder / "pairs.jsonl").write_text(pairs(options))
        work = ["--model", str(model), "--folder", made, "--step", str(options.step)]
        sides = {"ours": [sys.executable, __file__, "--role", "ours"]}
        if TRL.python.exists():
            sides["TRL"] = [str(TRL.python), str(HERE / "peers/trl_preference.py")]
            sides[SPINNING] = sides["TRL"]
        else:
            print("skipped TRL: not installed; --install-peers does it")
        for _ in range(options.repeat):
            for side, run in sides.items():
                rows.append({"side": side, **measured([*run, *work], spin=side == SPINNING)})
    for row in rows:
        print(json.dumps(row), flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    name = f"preference-{time.strftime('%Y%m%d-%H%M%S')}.json"
    written = {"machine": machine(), "model": str(options.model), "rows": rows}
    (options.results / name).write_text(json.dumps(written, indent=1))


def pairs(options: argparse.Namespace) -> str:
    """Pairs of random words, in TRL's explicit rows."""
    rng, rows = random.Random(0), []

    def said(role: str, opening: str) -> list[dict[str, str]]:
        text = " ".join([opening, *rng.choices(WORDS, k=options.words)])
        return [{"role": role, "content": text}]

    for number in range(options.pairs):
        prompt = said("user", f"Story {number}:")
        rows.append(
            {
                "prompt": prompt,
                "chosen": said("assistant", "Well,"),
                "rejected": said("assistant", "No,"),
            }
        )
    return "".join(json.dumps(row) + "\n" for row in rows)


def measured(command: list[str], *, spin: bool) -> dict[str, Any]:
    """Output of a side's process: its last line, and what the whole of it took.

    Threads of PyTorch that wait sleep, or with `spin` as by default spin for a while.
    """
    started = time.perf_counter()
    before = os.times()
    from serve_one import QUIET

    env = os.environ | ({} if spin else QUIET)
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    after, wall_s = os.times(), time.perf_counter() - started
    cpu_s = after.children_user + after.children_system
    cpu_s -= before.children_user + before.children_system
    last = json.loads(found.stdout.strip().splitlines()[-1])
    return {"process_cpu_s": round(cpu_s, 1), "process_wall_s": round(wall_s, 1), **last}


def ours(options: argparse.Namespace) -> None:
    """Our side: `prepare`, then all steps, as `marin-rl preference` takes them."""
    from marks import Marks

    from marin_rl.compilation import prepare_for_training
    from marin_rl.config import parse_config
    from marin_rl.progress import listening
    from marin_rl.rollouts.pinned import as_begun
    from marin_rl.storage.runs import Run
    from marin_rl.tokenizers import tokenizer_for
    from marin_rl.training.pair_phase import PreferenceTraining

    model, file = str(options.model), options.folder / "pairs.jsonl"
    steps = len(file.read_text().splitlines()) // options.step
    preference = {
        "pairs": str(file), "held_out_fraction": 0.0, "steps": steps, "steps_per_checkpoint": steps,
        "pairs_per_step": options.step, "schedule": "constant",
    }  # fmt: skip
    most = json.loads((options.model / "config.json").read_text())["max_position_embeddings"]
    policy = {"init": "hf", "hf_path": model, "tokenizer": model, "context_length": min(512, most)}
    tree = {"root": str(options.folder / "runs"), "policy": policy, "preference": preference}
    config = parse_config(tree)
    prepare_for_training()
    marks = Marks()
    run = Run.create_or_open(config, as_begun)
    training = PreferenceTraining(run, tokenizer_for(config.policy))
    ref = training.prepare()
    marks.add("prepare")
    taken = training._program.update

    def counted(*arguments: Any) -> Any:
        outcome = taken(*arguments)
        outcome[1]["grad_norm"].block_until_ready()
        marks.add("step")
        return outcome

    training._program.update = counted
    with listening(lambda event: None):
        done = training.run_segment(0, ref)
    marks.add("commit")
    print(json.dumps(marks.totals() | {"loss": done.summary["preference/loss"]}))


if __name__ == "__main__":
    main()
