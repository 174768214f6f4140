"""The engine with adapters next to the engine without, and what loading one costs.

    python bench/lora_engine.py [--rounds 7] [--slots 64] [--loads 10] [--size NAME=NUMBER]

The model is that of the standard work, in float32: 64 prompts of their own with 64 new tokens each,
on the base alone, merged with one adapter, with four adapters in turns, and with eight. The engines
take turns, so that what else runs on the machine touches all of them; ratios are medians over the
rounds of tokens per CPU-second against the base in the same round. Then adapters are loaded while
all slots decode: the time that decoding waits for each.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace

import jax
import numpy as np
from engine_own import model_of, played, request, standard
from levanter.models.lm_model import LmHeadModel
from machine import print_head
from standard_work import Work, sized

from marin_rl.config import EngineConfig
from marin_rl.inference.engine import Engine
from marin_rl.lora import Adapter, LoraSpec, adapter_of, initial_arrays, merged
from marin_rl.training.model import named_parameters, parameter_shapes, with_parameters

RANK = 8
ASKED = {"merged": 0.98, "4 adapters": 0.85, "8 adapters": 0.8}
LOAD_TOKENS = 256  # new tokens of each sequence that decodes while an adapter is loaded
LOAD_MS_MAX = 5.0


def adapter_for(model: LmHeadModel, seed: int) -> Adapter:
    """An adapter of all linear layers with values everywhere."""
    shapes = parameter_shapes(model)
    modules = LoraSpec(rank=RANK).resolve(shapes)
    arrays = initial_arrays(modules, shapes, seed)
    rng = np.random.default_rng(seed)
    filled = {name: 0.01 * rng.standard_normal(a.shape, np.float32) for name, a in arrays.items()}
    return adapter_of(modules, filled, shapes)


def engine_of(
    model: LmHeadModel, work: Work, slots: int, adapters: int, new_tokens: int = 0
) -> Engine:
    """A warm engine with this many adapters loaded."""
    room = EngineConfig(slots=slots, adapters_max=adapters, adapter_rank_max=RANK)
    context = work.prompt_tokens + (new_tokens or work.new_tokens)
    engine = Engine(model, room if adapters else EngineConfig(slots=slots), context_length=context)
    engine.warm_up()
    for number in range(adapters):
        load(engine, adapter_for(model, number), number)
    return engine


def load(engine: Engine, adapter: Adapter, number: int) -> int:
    """Load an adapter; the number of its load."""
    loaded = engine.adapters.load(
        adapter, name=f"adapter-{number}", weight_version=0, parameters_digest=str(number)
    )
    return loaded.number


def cpu_seconds(engine: Engine, work: Work, slots: int, round: int) -> float:
    """CPU-seconds of a full batch, every slot on the next adapter in turn."""
    numbers = [one.number for one in engine.adapters.loaded] or [0]
    requests = []
    for index in range(slots):
        one = request(work, work.prompt_tokens, 1000 * round + index)
        requests.append(replace(one, adapter=numbers[index % len(numbers)]))
    return played(engine, requests)[1]


def throughput(model: LmHeadModel, work: Work, slots: int, rounds: int) -> dict[str, float]:
    """Tokens per CPU-second against the base's, by engine."""
    one = adapter_for(model, 0)
    with_one = with_parameters(model, merged(named_parameters(model), one))
    engines = {
        "base": engine_of(model, work, slots, 0),
        "merged": engine_of(with_one, work, slots, 0),
        "4 adapters": engine_of(model, work, slots, 4),
        "8 adapters": engine_of(model, work, slots, 8),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for round in range(rounds + 1):
        for name, engine in engines.items():
            measured = cpu_seconds(engine, work, slots, round)
            if round:  # the first one fuses weights
                seconds[name].append(measured)
    for engine in engines.values():
        engine.close()
    tokens = slots * work.new_tokens
    report("base", {"tokens_per_cpu_s": tokens / statistics.median(seconds["base"])})
    ratios = {}
    for name in ASKED:
        pairs = zip(seconds["base"], seconds[name], strict=True)
        ratios[name] = statistics.median(base / own for base, own in pairs)
        rate = tokens / statistics.median(seconds[name])
        report(name, {"ratio": ratios[name], "asked": ASKED[name], "tokens_per_cpu_s": rate})
    return ratios


def loading(model: LmHeadModel, work: Work, slots: int, loads: int) -> float:
    """Longest time in ms that decoding waited for the load of an adapter, all slots decoding."""
    engine = engine_of(model, work, slots, 4, LOAD_TOKENS)
    engine.adapters.unload(engine.adapters.loaded[0].number)
    adapters = [adapter_for(model, seed) for seed in range(2)]
    waits, number = [], load(engine, adapters[0], 0)
    for index in range(loads):
        futures = [
            engine.submit(
                request(work, work.prompt_tokens, 1000 * index + slot, new_tokens=LOAD_TOKENS)
            )
            for slot in range(slots)
        ]
        while engine.active < slots:
            time.sleep(0.0005)
        engine.adapters.unload(number)
        before = engine.adapters.stats.write_s
        number = load(engine, adapters[index % 2], index)
        waits.append(1e3 * (engine.adapters.stats.write_s - before))
        for future in futures:
            future.result()
    engine.close()
    report(
        "load",
        {
            "median_ms": statistics.median(waits),
            "longest_ms": max(waits),
            "asked_ms": LOAD_MS_MAX,
            "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(dict(adapters[0].arrays))),
        },
    )
    return max(waits)


def report(measure: str, facts: dict[str, float]) -> None:
    """One line of JSON."""
    rounded = {name: round(value, 4) for name, value in facts.items()}
    sys.stdout.write(json.dumps({"measure": measure, **rounded}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure what the options ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--loads", type=int, default=10)
    parser.add_argument("--size", action="append", default=[], metavar="NAME=NUMBER")
    options = parser.parse_args()
    print_head()
    work = sized(Work(), options.size)
    model = model_of(*standard(work))
    throughput(model, work, options.slots, options.rounds)
    loading(model, work, options.slots, options.loads)


if __name__ == "__main__":
    main()
