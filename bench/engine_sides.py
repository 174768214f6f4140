"""One sampler on the standard work, as a program of its own: a JSON line per round.

    python bench/engine_sides.py SIDE --work FOLDER --cores N

Every line on standard input asks for a round; the answer says what it took. The sides are ours,
Levanter's engine, Hugging Face generate, CTranslate2 and tunix's sampler; each imports only what it
needs, so each runs in the environment that has it. Who takes turns with whom is left to engine.py.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from standard_work import END, PAD, SPECIAL, Work

# Samples one round of prompts [N, P], n of each; returns how many tokens that were.
Round = Callable[[np.ndarray, int], int]


def main() -> None:
    """Make the side, then answer every line with a round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=sorted(SIDES))
    parser.add_argument("--work", type=Path, required=True, help="folder of write_work")
    parser.add_argument("--cores", type=int, default=1)
    options = parser.parse_args()
    # before any library starts its threads
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    work = Work(**json.loads((options.work / "work.json").read_text()))
    play = SIDES[options.side](options.work / "model", work, options.cores)
    for number, _ in enumerate(sys.stdin):
        answer = timed_round(play, work, number)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def timed_round(play: Round, work: Work, number: int) -> dict[str, float]:
    """Wall and CPU seconds of one round, and the peak of memory so far."""
    shape = work.prompts, work.prompt_tokens
    random = np.random.default_rng(number)
    prompts = random.integers(len(SPECIAL), work.vocabulary, shape).astype(np.int32)
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = play(prompts, work.completions)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    expected = work.rows * work.new_tokens
    if tokens != expected:
        raise ValueError(f"expected {expected} tokens a round, found {tokens}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"tokens": tokens, "wall_s": wall, "cpu_s": cpu, "peak_rss_bytes": peak}


def ours(model: Path, work: Work, _cores: int) -> Round:
    """The embedded engine."""
    from marin_rl.compilation import keep_freed_memory
    from marin_rl.config import EngineConfig
    from marin_rl.inference.engine import Engine, GenerationRequest
    from marin_rl.training.hf_folders import load_hf
    from marin_rl.types import Sampling

    keep_freed_memory()  # as a run does
    engine = Engine(
        load_hf(model),
        EngineConfig(slots=work.rows),
        context_length=work.prompt_tokens + work.new_tokens,
    )
    engine.warm_up()
    sampling = Sampling(max_tokens=work.new_tokens)

    def play(prompts: np.ndarray, n: int) -> int:
        requests = [GenerationRequest(prompt_ids=row, n=n, sampling=sampling) for row in prompts]
        futures = [engine.submit(request) for request in requests]
        return sum(len(s.token_ids) for f in futures for s in f.result().samples)

    return play


def levanter(model: Path, work: Work, _cores: int) -> Round:
    """Levanter's own engine, with its cache in float32 and all prompts in one prefill."""
    import jax
    import jax.numpy as jnp
    from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
    from levanter.inference.jit_scheduler import SeqDecodingParams

    from marin_rl.training.hf_folders import load_hf

    length = work.prompt_tokens + work.new_tokens
    config = InferenceEngineConfig(
        max_seq_len=length,
        page_size=32,
        max_seqs=work.rows,
        max_pages=2 * work.rows * -(-length // 32),
        max_rounds=work.new_tokens,
        compute_dtype=jnp.float32,
        max_seqs_in_prefill=work.prompts,
        max_prefill_size=work.prompts * work.prompt_tokens,
        max_queued_tokens=max(512, work.rows),
    )
    engine = InferenceEngine.from_model_with_config(load_hf(model), None, config)

    def play(prompts: np.ndarray, n: int) -> int:
        requests = [
            Request(
                prompt_tokens=row.tolist(),
                request_id=index,
                decode_params=SeqDecodingParams(
                    max_num_tokens=jnp.int32(length),
                    stop_tokens=None,
                    temperature=jnp.float32(1.0),
                    top_p=jnp.float32(1.0),
                    key=jax.random.PRNGKey(index),
                ),
                n_generations=n,
            )
            for index, row in enumerate(prompts)
        ]
        return engine.generate(requests).total_generated

    return play


def huggingface(model: Path, work: Work, cores: int) -> Round:
    """transformers' generate, every sample a row of one batch; each prompt is run once."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(cores)
    network = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32)

    def play(prompts: np.ndarray, n: int) -> int:
        given = torch.from_numpy(prompts.astype(np.int64))
        rows = given.repeat_interleave(n, dim=0)
        with torch.inference_mode():
            cache = DynamicCache(config=network.config)
            network(given[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(n)
            out = network.generate(
                rows,
                past_key_values=cache,
                attention_mask=torch.ones_like(rows),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=work.new_tokens,
                max_new_tokens=work.new_tokens,
            )
        return (out.shape[1] - rows.shape[1]) * out.shape[0]

    return play


def ctranslate2(model: Path, work: Work, cores: int) -> Round:
    """CTranslate2's generator over the same folder, converted at the start.

    The samples of a prompt are hypotheses of one row, so that each prompt is run once.
    """
    import ctranslate2 as library

    folder = model.parent / "ctranslate2"
    if not folder.exists():
        library.converters.TransformersConverter(str(model)).convert(str(folder))
        name_all_tokens(folder / "config.json")
    generator = library.Generator(
        str(folder), device="cpu", compute_type="float32", intra_threads=cores, inter_threads=1
    )

    def play(prompts: np.ndarray, n: int) -> int:
        names = [[f"w{token - len(SPECIAL)}" for token in row] for row in prompts.tolist()]
        found = generator.generate_batch(
            names,
            num_hypotheses=n,
            max_batch_size=work.rows,
            min_length=work.new_tokens,
            max_length=work.new_tokens,
            sampling_topk=0,
            sampling_temperature=1.0,
            include_prompt_in_result=False,
            return_scores=True,
        )
        return sum(len(ids) for result in found for ids in result.sequences_ids)

    return play


def name_all_tokens(path: Path) -> None:
    """The work has no token that begins a text; CTranslate2 wants a name for it all the same."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: SPECIAL[0] if v is None else v for k, v in config.items()}))


class Numbers:
    """The tokenizer that tunix is given: a text is its token ids, written out."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        """None: tunix puts no id before a text where this is 0."""
        return 0

    def eos_id(self) -> int:
        """The end token."""
        return SPECIAL.index(END)

    def pad_id(self) -> int:
        """The padding token."""
        return SPECIAL.index(PAD)


def tunix(model: Path, work: Work, _cores: int) -> Round:
    """tunix's sampler over the same folder; top_p of 1 makes it draw at all."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.llama3.model import ModelConfig
    from tunix.models.llama3.params import create_model_from_safe_tensors

    config = json.loads((model / "config.json").read_text())
    network = create_model_from_safe_tensors(
        str(model),
        ModelConfig(
            num_layers=work.layers,
            vocab_size=work.vocabulary,
            embed_dim=work.hidden,
            hidden_dim=work.intermediate,
            num_heads=work.heads,
            head_dim=work.head_size,
            num_kv_heads=work.kv_heads,
            rope_theta=config["rope_theta"],
            norm_eps=config["rms_norm_eps"],
        ),
        mesh=jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2),
        dtype=jnp.float32,
    )
    length = work.prompt_tokens + work.new_tokens
    cache = CacheConfig(length, work.layers, work.kv_heads, work.head_size)
    sampler = Sampler(network, Numbers(), cache)

    def play(prompts: np.ndarray, n: int) -> int:
        out = sampler(
            [Numbers().decode(row) for row in prompts.tolist() for _ in range(n)],
            max_generation_steps=work.new_tokens,
            max_prompt_length=work.prompt_tokens,
            temperature=1.0,
            top_p=1.0,
            return_logprobs=True,
            seed=int(prompts[0, 0]),
        )
        return sum(len(tokens) for tokens in out.tokens)

    return play


SIDES = {
    "ours": ours,
    "levanter": levanter,
    "hf": huggingface,
    "ctranslate2": ctranslate2,
    "tunix": tunix,
}

if __name__ == "__main__":
    main()
