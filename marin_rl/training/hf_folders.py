"""Hugging Face folders of a policy's model: loaded, checked, and saved.

Which configurations are refused is in `marin_rl.hf_settings`; the modules are those of model.py.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from haliax._src.state_dict import flatten_modules_for_export
from haliax.nn.scan import Stacked
from haliax.state_dict import to_state_dict
from levanter.models.lm_model import LmHeadModel
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from marin_rl.chat_templates import without_date
from marin_rl.errors import InputError
from marin_rl.hf_settings import checked_hf_config
from marin_rl.model_folders import read_hf_config, weight_files
from marin_rl.progress import phase
from marin_rl.tokenizers import check_vocabulary, end_token_ids, export_tokenizer, load_tokenizer
from marin_rl.training.model import (
    FAMILIES,
    LevanterConfig,
    _is_named,
    _template,
    execution,
    family_of,
    with_parameters,
)

# Rotary tables that Llama 2 was saved with: the configuration says what is in them.
_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def hf_template(folder: str | Path) -> LmHeadModel:
    """The module of `load_hf` with shapes in place of arrays; raises InputError as it does."""
    path = Path(folder).resolve()
    return _template(*_hf_architecture(path))


def _hf_architecture(path: Path) -> tuple[LevanterConfig, int]:
    hf_config: Any = checked_hf_config(read_hf_config(path), path)
    family = FAMILIES[hf_config.model_type]
    config = dataclasses.replace(family.levanter.from_hf_config(hf_config), **execution())
    return config, hf_config.vocab_size


@phase("loading the model folder")
def load_hf(folder: str | Path) -> LmHeadModel:
    """Load a local Hugging Face folder of one of `FAMILIES`, weights as float32.

    Raises InputError, before reading any weight, when the folder is incomplete, when its
    configuration describes something that is not supported, or when its tokenizer gives ids that
    the model has no row for; and when the weights do not fit the configuration, or are not finite.
    """
    path = Path(folder).resolve()
    config, vocab_size = _hf_architecture(path)
    tokenizer = load_tokenizer(path)
    check_vocabulary(tokenizer, vocab_size)
    _check_tensors(_exported_shapes(config, vocab_size), path)
    template = _template(config, vocab_size)
    return with_parameters(template, _read_parameters(template, path))


def _read_parameters(template: LmHeadModel, path: Path) -> dict[str, jax.Array]:
    """Parameters of a folder whose tensors were checked, as float32, each read into its place.

    One parameter at a time is in memory twice, and never a whole checkpoint in bfloat16.
    """
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in weight_files(path):
            opened = stack.enter_context(safe_open(str(file), framework="numpy"))
            tensors |= dict.fromkeys(opened.keys(), opened)

        def read(name: str, array: NamedArray) -> jax.Array:
            out = np.empty(array.array.shape, np.float32)
            names = [name.format(layer=index) for index in range(len(out))]
            # a name without a layer names one tensor
            for place, each in zip(out, names, strict=True) if "{" in name else ((out, name),):
                place[...] = tensors[each].get_tensor(each).reshape(place.shape)
            if not np.isfinite(out).all():
                _name_not_finite(path)
            return jax.device_put(out)  # without a copy where that is possible

        return {key: read(name, array) for key, (name, array) in _hf_names(template).items()}


def _hf_names(
    module: eqx.Module, path: str = "", name: str = ""
) -> dict[str, tuple[str, NamedArray]]:
    """Hugging Face's name of every parameter, with `{layer}` where layers are stacked, and itself.

    By the maps of names that Levanter's modules have, which its own export goes by.
    """
    named: dict[str, tuple[str, NamedArray]] = {}
    names: dict[str, str | None] = getattr(module, "_state_dict_key_map", dict)()
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        inner = names.get(field.name, field.name)
        below = ".".join(part for part in (name, inner) if part)
        at = f"{path}/{field.name}" if path else field.name
        if isinstance(module, Stacked) and value is module.stacked:
            below += ".{layer}"
        if _is_named(value):
            named[at] = below, value
        elif isinstance(value, eqx.Module):
            named |= _hf_names(value, at, below)
    return named


def _name_not_finite(path: Path) -> None:
    """Raise InputError with the file, tensor and place of the first value that is not finite."""
    for file in weight_files(path):
        with safe_open(str(file), framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                array = np.asarray(tensors.get_tensor(name), np.float32)
                wrong = np.argwhere(~np.isfinite(array))
                if len(wrong):
                    place = tuple(map(int, wrong[0]))
                    raise InputError(
                        f"{file}: tensor {name} has {len(wrong)} values of {array.size} that are "
                        f"not finite, the first at {list(place)}: {array[place]}; expected finite "
                        "weights: copy the file again, or choose another checkpoint"
                    )
    raise InputError(f"{path}: a weight is too large for float32")


def _exported(model: LmHeadModel) -> dict[str, Any]:
    return to_state_dict(flatten_modules_for_export(eqx.filter(model, eqx.is_array)))


@lru_cache(maxsize=16)
def _exported_shapes(config: LevanterConfig, vocab_size: int) -> Mapping[str, tuple[int, ...]]:
    exported = eqx.filter_eval_shape(_exported, _template(config, vocab_size))
    return {name: tuple(array.shape) for name, array in exported.items()}


def _check_tensors(expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise InputError unless the folder's tensors have these names and shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    for file in weight_files(path):
        try:
            with safe_open(str(file), framework="numpy") as tensors:
                # Only headers: shapes are compared before gigabytes are read.
                names = tensors.keys()
                _check_apart(names, files, file)
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
                files |= dict.fromkeys(names, file)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {file}: {error}; copy it again") from error
    wrong = sorted(name for name in expected if shapes.get(name) != expected[name])
    if _HEAD in shapes and _HEAD not in expected and _EMBEDDING in shapes:
        _check_tied_head(files, path)
        del shapes[_HEAD]
    # A norm or bias that the configuration does not speak of would be dropped silently.
    surplus = sorted(
        name for name in set(shapes) - set(expected) if not _ROTARY_TABLE.fullmatch(name)
    )
    for name in (*wrong, *surplus):
        raise InputError(
            f"{path} does not fit its config.json: tensor {name} expected "
            f"{expected.get(name, 'absent')}, found {shapes.get(name, 'absent')} "
            f"({len(wrong) + len(surplus)} such tensors)"
        )


def _check_apart(names: Iterable[str], files: Mapping[str, Path], file: Path) -> None:
    """Raise InputError for a tensor that an earlier file has too: one of them would be dropped."""
    if twice := sorted(files.keys() & set(names)):
        raise InputError(
            f"{file}: the tensor {twice[0]} is in {files[twice[0]]} too, and one of them would be "
            f"dropped ({len(twice)} such tensors): expected each tensor once"
        )


def _check_tied_head(files: Mapping[str, Path], path: Path) -> None:
    """Raise InputError unless the head of tied embeddings is the embedding a second time."""
    with (
        safe_open(str(files[_HEAD]), framework="numpy") as heads,
        safe_open(str(files[_EMBEDDING]), framework="numpy") as embeddings,
    ):
        head, embedding = heads.get_tensor(_HEAD), embeddings.get_tensor(_EMBEDDING)
    alike = head.shape == embedding.shape and head.dtype == embedding.dtype
    # As bytes: NaN equals itself.
    if alike and np.array_equal(head.view(np.uint8), embedding.view(np.uint8)):
        return
    raise InputError(
        f"{path}: config.json has tie_word_embeddings true, but the tensors {_HEAD} and "
        f"{_EMBEDDING} differ, and the head would be dropped: expected equal ones, or none of the "
        "first; set tie_word_embeddings to false to load both, or remove the head from the file"
    )


@phase("writing the Hugging Face folder")
def save_hf(
    model: LmHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    dtype: str = "float32",
) -> None:
    """Write model.safetensors, config.json and the tokenizer; loads back to equal logits.

    The configuration carries `rope_theta` and `rope_parameters`, so that transformers 4 and 5 and
    the servers built on either read the same rotary base. Where several tokens end a completion,
    generation_config.json lists them.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(np.asarray(array).astype(jnp.dtype(dtype)))
        for name, array in _exported(model).items()
    }
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    export_tokenizer(_dateless(tokenizer), path)
    dtypes = {"dtype": dtype, "torch_dtype": dtype}
    _write_json(path / "config.json", _hf_config_of(model, tokenizer) | dtypes)
    ends = end_token_ids(tokenizer)
    # config.json names one end token; servers read the others from here.
    if len(ends) > 1:
        _write_json(path / "generation_config.json", {"eos_token_id": list(ends)})


def _dateless(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, whose chat template has a run's options but not the day of the run."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or without_date(template) == template:
        return tokenizer
    exported = copy.copy(tokenizer)  # the run's own is in use
    exported.chat_template = without_date(template)
    return exported


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", "utf-8")


def _hf_config_of(model: LmHeadModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    config: Any = model.config
    family = family_of(config)
    tree = config.to_hf_config(model.Vocab.size).to_dict()
    theta, scaling = config.rope.to_hf_config()
    # Levanter writes its default of YaRN's mscale, which Hugging Face means otherwise.
    scaling = {key: value for key, value in (scaling or {}).items() if key != "mscale"}
    return tree | {
        "architectures": [family.architecture],
        "hidden_act": family.hf.activation,
        "head_dim": config.attention_config().head_size,
        "rope_theta": theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta},
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
