"""A GGUF file opened: its metadata by key, and its tensors, still in the file.

Nothing a file says of itself is trusted: a length that leads past its end, too many fields, or a
value of another type is one error. Tensors are mapped, so that only what is converted is in memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor

from marin_rl.errors import InputError
from marin_rl.plain_files import check_regular

# A vocabulary of 262,144 tokens and 514,906 merges takes 1.8 million, of some 130 bytes each.
FIELDS_MAX = 2**22
_REFUSALS = (ValueError, ArithmeticError, KeyError, IndexError, RecursionError, TypeError)


class Metadata:
    """Keys and values of a GGUF file. Getters raise InputError for a value of another type."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        return self._value(key, default, str)

    def flag(self, key: str, *, default: bool) -> bool:
        return self._value(key, default, bool)

    def index(self, key: str) -> int | None:
        """Return the id of a token; None where the file names none."""
        return None if key not in self.values else self._value(key, None, int)

    def texts(self, key: str) -> list[str]:
        return self._list(key, str)

    def integers(self, key: str) -> list[int]:
        return self._list(key, int)

    def floats(self, key: str) -> list[float]:
        return self._list(key, float)

    def own(self) -> dict[str, Any]:
        """Keys of the model's architecture, without its name in front."""
        prefix = f"{self.architecture}."
        return {k.removeprefix(prefix): v for k, v in self.values.items() if k.startswith(prefix)}

    def refusal(self, expected: str, found: str) -> InputError:
        return InputError(f"{self.path}: expected {expected}, found {found}")

    def _value(self, key: str, default: Any, kind: Any) -> Any:
        value = self.values.get(key, default)
        if type(value) is not kind:
            raise self.refusal(f"{key} of type {kind.__name__}", f"{value!r:.80}")
        return value

    def _list(self, key: str, kind: Any) -> list[Any]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.refusal(f"a list at {key}", f"{value!r:.80}; use a file that has it")
        return value


def open_gguf(path: Path) -> tuple[Metadata, dict[str, ReaderTensor]]:
    """Read a file's metadata, and map its tensors.

    Raises InputError for what is no GGUF file, one cut short, and one of several parts.
    """
    try:
        check_regular(path, path.stat())
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}; name a GGUF file") from error
    if magic != b"GGUF":
        raise InputError(f"{path}: expected a GGUF file, which begins with GGUF, found {magic!r}")
    try:
        with np.errstate(over="raise"):  # a sum of offsets in 64 bits
            reader = _Reader(path)
        values = {key: field.contents() for key, field in reader.fields.items()}
    except _REFUSALS as error:
        raise InputError(
            f"{path}: expected a whole GGUF file of version 2 or 3, found {error}; copy it again"
        ) from error
    metadata = Metadata(path, values)
    parts = values.get("split.count", 1)
    if parts not in (0, 1):
        raise metadata.refusal(
            "one file", f"one of {parts} parts: merge them by `llama-gguf-split --merge`"
        )
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


class _Reader(GGUFReader):
    """The library's reader with bounds, and lists of numbers read at once.

    The library's own takes what a length leads past for empty, and would count to 2**64.
    """

    _fields = 0

    def _get(
        self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None
    ) -> np.ndarray:
        self._fields += 1
        if self._fields > FIELDS_MAX:
            raise ValueError(f"more than {FIELDS_MAX} fields")
        order = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        if int(offset) + int(count) * order.itemsize > len(self.data):
            raise ValueError(f"a field at byte {offset} that ends after the file's end")
        return np.frombuffer(self.data, order, int(count), int(offset))

    def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = self._get(orig_offs, np.uint32)
        scalar = self.gguf_scalar_to_np.get(GGUFValueType(kind[0]))
        if scalar is None:
            return super()._get_field_parts(orig_offs, raw_type)
        length = self._get(orig_offs + 4, np.uint64)
        if length[0] > FIELDS_MAX:
            raise ValueError(f"a list of {length[0]} numbers")
        values = self._get(orig_offs + 12, scalar, length[0])
        types = [GGUFValueType.ARRAY, GGUFValueType(kind[0])]
        return 12 + values.nbytes, [kind, length, values], [2], types
