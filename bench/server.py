"""Cost of the server over the engine: requests per second, latencies, overhead, memory.

    python bench/server.py [--requests 1000] [--concurrency 128] [--repeat 3]
    python bench/server.py --requests 10000 --repeat 1     # memory over many requests

    python bench/server.py --samples 8 --new-tokens 12 --slots 256 --chunk-steps 12  # a round's

A server process over a random model of the demo's size, which also writes its access log, and this
process, which sends it chat requests; each has a core of its own where there are two. In every
repetition the same requests, with the same seeds, go to the engine directly (in the server's
process), then over HTTP, then over HTTP as streams. All three must sample as many tokens.

`overhead`: the CPU-seconds of the threads that serve (event loop, tokenizer, writer, access log)
over those of the engine (its thread and XLA's), of the same run. `added_cpu` and `added_wall`: what
the process, or the clock, took beyond the engine asked directly, as a share of the latter.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from load import Load, post
from machine import machine, print_head

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CHAT = "/chat/completions"
# Threads of the server's process that are not the engine's.
SERVING = ("server", "tokenizer_0", "writer", "access-log")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--samples", type=int, default=1, help="n of every request")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--logprobs", action="store_true", help="ask for logprobs and token ids")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--chunk-steps", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    parser.add_argument("--role", choices=["client", "server"], default="client")
    return parser.parse_args()


def main() -> None:
    options = parse()
    cores = sorted(os.sched_getaffinity(0))
    core = cores[0] if options.role == "server" else cores[-1]
    os.sched_setaffinity(0, {core})  # before JAX starts its threads
    if options.role == "server":
        serve(options)
    else:
        measure(options)


def bodies(options: argparse.Namespace, *, stream: bool) -> list[dict[str, Any]]:
    """The requests: short conversations, each with a seed of its own."""
    made = []
    for index in range(options.requests):
        body: dict[str, Any] = {
            "model": "policy",
            "messages": [{"role": "user", "content": f"reverse the word number {index}"}],
            "max_tokens": options.new_tokens,
            "n": options.samples,
            "seed": index * options.samples,
        }
        if options.logprobs:
            body |= {"logprobs": True, "return_token_ids": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        made.append(body)
    return made


# --- the server's process -----------------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Start, say where, then obey one word a line: `engine` measures, `usage` tells, `end` ends."""
    from marin_rl.compilation import keep_freed_memory, spare_long_lived_objects
    from marin_rl.config import EngineConfig, load_config
    from marin_rl.serving.server import PolicyServer
    from marin_rl.tokenizers import character_tokenizer
    from marin_rl.training.model import build_model

    keep_freed_memory()
    demo = load_config(HERE.parent / "configs" / "demo.yaml")
    policy = demo.policy.model_copy(update={"context_length": 64 + options.new_tokens})
    tokenizer = character_tokenizer()
    engine = EngineConfig(slots=options.slots, chunk_steps=options.chunk_steps)
    server = PolicyServer(
        build_model(policy, 128, seed=0),
        tokenizer,
        demo.inference.model_copy(update={"engine": engine}),
        context_length=policy.context_length,
    )
    with Path(os.devnull).open("w") as nowhere:
        server.log_requests(nowhere)
        url = server.start(warm_up=True)
        spare_long_lived_objects()
        tell(url=url)
        for line in sys.stdin:
            if line.strip() == "end":
                break
            tell(**(engine_alone(server, options) if line.strip() == "engine" else usage()))
        server.stop()


def tell(**found: Any) -> None:
    """One line to the client's process."""
    print(json.dumps(found), flush=True)


def usage() -> dict[str, float]:
    """Of this process until now: CPU-seconds, those of Python's threads by name, resident MB."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = {"cpu_s": time.process_time(), "rss_mb": resident / 2**20}
    for thread in threading.enumerate():
        assert thread.ident is not None
        name, clock = thread.name, time.pthread_getcpuclockid(thread.ident)
        found[f"{name}_cpu_s"] = found.get(f"{name}_cpu_s", 0.0) + time.clock_gettime(clock)
    return found


def engine_alone(server: Any, options: argparse.Namespace) -> dict[str, float]:
    """The same requests, given to the engine by a thread that keeps as many in flight."""
    import numpy as np

    from marin_rl.serving.text.templates import ChatPrompts
    from marin_rl.tokenizers import character_tokenizer, encoder_of

    tokenizer = character_tokenizer()
    prompts_of, encode = ChatPrompts(tokenizer), encoder_of(tokenizer)
    asked = bodies(options, stream=False)
    texts = [prompts_of.text(body["messages"]) for body in asked]
    prompts = [np.asarray(encode(text, False), np.int32) for text in texts]
    room = threading.Semaphore(options.concurrency)
    futures = []
    wall, cpu = time.perf_counter(), time.process_time()
    for body, prompt in zip(asked, prompts, strict=True):
        room.acquire()
        future = server.engine.submit(_request(body, prompt))
        future.add_done_callback(lambda _: room.release())
        futures.append(future)
    tokens = sum(len(sample.token_ids) for future in futures for sample in future.result().samples)
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "tokens": tokens,
    }


def _request(body: dict[str, Any], prompt: Any) -> Any:
    from marin_rl.inference.generation import GenerationRequest
    from marin_rl.types import Sampling

    sampling = Sampling(max_tokens=body["max_tokens"], seed=body["seed"])
    return GenerationRequest(prompt_ids=prompt, n=body["n"], sampling=sampling)


# --- the client's process -----------------------------------------------------------------------


class Served:
    """The server's process, as the client's sees it."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--role", "server"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = self._read()["url"]

    def ask(self, word: str) -> dict[str, float]:
        """Answer of the process to a word."""
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        print("end", file=self.process.stdin, flush=True)
        assert self.process.wait(timeout=60) == 0

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server's process ended"
        return json.loads(line)


def measure(options: argparse.Namespace) -> None:
    """All repetitions, a line for each, and a JSON summary of the best."""
    print_head()
    served = Served()
    print(f"server's process {served.process.pid} at {served.url}, load {os.getloadavg()[0]:.1f}")
    once = argparse.Namespace(**vars(options) | {"requests": options.concurrency})
    for stream in (False, True):
        over_http(served, once, stream=stream)
    rounds = [repetition(served, options, number) for number in range(options.repeat)]
    served.end()
    best = {
        "options": {k: v for k, v in vars(options).items() if k not in ("role", "results")},
        "machine": machine(),
        "engine": min((r["engine"] for r in rounds), key=lambda found: found["cpu_s"]),
        "http": min((r["http"] for r in rounds), key=lambda found: found["cpu_s"]),
        "stream": min((r["stream"] for r in rounds), key=lambda found: found["cpu_s"]),
        "rss_mb": [mb for r in rounds for mb in r["rss_mb"]],
    }
    for kind in ("http", "stream"):
        best[kind]["added_cpu"] = added(best, kind, "cpu_s")
        best[kind]["added_wall"] = added(best, kind, "wall_s")
    print(json.dumps(best, indent=1))
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"server-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps({"best": best, "rounds": rounds}, indent=1), encoding="utf-8")


def added(found: dict[str, Any], kind: str, unit: str) -> float:
    """Cost of a way of asking beyond the engine asked directly, as a share of the latter."""
    return round(found[kind][unit] / found["engine"][unit] - 1, 3)


def repetition(served: Served, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Engine, HTTP, streams, one after another."""
    memory = [served.ask("usage")["rss_mb"]]
    engine = served.ask("engine")
    found: dict[str, Any] = {"engine": engine, "rss_mb": memory}
    for kind in ("http", "stream"):
        load, used = over_http(served, options, stream=kind == "stream", memory=memory)
        assert load.errors == 0, f"{load.errors} errors"
        assert load.tokens == engine["tokens"], (load.tokens, engine["tokens"])
        found[kind] = load.summary() | used
    for kind in ("engine", "http", "stream"):
        print(f"{number} {kind:<7} {json.dumps(found[kind])}")
    print(f"{number} resident memory, MB: {[round(mb) for mb in memory]}")
    return found


def over_http(
    served: Served,
    options: argparse.Namespace,
    *,
    stream: bool,
    memory: list[float] | None = None,
) -> tuple[Load, dict[str, float]]:
    """The load, and the CPU-seconds that the server's process and its threads spent on it.

    `memory` gains the process's resident MB ten times on the way.
    """
    asked = [json.dumps(body).encode() for body in bodies(options, stream=stream)]
    step = max(1, len(asked) // 10)

    def on_answer(count: int) -> None:
        if memory is not None and count % step == 0:
            statm = Path(f"/proc/{served.process.pid}/statm").read_text()
            memory.append(int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)

    before = served.ask("usage")
    load = post(served.url + CHAT, asked, options.concurrency, on_answer)
    after = served.ask("usage")
    used = {key: after[key] - before.get(key, 0.0) for key in after if "cpu" in key}
    serving = sum(used.get(f"{thread}_cpu_s", 0.0) for thread in SERVING)
    engine = used["cpu_s"] - serving - used["MainThread_cpu_s"]
    used |= {"serving_cpu_s": serving, "engines_cpu_s": engine, "overhead": serving / engine}
    return load, {key: round(value, 3) for key, value in used.items()}


if __name__ == "__main__":
    main()
