"""A tree of arrays in one file, as safetensors: how the checkpoint of an adapter lies.

Orbax takes tens of milliseconds of CPU time for the smallest tree, one file of a few megabytes
takes three. A name in the file is the path of an array in nested dicts, as a JSON list. Leaves out
when a tree is packed, and the digests that prove the bytes (`checkpoints`).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize, serialize

from marin_rl.errors import CorruptObject
from schemas.strict_json import parse_json

PACKED = "arrays.safetensors"

_DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype("<i8"), "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"), "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip


def packed(tree: Mapping[str, Any]) -> bytes:
    """Return nested dicts of NumPy arrays as the bytes of a file; the same for equal trees."""
    return serialize(
        {
            # JSON and not a joined path: names of arrays have slashes, and dots, of their own.
            json.dumps(path): {
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "data": array.tobytes(),
            }
            for path, array in _leaves(tree)
        }
    )


def unpacked(data: bytes, source: str) -> dict[str, Any]:
    """Return the tree of a file. Raises CorruptObject, naming `source`, for any other bytes."""
    tree: dict[str, Any] = {}
    try:
        for name, tensor in deserialize(data):
            *folders, last = parse_json(name.encode())
            branch = tree
            for folder in folders:
                branch = branch.setdefault(folder, {})
            if not isinstance(branch, dict) or last in branch:
                raise ValueError(f"two arrays at {name}")
            # A view of the bytes that were read, and no second copy of them.
            array = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]])
            branch[last] = array.reshape(tensor["shape"])
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptObject(f"{source}: expected a tree of arrays, found {error}") from error
    return tree


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for name, branch in tree.items():
        if isinstance(branch, Mapping):
            yield from _leaves(branch, (*path, name))
        else:
            yield (*path, name), branch
