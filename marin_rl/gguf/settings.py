"""Settings of a model in a GGUF file, as its config.json has them, and the other way.

One table has both directions. A key that is not in it is refused: it would change what is computed.
Nothing a file says of itself is trusted: a length that leads past its end, too many fields, or a
value of another type is one error. Tensors are mapped, so that only what is converted is in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from transformers import CONFIG_MAPPING

from marin_rl.errors import InputError
from marin_rl.models.families import config_json, described
from marin_rl.models.spec import Rope, Spec
from marin_rl.plain_files import check_regular

# A vocabulary of 262,144 tokens and 514,906 merges takes 1.8 million, of some 130 bytes each.
FIELDS_MAX = 2**22

Value = TypeVar("Value")


class Metadata:
    """Keys and values of a GGUF file. Getters raise InputError for a value of another type."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self.architecture = self.value("general.architecture", str)

    def own(self) -> dict[str, Any]:
        """Keys of the model's architecture, without its name in front."""
        prefix = f"{self.architecture}."
        return {k.removeprefix(prefix): v for k, v in self.values.items() if k.startswith(prefix)}

    def refusal(self, expected: str, found: str) -> InputError:
        return InputError(f"{self.path}: expected {expected}, found {found}")

    def value(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        value = self.values.get(key, default)
        if type(value) is not kind:
            raise self.refusal(f"{key} of type {kind.__name__}", f"{value!r:.80}")
        return value

    def list(self, key: str, kind: type[Value]) -> list[Value]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.refusal(f"a list at {key}", f"{value!r:.80}; use a file that has it")
        return value


def open_gguf(path: Path) -> tuple[Metadata, dict[str, ReaderTensor]]:
    """Read a file's metadata, and map its tensors. Raises InputError for damaged files."""
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
    except (ValueError, ArithmeticError, LookupError, RecursionError, TypeError) as error:
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


_COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
NUMBER_MAX = 2**30
_FRACTIONS = (
    "rms_norm_eps", "rope_theta", "_softcapping", "_multiplier", "logits_scaling", "_freq",
)  # fmt: skip
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Read elsewhere, or without a meaning for a decoder.
_OTHERS = {
    "vocab_size",
    "attention.value_length",
    "attention.causal",
    "attention.sliding_window_pattern",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.finetuned",
    *(f"rope.scaling.{key}" for key in _SCALING),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's family in both words; `interleaved`: rows of q and k are in llama.cpp's order.

    `by_width`: Gemma's model of so many layers, and no other, scales attention by width / heads.
    """

    family: str
    settings: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False
    by_width: int | None = None

    @property
    def shifted_norms(self) -> bool:
        """True where norms are stored as their difference from 1 in a folder, not in GGUF."""
        return self.family.startswith("gemma")


_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {f"{kind}_logit_softcapping": f"{kind}_logit_softcapping" for kind in ("attn", "final")}
_LOCAL = {"rope.freq_base_swa": "rope_local_base_freq"}
ARCHITECTURES = {
    "llama": Architecture(family="llama", interleaved=True),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3"),
    "gemma": Architecture(family="gemma"),
    "gemma2": Architecture(family="gemma2", settings=_WINDOW | _CAPS, by_width=46),
    "gemma3": Architecture(family="gemma3_text", settings=_WINDOW | _CAPS | _LOCAL, by_width=62),
    "phi3": Architecture(family="phi3", settings=_WINDOW),
    "olmo2": Architecture(family="olmo2"),
    "smollm3": Architecture(family="smollm3", interleaved=True),
    "granite": Architecture(family="granite", settings=_GRANITE, interleaved=True),
}
_DEFAULTED = ("attention.head_count_kv", "attention.key_length", "rope.freq_base")


def architecture_of(metadata: Metadata) -> Architecture:
    """Return a file's architecture. Raises InputError for one that is not converted."""
    known = ARCHITECTURES.get(metadata.architecture)
    if known is None:
        raise metadata.refusal(
            f"one of the architectures {', '.join(ARCHITECTURES)}",
            f"{metadata.architecture!r}: use the model's own Hugging Face folder",
        )
    return known


def spec_of(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: np.ndarray | None
) -> Spec:
    """The model of a file, by its metadata, shapes of its tensors, and its `rope_freqs`.

    Raises InputError naming what would be computed otherwise than the file says.
    """
    architecture, own = architecture_of(metadata), metadata.own()
    tree = _numbers(metadata, _COMMON | architecture.settings)
    if tree["num_hidden_layers"] > len(shapes):
        raise metadata.refusal(f"tensors of {tree['num_hidden_layers']} layers", str(len(shapes)))
    heads, width = tree["num_attention_heads"], tree["hidden_size"]
    size = tree.setdefault("head_dim", width // heads)
    tree.setdefault("num_key_value_heads", heads)
    tree.setdefault("rope_theta", 10_000.0)
    rotated = own.get("rope.dimension_count", size)
    partial = architecture.family == "phi3" and rotated in range(2, size, 2)
    value_size = own.get("attention.value_length", size)
    if size < 2 or size % 2 or value_size != size or not (rotated == size or partial):
        found = f"{size} of keys, {value_size!r} of values, {rotated!r} rotated"
        raise metadata.refusal("an even number of dimensions of a head", found)
    tree |= {
        "model_type": architecture.family,
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "partial_rotary_factor": rotated / size,
        "rope_scaling": _scaling(metadata, Rope(theta=tree["rope_theta"], size=rotated), factors),
    }
    if architecture.by_width is not None:
        by_width = architecture.by_width == tree["num_hidden_layers"]
        tree["query_pre_attn_scalar"] = width // heads if by_width else size
    if pattern := own.get("attention.sliding_window_pattern"):
        if not isinstance(pattern, list) or not all(isinstance(each, bool) for each in pattern):
            raise metadata.refusal("sliding_window_pattern as a list of layers", f"{pattern!r:.80}")
        kinds = {True: "sliding_attention", False: "full_attention"}
        tree |= {"layer_types": [kinds[each] for each in pattern]}
    return described(tree, metadata.path)


def _numbers(metadata: Metadata, known: Mapping[str, str]) -> dict[str, Any]:
    """Numbers of a config.json by the keys of a file. Raises InputError for an unknown key."""
    own = metadata.own()
    numbers: dict[str, Any] = {}
    for key, value in sorted(own.items()):
        name = f"{metadata.architecture}.{key}"
        if key in _OTHERS or value == 0:  # no window, no experts
            continue
        if key not in known:
            raise metadata.refusal("known settings", f"{name} {value!r:.40}: it is not supported")
        kinds = (int, float) if known[key].endswith(_FRACTIONS) else (int,)
        if type(value) not in kinds or not 0 < value <= NUMBER_MAX:
            raise metadata.refusal(f"a number up to {NUMBER_MAX} as {name}", f"{value!r:.80}")
        numbers[known[key]] = _shortest(value)
    for key, name in _COMMON.items():
        if name not in numbers and key not in _DEFAULTED:
            raise metadata.refusal(f"{metadata.architecture}.{key}", "none")
    return numbers


def _shortest(value: Any) -> Any:
    """A number as it was before the file made it float32: 9.999999747378752e-06 is 1e-5."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _scaling(metadata: Metadata, rope: Rope, factors: np.ndarray | None) -> dict[str, Any] | None:
    own = metadata.own()
    kind = own.get("rope.scaling.type", "none")
    if factors is not None:
        return _llama3(metadata, rope, factors)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise metadata.refusal("rope.scaling.type none, linear or yarn", repr(kind))
    names = ("factor",) if kind == "linear" else tuple(_SCALING)
    found = {n: own[f"rope.scaling.{n}"] for n in names if f"rope.scaling.{n}" in own}
    if not all(type(value) in (int, float) and value > 0 for value in found.values()):
        raise metadata.refusal("numbers at rope.scaling", f"{found!r:.80}")
    return {"rope_type": kind} | {_SCALING[n]: _shortest(value) for n, value in found.items()}


def _llama3(metadata: Metadata, rope: Rope, factors: np.ndarray) -> dict[str, Any]:
    """Recover the parameters of Llama 3.1's scaling from its factors, all that the file has."""
    for length in (2**power for power in range(3, 21)):
        scaling = {
            "rope_type": "llama3",
            "factor": _shortest(float(factors.max(initial=1))),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": length,
        }
        ours = rope_factors(Rope(theta=rope.theta, size=rope.size, scaling=tuple(scaling.items())))
        if ours.shape == factors.shape and np.allclose(ours, factors, rtol=1e-5):
            return scaling
    raise metadata.refusal("rope_freqs of Llama 3.1's scaling", "other factors: use the own folder")


def rope_factors(rope: Rope) -> np.ndarray:
    """Divisors of the frequencies, float32 [size / 2]."""
    return Rope(theta=rope.theta, size=rope.size).frequencies / rope.frequencies


def metadata_of(spec: Spec, name: str) -> dict[str, Any]:
    """Keys and values of a model; the inverse of `spec_of`. Raises InputError where it has none."""
    family = "llama" if spec.family == "mistral" else spec.family
    kinds = [kind for kind, each in ARCHITECTURES.items() if each.family == family]
    if not kinds:
        families = ", ".join(each.family for each in ARCHITECTURES.values())
        raise InputError(
            f"a {spec.family} model cannot be a GGUF file: expected one of {families}; "
            "`marin-rl export RUN --hf FOLDER` writes its folder"
        )
    (kind,) = kinds
    hf = CONFIG_MAPPING[spec.family](**config_json(spec))
    known = _COMMON | ARCHITECTURES[kind].settings
    found = {key: getattr(hf, setting, None) for key, setting in known.items()}
    if found.get("attention.sliding_window", 0) is None:
        found["attention.sliding_window"] = 0
    own: dict[str, Any] = {
        key: float(value) if known[key].endswith(_FRACTIONS) else value
        for key, value in found.items()
        if value is not None
    }
    own |= {"vocab_size": spec.vocabulary, "attention.value_length": spec.head_size}
    if spec.ropes:
        own["rope.dimension_count"] = spec.ropes[0].size
    scaling = next((dict(rope.scaling) for rope in spec.ropes if rope.scaling), {})
    # Of Llama 3.1 the file has factors in place of these keys.
    if scaling and scaling["rope_type"] != "llama3":
        own["rope.scaling.type"] = scaling["rope_type"]
        for key, name in _SCALING.items():
            if name in scaling:
                value = scaling[name] if key.endswith("length") else float(scaling[name])
                own[f"rope.scaling.{key}"] = value
    common = {"general.architecture": kind, "general.type": "model", "general.name": name}
    return common | {f"{kind}.{key}": value for key, value in own.items()}
