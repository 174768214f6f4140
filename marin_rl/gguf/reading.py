"""A GGUF file becomes a Hugging Face folder; everything is checked before anything is written."""

import os
import shutil
from collections import Counter
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
)
from marin_rl.gguf.tokenizer import read_tokenizer
from marin_rl.models.module import model_of
from marin_rl.progress import phase
from marin_rl.serving.weights.export import check_new_folder
from marin_rl.tokenizers import check_vocabulary
from marin_rl.training.hf_folders import special_ids, write_folder, write_json
from marin_rl.training.hf_weights import tensor_shapes


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
        model = model_of(spec)
        shapes = tensor_shapes(model)
        names = gguf_names(metadata.architecture, spec.layers, shapes)
        check_tensors(metadata, tensors, {names[name]: shape for name, shape in shapes.items()})
        tokenizer, ends = read_tokenizer(metadata)
        check_vocabulary(tokenizer, spec.vocabulary)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with phase("writing the Hugging Face folder"):
            parts = (folder_parts(n, tensors[names[n]], spec, architecture) for n in shapes)
            write_folder(partial, model, tokenizer, parts, dtype)
            special = special_ids(tokenizer) | {"eos_token_id": ends}
            write_json(partial / "generation_config.json", special)
            partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Imported(
        folder=output,
        family=spec.family,
        tensors=dict(Counter(each.tensor_type.name for each in tensors.values())),
        chat_template=bool(tokenizer.chat_template),
    )
