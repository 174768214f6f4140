"""A GGUF file becomes a Hugging Face folder, and a model a GGUF file that llama.cpp reads.

Everything is checked before anything is written; the way back gives the same model. Weights pass a
part at a time. The library's table names them. Of interleaved architectures llama.cpp has the rows
of q and k in the order of pairs that its rotary embedding turns, a folder those of the two halves.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.errors import InputError
from marin_rl.gguf import settings
from marin_rl.gguf.settings import Architecture, Metadata
from marin_rl.gguf.tokenizer import read_tokenizer, tokenizer_metadata
from marin_rl.models.module import LanguageModel, model_of
from marin_rl.models.spec import Spec
from marin_rl.plain_files import whole_or_absent
from marin_rl.progress import phase
from marin_rl.serving.weights.export import check_new_folder
from marin_rl.tokenizers import check_vocabulary
from marin_rl.training.hf_folders import special_ids, write_folder, write_json
from marin_rl.training.hf_weights import exported, tensor_shapes

ROPE_FREQS = "rope_freqs.weight"
NUMBERS_AT_ONCE = 2**24  # 64 MiB in float32


def shapes_of(tensors: Mapping[str, gguf.ReaderTensor]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, as NumPy has them: GGUF has the last axis first."""
    return {name: tuple(map(int, each.shape[::-1])) for name, each in tensors.items()}


def gguf_names(architecture: str, layers: int, names: Iterable[str]) -> dict[str, str]:
    (kind,) = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, layers)
    found = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    known = {name: ours for name, ours in found.items() if ours is not None}
    assert len(set(known.values())) == len(found), "each tensor of these families has one name"
    return known


def check_tensors(
    metadata: Metadata,
    tensors: Mapping[str, gguf.ReaderTensor],
    expected: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise InputError unless a file has these tensors, of types that can be read."""
    shapes = shapes_of(tensors)
    wrong = [name for name in {**expected, **shapes} if expected.get(name) != shapes.get(name)]
    wrong = [name for name in sorted(wrong) if name != ROPE_FREQS]
    if wrong:
        name, count = wrong[0], len(wrong)
        raise metadata.refusal(
            f"tensor {name} {expected.get(name, 'absent')}",
            f"{shapes.get(name, 'absent')} ({count} such tensors): use a file of the whole model",
        )
    for kind, tensor in {each.tensor_type: each for each in tensors.values()}.items():
        try:
            gguf.dequantize(tensor.data[:1] if tensor.data.ndim > 1 else tensor.data, kind)
        except (NotImplementedError, ValueError, TypeError) as error:
            raise metadata.refusal(
                "tensors in a quantization that the library gguf reads",
                f"{kind.name} ({error}): use a file of F16, BF16, Q8_0 or K-quants",
            ) from error


def interleaved(rows: int, heads: int) -> np.ndarray:
    """For each row of a GGUF file, the row of a folder; `argsort` is the other way."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def heads_of(name: str, spec: Spec, architecture: Architecture) -> int | None:
    """Heads of a folder's tensor whose rows have another order in a GGUF file; None for others."""
    heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads} if architecture.interleaved else {}
    return heads.get(name.split(".")[-2])


def folder_parts(
    name: str, tensor: gguf.ReaderTensor, spec: Spec, architecture: Architecture
) -> Iterator[np.ndarray]:
    """Rows of a folder's tensor in order, float32, never all of a large one at once."""
    rows, data = int(tensor.shape[-1]), tensor.data
    heads = heads_of(name, spec, architecture)
    order = None if heads is None else np.argsort(interleaved(rows, heads))
    step = max(NUMBERS_AT_ONCE * rows // max(tensor.n_elements, 1), 1)
    for start in range(0, rows, step):
        chosen = slice(start, start + step) if order is None else order[start : start + step]
        if data.ndim == 1:  # of bytes where it is quantized
            part = gguf.dequantize(data, tensor.tensor_type)[chosen]
        else:
            part = gguf.dequantize(data[chosen], tensor.tensor_type)
        yield part - 1 if architecture.shifted_norms and name.endswith("norm.weight") else part


# llama.cpp's numbers of what most tensors of a file are.
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_VALUE_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}


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
    values = settings.metadata_of(spec, file.stem) | {"general.file_type": _FILE_TYPES[gguf_type]}
    values |= tokenizer_metadata(tokenizer, spec.vocabulary)
    metadata = Metadata(file, values)
    names = gguf_names(metadata.architecture, spec.layers, shapes)
    scaled = (rope for rope in spec.ropes if dict(rope.scaling).get("rope_type") == "llama3")
    factors = dict([(ROPE_FREQS, settings.rope_factors(rope)) for rope in scaled][:1])
    stored = {name: each.shape for name, each in factors.items()}
    stored |= {names[name]: shape for name, shape in shapes.items()}
    again = settings.spec_of(metadata, stored, factors.get(ROPE_FREQS))
    if again != spec:
        raise InputError(
            f"{file}: a GGUF file would say something else of this {spec.family} model: "
            f"{spec.difference(again)}; `marin-rl export RUN --hf FOLDER` writes its folder"
        )
    with (
        whole_or_absent(file) as partial,
        closing(gguf.GGUFWriter(partial, metadata.architecture)) as writer,
    ):
        for key, value in values.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif key != "general.architecture":  # which is the writer's own
                writer.add_key_value(key, value, _VALUE_TYPES[type(value)])
        for name, shape in stored.items():
            _add_tensor(writer, name, shape, gguf_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in chain(factors.values(), _arrays(model, settings.architecture_of(metadata))):
            writer.write_tensor_data(gguf.quantize(array, _type_of(array.shape, gguf_type)))


def _arrays(model: LanguageModel, architecture: Architecture) -> Iterator[np.ndarray]:
    """Tensors as a GGUF file has them, float32, in the order of `tensor_shapes`."""
    for name, array in exported(model):
        heads = heads_of(name, model.spec, architecture)
        rows = array if heads is None else array[interleaved(len(array), heads)]
        shifted = architecture.shifted_norms and name.endswith("norm.weight")
        yield np.ascontiguousarray(rows + 1 if shifted else rows, np.float32)


def _type_of(shape: tuple[int, ...], gguf_type: str) -> gguf.GGMLQuantizationType:
    """The type of a tensor: vectors stay whole, and rows that are no whole blocks are float16."""
    kind = "f32" if len(shape) == 1 else gguf_type
    if kind == "q8_0" and shape[-1] % 32:  # numbers of a block
        kind = "f16"
    return gguf.GGMLQuantizationType[kind.upper()]


def _add_tensor(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], gguf_type: str) -> None:
    kind = _type_of(shape, gguf_type)
    plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    dtype = np.dtype(plain.get(kind, np.uint8))
    stored = shape if kind in plain else gguf.quant_shape_to_byte_shape(shape, kind)
    writer.add_tensor_info(name, stored, dtype, math.prod(stored) * dtype.itemsize, kind)


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
        metadata, tensors = settings.open_gguf(file)
        architecture = settings.architecture_of(metadata)
        factors = tensors.get(ROPE_FREQS)
        spec = settings.spec_of(
            metadata,
            shapes_of(tensors),
            None if factors is None else gguf.dequantize(factors.data, factors.tensor_type),
        )
        model = model_of(spec)
        shapes = tensor_shapes(model)
        names = gguf_names(metadata.architecture, spec.layers, shapes)
        check_tensors(metadata, tensors, {names[name]: shape for name, shape in shapes.items()})
        tokenizer, ends = read_tokenizer(metadata)
        check_vocabulary(tokenizer, spec.vocabulary)
    with phase("writing the Hugging Face folder"), whole_or_absent(output) as partial:
        parts = (folder_parts(n, tensors[names[n]], spec, architecture) for n in shapes)
        write_folder(partial, model, tokenizer, parts, dtype)
        special = special_ids(tokenizer) | {"eos_token_id": ends}
        write_json(partial / "generation_config.json", special)
    return Imported(
        folder=output,
        family=spec.family,
        tensors=dict(Counter(each.tensor_type.name for each in tensors.values())),
        chat_template=bool(tokenizer.chat_template),
    )
