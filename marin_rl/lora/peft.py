"""PEFT's folders: adapter_config.json and adapter_model.safetensors, read and written.

PEFT names every layer by itself (`base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight`,
[r, in]); here they are stacked. A folder may come from anywhere: sizes are looked at before data,
nothing in it is executed, and what would be computed otherwise than PEFT does is refused by name.
No link is followed out of it, but to files of the same download in the Hugging Face cache.

`policy.lora` names such a folder, or describes an adapter: `modules` are `all-linear`, names
(`q_proj`, `mlp.up_proj`) or patterns (`mlp.*`, `*.?_proj`). `ranks` and `alphas` give modules
their own, by the same names and patterns; the first that matches applies.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from marin_rl import plain_files
from marin_rl.config import LoraConfig
from marin_rl.errors import InputError
from marin_rl.lora.adapter import (
    ALL_LINEAR,
    Adapter,
    LinearShape,
    LoraModule,
    Shapes,
    a_name,
    adapter_of,
    b_name,
    check_rank,
    linear_shapes,
    module_name,
)

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
HEADER_BYTES_MAX = 2**24  # far above any adapter's
# Far above those of any adapter; beyond them logits overflow, and what is sampled is uniform noise.
VALUE_MAX = SETTING_MAX = 1e6

# Layers below 10,000 and without leading zeros: one layer has one spelling.
_KEY = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9]\d{0,3})\.([a-z_]+\.[a-z_]+)\.lora_([AB])\.weight"
)
# Names with dots, as PEFT writes them; a regular expression of a stranger may run for hours.
_PATTERN = re.compile(r"\^?[\w.\\]+\$?")

# What is read, and keys that change no number whatever they are.
_READ = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "target_modules",
    "init_lora_weights",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "exclude_modules", "lora_dropout", "layers_pattern",
    "loftq_config", "eva_config", "corda_config", "megatron_config", "megatron_core",
    "runtime_config", "qalora_group_size",
}  # fmt: skip
_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")  # others change the base
# Values by which PEFT says that an option is off; an unknown key is refused at any other.
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "none")
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def read_peft(folder: str | Path, shapes: Shapes) -> Adapter:
    """Read an adapter for a base whose parameters have these shapes; float32, layers stacked.

    Raises InputError for a folder that is no adapter of this base, that is damaged or too large, or
    that asks for what is not computed here (DoRA, biases, modules saved whole, …).
    """
    path = Path(folder)
    # Settings before tensors: an adapter of another kind is refused by name, not by its arrays.
    config = _checked_config(path)
    tensors = _read_tensors(path, shapes)
    layers = linear_shapes(shapes)
    names = {module_name(path): path for path in layers}
    parts: dict[str, dict[tuple[int, str], np.ndarray]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match[2] not in names:
            raise InputError(
                f"{path / WEIGHTS_FILE}: tensor {key!r:.200} belongs to no linear layer of the "
                f"base: expected lora_A and lora_B of {', '.join(names)}"
            )
        _check_target(path, config, f"model.layers.{match[1]}.{match[2]}")
        parts.setdefault(names[match[2]], {})[int(match[1]), match[3]] = tensor
    modules, arrays = {}, {}
    # In the base's order, not the file's.
    for weight in (weight for weight in layers if weight in parts):
        modules[weight], a, b = _stacked(path, config, weight, layers[weight], parts[weight])
        arrays |= {a_name(weight): a, b_name(weight): b}
    if not modules:
        raise InputError(f"{path / WEIGHTS_FILE} holds no tensor: expected lora_A and lora_B")
    return adapter_of(modules, arrays, shapes)


def check_adapter_folder(folder: Path) -> None:
    """Raise InputError for a folder without the two files of an adapter."""
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise InputError(
            f"no adapter at {folder}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, as "
            "PEFT's save_pretrained writes it"
        )


def _read(folder: Path, name: str, bytes_max: int) -> bytes:
    """Return the bytes of a file of an adapter.

    Raises InputError for a link out of the folder, what is no regular file, and too many bytes.
    """
    file, top = folder / name, Path(os.path.realpath(folder))
    if top.parent.name == "snapshots":  # of the Hugging Face cache: its files link to ../../blobs
        top = top.parent.parent
    place = Path(os.path.realpath(file))
    if not place.is_relative_to(top):
        raise InputError(f"{file} is a link that leads out of {folder}: copy the file there")
    try:
        # Part by part without links: a folder on the way may be replaced by one in the meantime.
        with plain_files.folder_below(top, place.relative_to(top).parts[:-1]) as below:
            opened = os.open(place.name, os.O_RDONLY | plain_files.CAREFULLY, dir_fd=below)
        with os.fdopen(opened, "rb") as data:
            plain_files.check_regular(file, os.fstat(data.fileno()), bytes_max)
            return data.read(bytes_max)
    except OSError as error:
        raise InputError(f"cannot read {file}: {os.strerror(error.errno or 0)}") from None


# ---------------------------------------------------------------- adapter_config.json


def _checked_config(folder: Path) -> Mapping[str, Any]:
    """Read adapter_config.json. Raises InputError for what cannot be computed as it says."""
    check_adapter_folder(folder)
    plain_files.check_model_folder(folder)
    file = folder / CONFIG_FILE
    config = plain_files.object_in(file, _read(folder, CONFIG_FILE, plain_files.SETTINGS_BYTES_MAX))
    if config.get("peft_type") != "LORA":
        raise InputError(f"{file}: expected peft_type LORA, found {config.get('peft_type')!r:.80}")
    start = config.get("init_lora_weights", True)
    if not any(start is known or start == known for known in _INITIALISATIONS):
        raise InputError(
            f"{file}: init_lora_weights {start!r:.80} changes the base's weights; expected one of "
            f"{_INITIALISATIONS}: convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    for key in sorted(set(config) - _READ - _WITHOUT_EFFECT):
        if not any(config[key] == neutral for neutral in _NEUTRAL):
            raise InputError(
                f"{file}: {key} is {config[key]!r:.80}, which is not supported; expected null or "
                "false: only A and B of linear layers are read"
            )
    _check_numbers(file, config)
    return config


def _check_numbers(file: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError unless rank, alpha, their patterns and the scale have their types."""
    if not isinstance(config.get("use_rslora", False), bool):
        raise InputError(f"{file}: expected use_rslora true or false")
    for key, pattern, kinds in (
        ("r", "rank_pattern", (int,)),
        ("lora_alpha", "alpha_pattern", (int, float)),
    ):
        patterns = config.get(pattern) or {}
        if not isinstance(patterns, dict):
            raise InputError(f"{file}: expected {pattern} to be an object")
        for name, value in {key: config.get(key), **patterns}.items():
            # True is an int to isinstance, and would be read as rank 1.
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise InputError(f"{file}: expected a number for {name!r:.80}, found {value!r:.80}")
            if abs(value) > SETTING_MAX:
                raise InputError(
                    f"{file}: expected at most {SETTING_MAX:g} for {name!r:.80}, "
                    f"found {value!r:.80}"
                )
            if name != key and not _PATTERN.fullmatch(name):
                raise InputError(
                    f"{file}: {pattern} has the pattern {name!r:.80}; expected names of modules, "
                    "such as model.layers.0.self_attn.q_proj: write them out"
                )


def _check_target(folder: Path, config: Mapping[str, Any], name: str) -> None:
    """Raise InputError for a module with tensors that a list of `target_modules` leaves out.

    PEFT ignores such tensors, so that its numbers would be others than ours.
    """
    targets = config.get("target_modules")
    # a text is a regular expression or all-linear: a stranger's pattern is not evaluated
    if not isinstance(targets, list):
        return
    if not any(name == target or name.endswith(f".{target}") for target in targets):
        raise InputError(
            f"{folder / CONFIG_FILE}: target_modules {targets!r:.200} has not {name}, which "
            f"{WEIGHTS_FILE} has tensors of: expected both of one adapter; copy the folder again"
        )


def _setting(config: Mapping[str, Any], key: str, pattern: str, name: str) -> Any:
    """Setting of a module by the first pattern that matches it, else that of all modules."""
    for text, value in (config.get(pattern) or {}).items():
        plain = text.removeprefix("^").removesuffix("$").replace("\\.", ".")
        # Without `^` a pattern matches the end of a name, at a dot, as in PEFT.
        if name == plain or (not text.startswith("^") and name.endswith(f".{plain}")):
            return value
    return config[key]


# ---------------------------------------------------------------- adapter_model.safetensors


def _read_tensors(folder: Path, shapes: Shapes) -> dict[str, np.ndarray]:
    """Tensors of a folder by name, float32. Raises InputError where damaged or too large.

    No file of an adapter is larger than A and B of full rank.
    """
    full = sum(
        math.prod(layer.a_shape(layer.rank_max)) + math.prod(layer.b_shape(layer.rank_max))
        for layer in linear_shapes(shapes).values()
    )
    # 4 bytes for each number: float32 is the widest dtype that is read.
    file = folder / WEIGHTS_FILE
    data = _read(folder, WEIGHTS_FILE, HEADER_BYTES_MAX + 4 * full)
    try:
        entries = deserialize(data)
    except SafetensorError as error:
        raise InputError(f"cannot read {file}: {error}; copy it again") from error
    tensors: dict[str, np.ndarray] = {}
    for name, entry in entries:
        dtype = entry["dtype"]
        if dtype not in _DTYPES:
            raise InputError(f"{file}: tensor {name!r:.200} is {dtype}: expected F32, F16 or BF16")
        numbers = np.frombuffer(entry["data"], _DTYPES[dtype])
        if dtype == "BF16":
            # The upper half of a float32; NumPy has no such dtype.
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = numbers.astype(np.float32).reshape(entry["shape"])
    return tensors


def _stacked(
    folder: Path,
    config: Mapping[str, Any],
    weight: str,
    layer: LinearShape,
    parts: Mapping[tuple[int, str], np.ndarray],
) -> tuple[LoraModule, np.ndarray, np.ndarray]:
    """A and B of all layers of one kind, and their rank and alpha.

    Layers of a smaller rank are filled up with zeros, and those of another scale have it in B.
    """
    name, count = module_name(weight), layer.layers
    if sorted(parts) != sorted((index, side) for index in range(count) for side in "AB"):
        raise InputError(
            f"{folder / WEIGHTS_FILE}: expected lora_A and lora_B of {name} in each of the "
            f"{count} layers of the base, found {len(parts)} tensors; use the base that the "
            "adapter was made for, or copy the file again"
        )
    # PEFT has a rank and an alpha for every layer, one stacked module a single pair.
    single = [_module(folder, config, name, layer, parts, index) for index in range(count)]
    widest = max(single, key=lambda module: module.rank)
    a = np.zeros((count, widest.rank, math.prod(layer.inputs)), np.float32)  # [L, r, in]
    b = np.zeros((count, math.prod(layer.outputs), widest.rank), np.float32)  # [L, out, r]
    for index, module in enumerate(single):
        a[index, : module.rank] = parts[index, "A"]
        b[index, :, : module.rank] = parts[index, "B"]
        if module.scale != widest.scale:
            # The stacked module applies the widest one's scale to all layers.
            b[index] *= np.float32(module.scale / widest.scale)
    for side, values in (("A", a), ("B", b)):
        largest = float(np.abs(values).max(initial=0.0))
        if largest > VALUE_MAX:  # NaN is refused with all that is not finite
            raise InputError(
                f"{folder / WEIGHTS_FILE}: lora_{side} of {name} has a value of {largest:g}: "
                f"expected finite ones of at most {VALUE_MAX:g}; train or copy it again"
            )
    return widest, a.reshape(layer.a_shape(widest.rank)), b.reshape(layer.b_shape(widest.rank))


def _module(
    folder: Path,
    config: Mapping[str, Any],
    name: str,
    layer: LinearShape,
    parts: Mapping[tuple[int, str], np.ndarray],
    index: int,
) -> LoraModule:
    """Rank and alpha of one layer. Raises InputError unless its A and B have those dimensions."""
    name = f"model.layers.{index}.{name}"
    module = LoraModule(
        rank=_setting(config, "r", "rank_pattern", name),
        alpha=float(_setting(config, "lora_alpha", "alpha_pattern", name)),
        rslora=config.get("use_rslora", False),
    )
    check_rank(name, module, layer)
    inputs, outputs = math.prod(layer.inputs), math.prod(layer.outputs)
    for side, shape in (("A", (module.rank, inputs)), ("B", (outputs, module.rank))):
        if parts[index, side].shape != shape:
            raise InputError(
                f"{folder}: lora_{side} of {name} expected {shape}, found "
                f"{parts[index, side].shape}; use the base that the adapter was made for"
            )
    return module


# ---------------------------------------------------------------- writing


def write_peft(folder: str | Path, adapter: Adapter, base: str | None = None) -> None:
    """Write a new folder that PEFT, vLLM and SGLang load; `base` is the name of the base model."""
    path = Path(folder)
    try:
        # Without exist_ok: of two writers one fails, and neither overwrites the other.
        path.mkdir(parents=True)
    except FileExistsError as error:
        raise InputError(f"{path} exists: expected a new folder; nothing is overwritten") from error
    tensors: dict[str, np.ndarray] = {}
    for weight, module in adapter.modules.items():
        a = np.asarray(adapter.arrays[a_name(weight)], np.float32)
        b = np.asarray(adapter.arrays[b_name(weight)], np.float32)
        for index in range(len(a)):
            key = f"base_model.model.model.layers.{index}.{module_name(weight)}"
            one_a, one_b = a[index].reshape(module.rank, -1), b[index].reshape(-1, module.rank)
            tensors[f"{key}.lora_A.weight"] = np.ascontiguousarray(one_a)  # [r, in]
            tensors[f"{key}.lora_B.weight"] = np.ascontiguousarray(one_b)  # [out, r]
    save_file(tensors, str(path / WEIGHTS_FILE), metadata={"format": "pt"})
    text = json.dumps(_peft_config(adapter, base), indent=2, sort_keys=True)
    (path / CONFIG_FILE).write_text(text + "\n", "utf-8")


def _peft_config(adapter: Adapter, base: str | None) -> dict[str, Any]:
    """adapter_config.json; modules that differ from the first have patterns."""
    first, *_ = adapter.modules.values()
    names = {module_name(weight): module for weight, module in adapter.modules.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": _plain(first.alpha),
        "rank_pattern": {n: m.rank for n, m in names.items() if m.rank != first.rank},
        "alpha_pattern": {n: _plain(m.alpha) for n, m in names.items() if m.alpha != first.alpha},
        "target_modules": sorted(name.rpartition(".")[2] for name in names),
        "use_rslora": first.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
    }


def _plain(alpha: float) -> float | int:
    """Return an integer where alpha is one: vLLM takes no other."""
    return int(alpha) if alpha.is_integer() else alpha


def configured_modules(lora: LoraConfig | None, shapes: Shapes) -> dict[str, LoraModule]:
    """Rank and alpha of every adapted weight of a base, by path, in its order; none without one.

    Raises InputError for names and patterns that match nothing, for ranks that the base cannot
    have, and for a folder that `init_from` names and that is unfit.
    """
    if lora is None:
        return {}
    # Ranks and scales are the folder's own: its arrays have no other shapes.
    if lora.init_from is not None:
        return dict(read_peft(lora.init_from, shapes).modules)
    layers = linear_shapes(shapes)
    names = {path: module_name(path) for path in layers}
    for pattern in (*lora.modules, *lora.ranks, *lora.alphas):
        if pattern != ALL_LINEAR and not any(_matches(pattern, n) for n in names.values()):
            raise InputError(
                f"no linear layer matches {pattern!r}: expected {ALL_LINEAR}, a name or a "
                f"pattern of {', '.join(names.values())}; embeddings and the head stay frozen"
            )
    chosen = {
        path: _module_of(lora, name)
        for path, name in names.items()
        if any(pattern == ALL_LINEAR or _matches(pattern, name) for pattern in lora.modules)
    }
    for path, module in chosen.items():
        check_rank(names[path], module, layers[path])
    return chosen


def _module_of(lora: LoraConfig, name: str) -> LoraModule:
    assert lora.rank is not None, "the configuration names a rank or a folder"
    rank = next((r for pattern, r in lora.ranks.items() if _matches(pattern, name)), lora.rank)
    alphas = (a for pattern, a in lora.alphas.items() if _matches(pattern, name))
    return LoraModule(rank=rank, alpha=next(alphas, lora.alpha), rslora=lora.rslora)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)
