"""Figures of an accelerator, in ten minutes at most, next to their targets.

    make gpu                                     # or: python bench/gpu.py [--minutes 9.5]
    python bench/gpu.py --tiny                   # the same parts, on a CPU, in sizes of a toy
    python bench/gpu.py --only roofs,decode      # parts by name
    python bench/gpu.py --output FOLDER          # where results.json is kept (default: build/gpu)

Parts run one after the other, the cheapest first, each a program of its own with seconds of its
own: one that fails, runs out of memory or of time costs its own figures alone. Every line is
printed and kept as soon as it is known, so that a script that is cut off leaves what it has. The
table at the end has the targets. Roofs are measured on this card (a copy, a product), not read off
a data sheet. MARIN_RL_REAL_MODEL names the Hugging Face folder of the last part.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout

from machine import print_head

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent

Figures = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A program whose lines of JSON are figures, and how long it may take on a card."""

    name: str
    command: list[str]
    seconds: int


def parts_of(options: argparse.Namespace, folder: Path, roofs: Figures) -> Iterator[Part]:
    """Parts in their order; `roofs` are filled by the first before the others are asked for."""
    python, tiny = sys.executable, options.tiny
    own = [python, str(Path(__file__).resolve()), *(["--tiny"] if tiny else [])]
    yield Part("roofs", [*own, "--part", "roofs"], 60)
    yield Part("bits", [*own, "--part", "bits"], 40)
    yield Part("decode", [*own, "--part", "decode"], 120)
    peak = [f"--peak-tflops={roofs['bfloat16_tflops']}"] if "bfloat16_tflops" in roofs else []
    mfu = [python, str(HERE / "mfu.py"), *peak, "--checkpointing"]
    if tiny:
        mfu += ["--model", "tiny", "--dtype", "float32"]
    rows = ["128", "--rows", "4"] if tiny else ["4096", "--rows", "8", "--microbatch", "4"]
    yield Part("train 4k", [*mfu, "--steps", "3", "--row", *rows], 60)
    rows = ["256", "--rows", "2"] if tiny else ["32768", "--rows", "2"]
    yield Part("train 32k", [*mfu, "--steps", "2", "--row", *rows], 60)
    for number in (1, 2):  # the second with the programs of the first, and to the same bits
        part = [*own, "--part", "round", "--folder", str(folder / f"run{number}")]
        yield Part(f"round {number}", part, 60)
    yield Part("cold", [*own, "--part", "cold", "--folder", str(folder / "cold")], 90)
    engine = [python, str(HERE / "engine.py"), "--rounds", "1"]
    if "copy_gb_s" in roofs:
        engine.append(f"--bandwidth-gb-s={roofs['copy_gb_s']}")
    sizes = ["tiny", "--dtype", "float32"] if tiny else ["0.5b"]
    yield Part("engine", [*engine, "--batch", "8" if tiny else "1,64,256", "--model", *sizes], 120)
    if model := os.environ.get("MARIN_RL_REAL_MODEL"):
        yield Part("real", [python, str(HERE / "serve_one.py"), "--model", model], 90)


def main() -> None:
    """Run the parts within the time, and print the table."""
    options = parse()
    if options.part:
        for figures in PARTS[options.part](options):
            print(json.dumps(figures), flush=True)
        return
    print_head()
    began, results, roofs = time.monotonic(), list[Figures](), Figures()
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for part in parts_of(options, Path(folder), roofs):
            left = 60 * options.minutes - (time.monotonic() - began)
            if options.only and part.name.split()[0] not in options.only.split(","):
                continue
            for figures in outcome_of(part, min(left, 2 * part.seconds)):
                results.append({"part": part.name, **figures})
                print(json.dumps(results[-1]), flush=True)
                (output / "results.json").write_text(json.dumps(results, indent=1))
                if part.name == "roofs":
                    roofs |= figures
    print_table(results)
    print(f"{time.monotonic() - began:.0f} s; figures: {output / 'results.json'}")
    sys.exit(any("failed" in figures for figures in results))


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="sizes of a toy, for a CPU")
    parser.add_argument("--minutes", type=float, default=9.5, help="of all parts together")
    parser.add_argument("--only", default="", help="names of parts, by comma")
    parser.add_argument("--output", default=str(REPOSITORY / "build" / "gpu"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def outcome_of(part: Part, seconds: float) -> Iterator[Figures]:
    """Figures of a part as they are printed, and its seconds; why it failed, where it did."""
    if seconds < 5:
        yield {"failed": "no time was left"}
        return
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            ["timeout", "--kill-after=9", f"{seconds:.0f}", *part.command],
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if code := process.wait():
            errors.seek(0)
            late = code in (124, 137)  # as `timeout` ends it
            reason = f"took more than {seconds:.0f} s" if late else errors.read()[-400:]
            yield {"failed": reason}
    yield {"part_s": round(time.monotonic() - began, 1)}


# ---------------------------------------------------------------- parts that run in this file


def roofs(options: argparse.Namespace) -> Iterator[Figures]:
    """Versions, and what the card copies and multiplies a second."""
    import jax
    import jax.numpy as jnp

    libraries = {
        name: version(name) for name in ("jax", "jaxlib", "marin-levanter", "transformers")
    }
    device = jax.devices()[0]
    yield {"python": sys.version.split()[0], **libraries, "device": device.device_kind}
    count = 2**22 if options.tiny else 2**31
    array = jnp.ones(count, jnp.uint8)
    seconds = median_s(jax.jit(lambda x: x + 1), array)
    yield {"copy_gb_s": round(2 * count / seconds / 1e9, 1)}
    size = 256 if options.tiny else 8192
    for dtype in ("bfloat16", "float32"):
        square = jax.random.normal(jax.random.PRNGKey(0), (size, size), dtype)
        seconds = median_s(jax.jit(lambda a: a @ a), square)
        yield {f"{dtype}_tflops": round(2 * size**3 / seconds / 1e12, 3)}


def decode(options: argparse.Namespace) -> Iterator[Figures]:
    """Milliseconds of a decode step by the form of its cache, without engine and sampling."""
    import jax
    import jax.numpy as jnp
    from engine_own import HALF_BILLION, model_of, standard
    from standard_work import Work

    from marin_rl.inference import decoder, kv_cache
    from marin_rl.inference.adapters import BankSizes, bank_shapes, with_bank
    from marin_rl.inference.weights import fused_weights, read_model, rotary_table

    tiny = options.tiny
    sizes = standard(Work()) if tiny else HALF_BILLION
    dtype = jnp.dtype("float32" if tiny else "bfloat16")
    spec, weights = read_model(model_of(*sizes))
    steps, context = (4, 256) if tiny else (16, 2048)
    fused = fused_weights(spec, weights, dtype, rotary_table(spec, context))
    room = BankSizes(adapters=8, rank=16)
    empty = bank_shapes(spec, room, dtype, masked=False)
    bank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), empty)
    forms = {"one block": fused, "one block, 8 adapters": with_bank(fused, bank), "blocks": fused}
    for form, slots in itertools.product(forms, (4,) if tiny else (1, 64, 256)):
        own = jnp.arange(slots) % 9 if "adapters" in form else None
        cache = kv_cache.empty_cache(spec, slots, context, dtype, whole=form != "blocks")
        read = bytes_of(fused.layers) + fused.ends.head.nbytes + bytes_of(cache) // 2

        def run(weights: Any, cache: Any, tokens: Any, own: Any) -> Any:
            def body(number: Any, state: Any) -> Any:
                cache, tokens = state
                at = jnp.full(len(tokens), context // 2, jnp.int32) + number
                logits, cache = decoder.decode_step(spec, weights, cache, tokens, at, None, own)
                return cache, jnp.argmax(logits, -1).astype(jnp.int32)

            return jax.lax.fori_loop(0, steps, body, (cache, tokens))

        program = jax.jit(run, donate_argnums=1)
        tokens, times = jnp.zeros(slots, jnp.int32), list[float]()
        for _ in range(4):
            started = time.perf_counter()
            cache, tokens = jax.block_until_ready(program(forms[form], cache, tokens, own))
            times.append(time.perf_counter() - started)
        step_s = sorted(times[1:])[1] / steps
        del cache
        yield {
            "slots": slots,
            "form": form,
            "step_ms": round(1000 * step_s, 3),
            "tokens_per_second": round(slots / step_s),
            "gb_s_of_weights_and_half_the_cache": round(read / step_s / 1e9, 1),
            "first_call_s": round(times[0], 1),
        }


def bits(options: argparse.Namespace) -> Iterator[Figures]:
    """Differences of a GPU's kernels from the same attention by XLA, and what an engine proves."""
    import jax
    import jax.numpy as jnp
    from engine_own import model_of, standard
    from standard_work import Work

    from marin_rl.config import EngineConfig
    from marin_rl.inference import kv_cache
    from marin_rl.inference.engine import Engine
    from marin_rl.models.fused_attention import attend_fused, kernels_for

    dtype = jnp.dtype("float32" if options.tiny else "bfloat16")
    shape, key = (2, 512, 2, 64), jax.random.PRNGKey(0)  # rows, positions, heads, head size
    query = jax.random.normal(key, (*shape[:3], 7, 64), dtype) / 8
    keys, values = jax.random.normal(key, (2, *shape), dtype)
    if kernels_for(dtype):
        by_cudnn, by_xla = (
            attend_fused(query, keys, values, None, 100, by) for by in ("cudnn", "xla")
        )
        yield {"cudnn_difference": float(jnp.max(jnp.abs(by_cudnn - by_xla)))}
    block = kv_cache.WholeBlock(keys.swapaxes(1, 2), values.swapaxes(1, 2))
    at, limits = jnp.asarray([5, 500]), kv_cache.Limits(100, None, None)
    inputs = query[:, 0], block, at, limits
    by_kernel = kv_cache.attend_by_kernel(*inputs, interpret=not kernels_for(dtype))
    seen = limits.visible(jnp.arange(512), at[:, None])[:, None, None]
    scores = jnp.einsum("skgh,skbh->skgb", query[:, 0], block.keys).astype("float32")
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(dtype)
    plainly = jnp.einsum("skgb,skbh->skgh", shares, block.values).reshape(2, -1)
    yield {"kernel_difference": float(jnp.max(jnp.abs(by_kernel - plainly)))}
    engine = Engine(
        model_of(*standard(Work())), EngineConfig(slots=64), context_length=256, dtype=dtype
    )
    yield {"not_promised": engine.plan.not_promised}
    engine.close()


def run_of(options: argparse.Namespace, *settings: str) -> Figures:
    """Seconds of a run from its start, the programs it compiled, and the digest it ends in."""
    folder = Path(options.folder)
    programs = folder.with_name("programs")
    command = [str(Path(sys.executable).with_name("marin-rl")), "run", "configs/debug.yaml"]
    for setting in (f"root={folder}", *settings):
        command += ["--set", setting]
    known, began = set(programs.rglob("*-cache")), time.monotonic()
    done = subprocess.run(
        command,
        env=os.environ | {"MARIN_RL_COMPILATION_CACHE": str(programs)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"marin-rl run ended with {done.returncode}: {done.stderr[-300:]}")
    seconds = time.monotonic() - began
    *_, manifest = sorted(folder.glob("*/checkpoints/round-*/manifest.json"))
    digest = json.loads(manifest.read_text())["extra"]["parameters_digest"]
    compiled = len(set(programs.rglob("*-cache")) - known)
    return {"run_s": round(seconds, 1), "programs": compiled, "digest": digest[:8]}


def round_(options: argparse.Namespace) -> Iterator[Figures]:
    """A run of `configs/debug.yaml`, all stages."""
    yield run_of(options)


def cold(options: argparse.Namespace) -> Iterator[Figures]:
    """One round of a model of 0.5B, of which no program is known."""
    from mfu import MODELS

    sizes = {} if options.tiny else MODELS["0.5b"] | {"tie_embeddings": True}
    model = [f"policy.model.{name}={value}" for name, value in sizes.items()]
    dtype = [] if options.tiny else ["policy.compute_dtype=bfloat16"]
    yield run_of(options, "rounds=1", *model, *dtype)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Figures]]] = {
    "roofs": roofs,
    "bits": bits,
    "decode": decode,
    "round": round_,
    "cold": cold,
}


def median_s(function: Callable[..., Any], *arguments: Any) -> float:
    """Median seconds of five calls after the first."""
    import jax

    times = list[float]()
    for _ in range(6):
        started = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[2]


def bytes_of(arrays: Any) -> int:
    """Bytes of all arrays of a tree."""
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


# ---------------------------------------------------------------- the table


def print_table(results: list[Figures]) -> None:
    """Each target, what was measured, and whether it is met; `-` where nothing was measured."""

    def found(part: str, name: str, **where: Any) -> Any:
        for figures in results:
            matches = all(figures.get(key) == value for key, value in where.items())
            if figures["part"] == part and name in figures and matches:
                return figures[name]
        return None

    digests = [found(f"round {number}", "digest") for number in (1, 2)]
    kernels = [found("bits", name) for name in ("cudnn_difference", "kernel_difference")]
    again = found("round 2", "programs")
    peaks = [found("train 4k", name) for name in ("peak_gb", "planned_gb")]
    rows = [
        (
            "share of the bandwidth roof, decode, 256",
            found("engine", "share_of_bound", batch=256),
            ">= 0.6",
        ),
        ("MFU, 0.5B, rows of 4k", found("train 4k", "mfu"), ">= 0.4"),
        ("MFU, 0.5B, rows of 32k", found("train 32k", "mfu"), ">= 0.4"),
        ("peak of memory over the plan's", peaks[0] and peaks[0] / peaks[1], "<= 1"),
        ("difference of kernels from XLA's", max(filter(None, kernels), default=None), "<= 0.02"),
        ("seconds of a 0.5B run of one round, cold", found("cold", "run_s"), "<= 60"),
        ("seconds of the debug run, cold", found("round 1", "run_s"), ""),
        ("seconds of the debug run, programs kept", found("round 2", "run_s"), ""),
        ("programs compiled by the second run", again, "0"),
        ("two runs end in equal bits", None if None in digests else digests[0] == digests[1], ""),
        (
            "tokens/s of a real model, 64 streams",
            found("real", "tokens_per_second", streams=64),
            "",
        ),
    ]
    print(f"\n{'figure':<44}{'measured':>12}{'target':>10}")
    for name, measured, target in rows:
        shown = "-" if measured is None else f"{measured:.3g}" if measured else str(measured)
        print(f"{name:<44}{shown:>12}{target:>10}")


if __name__ == "__main__":
    main()
