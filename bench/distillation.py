"""A divergence to a teacher as loss: what it adds to a step, next to the teacher's forward pass.

    python bench/distillation.py --model path/to/hf-folder [--rows 8] [--completion 120]

CPU seconds of the passes of a step without a teacher, of the teacher's forward pass by itself and
of the passes of a step with it, in turn, in float32; medians, without the first of each, which
compiles. The teacher is the model itself with weights 1 % larger.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from machine import print_head
from serve_one import tiny_model

from marin_rl.compilation import prepare_for_training
from marin_rl.config import DistillationConfig, DivergenceConfig, parse_config
from marin_rl.models.families import described_folder
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.compiled_step import CompiledStep, policy_settings
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.logprobs import ALONE
from marin_rl.training.model import named_parameters
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.step import beside_teacher
from marin_rl.training.step_types import TrainableParams, as_array, step_arrays
from marin_rl.types import TrainingBatch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: a tiny one")
    parser.add_argument("--rows", type=int, default=8, help="of a step, which is one microbatch")
    parser.add_argument("--prompt", type=int, default=8, help="tokens")
    parser.add_argument("--completion", type=int, default=120, help="tokens, which are trained on")
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


def runs(options: argparse.Namespace, model: Path) -> dict[str, Callable[[], Any]]:
    policy = {"init": "hf", "hf_path": str(model), "tokenizer": str(model)}
    config = parse_config({"policy": {**policy, "context_length": 128}})
    settings = replace(policy_settings(config), packing=ALONE)
    adamw = policy_adamw(config.training)
    program = CompiledStep(config, tokenizer_for(config.policy), adamw, settings)
    arrays = {n: jax.device_put(a) for n, a in named_parameters(load_hf(model)).items()}
    trained = TrainableParams(arrays)
    teacher = {name: 1.01 * array for name, array in arrays.items()}
    shape = options.rows, options.prompt + options.completion
    mask, nothing = np.ones(shape, np.int32), np.zeros(shape, np.float32)
    mask[:, : options.prompt] = 0
    vocabulary = program.template.spec.vocabulary
    batch = TrainingBatch(
        token_ids=np.random.default_rng(0).integers(0, vocabulary, shape).astype(np.int32),
        loss_mask=mask, segment_ids=np.ones(shape, np.int32),
        positions=np.tile(np.arange(shape[1], dtype=np.int32), (options.rows, 1)),
        policy_logprobs=nothing, advantages=mask.astype(np.float32), returns=nothing,
    )  # fmt: skip
    rows, used = step_arrays(batch, options.rows, 1)

    def step(form: DivergenceConfig | None = None) -> Any:
        own, frozen = settings, {}
        if form is not None:
            distilled, spec = DistillationConfig(loss=form), described_folder(str(model))
            own = replace(settings, distillation=distilled, teacher=spec)
            frozen = beside_teacher({}, teacher)
        passes = program.forward_backward(own)
        return jax.block_until_ready(passes(trained, frozen, None, rows, used)[0])

    forward = program.score, TrainableParams(None), teacher, rows, as_array(used)
    return {
        "step": step,
        "teacher": lambda: jax.block_until_ready(forward[0](*forward[1:])),
        "with its 64 likeliest tokens": lambda: step(DivergenceConfig(top_k=64)),
        "with all tokens": lambda: step(DivergenceConfig(top_k=None)),
    }


def main() -> None:
    options = parse()
    print_head()
    prepare_for_training()
    with tempfile.TemporaryDirectory() as made:
        taken = runs(options, options.model or tiny_model(Path(made) / "tiny"))
        spent: dict[str, list[float]] = {name: [] for name in taken}
        for _ in range(1 + options.repeat):
            for name, run in taken.items():
                began = time.process_time()
                run()
                spent[name].append(time.process_time() - began)
    median = {name: statistics.median(each[1:]) for name, each in spent.items()}
    step, teacher = median["step"], median["teacher"]
    print(f"step {step:.3f} CPU seconds, the teacher's forward pass {teacher:.3f}")
    for name in [*median][2:]:
        added = median[name] - step - teacher
        print(f"{name}: {median[name]:.3f}, more than both by {added / step:+.1%} of a step")


if __name__ == "__main__":
    main()
