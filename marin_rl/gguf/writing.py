"""A model becomes a GGUF file that llama.cpp reads, where the way back gives the same model."""

import math
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    quant_shape_to_byte_shape,
    quantize,
)
from transformers import PreTrainedTokenizerBase

from marin_rl.errors import InputError
from marin_rl.gguf.files import Metadata
from marin_rl.gguf.settings import (
    Architecture,
    architecture_of,
    metadata_of,
    rope_factors,
    spec_of,
)
from marin_rl.gguf.tensors import ROPE_FREQS, gguf_names, heads_of, interleaved
from marin_rl.gguf.tokenizer import tokenizer_metadata
from marin_rl.models.module import LanguageModel
from marin_rl.progress import phase
from marin_rl.training.hf_weights import exported, tensor_shapes

_BLOCK = 32  # of Q8_0
# llama.cpp's numbers of what most tensors of a file are.
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}


@phase("writing the GGUF file")
def export_gguf(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, file: Path, gguf_type: str
) -> None:
    """Write a model and its tokenizer. Vectors are float32, as llama.cpp expects them.

    Raises InputError, before anything is written, for a file that exists, a tokenizer that has no
    word in GGUF, and a model that the file would describe as another.
    """
    if file.exists():
        raise InputError(f"{file} exists: expected a new file; nothing is overwritten")
    spec, shapes = model.spec, tensor_shapes(model)
    values = metadata_of(spec, file.stem) | {"general.file_type": _FILE_TYPES[gguf_type]}
    values |= tokenizer_metadata(tokenizer, spec.vocabulary)
    metadata = Metadata(file, values)
    names = gguf_names(metadata.architecture, spec.layers, shapes)
    scaled = (rope for rope in spec.ropes if dict(rope.scaling).get("rope_type") == "llama3")
    factors = dict([(ROPE_FREQS, rope_factors(rope)) for rope in scaled][:1])
    stored = {names[name]: shape for name, shape in shapes.items()}
    again = spec_of(metadata, stored, factors.get(ROPE_FREQS))
    if again != spec:
        raise InputError(
            f"{file}: a GGUF file would say something else of this {spec.family} model: "
            f"{spec.difference(again)}; `marin-rl export RUN --hf FOLDER` writes its folder"
        )
    vectors = [(name, each.shape) for name, each in factors.items()]
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    writer = GGUFWriter(partial, metadata.architecture)
    try:
        for key, value in values.items():
            _add_value(writer, key, value)
        for name, shape in [*vectors, *stored.items()]:
            _add_tensor(writer, name, shape, gguf_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in chain(factors.values(), _arrays(model, architecture_of(metadata))):
            writer.write_tensor_data(quantize(array, _type_of(array.shape, gguf_type)))
        writer.close()
        partial.rename(file)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _arrays(model: LanguageModel, architecture: Architecture) -> Iterator[np.ndarray]:
    """Tensors as a GGUF file has them, float32, in the order of `tensor_shapes`."""
    for name, array in exported(model):
        heads = heads_of(name, model.spec, architecture)
        rows = array if heads is None else array[interleaved(len(array), heads)]
        shifted = architecture.shifted_norms and name.endswith("norm.weight")
        yield np.ascontiguousarray(rows + 1 if shifted else rows, np.float32)


def _type_of(shape: tuple[int, ...], gguf_type: str) -> GGMLQuantizationType:
    """The type of a tensor: vectors stay whole, and rows that are no whole blocks are float16."""
    kind = "f32" if len(shape) == 1 else gguf_type
    if kind == "q8_0" and shape[-1] % _BLOCK:
        kind = "f16"
    return GGMLQuantizationType[kind.upper()]


def _add_tensor(writer: GGUFWriter, name: str, shape: tuple[int, ...], gguf_type: str) -> None:
    kind = _type_of(shape, gguf_type)
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    dtype = np.dtype(plain.get(kind, np.uint8))
    stored = shape if kind in plain else quant_shape_to_byte_shape(shape, kind)
    writer.add_tensor_info(name, stored, dtype, math.prod(stored) * dtype.itemsize, kind)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    if key == "general.architecture":
        return  # the writer's own
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, kinds.get(type(value), GGUFValueType.STRING))
