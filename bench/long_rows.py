"""Long rows over the mesh axis `context`: what a device needs, and how far results are from one's.

    python bench/long_rows.py --model FOLDER --row 32768 --axes 1 2 4 --compile
    python bench/long_rows.py --model FOLDER --row 32768 --axes 1 4
    python bench/long_rows.py --model FOLDER --row 4096 --axes 1 4 --gradients

One row of the pages of docs/ through a model's folder, all of whose layers are taken without
`--layers`. For rows beyond a model's own positions, give a copy of its folder whose config.json has
`rope_scaling`, such as yarn. A line of JSON for each axis: GB of a device by XLA's analysis, and
the largest differences to the first axis by the largest value, of log-probabilities and of each
gradient. Devices are parts of this machine's CPU: they come to a sum minutes apart, for which XLA
waits 40 s by itself.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.config import MeshConfig
from marin_rl.models.module import LanguageModel, model_of
from marin_rl.tokenizers import load_tokenizer
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.logprobs import packing_of, token_logprobs
from marin_rl.training.mesh import layout_of
from marin_rl.training.model import named_parameters, with_gradient_checkpointing, with_parameters

DOCS = Path(__file__).resolve().parent.parent / "docs"
STACKED = "transformer/layers/stacked/"
# Read when JAX starts its devices, at the first that is asked for.
FLAGS = {
    "xla_force_host_platform_device_count": 8,
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
}


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--row", type=int, default=32_768, help="tokens of the row")
    parser.add_argument("--axes", type=int, nargs="+", default=[1, 4], help="sizes of the axis")
    parser.add_argument("--layers", type=int, help="the first of the model's; default: all")
    parser.add_argument("--gradients", action="store_true", help="with gradient checkpointing")
    parser.add_argument("--compile", action="store_true", help="only")
    return parser.parse_args()


def first_layers(folder: str, layers: int | None) -> LanguageModel:
    """A folder's model, or its first layers."""
    model = load_hf(folder)
    spec = dataclasses.replace(model.spec, kinds=model.spec.kinds[:layers])
    cut = {
        name: array[:layers] if name.startswith(STACKED) else array
        for name, array in named_parameters(model).items()
    }
    return with_gradient_checkpointing(with_parameters(model_of(spec), cut))


def measured(model: LanguageModel, axis: int, options: argparse.Namespace) -> dict[str, Any]:
    """Memory of a device, seconds, and results on the host, unless nothing is to be run."""
    layout, places = (
        layout_of(MeshConfig(context=axis)),
        np.arange(options.row, dtype=np.int32)[None],
    )
    pages = "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    ids = np.resize(load_tokenizer(options.model)(pages)["input_ids"], places.shape)
    weights = np.random.default_rng(0).standard_normal(ids.shape, np.float32) / options.row

    def summed(parameters: Any, *rows: Any) -> Any:
        packed = packing_of("sequences")  # attention in blocks, on one device too
        logprobs = token_logprobs(
            with_parameters(model, parameters), *rows, packing=packed
        ).logprobs
        return jnp.sum(weights * logprobs), logprobs

    program = jax.grad(summed, has_aux=True) if options.gradients else summed
    placed = layout.place_parameters(named_parameters(model), model)
    with layout.active():
        rows = layout.place_rows(tuple(each[None] for each in (ids, places * 0 + 1, places)))
        arguments = placed, *(each[0] for each in rows), jnp.asarray(places > 0)
        compiled = jax.jit(program).lower(*arguments).compile()
        memory, started = compiled.memory_analysis(), time.perf_counter()
        told = {
            "arguments_gb": round(memory.argument_size_in_bytes / 1e9, 3),
            "besides_gb": round(memory.temp_size_in_bytes / 1e9, 3),
        }
        if options.compile:
            return told
        first, logprobs = compiled(*arguments)
        results = {"logprobs": np.asarray(logprobs)}
        if options.gradients:
            results |= {name: np.asarray(array) for name, array in first.items()}
    return {**told, "seconds": round(time.perf_counter() - started, 1), "results": results}


def main() -> None:
    """Measure and print."""
    options = parse()
    flags = (f"--{name}={value}" for name, value in FLAGS.items())
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    model, expected = first_layers(options.model, options.layers), {}
    for axis in options.axes:
        told = measured(model, axis, options)
        results = told.pop("results", {})
        expected = expected or results
        apart = {
            name: float(np.abs(results[name] - array).max() / np.abs(array).max())
            for name, array in expected.items()
        }
        if apart:
            told |= {
                "logprobs_apart": apart.pop("logprobs"),
                "gradients_apart": apart and max(apart.values()),
            }
        sys.stdout.write(json.dumps({"context": axis, **told}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
