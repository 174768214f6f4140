"""Speed of dialogues on the embedded engine, with and without the cache of their last turns.

    python bench/episodes.py [--rounds 3] [--history 1000] [--step-s 1.0]

On the model of the standard work (standard_work.py), in one invocation:

- `turns`: 64 dialogues of 4 turns of 32 tokens against single turns with as many sampled tokens;
- `history`: dialogues of 8 turns on histories of `--history` tokens, from the cache that each turn
  left, and prefilled from the start: tokens prefilled for each new one, time, and equal bits;
- `busy`: 128 episodes on 64 slots, whose environment takes `--step-s` seconds a step: the share of
  the time in which the engine computes;
- `single`: a round of the standard work's one-turn problems with the prefix cache and without.

Each prints one line of JSON. Sides take turns and the first round of each does not count; ratios
are medians of the pairs, of wall time and of CPU-seconds.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import head
from standard_work import Work, add_size_option, sized

sys.path.insert(0, str(Path(__file__).parent.parent))  # this checkout, whatever is installed

from engine_own import model_of, played, report, request, standard

from marin_rl.compilation import keep_freed_memory
from marin_rl.config import EngineConfig
from marin_rl.inference.engine import Engine, GenerationRequest
from marin_rl.types import Sampling

SLOTS = 64
Seconds = tuple[float, float]  # wall and CPU


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--history", type=int, default=1000)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--only", default="", help="measures to take, by comma")
    add_size_option(parser)
    return parser.parse_args()


def main() -> None:
    """Take every measure that is asked for."""
    options = parse()
    keep_freed_memory()
    sys.stdout.write(head() + "\n")
    work = sized(Work(), options.sizes)
    for name in options.only.split(",") if options.only else MEASURES:
        report(name, MEASURES[name](work, options))


def engine_of(work: Work, context: int, slots: int, *, prefix_cache: bool) -> Engine:
    """A warm engine over the work's model."""
    settings = EngineConfig(slots=slots, prefix_cache=prefix_cache)
    config, vocabulary = standard(work)
    engine = Engine(model_of(config, vocabulary), settings, context_length=context)
    engine.warm_up()
    return engine


def ids(work: Work, length: int, seed: int) -> np.ndarray:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, work.vocabulary, length).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Play:
    """A dialogue's sizes in tokens, the seconds of a step, and what is done before each turn."""

    history: int
    turns: int
    tokens: int
    new: int
    step_s: float = 0.0
    before: Callable[[], None] = lambda: None

    @property
    def length(self) -> int:
        """Tokens at the end."""
        return self.history + self.turns * (self.tokens + self.new)


async def dialogue(engine: Engine, work: Work, play: Play, seed: int) -> list[bytes]:
    """Play a dialogue; return the bits of what it sampled. New tokens follow each turn."""
    prompt, sampled = ids(work, play.history, seed), []
    for turn in range(play.turns):
        play.before()
        sampling = Sampling(max_tokens=play.tokens, seed=seed + turn)
        one = GenerationRequest(prompt_ids=prompt, sampling=sampling)
        result = await asyncio.wrap_future(engine.submit(one))
        (sample,) = result.samples
        sampled += [sample.token_ids.tobytes(), sample.logprobs.tobytes()]
        if play.step_s:
            await asyncio.sleep(play.step_s)
        parts = prompt, sample.token_ids, ids(work, play.new, seed + turn + 1)
        prompt = np.concatenate(parts).astype(np.int32)
    return sampled


def timed(calls: list[Coroutine[Any, Any, list[bytes]]]) -> tuple[Seconds, list[list[bytes]]]:
    """Wall and CPU seconds of coroutines that run side by side, and their results."""

    async def run() -> list[list[bytes]]:
        return await asyncio.gather(*calls)

    wall, cpu = time.perf_counter(), time.process_time()
    results = asyncio.run(run())
    return (time.perf_counter() - wall, time.process_time() - cpu), results


def turns(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """64 dialogues x 4 turns x 32 tokens against 4 x 64 single turns, one after another."""
    slots, count, tokens = options.slots, 4, work.new_tokens // 2
    play = Play(history=work.prompt_tokens, turns=count, tokens=tokens, new=work.prompt_tokens // 4)
    engine = engine_of(work, play.length, slots, prefix_cache=True)
    several, single = [], []
    for number in range(options.rounds + 1):
        seeds = [10_000 * number + 10 * index for index in range(slots)]
        several.append(timed([dialogue(engine, work, play, seed) for seed in seeds])[0])
        apart = [
            request(work, work.prompt_tokens, seed + turn, new_tokens=tokens)
            for turn in range(count)
            for seed in seeds
        ]
        single.append(played(engine, apart))
    engine.close()
    wall, cpu = ratios(single, several)
    sampled = slots * count * tokens
    return {
        "asked": 0.8,
        "tokens_per_second_ratio": wall,
        "tokens_per_cpu_second_ratio": cpu,
        "tokens_per_second": sampled / statistics.median(one[0] for one in several[1:]),
    }


def history(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """8 dialogues of 8 turns on long histories: from the cache, and prefilled from the start.

    From the start twice: by the same engine, whose cache is emptied before each turn, with the same
    bits; and by an engine without the cache, whose prefill has other last bits.
    """
    play = Play(history=options.history, turns=8, tokens=8, new=8)
    keeping, plain = (
        engine_of(work, play.length, options.slots, prefix_cache=on) for on in (True, False)
    )
    sides = {
        "cached": (keeping, play),
        "fresh": (keeping, replace(play, before=keeping.reset_prefix_cache)),
        "plain": (plain, play),
    }
    spent: dict[str, list[Seconds]] = {name: [] for name in sides}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    played: list[dict[str, list[list[bytes]]]] = []
    for number in range(options.rounds + 1):
        seeds = [1000 * number + 100 * index for index in range(8)]
        played.append({})
        for name, (engine, own) in sides.items():
            engine.reset_prefix_cache()
            # the first turn, whose history is new to all
            timed([dialogue(engine, work, replace(play, turns=1), seed) for seed in seeds])
            before = engine.stats.snapshot()
            seconds, played[-1][name] = timed([dialogue(engine, work, own, s) for s in seeds])
            spent[name].append(seconds)
            prefilled = engine.stats.prefilled_tokens - before.prefilled_tokens
            rates[name].append(prefilled / (len(seeds) * (play.turns - 1) * play.new))
    keeping.close()
    plain.close()
    wall, cpu = ratios(spent["cached"], spent["fresh"])
    plain_wall, plain_cpu = ratios(spent["cached"], spent["plain"])
    return {
        "asked": 1 / 3,
        "ratio_wall": wall,
        "ratio_cpu": cpu,
        "ratio_wall_of_plain": plain_wall,
        "ratio_cpu_of_plain": plain_cpu,
        "prefilled_per_new_token": statistics.median(rates["cached"][1:]),
        "prefilled_per_new_token_without": statistics.median(rates["fresh"][1:]),
        "same_bits": all(one["cached"] == one["fresh"] for one in played),
        **compared(
            [turns for one in played for turns in one["cached"]],
            [turns for one in played for turns in one["plain"]],
        ),
    }


def compared(ones: list[list[bytes]], others: list[list[bytes]]) -> dict[str, Any]:
    """Dialogues with the same tokens on both sides, and how far logprobs differ in these."""
    same = [(one, other) for one, other in zip(ones, others, strict=True) if one[::2] == other[::2]]
    gaps = [
        np.abs(np.frombuffer(a, np.float32) - np.frombuffer(b, np.float32)).max()
        for one, other in same
        for a, b in zip(one[1::2], other[1::2], strict=True)
    ]
    return {
        "dialogues": len(ones),
        "same_tokens_as_plain": len(same),
        "logprobs_differ_by": f"{max(gaps, default=0.0):.1e}",
    }


def busy(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """Twice as many episodes as slots, with slow steps: the share of time that is computed."""
    play = Play(
        history=work.prompt_tokens,
        turns=4,
        tokens=2 * work.new_tokens,
        new=work.prompt_tokens // 4,
        step_s=options.step_s,
    )
    engine = engine_of(work, play.length, options.slots, prefix_cache=True)
    stats = engine.stats.snapshot()
    episodes = range(2 * options.slots)
    (wall, _), _ = timed([dialogue(engine, work, play, 10 * index) for index in episodes])
    wall -= options.step_s  # after the last turns there is nothing to compute
    after = engine.stats.snapshot()
    engine.close()
    computed = after.prefill_s + after.decode_s - stats.prefill_s - stats.decode_s
    slot_steps = after.slot_steps - stats.slot_steps
    return {
        "asked": 0.9,
        "busy_share": computed / wall,
        "busy_slot_share": (after.busy_slot_steps - stats.busy_slot_steps) / slot_steps,
        "continued": after.continued_prompts - stats.continued_prompts,
        "seconds": wall,
    }


def single(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """A round of one-turn problems with the prefix cache against one without."""
    length = work.prompt_tokens + work.new_tokens
    engines = [engine_of(work, length, work.rows, prefix_cache=on) for on in (True, False)]
    seconds: list[list[Seconds]] = [[], []]
    for number in range(options.rounds + 1):
        seeds = range(1000 * number, 1000 * number + work.prompts)
        groups = [request(work, work.prompt_tokens, seed, work.completions) for seed in seeds]
        for engine, spent in zip(engines, seconds, strict=True):
            spent.append(played(engine, groups))
    for engine in engines:
        engine.close()
    wall, cpu = ratios(*seconds)
    return {"asked": 1.02, "ratio_wall": wall, "ratio_cpu": cpu}


def ratios(ones: list[Seconds], others: list[Seconds]) -> tuple[float, float]:
    """Medians of `ones` over `others`, pair by pair, but for the first."""
    pairs = list(zip(ones[1:], others[1:], strict=True))
    wall, cpu = (statistics.median(a[clock] / b[clock] for a, b in pairs) for clock in (0, 1))
    return wall, cpu


MEASURES = {"turns": turns, "history": history, "busy": busy, "single": single}


if __name__ == "__main__":
    main()
