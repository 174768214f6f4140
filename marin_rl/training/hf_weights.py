"""Weights of Hugging Face folders: read into memory, checked, and as tensors to be written.

Which configurations are refused, and the names of tensors, are in `marin_rl.models.families`.
Leaves out tokenizers, whose library takes a second to import, so that a server reads weights while
it imports the rest.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from marin_rl.compilation import device_array
from marin_rl.errors import InputError
from marin_rl.models.families import Tensor, described_folder, tensors_of
from marin_rl.models.module import LanguageModel, model_of
from marin_rl.models.spec import Spec
from marin_rl.plain_files import weight_files
from marin_rl.storage.array_files import Box, extents, overlap, whole_box
from marin_rl.storage.checkpoints import LocalBoxes
from marin_rl.training.model import (
    named_parameters,
    parameter_shapes,
    parameter_structs,
    parameters_digest,
    with_parameters,
)

# Rotary tables that Llama 2 was saved with: the configuration says what is in them.
_ROTARY_TABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# Masks that GPT-2 was saved with.
_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
_GPT2 = "transformer."
# Constants of xIELU, which Apertus is saved with.
_XIELU = re.compile(r"model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def hf_template(folder: str | Path) -> LanguageModel:
    """The module of `load_hf` with shapes in place of arrays; raises InputError as it does."""
    return model_of(described_folder(folder))


def read_weights(
    template: LanguageModel, folder: str | Path, like: Mapping[str, Any] | None = None
) -> LanguageModel:
    """Read the weights of a folder that is described by `template`, as float32.

    `like` has the shapes of parameters, and where they have shardings, they are placed by these:
    a process keeps its own part. Raises InputError as `load_hf` does, but for what it says of the
    tokenizer.
    """
    return with_parameters(template, read_parameters(template, folder, like))


def begin_reading(folder: str | Path) -> "Future[tuple[LanguageModel, str]]":
    """Read a folder's model, and compute the digest of its parameters, in a thread."""

    def read() -> tuple[LanguageModel, str]:
        model = read_weights(hf_template(folder), folder)
        return model, parameters_digest(model)

    with_thread = ThreadPoolExecutor(1, "weights")
    begun = with_thread.submit(read)
    with_thread.shutdown(wait=False)  # once it has read
    return begun


def read_parameters(
    template: LanguageModel, folder: str | Path, like: Mapping[str, Any] | None = None
) -> dict[str, jax.Array]:
    """Parameters of a folder by path, each read into its place: see `read_weights`.

    One tensor at a time is in memory twice, and never a whole checkpoint in bfloat16.
    """
    path = Path(folder).resolve()
    prefix = _check_tensors(tensor_shapes(template), path)
    like = like or {
        name: struct.update(dtype=np.float32)
        for name, struct in parameter_structs(template).items()
    }
    arrays: dict[str, jax.Array] = {}
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for file in weight_files(path):
            opened = stack.enter_context(safe_open(str(file), framework="numpy"))
            files |= dict.fromkeys(opened.keys(), opened)
        for name, tensor in _tensors(template).items():
            outs = {part: LocalBoxes(like[part]) for part in tensor.paths}
            for full, layer, expert in _copies(template.spec, name.removeprefix(prefix)):
                _fill_own(outs, files[full].get_slice(full), tensor.layout, layer, expert)
            for part, out in outs.items():
                if not all(np.isfinite(values).all() for values in out.values.values()):
                    _name_not_finite(path)
                arrays[part] = device_array(out.array(), copy=False)  # a CPU takes the very memory
    return arrays


def _fill_own(
    outs: Mapping[str, LocalBoxes],
    stored: Any,
    layout: str,
    layer: int | None,
    expert: int | None,
) -> None:
    """Write one tensor of a file into what this process has of the parameters that it holds.

    Of `stored`, a slice of safetensors, it reads no more than that where rows are in order.
    """
    whole = {part: out.values.get(whole_box(out.shape)) for part, out in outs.items()}
    if all(array is not None for array in whole.values()):
        places = [_own(array, part, layer, expert) for part, array in whole.items()]
        _fill(places, stored[:], layout)
        return
    boxes = {part: _own_box(out.shape, part, layer, expert) for part, out in outs.items()}
    read = [slice(0, size) for size in stored.get_shape()]
    if layout == "rows" and expert is None:
        boxes = _narrowed(outs, boxes, 0 if layer is None else 1, read)
    arrays = [np.empty(extents(box), np.float32) for box in boxes.values()]
    first = None if layer is None else 0, None if expert is None else 0
    parts = zip(outs, arrays, strict=True)
    _fill([_own(array, part, *first) for part, array in parts], stored[tuple(read)], layout)
    for (part, box), array in zip(boxes.items(), arrays, strict=True):
        outs[part].fill(box, array)


def _narrowed(
    outs: Mapping[str, LocalBoxes], boxes: Mapping[str, Box], first: int, read: list[slice]
) -> dict[str, Box]:
    """Boxes of parts of a tensor without what no device of this process has; `read` likewise.

    Columns are the last axis of each part where they are one, and rows those of a part alone, whose
    axes begin at `first`.
    """
    narrowed, width = dict[str, Box](), read[1].stop if len(read) == 2 else 0
    for part, box in boxes.items():
        held = [both for each in outs[part].values if (both := overlap(each, box)) is not None]
        ends = np.array(held)
        own = list(zip(ends[..., 0].min(0).tolist(), ends[..., 1].max(0).tolist(), strict=True))
        spans, sizes = list(box), extents(box)
        if sizes[-1] == width:
            spans[-1], read[1] = own[-1], slice(*own[-1])
        if len(boxes) == 1:
            spans[first], rows = own[first], read[0].stop // sizes[first]
            read[0] = slice(own[first][0] * rows, own[first][1] * rows)
        narrowed[part] = tuple(spans)
    return narrowed


def _own_box(shape: Sequence[int], path: str, layer: int | None, expert: int | None) -> Box:
    """The box that `_own` is a view of."""
    axis = (layer is not None) + ("/down_proj/" in path)
    at = {**({} if layer is None else {0: layer}), **({} if expert is None else {axis: expert})}
    return tuple((at.get(n, 0), at[n] + 1 if n in at else size) for n, size in enumerate(shape))


def _copies(spec: Spec, name: str) -> Iterator[tuple[str, int | None, int | None]]:
    """Names of a tensor, its layer and its expert, of all layers and experts that have it."""
    layers = range(spec.layers) if "{layer}" in name else (None,)
    experts = range(spec.experts) if "{expert}" in name else (None,)
    for layer in layers:
        for expert in experts:
            yield name.format(layer=layer, expert=expert), layer, expert


def _own(array: Any, path: str, layer: int | None, expert: int | None) -> Any:
    """The part of a parameter that is of a layer, and of an expert; a view."""
    own = array if layer is None else array[layer]
    if expert is None:
        return own
    return own[:, expert] if "/down_proj/" in path else own[expert]


def _fill(places: list[np.ndarray], stored: np.ndarray, layout: str) -> None:
    """Write one tensor of a file into the parameters that it holds; the inverse of `_joined`."""
    match layout:
        case "inputs":
            parts = np.moveaxis(stored.swapaxes(1, 2).reshape(*places[0].shape[:2], 2, -1), 2, 0)
        case "biases":
            parts = np.moveaxis(stored.reshape(*places[0].shape, 2), 2, 0)
        case "outputs":
            parts = [stored.transpose(2, 0, 1)]
        case _:
            rows = stored.T if layout == "columns" else stored
            sizes = [place.size // math.prod(rows.shape[1:]) for place in places]
            parts = np.split(rows, np.cumsum(sizes)[:-1])
    for place, part in zip(places, parts, strict=True):
        place[...] = part.reshape(place.shape)


def _joined(name: str, parts: list[Any], layout: str, np: Any) -> Any:
    """A tensor of a file by the parameters that it holds; `np` is that module, or JAX's."""
    match layout:
        case "inputs":
            both = np.stack(parts, axis=2)
            return both.reshape(len(both), -1, both.shape[-1]).swapaxes(1, 2)
        case "biases":
            both = np.stack(parts, axis=2)
            return both.reshape(len(both), -1)
        case "outputs":
            return parts[0].transpose(1, 2, 0)
        case _ if name.endswith((".bias", ".sinks")):
            return np.concatenate([part.reshape(-1) for part in parts])
        case _ if parts[0].ndim == 1 or name.endswith("_bias"):
            return np.concatenate(parts)
        case _:
            # The last projection of attention has inputs on two axes: heads, and their dimensions.
            output = name.endswith(("o_proj.weight", "attn.c_proj.weight"))
            columns = math.prod(parts[0].shape[1:]) if output else parts[0].shape[-1]
            rows = np.concatenate([part.reshape(-1, columns) for part in parts])
            return rows.T if layout == "columns" else rows


def _tensors(template: LanguageModel) -> dict[str, Tensor]:
    return tensors_of(template.spec, list(parameter_shapes(template)))


def tensor_shapes(template: LanguageModel) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a folder by name."""
    structs = parameter_structs(template)
    expected: dict[str, tuple[int, ...]] = {}
    for name, tensor in _tensors(template).items():
        first, layer, expert = next(_copies(template.spec, name))
        # Of one number, which takes no memory whatever the shape is.
        whole = {path: np.broadcast_to(np.float32(0), structs[path].shape) for path in tensor.paths}
        parts = [_own(array, path, layer, expert) for path, array in whole.items()]
        join = partial(_joined, first, layout=tensor.layout, np=jnp)
        shapes = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in parts]
        shape = jax.eval_shape(join, shapes).shape
        expected |= {full: shape for full, *_ in _copies(template.spec, name)}
    return expected


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


def exported(model: LanguageModel) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of a folder by name, one at a time."""
    arrays = named_parameters(model)
    for name, tensor in _tensors(model).items():
        whole = {path: np.asarray(arrays[path]) for path in tensor.paths}
        for full, layer, expert in _copies(model.spec, name):
            parts = [_own(array, path, layer, expert) for path, array in whole.items()]
            yield full, _joined(full, parts, tensor.layout, np)


def _check_tensors(expected: Mapping[str, tuple[int, ...]], path: Path) -> str:
    """Raise InputError unless the folder's tensors have these names and shapes.

    Returns what its names lack in front: GPT-2's own files leave out `transformer.`.
    """
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
    prefix = _GPT2 if any(_GPT2 + name in expected for name in shapes) else ""
    expected = {name.removeprefix(prefix): shape for name, shape in expected.items()}
    wrong = sorted(name for name in expected if shapes.get(name) != expected[name])
    if _HEAD in shapes and _HEAD not in expected and _EMBEDDING in shapes:
        _check_tied_head(files, path)
        del shapes[_HEAD]
    # A norm or bias that the configuration does not speak of would be dropped silently.
    surplus = sorted(
        name
        for name in set(shapes) - set(expected)
        if not any(known.fullmatch(name) for known in (_ROTARY_TABLE, _MASK, _XIELU))
    )
    for name in (*wrong, *surplus):
        raise InputError(
            f"{path} does not fit its config.json: tensor {name} expected "
            f"{expected.get(name, 'absent')}, found {shapes.get(name, 'absent')} "
            f"({len(wrong) + len(surplus)} such tensors)"
        )
    return prefix


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
