"""Measurements of our engine alone: shared prompts, load, memory, swaps, big models.

Each measurement prints one line of JSON with the number that was asked for and its limit. Ratios
are of CPU-seconds as well as of wall time, since a shared machine makes the latter worthless.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from standard_work import Work

from marin_rl.compilation import keep_freed_memory
from marin_rl.config import EngineConfig, ModelConfig, PolicyConfig
from marin_rl.inference.engine import Engine, GenerationRequest
from marin_rl.inference.kv_cache import KERNEL_POSITIONS
from marin_rl.models.module import LanguageModel
from marin_rl.training.model import build_model
from marin_rl.types import Sampling

# Prompts of `shared_prompt` and `mixed`: 512 tokens of the standard work's 32.
LONG_PROMPT = 16
HALF_BILLION = (
    ModelConfig(
        hidden_size=896,
        intermediate_size=4864,
        layers=24,
        heads=14,
        kv_heads=2,
    ),
    151_936,
)


def run(modes: list[str], work: Work, options: argparse.Namespace) -> None:
    """Everything that is asked for, one after the other."""
    keep_freed_memory()
    for mode in modes:
        report(mode, MEASURES[mode](work, options.rounds))
    if options.model:
        for batch in map(int, options.batch.split(",")):
            report("bandwidth", bandwidth(work, options, batch))


def report(mode: str, found: dict[str, Any]) -> None:
    """One line."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
    place = {"cores": len(os.sched_getaffinity(0)), "load_average": round(os.getloadavg()[0], 1)}
    sys.stdout.write(json.dumps({"measure": mode, **place, **rounded}) + "\n")
    sys.stdout.flush()


def standard(work: Work) -> tuple[ModelConfig, int]:
    """Architecture and vocabulary of the work's model."""
    model = ModelConfig(
        hidden_size=work.hidden,
        intermediate_size=work.intermediate,
        layers=work.layers,
        heads=work.heads,
        kv_heads=work.kv_heads,
        tie_embeddings=False,
    )
    return model, work.vocabulary


def model_of(model: ModelConfig, vocabulary: int, seed: int = 0) -> LanguageModel:
    """Random weights, with room for long prompts."""
    return build_model(PolicyConfig(model=model, context_length=4096), vocabulary, seed)


def engine_of(work: Work, context: int, slots: int | None = None) -> Engine:
    """A warm engine over the work's model; `slots` for all of its rows by default."""
    settings = EngineConfig(slots=slots or work.rows)
    engine = Engine(model_of(*standard(work)), settings, context_length=context)
    engine.warm_up()
    return engine


def request(
    work: Work, length: int, seed: int, n: int = 1, new_tokens: int | None = None
) -> GenerationRequest:
    """A random prompt of `length`."""
    sampling = Sampling(max_tokens=new_tokens or work.new_tokens, seed=seed)
    prompt = np.random.default_rng(seed).integers(0, work.vocabulary, length).astype(np.int32)
    return GenerationRequest(prompt_ids=prompt, n=n, sampling=sampling)


def played(engine: Engine, requests: list[GenerationRequest]) -> tuple[float, float]:
    """Wall and CPU seconds until all of them are answered."""
    wall, cpu = time.perf_counter(), time.process_time()
    futures = [engine.submit(one) for one in requests]
    for future in futures:
        future.result()
    return time.perf_counter() - wall, time.process_time() - cpu


def shared_prompt(work: Work, rounds: int) -> dict[str, Any]:
    """16 groups of 8 on prompts of 512 against 128 requests of their own, 64 new tokens each."""
    length = LONG_PROMPT * work.prompt_tokens
    engine = engine_of(work, length + work.new_tokens)
    shared, apart = [], []
    for number in range(rounds + 1):
        seeds = range(1000 * number, 1000 * number + work.rows)
        groups = [request(work, length, seed, work.completions) for seed in seeds[: work.prompts]]
        singles = [request(work, length, seed) for seed in seeds]
        shared.append(played(engine, groups))
        apart.append(played(engine, singles))
    engine.close()
    wall, cpu = (
        statistics.median(one[clock] / many[clock] for one, many in zip(apart, shared, strict=True))
        for clock in (0, 1)
    )
    return {
        "asked": 3.0,
        "ratio_wall": wall,
        "ratio_cpu": cpu,
        "shared_cpu_s": statistics.median(cpu for _, cpu in shared),
        "apart_cpu_s": statistics.median(cpu for _, cpu in apart),
    }


def mixed(work: Work, rounds: int) -> dict[str, Any]:
    """Prompts and completions of 8 to 512 tokens that arrive over time: busy share of the slots.

    Counted from when the slots are first full until the last request has come.
    """
    longest, slots = LONG_PROMPT * work.prompt_tokens, work.rows // 4
    engine = engine_of(work, 2 * longest, slots)
    random = np.random.default_rng(0)
    futures = []
    before = (0, 0)
    for index in range(2 * slots * max(rounds, 4)):  # some must come after the first are seated
        prompt, new = random.integers(8, longest + 1, 2).tolist()
        futures.append(engine.submit(request(work, prompt, index, new_tokens=new)))
        while engine.queued > slots // 2:
            time.sleep(0.001)
        if index == slots + slots // 2:
            before = engine.stats.tokens, engine.stats.slot_steps
    after = engine.stats.tokens, engine.stats.slot_steps
    wait(futures)
    engine.close()
    return {"asked": 0.8, "busy_share": (after[0] - before[0]) / (after[1] - before[1])}


def memory(work: Work, rounds: int) -> dict[str, Any]:
    """Peak memory beyond what the process had before the model, its weights and its cache."""
    jnp.zeros(8).block_until_ready()
    start = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    length = 2 * work.prompt_tokens
    engine = engine_of(work, length + work.new_tokens)
    for number in range(rounds):
        seeds = range(100 * number, 100 * number + work.prompts)
        played(engine, [request(work, length, seed, work.completions) for seed in seeds])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = bytes_of(engine.policy.weights) + bytes_of(engine._runner.memory.caches)
    engine.close()
    return {"asked_mb": 300, "beyond_mb": (peak - start - held) / 2**20, "held_mb": held / 2**20}


def bytes_of(arrays: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def swap(work: Work, rounds: int) -> dict[str, Any]:
    """Milliseconds of putting other weights in the place of those that are sampled with."""
    length = 2 * work.prompt_tokens
    engine = engine_of(work, length + work.new_tokens)
    models = [model_of(*standard(work), seed=seed) for seed in (1, 2)]
    futures = [engine.submit(request(work, length, index)) for index in range(work.rows)]
    times = []
    # Every swap has a version of its own: two weights of one version are refused while requests
    # run, and version 0 is that of the engine's first weights.
    for version in range(1, 10 * rounds + 1):
        started = time.perf_counter()
        engine.swap(models[version % 2], version, str(version))
        times.append(1000 * (time.perf_counter() - started))
    wait(futures)
    engine.close()
    return {"asked_ms": 10, "median_ms": statistics.median(times), "longest_ms": max(times)}


def bandwidth(work: Work, options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Decode tokens/s of a random model against the bound that memory sets.

    The bound: bytes of the weights and of the cache blocks that a step reads, over the bandwidth.
    """
    config, vocabulary = HALF_BILLION if options.model == "0.5b" else standard(work)
    prompt = new = 2 * work.new_tokens
    dtype = jnp.dtype(options.dtype)
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), model_of(config, vocabulary))
    settings = EngineConfig(slots=batch, chunk_steps=16)
    engine = Engine(model, settings, context_length=prompt + new, dtype=dtype)
    engine.warm_up()
    steps = []
    for number in range(options.rounds + 1):
        before = engine.stats.decode_s
        played(engine, [request(work, prompt, number, n=batch, new_tokens=new)])
        steps.append((engine.stats.decode_s - before) / new)
    step_s = statistics.median(steps[1:])
    # a whole block is read by the kernel as far as each sequence goes
    size = KERNEL_POSITIONS if engine.plan.whole else engine.plan.block
    seen = statistics.mean(-(-position // size) * size for position in range(prompt, prompt + new))
    cache = bytes_of(engine._runner.memory.caches) * seen / (prompt + new)
    read = bytes_of(engine.policy.weights) + cache
    if config.tie_embeddings:
        read -= engine.policy.weights.ends.embedding.nbytes  # listed twice, read once
    proofs = asdict(engine.plan.invariance)
    engine.close()
    found = {
        "device": jax.devices()[0].device_kind,
        "batch": batch,
        "tokens_per_second": batch / step_s,
        "step_ms": 1000 * step_s,
        "read_mb_per_step": read / 2**20,
        "batch_invariant": proofs["slots"] and proofs["prompts"],
    }
    if options.bandwidth_gb_s:
        bound = read / (options.bandwidth_gb_s * 1e9)
        found |= {"bound_tokens_per_second": batch / bound, "share_of_bound": bound / step_s}
    return found


MEASURES = {"shared_prompt": shared_prompt, "mixed": mixed, "memory": memory, "swap": swap}
