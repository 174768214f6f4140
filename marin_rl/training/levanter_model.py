"""Our models as Levanter's: for its trainers, optimizers, losses and evaluations.

    from marin_rl.training.levanter_model import HfFolderConfig
    model = HfFolderConfig(hf_path="Qwen3-4B").load()

Importing the module registers the configuration in Levanter, as `type: marin_rl` of its YAML files.
Nothing else here imports Levanter, but for its attention on a TPU.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.errors import InputError
from marin_rl.models.families import described_folder
from marin_rl.models.module import LanguageModel, model_of
from marin_rl.models.spec import Spec
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.logprobs import final_states
from marin_rl.training.model import parameter_structs, with_parameters


@LmConfig.register_subclass("marin_rl")
@dataclass(frozen=True)
class HfFolderConfig(LmConfig["LevanterModel"]):
    """A model of any family here, by its Hugging Face folder.

    `max_seq_len` of 0 is the folder's own.
    """

    hf_path: str = ""
    max_seq_len: int = 0

    def __post_init__(self) -> None:
        if self.max_seq_len == 0:
            object.__setattr__(self, "max_seq_len", self.spec.context_length)

    @cached_property
    def spec(self) -> Spec:
        """The folder's model. Raises InputError as `load_hf` does."""
        return described_folder(self.hf_path)

    @property
    def model_type(self) -> type["LevanterModel"]:
        """The class of its models."""
        return LevanterModel

    @property
    def Embed(self) -> Axis:
        """Axis of the residual stream."""
        return Axis("embed", self.spec.width)

    def load(self) -> "LevanterModel":
        """The model with the folder's weights, in float32."""
        return LevanterModel(load_hf(self.hf_path), self)


class LevanterModel(LmHeadModel[HfFolderConfig]):
    """A model of ours behind Levanter's interface; `model` has its parameters."""

    model: LanguageModel
    _config: HfFolderConfig = dataclasses.field(metadata={"static": True})

    @property
    def config(self) -> HfFolderConfig:
        return self._config

    @property
    def Vocab(self) -> Axis:
        return Axis("vocab", self.model.spec.vocabulary)

    @classmethod
    def init(cls, Vocab: Axis, config: HfFolderConfig, *, key: jax.Array) -> "LevanterModel":
        """Matrices normal of the folder's `initializer_range`, norms and biases as they begin."""
        spec = dataclasses.replace(config.spec, vocabulary=Vocab.size)
        template = model_of(spec)
        arrays = parameter_structs(template)
        keys = dict(zip(arrays, jax.random.split(key, len(arrays)), strict=True))

        def first(name: str, shape: Any) -> jax.Array:
            if name.endswith("bias"):
                return jnp.zeros(shape)
            if "norm" in name:
                return jnp.full(shape, 0.0 if spec.norm == "gemma" else 1.0)
            return spec.initializer_range * jax.random.normal(keys[name], shape)

        weights = {name: first(name, array.shape) for name, array in arrays.items()}
        return cls(with_parameters(template, weights), config)

    def activations(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key: Any = None,
        pos_ids: NamedArray | None = None,
    ) -> NamedArray:
        """States after the final norm; a mask is to be causal, by segments or none.

        Raises InputError for another one; `key` is unused: there is no dropout.
        """
        del key
        position = input_ids.resolve_axis("position")
        batch = tuple(axis for axis in input_ids.axes if axis.name != "position")
        shape = (-1, position.size)

        def rows(named: NamedArray) -> jax.Array:
            return named.broadcast_axis(batch).rearrange((*batch, position)).array.reshape(shape)

        positions = hax.arange(position) if pos_ids is None else pos_ids
        states = final_states(
            self.model, rows(input_ids), rows(_segments(attn_mask, position)), rows(positions)
        )
        axes = (*batch, position, self.Embed)
        return hax.named(states.reshape([axis.size for axis in axes]), axes)

    def get_lm_head(self) -> NamedArray:
        return hax.named(self.model.head, (self.Vocab, self.Embed))

    def resize_vocab(self, new_size: int, key: Any = None) -> "LevanterModel":
        raise InputError("a vocabulary is not resized: expected that of the folder")


def _segments(mask: AttentionMask | NamedArray | None, position: Axis) -> NamedArray:
    """Segment of each position, counted from 1, for ours takes 0 as padding."""
    plain = isinstance(mask, AttentionMask) and mask.is_causal and mask.explicit_mask is None
    if mask is not None and not plain:
        raise InputError(f"expected a causal mask, with segments or without, found {mask}")
    segments = None if mask is None else cast(Any, mask).segment_ids
    if segments is None:
        return hax.ones(position, dtype=jnp.int32)
    own = segments[0] if isinstance(segments, tuple) else segments
    return own.astype(jnp.int32) + 1
