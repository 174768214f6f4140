"""Figures of an accelerator, in ten minutes at most, next to their targets.

    make gpu                                     # or: python bench/gpu.py [--minutes 9.5]
    python bench/gpu.py --tiny                   # the same parts, on a CPU, in sizes of a toy
    python bench/gpu.py --only roofs,decode      # parts by name
    python bench/gpu.py --output FOLDER          # where results.json is kept (default: build/gpu)

Parts run one after the other, the cheapest first, each a program of its own that gets the time that
is left: one that fails, runs out of memory or of time costs its own figures alone. Every line is
printed and kept as soon as it is known, so that a script that is cut off leaves what it has. The
table at the end has the targets. Roofs are measured on this card (a copy, a product), not read off
a data sheet.
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
    yield Part("decode", [*own, "--part", "decode"], 150)
    peak = [f"--peak-tflops={roofs['bfloat16_tflops']}"] if "bfloat16_tflops" in roofs else []
    mfu = [python, str(HERE / "mfu.py"), *peak, "--checkpointing"]
    if tiny:
        short = ["--model", "tiny", "--dtype", "float32", "--row", "128", "--rows", "4"]
        yield Part("train 4k", [*mfu, *short, "--steps", "1"], 60)
    else:
        rows = ["--row", "4096", "--rows", "8", "--microbatch", "4", "--steps", "3"]
        yield Part("train 4k", [*mfu, *rows], 90)
        yield Part("train 32k", [*mfu, "--row", "32768", "--rows", "2", "--steps", "2"], 90)
    engine = [python, str(HERE / "engine.py"), "--rounds", "1"]
    if "copy_gb_s" in roofs:
        engine.append(f"--bandwidth-gb-s={roofs['copy_gb_s']}")
    sizes = (
        ["tiny", "--dtype", "float32", "--batch", "8"] if tiny else ["0.5b", "--batch", "1,64,256"]
    )
    yield Part("engine", [*engine, "--model", *sizes], 120)
    for number in (1, 2):  # the second with the programs of the first, and to the same bits
        part = [*own, "--part", "round", "--folder", str(folder / f"run{number}")]
        yield Part(f"round {number}", part, 120)


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
            for figures in outcome_of(part, min(left, 4 * part.seconds)):
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
            ["timeout", f"{seconds:.0f}", *part.command],
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if code := process.wait():
            errors.seek(0)
            reason = f"took more than {seconds:.0f} s" if code == 124 else errors.read()[-400:]
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
    from marin_rl.inference.weights import fused_weights, read_model, rotary_table

    tiny = options.tiny
    sizes = standard(Work()) if tiny else HALF_BILLION
    dtype = jnp.dtype("float32" if tiny else "bfloat16")
    spec, weights = read_model(model_of(*sizes))
    steps, context = (4, 256) if tiny else (16, 2048)
    forms = {
        "blocks": {},
        "one block": {"whole": True},
        "layers in a scan": {"whole": True, "stacked": True},
    }
    for form, slots in itertools.product(forms, (4,) if tiny else (1, 64, 256)):
        stacked = "stacked" in forms[form]
        fused = fused_weights(spec, weights, dtype, stacked=stacked)
        held = bytes_of(fused)
        cache = kv_cache.empty_cache(spec, slots, context, dtype, **forms[form])
        rotary = rotary_table(spec, kv_cache.cache_length(cache))
        turning = fused._replace(ends=fused.ends._replace(rotary=rotary))
        read = held + bytes_of(cache) // 2

        def run(weights: Any, cache: Any, tokens: Any) -> Any:
            def body(number: Any, state: Any) -> Any:
                cache, tokens = state
                at = jnp.full(len(tokens), context // 2, jnp.int32) + number
                logits, cache = decoder.decode_step(spec, weights, cache, tokens, at)
                return cache, jnp.argmax(logits, -1).astype(jnp.int32)

            return jax.lax.fori_loop(0, steps, body, (cache, tokens))

        program = jax.jit(run, donate_argnums=1)
        tokens, times = jnp.zeros(slots, jnp.int32), list[float]()
        for _ in range(4):
            started = time.perf_counter()
            cache, tokens = jax.block_until_ready(program(turning, cache, tokens))
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


def round_(options: argparse.Namespace) -> Iterator[Figures]:
    """Seconds of a run from its start, and the digest that it ends in."""
    command = [str(Path(sys.executable).with_name("marin-rl")), "run", "configs/debug.yaml"]
    cache = {"MARIN_RL_COMPILATION_CACHE": str(Path(options.folder).with_name("programs"))}
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--root", options.folder], env=os.environ | cache, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"marin-rl run ended with {done.returncode}: {done.stderr[-300:]}")
    seconds = time.monotonic() - began
    (manifest, *_) = sorted(Path(options.folder).glob("*/checkpoints/round-*/manifest.json"))[::-1]
    digest = json.loads(manifest.read_text())["extra"]["parameters_digest"]
    yield {"run_s": round(seconds, 1), "checkpoint": manifest.parent.name, "digest": digest[:8]}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Figures]]] = {
    "roofs": roofs,
    "decode": decode,
    "round": round_,
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
    rows = [
        (
            "share of the bandwidth roof, decode, 256",
            found("engine", "share_of_bound", batch=256),
            0.6,
        ),
        ("MFU, 0.5B, rows of 4k", found("train 4k", "mfu"), 0.4),
        ("MFU, 0.5B, rows of 32k", found("train 32k", "mfu"), 0.4),
        ("seconds of the debug run, cold", found("round 1", "run_s"), None),
        ("seconds of the debug run, programs kept", found("round 2", "run_s"), None),
        ("two runs end in equal bits", None if None in digests else digests[0] == digests[1], True),
    ]
    print(f"\n{'figure':<44}{'measured':>12}{'target':>10}")
    for name, measured, target in rows:
        shown = "-" if measured is None else str(measured)
        asked = "" if target is None else f"{target}" if target is True else f">= {target}"
        print(f"{name:<44}{shown:>12}{asked:>10}")


if __name__ == "__main__":
    main()
