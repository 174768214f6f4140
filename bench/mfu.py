"""MFU of the training step alone: a random model, rows of one sequence each, no run around it.

    python bench/mfu.py                                   # 0.5B, bfloat16, 4,096 tokens a row
    python bench/mfu.py --microbatch 4 --checkpointing
    python bench/mfu.py --model tiny --row 128 --rows 4 --peak-tflops 0.2    # on a CPU

The first is meant for a GPU, whose peak `marin_rl.training.flops` knows; elsewhere MFU is printed
where `--peak-tflops` says what the devices can do. Model FLOPs are those of `perf/mfu`: what is
computed again counts nothing. Prints one line of JSON: the median of the steps after the first, and
the peak of the device's memory next to that of the plan.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout

import jax
import numpy as np
from machine import print_head
from standard_work import Work

from marin_rl.compilation import enable_compilation_cache, keep_freed_memory
from marin_rl.config import Config
from marin_rl.planning import plan
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.compiled_step import CompiledStep, to_fixed_shape
from marin_rl.training.logprobs import packing_of
from marin_rl.training.model import build_model, named_parameters
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.round_stats import peak_of_devices, training_flops
from marin_rl.training.state import fresh_state
from marin_rl.training.step_types import StepSettings
from marin_rl.types import TrainingBatch, segment_lengths, segment_starts

# The sizes of Qwen2.5-0.5B, and of the standard work of round.py.
MODELS = {
    "0.5b": {
        "hidden_size": 896,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
    },
    "tiny": Work().sizes,
}


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--microbatch", type=int, default=1, help="rows of a microbatch")
    parser.add_argument("--prompt", type=float, default=0.125, help="share that is not trained on")
    parser.add_argument("--packing", choices=("none", "sequences"), default="none")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, help="of all devices; default: by their name")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse()
    print_head()
    keep_freed_memory()
    enable_compilation_cache()
    config = config_of(options)
    settings = StepSettings(
        objective=config.objective,
        packing=packing_of(options.packing),
        compute_dtype=options.dtype,
    )
    program = CompiledStep(config, character_tokenizer(), policy_adamw(config.training), settings)
    batch = batch_of(options)
    rows = to_fixed_shape(batch, options.microbatch, options.rows)
    vocabulary = MODELS[options.model]["vocab_size"]
    parameters = named_parameters(build_model(config.policy, vocabulary, 0))
    state = program.place(fresh_state(parameters, program.optimizer, 0))
    backend, loss = DeviceBackend(program, state), Loss(settings=settings)
    del parameters, state  # the backend's alone, so that each step frees the old ones
    seconds = []
    for _ in range(options.steps + 1):
        started = time.perf_counter()
        forward, update = backend.forward_backward(rows, loss), backend.optim_step()
        forward.result()
        skipped = update.result().metrics["updates/skipped"]
        jax.block_until_ready(backend.get_weights().result())
        seconds.append(time.perf_counter() - started)
        assert not skipped, "an update was not finite"
    flops = training_flops(program.template, segment_lengths(batch), segment_starts(batch))
    planned = plan(config).step_bytes or 0
    held = jax.local_devices()[0].memory_stats() or {}
    memory = {"planned_gb": planned, "peak_gb": held.get("peak_bytes_in_use", 0)}
    memory = {name: round(value / 1e9, 2) for name, value in memory.items()}
    sys.stdout.write(json.dumps(report(options, seconds, flops) | memory) + "\n")


def config_of(options: argparse.Namespace) -> Config:
    """A run's configuration with the model and the objective's defaults."""
    model = MODELS[options.model] | {"tie_embeddings": True}
    context = {"context_length": options.row, "compute_dtype": options.dtype}
    return Config.model_validate(
        {
            "policy": {**context, "model": model},
            "sampling": {"max_tokens": options.row // 2},
            "batching": {"packing": options.packing, "row_tokens": options.row},
            "training": {
                "gradient_checkpointing": options.checkpointing,
                "microbatch_sequences": options.microbatch,
                "warmup_steps": 0,
            },
        }
    )


def batch_of(options: argparse.Namespace) -> TrainingBatch:
    """Random tokens: every row one sequence, all of which but its beginning is trained on."""
    random = np.random.default_rng(0)
    shape = options.rows, options.row
    mask = np.zeros(shape, np.int32)
    mask[:, int(options.prompt * options.row) :] = 1
    positions = np.broadcast_to(np.arange(options.row, dtype=np.int32), shape)
    return TrainingBatch(
        token_ids=random.integers(MODELS[options.model]["vocab_size"], size=shape, dtype=np.int32),
        loss_mask=mask,
        segment_ids=np.ones(shape, np.int32),
        positions=positions,
        policy_logprobs=np.float32(-np.log(MODELS[options.model]["vocab_size"])) * mask,
        advantages=random.standard_normal((options.rows, 1), np.float32) * mask,
        returns=np.zeros(shape, np.float32),
    )


def report(options: argparse.Namespace, seconds: list[float], flops: float) -> dict[str, Any]:
    """Measured figures; `mfu` is None where the devices' peak is unknown."""
    step_s = statistics.median(seconds[1:])
    given = options.peak_tflops
    peak = given * 1e12 if given else peak_of_devices(1)
    return {
        "device": jax.devices()[0].device_kind,
        **{name: value for name, value in vars(options).items() if name != "steps"},
        "first_step_s": round(seconds[0], 3),
        "step_s": round(step_s, 4),
        "tokens_per_second": round(options.rows * options.row / step_s, 1),
        "model_tflops_per_second": round(flops / step_s / 1e12, 4),
        "mfu": None if peak is None else round(flops / step_s / peak, 4),
    }


if __name__ == "__main__":
    main()
