"""The engine with adapters, or over a quantised base, next to the engine without; loading one.

The model is that of the standard work, in float32: 64 prompts of their own with 64 new tokens each,
on the base alone, merged with one adapter, with four adapters in turns, with eight (half of them in
each of two lanes, then all in each), and on the base in int8 and NF4. The engines take turns, so
that what else runs on the machine touches all of them; ratios are medians over the rounds of tokens
per CPU-second against the base in the same round. Then adapters are loaded while all slots decode:
the time that decoding waits for each.
"""

import statistics
import time
from dataclasses import replace

import jax
import numpy as np
from engine_own import played, request
from lora_report import Report
from standard_work import Work

from marin_rl.config import EngineConfig, LoraConfig
from marin_rl.inference.engine import Engine
from marin_rl.lora.adapter import Adapter, adapter_of, initial_arrays, merged
from marin_rl.lora.peft import configured_modules
from marin_rl.lora.quantization import quantize_base
from marin_rl.models.module import LanguageModel
from marin_rl.training.adapters import with_quantized
from marin_rl.training.model import named_parameters, parameter_shapes, with_parameters

RANK = 8
MIXED = "8 adapters in each lane"
ASKED = {"merged": 0.98, "4 adapters": 0.85, "8 adapters": 0.8}
LOAD_TOKENS = 256  # new tokens of each sequence that decodes while an adapter is loaded
LOAD_MS_MAX = 5.0


def adapter_for(model: LanguageModel, seed: int) -> Adapter:
    """An adapter of all linear layers with values everywhere."""
    shapes = parameter_shapes(model)
    modules = configured_modules(LoraConfig(rank=RANK), shapes)
    arrays = initial_arrays(modules, shapes, seed)
    rng = np.random.default_rng(seed)
    filled = {name: 0.01 * rng.standard_normal(a.shape, np.float32) for name, a in arrays.items()}
    return adapter_of(modules, filled, shapes)


def engine_of(
    model: LanguageModel, work: Work, slots: int, adapters: int, new_tokens: int = 0
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


def cpu_seconds(engine: Engine, work: Work, slots: int, round: int, together: int = 1) -> float:
    """CPU-seconds of a full batch, every slot on the next adapter in turn, or every few slots."""
    numbers = [one.number for one in engine.adapters.loaded] or [0]
    requests = []
    for index in range(slots):
        one = request(work, work.prompt_tokens, 1000 * round + index)
        requests.append(replace(one, adapter=numbers[index // together % len(numbers)]))
    return played(engine, requests)[1]


def quantised(model: LanguageModel, scheme: str) -> LanguageModel:
    """The model with its linear layers quantised."""
    arrays = quantize_base(named_parameters(model), scheme)
    return with_parameters(with_quantized(model, scheme), arrays)


def throughput(model: LanguageModel, work: Work, slots: int, rounds: int, report: Report) -> None:
    """Tokens per CPU-second against the base's, by engine."""
    one = adapter_for(model, 0)
    with_one = with_parameters(model, merged(named_parameters(model), one))
    engines = {
        "base": engine_of(model, work, slots, 0),
        "merged": engine_of(with_one, work, slots, 0),
        "4 adapters": engine_of(model, work, slots, 4),
        "8 adapters": (eight := engine_of(model, work, slots, 8)),
        MIXED: eight,
        "int8 base": engine_of(quantised(model, "int8"), work, slots, 0),
        "nf4 base": engine_of(quantised(model, "nf4"), work, slots, 0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for round in range(rounds + 1):
        for name, engine in engines.items():
            # requests take lanes in turn, so that pairs of them bring all eight into each lane
            measured = cpu_seconds(engine, work, slots, round, 2 if name == MIXED else 1)
            if round:  # the first one fuses weights
                seconds[name].append(measured)
    for engine in set(engines.values()):
        engine.close()
    tokens = slots * work.new_tokens
    report.add("base, tokens per CPU-s", tokens / statistics.median(seconds["base"]))
    for name in (name for name in engines if name != "base"):
        pairs = zip(seconds["base"], seconds[name], strict=True)
        ratio = statistics.median(base / own for base, own in pairs)
        rate = tokens / statistics.median(seconds[name])
        report.add(name, ratio, at_least=ASKED.get(name), tokens_per_cpu_s=rate)


def loading(model: LanguageModel, work: Work, slots: int, loads: int, report: Report) -> None:
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
    report.add(
        "load while decoding, ms",
        max(waits),
        at_most=LOAD_MS_MAX,
        median=statistics.median(waits),
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(dict(adapters[0].arrays))),
    )
