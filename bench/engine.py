"""Tokens per second and CPU-seconds of the embedded engine on the standard work.

    python bench/engine.py [--rounds 5] [--cores 1]

The standard work: a 3.2M-parameter Llama (hidden 256, 4 layers, 4 heads, 2 key/value heads,
intermediate 704, vocabulary 512), float32; 16 requests of 8 samples of 64 new tokens, prompts of
64. Prints one line per round (the first one apart: it compiles) and a JSON summary. `--cores 1`
pins the process to one core, for numbers per core.
"""

import argparse
import json
import os
import resource
import time
from typing import Any


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=0, help="0: all")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--chunk-steps", type=int, default=16)
    parser.add_argument("--slots", type=int, default=128)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.cores:
        # before JAX starts its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    engine = build(options)
    started = time.monotonic()
    engine.warm_up()
    print(f"warm-up {time.monotonic() - started:.2f} s")
    rounds = [measure(engine, options, number) for number in range(options.rounds + 1)]
    engine.close()
    report(engine, options, rounds[1:])


def build(options: argparse.Namespace) -> Any:
    """The engine over a random model of the standard size."""
    import haliax as hax
    import jax
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    from marin_rl.compilation import keep_freed_memory
    from marin_rl.config import EngineConfig
    from marin_rl.inference.engine import Engine

    keep_freed_memory()  # as a run does
    context = options.prompt + options.new_tokens
    config = LlamaConfig(
        max_seq_len=context,
        hidden_dim=256,
        intermediate_dim=704,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        gradient_checkpointing=False,
    )
    model = LlamaLMHeadModel.init(hax.Axis("vocab", 512), config, key=jax.random.key(0))
    settings = EngineConfig(slots=options.slots, chunk_steps=options.chunk_steps)
    return Engine(model, settings, context_length=context)


def tokens_of(options: argparse.Namespace) -> int:
    """Tokens sampled in one round."""
    return options.requests * options.samples * options.new_tokens


def measure(engine: Any, options: argparse.Namespace, number: int) -> tuple[float, float]:
    """Wall and CPU seconds of one round of requests."""
    import numpy as np

    from marin_rl.inference.engine import GenerationRequest
    from marin_rl.types import Sampling

    shape = options.requests, options.prompt
    prompts = np.random.default_rng(number).integers(0, 512, shape).astype(np.int32)
    tokens = tokens_of(options)
    wall, cpu = time.perf_counter(), time.process_time()
    futures = [
        engine.submit(
            GenerationRequest(
                prompt_ids=prompt,
                n=options.samples,
                sampling=Sampling(max_tokens=options.new_tokens, seed=number * 1000 + index),
            )
        )
        for index, prompt in enumerate(prompts)
    ]
    sampled = sum(len(s.token_ids) for f in futures for s in f.result().samples)
    assert sampled == tokens, (sampled, tokens)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        f"round {number}: {wall:.3f} s wall, {cpu:.3f} CPU-s, {tokens / wall:,.0f} tokens/s, "
        f"{tokens / cpu:,.0f} tokens per CPU-second"
    )
    return wall, cpu


def report(engine: Any, options: argparse.Namespace, rounds: list[tuple[float, float]]) -> None:
    """Print the best round as JSON."""
    tokens = tokens_of(options)
    wall, cpu = min(r[0] for r in rounds), min(r[1] for r in rounds)
    print(
        json.dumps(
            {
                "tokens_per_second": round(tokens / wall),
                "tokens_per_cpu_second": round(tokens / cpu),
                "wall_s": round(wall, 3),
                "cpu_s": round(cpu, 3),
                "cores": len(os.sched_getaffinity(0)),
                "load_average": os.getloadavg()[0],
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "stats": {
                    "prefill_s": round(engine.stats.prefill_s, 3),
                    "decode_s": round(engine.stats.decode_s, 3),
                },
            }
        )
    )


if __name__ == "__main__":
    main()
