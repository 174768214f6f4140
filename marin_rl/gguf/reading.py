"""A GGUF file becomes a Hugging Face folder; everything is checked before anything is written."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf import dequantize

from marin_rl.gguf.files import open_gguf
from marin_rl.gguf.settings import architecture_of, spec_of
from marin_rl.gguf.tensors import (
    ROPE_FREQS,
    check_tensors,
    folder_parts,
    gguf_names,
    shapes_of,
    write_safetensors,
)
from marin_rl.gguf.tokenizer import read_tokenizer
from marin_rl.models.families import config_json
from marin_rl.models.module import model_of
from marin_rl.progress import phase
from marin_rl.serving.weights.export import check_new_folder
from marin_rl.tokenizers import check_vocabulary, export_tokenizer
from marin_rl.training.hf_folders import tensor_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Facts of a new folder: its family, counts of tensors by stored type, a template or not."""

    folder: Path
    family: str
    tensors: dict[str, int]
    chat_template: bool


def import_gguf(file: Path, output: Path, dtype: str) -> Imported:
    """Write the folder of a GGUF file, its weights as `dtype`.

    Raises InputError, before anything is written, for a file that is damaged or of a model,
    tokenizer or quantization that is not known, and for an output that has something in it.
    """
    check_new_folder(output)
    with phase("reading the GGUF file"):
        metadata, tensors = open_gguf(file)
        architecture = architecture_of(metadata)
        factors = tensors.get(ROPE_FREQS)
        spec = spec_of(
            metadata,
            shapes_of(tensors),
            None if factors is None else dequantize(factors.data, factors.tensor_type),
        )
        shapes = tensor_shapes(model_of(spec))
        names = gguf_names(metadata.architecture, spec.layers, shapes)
        check_tensors(metadata, tensors, {names[name]: shape for name, shape in shapes.items()})
        tokenizer, ends = read_tokenizer(metadata)
        check_vocabulary(tokenizer, spec.vocabulary)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in _SPECIAL}
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with phase("writing the Hugging Face folder"):
            partial.mkdir(parents=True)
            export_tokenizer(tokenizer, partial)
            dtypes = {"dtype": dtype, "torch_dtype": dtype}
            _write(partial / "config.json", config_json(spec) | special | dtypes)
            _write(partial / "generation_config.json", special | {"eos_token_id": ends})
            parts = (folder_parts(n, tensors[names[n]], spec, architecture) for n in shapes)
            write_safetensors(partial / "model.safetensors", shapes, parts, dtype)
            partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Imported(
        folder=output,
        family=spec.family,
        tensors=dict(Counter(each.tensor_type.name for each in tensors.values())),
        chat_template=bool(tokenizer.chat_template),
    )


_SPECIAL = ("bos", "eos", "pad")


def _write(file: Path, tree: Mapping[str, object]) -> None:
    file.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", "utf-8")
