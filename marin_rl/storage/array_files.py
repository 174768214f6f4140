"""Arrays in safetensors files, whole or cut into boxes, which are read back into other boxes.

A box is a start and an end on each axis of an array. A tensor is named by the path of its array in
a tree, as JSON, and where it is not the whole array by its starts too. Leaves out which process
writes what, and the digests of the files (checkpoints.py).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from marin_rl.errors import CorruptObject
from schemas.strict_json import parse_json

SUFFIX = ".safetensors"

Box = tuple[tuple[int, int], ...]
ArrayPath = tuple[str, ...]
Header = Mapping[str, Any]  # of a file: dtype, shape and place of each tensor by its name

_DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype("<i8"), "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"), "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def extents(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box)


def within(box: Box, outer: Box) -> tuple[Any, ...]:
    """The index of a box in an array that holds `outer`, which contains it: a view by it."""
    pairs = zip(box, outer, strict=True)
    # With an ellipsis an array without axes stays an array.
    return *(slice(s - start, e - start) for (s, e), (start, _) in pairs), ...


def overlap(one: Box, other: Box) -> Box | None:
    both = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(one, other, strict=True))
    return both if all(start < end for start, end in both) else None


def cut(box: Box, itemsize: int, bytes_max: int, axes: int | None = None) -> Iterator[Box]:
    """Cut a box into ones of `bytes_max` bytes at most, in their order in memory.

    Only the first `axes` axes are cut, of which an entry may be larger.
    """
    size = math.prod(extents(box)) * itemsize
    axis = next((axis for axis, (start, end) in enumerate(box[:axes]) if end - start > 1), None)
    if size <= bytes_max or axis is None:
        yield box
        return
    start, end = box[axis]
    step = max(1, bytes_max * (end - start) // size)
    for first in range(start, end, step):
        part = (*box[:axis], (first, min(first + step, end)), *box[axis + 1 :])
        yield from cut(part, itemsize, bytes_max, axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a file: a box of an array, all of it or not, and its place after the header."""

    path: ArrayPath
    box: Box
    dtype: np.dtype[Any]
    whole: bool
    offset: int = 0

    @property
    def name(self) -> str:
        starts = [] if self.whole else [[start for start, _ in self.box]]
        # JSON and not a joined path: names of arrays have slashes, and dots, of their own.
        return json.dumps([*self.path, *starts])

    @property
    def nbytes(self) -> int:
        return math.prod(extents(self.box)) * self.dtype.itemsize

    def values(self, data: memoryview, source: str) -> np.ndarray:
        """A view of the tensor in its file. Raises CorruptObject, naming `source`."""
        with _refused(source):
            begin = 8 + int.from_bytes(data[:8], "little") + self.offset
            flat = np.frombuffer(data[begin : begin + self.nbytes], self.dtype)
            return flat.reshape(extents(self.box))


def encoded(tensors: Iterable[tuple[Tensor, np.ndarray]]) -> tuple[bytes, Header]:
    """A file of tensors, and its header; the same for equal tensors."""
    # The largest items first, which aligns all: readers of other projects map them.
    ordered = sorted(tensors, key=lambda item: (-item[0].dtype.itemsize, item[0].name))
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    header, end = dict[str, Any](), 0
    for tensor, _ in ordered:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(extents(tensor.box)),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    flat = (np.ascontiguousarray(values).reshape(-1).view(np.uint8).data for _, values in ordered)
    return b"".join([len(text).to_bytes(8, "little"), text, *flat]), header


def header_of(data: memoryview, source: str) -> Header:
    """The header of a file. Raises CorruptObject, naming `source`."""
    with _refused(source):
        size = int.from_bytes(data[:8], "little")
        if not 0 < size <= len(data) - 8:
            raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
        return parse_json(bytes(data[8 : 8 + size]))


def tensors_of(header: Any, source: str) -> list[Tensor]:
    """The tensors that a header names. Raises CorruptObject, naming `source`."""
    with _refused(source):
        named = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return [_tensor(name, entry) for name, entry in named.items()]


def _tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
    *path, last = parse_json(name.encode())
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    whole = isinstance(last, str)
    path, starts = ([*path, last], [0] * len(shape)) if whole else (path, last)
    numbers = [*shape, *starts, begin, end]
    if not path or not all(isinstance(each, str) for each in path):
        raise ValueError(f"the name {name:.100}")
    if not all(type(each) is int and 0 <= each < 2**53 for each in numbers):
        raise ValueError(f"other numbers than places in the entry of {name:.100}")
    box = tuple((start, start + size) for start, size in zip(starts, shape, strict=True))
    dtype = _DTYPES[entry["dtype"]]
    tensor = Tensor(path=tuple(path), box=box, dtype=dtype, whole=whole, offset=begin)
    if tensor.nbytes != end - begin:
        raise ValueError(f"{end - begin} bytes for the shape {shape} of {name:.100}")
    return tensor


def shapes_of(tensors: Iterable[Tensor], source: str) -> dict[ArrayPath, tuple[str, list[int]]]:
    """Dtypes and shapes of the arrays that tensors make up. Raises CorruptObject."""
    shapes = dict[ArrayPath, tuple[str, list[int]]]()
    with _refused(source):
        for tensor in tensors:
            ends = [end for _, end in tensor.box]
            dtype, known = shapes.setdefault(tensor.path, (tensor.dtype.name, ends))
            if dtype != tensor.dtype.name or len(known) != len(ends):
                raise ValueError(f"two arrays at {tensor.path}")
            shapes[tensor.path] = dtype, [*map(max, known, ends)]
        for path in shapes:
            if any(path[:length] in shapes for length in range(1, len(path))):
                raise ValueError(f"an array below an array, {path}")
    return shapes


@contextmanager
def _refused(source: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptObject(f"{source}: expected a tree of arrays, found {error}") from error
