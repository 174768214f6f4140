"""Weights of GGUF files by their names in a Hugging Face folder, a part at a time.

The library's table names them. Of interleaved architectures llama.cpp has the rows of q and k in
the order of pairs that its rotary embedding turns, a folder those of the two halves.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from gguf import MODEL_ARCH_NAMES, ReaderTensor, dequantize, get_tensor_name_map

from marin_rl.gguf.files import Metadata
from marin_rl.gguf.settings import Architecture
from marin_rl.models.spec import Spec

ROPE_FREQS = "rope_freqs.weight"
NUMBERS_AT_ONCE = 2**24  # 64 MiB in float32


def shapes_of(tensors: Mapping[str, ReaderTensor]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, as NumPy has them: GGUF has the last axis first."""
    return {name: tuple(map(int, each.shape[::-1])) for name, each in tensors.items()}


def gguf_names(architecture: str, layers: int, names: Iterable[str]) -> dict[str, str]:
    """Names of tensors in a GGUF file by their names in a folder."""
    (kind,) = (each for each, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, layers)
    found = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    known = {name: ours for name, ours in found.items() if ours is not None}
    assert len(set(known.values())) == len(found), "each tensor of these families has one name"
    return known


def check_tensors(
    metadata: Metadata,
    tensors: Mapping[str, ReaderTensor],
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
            dequantize(tensor.data[:1] if tensor.data.ndim > 1 else tensor.data, kind)
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
    if not architecture.interleaved:
        return None
    part = name.rpartition(".")[0]
    heads = {"q_proj": spec.heads, "k_proj": spec.kv_heads}
    return heads.get(part.rpartition(".")[2])


def folder_parts(
    name: str, tensor: ReaderTensor, spec: Spec, architecture: Architecture
) -> Iterator[np.ndarray]:
    """Rows of a folder's tensor in order, float32, never all of a large one at once."""
    rows, data = int(tensor.shape[-1]), tensor.data
    heads = heads_of(name, spec, architecture)
    order = None if heads is None else np.argsort(interleaved(rows, heads))
    step = max(NUMBERS_AT_ONCE * rows // max(tensor.n_elements, 1), 1)
    for start in range(0, rows, step):
        chosen = slice(start, start + step) if order is None else order[start : start + step]
        if data.ndim == 1:  # of bytes where it is quantized
            part = dequantize(data, tensor.tensor_type)[chosen]
        else:
            part = dequantize(data[chosen], tensor.tensor_type)
        yield part - 1 if architecture.shifted_norms and name.endswith("norm.weight") else part
