"""Hugging Face folders of a policy's model: loaded, checked, and saved.

Weights alone are read in `hf_weights`.
"""

import copy
import json
import math
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.chat_templates import without_date
from marin_rl.errors import InputError
from marin_rl.models.families import config_json
from marin_rl.models.module import LanguageModel
from marin_rl.plain_files import WEIGHTS_FILE, WEIGHTS_INDEX
from marin_rl.progress import phase
from marin_rl.tokenizers import check_vocabulary, end_token_ids, export_tokenizer, load_tokenizer
from marin_rl.training.hf_weights import exported, hf_template, read_weights, tensor_shapes

FILE_BYTES_MAX = 5 * 10**9  # as transformers has it
_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Shape = tuple[int, ...]


@phase("loading the model folder")
def load_hf(folder: str | Path, like: Mapping[str, Any] | None = None) -> LanguageModel:
    """Load a local Hugging Face folder of a known family, weights as float32.

    `like` says where they are to be: see `read_weights`. Raises InputError, before reading any
    weight, when the folder is incomplete, when its configuration describes something that is not
    supported, or when its tokenizer gives ids that the model has no row for; and when the weights
    do not fit the configuration, or are not finite.
    """
    template = hf_template(folder)
    check_vocabulary(load_tokenizer(folder), template.spec.vocabulary)
    return read_weights(template, folder, like)


@phase("writing the Hugging Face folder")
def save_hf(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    dtype: str = "float32",
) -> None:
    """Write weights, config.json and the tokenizer; loads back to equal logits.

    The configuration carries `rope_theta` and `rope_parameters`, so that transformers 4 and 5 and
    the servers built on either read the same rotary base. Where several tokens end a completion,
    generation_config.json lists them.
    """
    path = Path(folder)
    whole = ([array] for _, array in exported(model))
    write_folder(path, model, _dateless(tokenizer), whole, dtype)
    ends = end_token_ids(tokenizer)
    # config.json names one end token; servers read the others from here.
    if len(ends) > 1:
        write_json(path / "generation_config.json", {"eos_token_id": list(ends)})


def write_folder(
    folder: Path,
    template: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    tensors: Iterable[Iterable[np.ndarray]],
    dtype: str,
) -> None:
    """Write weights, config.json and tokenizer of a model.

    `tensors` are those of `tensor_shapes` in their order, each in parts of whole rows. Weights are
    model.safetensors or, above FILE_BYTES_MAX, several files and their index. Raises InputError as
    `_write_safetensors` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes, size, remaining = tensor_shapes(template), jnp.dtype(dtype).itemsize, iter(tensors)
    files, places = _files(shapes, size), dict[str, str]()
    for number, own in enumerate(files, 1):
        name = WEIGHTS_FILE
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_safetensors(folder / name, own, islice(remaining, len(own)), dtype)
        places |= dict.fromkeys(own, name)
    assert next(remaining, None) is None, "each tensor has a shape"
    if len(files) > 1:
        total = {"total_size": size * sum(map(math.prod, shapes.values()))}
        write_json(folder / WEIGHTS_INDEX, {"metadata": total, "weight_map": places})
    export_tokenizer(tokenizer, folder)
    dtypes = {"dtype": dtype, "torch_dtype": dtype}
    config = config_json(template.spec) | special_ids(tokenizer) | dtypes
    write_json(folder / "config.json", config)


def _files(shapes: Mapping[str, Shape], size: int) -> list[dict[str, Shape]]:
    """Tensors in files of FILE_BYTES_MAX, which a single one may exceed; `size` is an entry's."""
    files, n_bytes = [dict[str, Shape]()], 0
    for name, shape in shapes.items():
        n_bytes += math.prod(shape) * size
        if n_bytes > FILE_BYTES_MAX and files[-1]:
            files.append({})
            n_bytes = math.prod(shape) * size
        files[-1][name] = shape
    return files


def _write_safetensors(
    file: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterable[Iterable[np.ndarray]],
    dtype: str,
) -> None:
    """Write tensors part by part: the library's own writer has all of them in memory twice.

    Raises InputError for a value that is not finite, or is too large for `dtype`.
    """
    size, end = jnp.dtype(dtype).itemsize, 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * size
        places = {"shape": shape, "data_offsets": [begin, end]}
        header[name] = {"dtype": _SAFETENSORS[dtype]} | places
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out, np.errstate(over="ignore", invalid="ignore"):
        out.write(len(text).to_bytes(8, "little") + text)
        for name, parts in zip(shapes, tensors, strict=True):
            for part in parts:
                stored = np.ascontiguousarray(part.astype(jnp.dtype(dtype)))
                if not np.isfinite(stored).all():
                    raise InputError(
                        f"{name} has values that are not finite in {dtype}: expected finite "
                        "weights; choose a dtype with a wider range, another checkpoint, or copy "
                        "the file again"
                    )
                out.write(stored.view(np.uint8).data)
        assert out.tell() == 8 + len(text) + end, "each tensor was written whole"


def _dateless(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, whose chat template has a run's options but not the day of the run."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or without_date(template) == template:
        return tokenizer
    exported = copy.copy(tokenizer)  # the run's own is in use
    exported.chat_template = without_date(template)
    return exported


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", "utf-8")


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Ids of tokens as config.json names them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}
