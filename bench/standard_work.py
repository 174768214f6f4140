"""The standard work of the round benchmark, once for all sides: model, tokenizer, prompts, reward.

A Llama of 3.2M parameters, 16 prompts of 32 tokens with 8 completions of 64 tokens each, fp32, one
optimizer step a round; or, as `short_work`, completions that end after about 3 tokens of the 64
that they may have; or, as `real_work`, a model folder with prompts and completions as they come.
`write_work` lays it down as files that every side reads, so all start from
equal weights and see equal prompts. Runs in ours and in the peers' environments alike; who is timed
and how is left to round.py.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

PAD, END, USER, ASSISTANT = SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# One coordinate of the residual stream is the same for every token and reaches only the rows of the
# special tokens in the output head: a bias of about -70 nats, so a completion never ends early.
CONSTANT = 0.1
SPECIAL_ROW = -100.0

# The end token's row where completions are short: about 5.6 nats, one token in three.
ENDING_ROW = 8.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The sizes of one round, and of the model; or the folder of one that is there."""

    prompts: int = 16
    completions: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 64
    vocabulary: int = 512
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 704
    learning_rate: float = 1e-4
    seed: int = 0
    ends_early: bool = False
    model: str | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The model's, by the names of our `policy.model`."""
        return {
            "hidden_size": self.hidden,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
        }

    @property
    def rows(self) -> int:
        """Completions of one round."""
        return self.prompts * self.completions

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


def short_work(**sizes: int) -> Work:
    """The standard work with completions of about 3 tokens.

    Longer completions are paid better, and a policy finds that out within a round: so it learns
    next to nothing here, at the same cost.
    """
    return Work(ends_early=True, learning_rate=1e-9, **sizes)


def real_work(model: Path, **sizes: int) -> Work:
    """A round of a chat model on sums: prompts of at most 64 tokens, completions of at most 48."""
    most = {"prompt_tokens": 64, "new_tokens": 48, **sizes}
    return Work(ends_early=True, learning_rate=1e-6, model=str(model.resolve()), **most)


def add_size_option(parser: argparse.ArgumentParser) -> None:
    """Add `--size`, which `sized` takes."""
    parser.add_argument(
        "--size",
        dest="sizes",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="another size of the work, e.g. hidden=32 or prompts=2; repeatable",
    )


def sized(work: Work, sizes: Sequence[str]) -> Work:
    """`work` with fields replaced, each written NAME=NUMBER.

    Raises SystemExit for a name that is not a whole number of `Work`.
    """
    known = [field.name for field in fields(Work) if field.type is int]
    given: dict[str, int] = {}
    for size in sizes:
        name, _, number = size.partition("=")
        if name not in known or not number.isdecimal():
            raise SystemExit(
                f"--size: expected NAME=NUMBER with one of {', '.join(known)}, found {size!r}"
            )
        given[name] = int(number)
    return replace(work, **given)


def reward(_example: object, completion: str) -> float:
    """Share of even words in a completion: cheap, and rarely equal within a group."""
    words = completion.split()
    return sum(word[-1:] in "02468" for word in words) / max(len(words), 1)


def write_work(folder: Path, work: Work, rounds: int) -> None:
    """Write `work.json`, `prompts.jsonl` (enough for `rounds`) and the model folder `model/`."""
    model = folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    prompts = "".join(json.dumps(row) + "\n" for row in prompt_rows(work, rounds))
    (folder / "prompts.jsonl").write_text(prompts)
    if work.model is not None:
        model.symlink_to(work.model)
        return
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(model_config(work), indent=1))
    save_file(parameters(work), model / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(model, work)


# Enough that one of them is for evaluation.
PROMPTS_MIN = 64


def prompt_rows(work: Work, rounds: int) -> list[dict[str, str]]:
    """Random words, `prompt_tokens` tokens once rendered, or sums; twice as many as are asked for.

    An environment takes a tenth of them for evaluation, so there are PROMPTS_MIN at least.
    """
    random = np.random.default_rng(work.seed)
    count = max(2 * rounds * work.prompts, PROMPTS_MIN)
    if work.model is None:
        words = random.integers(
            work.vocabulary - len(SPECIAL), size=(count, work.prompt_tokens - 2)
        )
        texts = [" ".join(f"w{word}" for word in row) for row in words]
    else:
        sums = random.integers(10, 99, size=(count, 2))
        texts = [f"{a} + {b} = ? Answer with the number only." for a, b in sums]
    return [{"id": str(i), "prompt": text, "answer": ""} for i, text in enumerate(texts)]


def write_tokenizer(folder: Path, work: Work) -> None:
    """One token per word `w0`, `w1`, … and the special ones, as both transformers 4 and 5 read."""
    words = [f"w{i}" for i in range(work.vocabulary - len(SPECIAL))]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": work.prompt_tokens + work.new_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def model_config(work: Work) -> dict[str, object]:
    """config.json; the rotary base stands in both places, for transformers 4 and 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": work.hidden,
        "num_hidden_layers": work.layers,
        "num_attention_heads": work.heads,
        "num_key_value_heads": work.kv_heads,
        "head_dim": work.head_size,
        "intermediate_size": work.intermediate,
        "vocab_size": work.vocabulary,
        "max_position_embeddings": work.prompt_tokens + work.new_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def parameters(work: Work) -> dict[str, np.ndarray]:
    """Random weights (normal, std 0.02) by Hugging Face's names; special tokens are unreachable."""
    random = np.random.default_rng(work.seed)

    def normal(rows: int, columns: int) -> np.ndarray:
        return random.normal(0.0, 0.02, (rows, columns)).astype(np.float32)

    embedding = normal(work.vocabulary, work.hidden)
    embedding[:, 0] = CONSTANT
    head = normal(work.vocabulary, work.hidden)
    head[:, 0] = 0.0
    head[: len(SPECIAL), 0] = SPECIAL_ROW
    if work.ends_early:
        head[SPECIAL.index(END), 0] = ENDING_ROW
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(work.hidden, np.float32),
        "lm_head.weight": head,
    }
    query, key = work.heads * work.head_size, work.kv_heads * work.head_size
    reading = {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": key,
        "mlp.gate_proj": work.intermediate,
        "mlp.up_proj": work.intermediate,
    }
    writing = {"self_attn.o_proj": query, "mlp.down_proj": work.intermediate}
    for layer in range(work.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(work.hidden, np.float32)
        for name, width in reading.items():
            weight = normal(width, work.hidden)
            weight[:, 0] = 0.0
            tensors[f"{prefix}{name}.weight"] = weight
        for name, width in writing.items():
            weight = normal(work.hidden, width)
            weight[0, :] = 0.0
            tensors[f"{prefix}{name}.weight"] = weight
    return tensors
