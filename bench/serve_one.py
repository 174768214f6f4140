"""A server of a model folder for one reader and for many: tokens a CPU-second, and first tokens.

    python bench/serve_one.py --model path/to/hf-folder [--streams 1,16,64] [--new-tokens 96]
    python bench/serve_one.py --model path/to/hf-folder --peers      # --install-peers makes them

`marin-rl serve --model` is started as people start it, with `--slots` sequences of `--context`
tokens. Each number of streams is asked twice, with one conversation each; the first time compiles
and does not count. CPU-seconds are those of the server's whole process; peers run the same number
of new tokens for a lone prompt within their own process, without HTTP.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PEERS = ("transformers", "ctranslate2")
PROMPT_TOKENS = 40
# threads of torch that wait would spin, and eat the CPU-seconds that are measured
QUIET = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: a tiny one")
    parser.add_argument("--streams", default="1,16,64", help="streams at once, in this order")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--set", action="append", default=[], help="a setting of the server")
    parser.add_argument("--peers", action="store_true", help="a lone prompt by other engines too")
    parser.add_argument("--install-peers", action="store_true", help="make their environment first")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    parser.add_argument("--role", choices=PEERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.role:
        alone(options)
        return
    from machine import machine, print_head
    from peer_venvs import HF, install

    print_head()
    if options.install_peers:
        install(HF)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or tiny_model(Path(folder) / "tiny")
        rows = served(options, model)
        for peer in PEERS if options.peers else ():
            if HF.python.exists():
                rows.append(peer_row(peer, HF.python, model, options.new_tokens))
            else:
                print(f"skipped {peer}: not installed; --install-peers does it")
    for row in rows:
        print(json.dumps(row), flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    written = {"machine": machine(), "model": str(options.model), "rows": rows}
    name = f"serve-one-{time.strftime('%Y%m%d-%H%M%S')}.json"
    (options.results / name).write_text(json.dumps(written, indent=1))


def tiny_model(folder: Path) -> Path:
    """A folder with random weights, for trying the script."""
    from marin_rl.config import parse_config
    from marin_rl.tokenizers import character_tokenizer
    from marin_rl.training.hf_folders import save_hf
    from marin_rl.training.model import build_model

    tokenizer, policy = character_tokenizer(), parse_config({}).policy
    save_hf(build_model(policy, len(tokenizer), 0), tokenizer, folder)
    return folder


def served(options: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """Rows of the server, for each number of streams."""
    settings = [
        f"policy.context_length={options.context}",
        f"sampling.max_tokens={options.new_tokens}",
    ]
    settings += [f"inference.engine.slots={options.slots}", *options.set]
    command = [sys.executable, "-m", "marin_rl", "serve", "--model", str(model), "--port", "0"]
    command += ["--json", *(part for each in settings for part in ("--set", each))]
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        states = (json.loads(line) for line in server.stdout)
        ready = next((state for state in states if state["state"] == "ready"), None)
        if ready is None:
            log.seek(0)
            raise SystemExit(log.read().decode())
        start = {"side": "marin-rl", "streams": 0, "ready_s": round(time.monotonic() - began, 1)}
        rows = [start | usage(server.pid)]
        try:
            for streams in map(int, options.streams.split(",")):
                ask(ready["url"], streams, options.new_tokens)  # compiles what it needs
                before = usage(server.pid)["cpu_s"]
                load = ask(ready["url"], streams, options.new_tokens)
                rows.append(row_of("marin-rl", streams, load, server.pid, before))
        finally:
            server.terminate()
            server.wait(60)
    return rows


def ask(url: str, streams: int, new_tokens: int) -> Any:
    """Send that many conversations at once, each streamed to its last token."""
    from load import post

    bodies = [
        {
            "model": "policy",
            "messages": [{"role": "user", "content": f"tell me a long story, number {index}"}],
            "max_tokens": new_tokens,
            "seed": index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for index in range(streams)
    ]
    encoded = [json.dumps(body).encode() for body in bodies]
    return post(url + "/chat/completions", encoded, streams)


def row_of(side: str, streams: int, load: Any, pid: int, before: float) -> dict[str, Any]:
    """Numbers of one measurement."""
    used, seen = usage(pid), load.summary()
    # The kernel counts ticks, of which a tiny load may take none.
    cpu = max(used["cpu_s"] - before, 1 / os.sysconf("SC_CLK_TCK"))
    return {
        "side": side,
        "streams": streams,
        "tokens": load.tokens,
        "tokens_per_cpu_second": round(load.tokens / cpu, 2),
        "tokens_per_second": seen["tokens_per_s"],
        "first_token_ms": seen["first_byte_p50_ms"],
        "errors": load.errors,
        **used,
    }


def usage(pid: int) -> dict[str, float]:
    """CPU-seconds and resident megabytes of a process, by the kernel's count."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return {"cpu_s": seconds, "rss_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)}


def peer_row(peer: str, python: Path, model: Path, new_tokens: int) -> dict[str, Any]:
    """A peer's numbers for a lone prompt, measured in its own process."""
    command = [str(python), __file__, "--role", peer, "--model", str(model)]
    command += ["--new-tokens", str(new_tokens)]
    ended = subprocess.run(
        command, env=os.environ | QUIET, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


# --- in the process of a peer, in its environment ---------------------------------------------


def alone(options: argparse.Namespace) -> None:
    """Print the peer's tokens a CPU-second: the best of three, after one that does not count."""
    with tempfile.TemporaryDirectory() as folder:
        play = {"transformers": by_transformers, "ctranslate2": by_ctranslate2}[options.role](
            options.model, options.new_tokens, Path(folder)
        )
        play()
        best = 0.0
        for _ in range(3):
            began = time.process_time()
            tokens = play()
            best = max(best, tokens / (time.process_time() - began))
    row = {"side": options.role, "streams": 1, "tokens_per_cpu_second": round(best, 2)}
    print(json.dumps(row))


def by_transformers(model: Path, new_tokens: int, folder: Path) -> Any:
    """Hugging Face generate in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    library = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.arange(5, 5 + PROMPT_TOKENS)[None]

    def play() -> int:
        with torch.inference_mode():
            out = library.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                top_k=0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        return out.shape[1] - prompt.shape[1]

    return play


def by_ctranslate2(model: Path, new_tokens: int, folder: Path) -> Any:
    """CTranslate2's generator in float32."""
    import ctranslate2 as library
    from transformers import AutoTokenizer

    library.converters.TransformersConverter(str(model)).convert(str(folder / "converted"))
    generator = library.Generator(str(folder / "converted"), device="cpu", compute_type="float32")
    names = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens(
        list(range(5, 5 + PROMPT_TOKENS))
    )

    def play() -> int:
        (result,) = generator.generate_batch(
            [names],
            min_length=new_tokens,
            max_length=new_tokens,
            sampling_topk=0,
            include_prompt_in_result=False,
        )
        return len(result.sequences_ids[0])

    return play


if __name__ == "__main__":
    main()
