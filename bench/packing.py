"""The training step with a sequence a row, with packed rows, and with each group's prompt once.

    python bench/packing.py                            # long prompts: 512 tokens, and 64 sampled
    python bench/packing.py --prompt 32 --groups 16    # the standard work of round.py
    python bench/packing.py --prompt 32 --groups 16 --mean 3           # and its short work
    python bench/packing.py --prompt 32 --groups 16 --shortest 1       # completions of 1 to 64

The model of the standard work (3.2M-parameter Llama, float32). The same rollouts go through
`marin_rl.batching` in each layout and through one optimizer step, in turns, in one process; prints
medians of wall and CPU seconds, ratios to a sequence a row, and the largest difference of the
parameters after the step. A sequence a row is padded to the longest there is, or with `--padded-to
bucket` to what batches are padded to by default.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np
from machine import print_head
from standard_work import Work, add_size_option, sized

LAYOUTS = ("none", "sequences", "shared_prompt")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--completion", type=int, default=64)
    parser.add_argument("--shortest", type=int, help="completions of any length from here on")
    parser.add_argument("--mean", type=float, help="mean tokens of completions that end at random")
    parser.add_argument("--padded-to", choices=("longest", "bucket"), default="longest")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--row", type=int, help="tokens of a row where sequences are packed")
    parser.add_argument("--microbatch-tokens", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    add_size_option(parser)
    return parser.parse_args()


def main() -> None:
    options = parse()
    print_head()
    steps = {layout: prepared(options, layout) for layout in options.layouts}
    after = {layout: step() for layout, step in steps.items()}  # compiles
    taken: dict[str, list[tuple[float, float]]] = {layout: [] for layout in options.layouts}
    for _ in range(options.rounds):
        for layout, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            taken[layout].append((time.perf_counter() - wall, time.process_time() - cpu))
    report(options, taken, after)


def prepared(options: argparse.Namespace, layout: str) -> Any:
    """A function that takes one optimizer step on the same rollouts in one layout."""
    from marin_rl.config import Config
    from marin_rl.tokenizers import character_tokenizer
    from marin_rl.training.backend import DeviceBackend, Loss
    from marin_rl.training.compiled_step import CompiledStep, to_fixed_shape
    from marin_rl.training.logprobs import packing_of
    from marin_rl.training.model import build_model, named_parameters
    from marin_rl.training.optimizer import policy_adamw
    from marin_rl.training.state import fresh_state
    from marin_rl.training.step_types import StepSettings

    work = sized(Work(), options.sizes)
    longest = options.prompt + options.completion
    sampled = completion_tokens(options)
    row = row_tokens(options, layout, options.prompt + int(sampled.max()))
    config = Config.model_validate(
        {
            "policy": {
                "context_length": longest + 1,
                "model": work.sizes,
            },
            "sampling": {"max_tokens": options.completion},
            "batching": {"packing": layout, "row_tokens": max(row, longest + 1)},
        }
    )
    settings = StepSettings(
        objective=config.objective,
        packing=packing_of(layout),
    )
    tokenizer = character_tokenizer()
    program = CompiledStep(config, tokenizer, policy_adamw(config.training), settings)
    batch = batch_of(options, layout, row, sampled)
    # about as many tokens in a microbatch whatever the layout
    microbatch = max(1, options.microbatch_tokens // row)
    rows = to_fixed_shape(batch, microbatch, len(batch.token_ids))
    print(f"{layout}: {len(batch.token_ids)} rows of {row} tokens, {microbatch} in a microbatch")
    parameters = named_parameters(build_model(config.policy, work.vocabulary, 0))

    def step() -> dict[str, np.ndarray]:
        backend = DeviceBackend(program, fresh_state(dict(parameters), program.optimizer, 0))
        forward, update = (
            backend.forward_backward(rows, Loss(settings=settings)),
            backend.optim_step(),
        )
        forward.result(), update.result()
        return {name: np.asarray(array) for name, array in backend.close().parameters.items()}

    return step


def completion_tokens(options: argparse.Namespace) -> np.ndarray:
    """The tokens of each completion: all the same, anything from the shortest on, or geometric."""
    random, count = np.random.default_rng(1), options.group * options.groups
    if options.mean:
        return np.minimum(random.geometric(1 / options.mean, count), options.completion)
    shortest = options.shortest or options.completion
    return random.integers(shortest, options.completion + 1, count)


def row_tokens(options: argparse.Namespace, layout: str, longest: int) -> int:
    """The tokens of a row: the longest sequence, or what the layout puts together."""
    from marin_rl.batching.plan import bucket
    from marin_rl.config import BatchingConfig

    together = options.prompt + options.group * options.completion
    match layout:
        case "none":
            return longest if options.padded_to == "longest" else bucket(longest, BatchingConfig())
        case "sequences":
            return options.row or max(longest, min(together, 512))
        case _:
            return options.row or together


def batch_of(options: argparse.Namespace, layout: str, row: int, sampled: np.ndarray) -> Any:
    """The rollouts as a training batch, laid out by the library's own packing."""
    import pyarrow as pa

    from marin_rl.batching.packing import Kept, fill_packed, one_per_row, pack
    from marin_rl.types import TrainingBatch

    rng = np.random.default_rng(0)
    count = options.group * options.groups
    prompts = rng.integers(8, 512, (options.groups, options.prompt))
    ids = [
        np.concatenate([prompts[k // options.group], rng.integers(8, 512, sampled[k])])
        for k in range(count)
    ]
    sizes = np.full(count, options.prompt), sampled
    table = pa.table(
        {
            "rollout_id": [f"r{k}" for k in range(count)],
            "environment": ["bench"] * count,
            "token_ids": pa.array([row.tolist() for row in ids], pa.list_(pa.int32())),
            "loss_mask": [[0] * options.prompt + [1] * size for size in sampled],
            "logprobs": pa.array([[-6.0] * len(row) for row in ids], pa.list_(pa.float32())),
        }
    )
    kept = Kept(
        index_K=np.arange(count),
        prompt_K=sizes[0],
        sampled_K=sizes[1],
        advantage_K=rng.standard_normal(count),
        reward_K=np.zeros(count),
    )
    if layout == "none":
        packing = one_per_row(np.zeros(count, np.int64))
    else:
        shared = layout == "shared_prompt"
        places = np.arange(count) // options.group, np.zeros(count, np.int64)
        packing = pack(*sizes, *places, row_tokens=row, share=shared)
    (rows,) = fill_packed(packing, kept, row, table, iter([table]))
    return TrainingBatch(**rows.arrays)


def report(
    options: argparse.Namespace,
    taken: dict[str, list[tuple[float, float]]],
    after: dict[str, dict[str, np.ndarray]],
) -> None:
    """One line a layout, as JSON."""
    print(f"{vars(options)}, load {os.getloadavg()[0]:.1f}")
    first = options.layouts[0]
    medians = {
        layout: [statistics.median(column) for column in zip(*pairs, strict=True)]
        for layout, pairs in taken.items()
    }
    for layout, (wall, cpu) in medians.items():
        gap = max(
            float(np.abs(after[layout][name] - array).max()) for name, array in after[first].items()
        )
        print(
            json.dumps(
                {
                    "layout": layout,
                    "wall_s": round(wall, 3),
                    "cpu_s": round(cpu, 3),
                    "times_faster_wall": round(medians[first][0] / wall, 2),
                    "times_faster_cpu": round(medians[first][1] / cpu, 2),
                    "largest_difference": gap,
                }
            )
        )


if __name__ == "__main__":
    main()
