"""A number for every token: a scalar head over a model's final hidden states.

Value functions and reward models are the same module, a trunk without its output head and a
`ScalarHead`; only where they are read and how they are trained differs. The trunk is one of
Levanter's models, so its parameters are named, saved and sharded as a policy's are, by the
functions of model.py. Leaves out losses.

Axes: B sequences, T positions, E embedding.
"""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Float, Int
from levanter.models.lm_model import LmHeadModel

from marin_rl.training.scoring import final_states

EMBED = "embed"  # as the models name the axis that mesh.py shards


class ScalarHead(eqx.Module):
    """A linear map of hidden states to one float32 number each."""

    weight: NamedArray
    bias: NamedArray

    @staticmethod
    def init(width: int, key: Array | None = None, std: float = 0.0) -> "ScalarHead":
        """A head over states of `width`: weights normal of `std`, bias 0.

        With std 0, the default, it says 0 of everything, and `key` is not needed.
        """
        weight = jnp.zeros(width, jnp.float32)
        if std > 0:
            assert key is not None, "random weights need a key"
            weight = std * jax.random.normal(key, (width,), jnp.float32)
        zero = hax.named(jnp.zeros((), jnp.float32), ())
        return ScalarHead(hax.named(weight, Axis(EMBED, width)), zero)

    def __call__(self, states: Float[Array, "*N E"]) -> Float[Array, "*N"]:
        """Scalar of every state, in float32 for any dtype of states and weights."""
        product = jnp.einsum(
            "...e,e->...", states, self.weight.array, preferred_element_type=jnp.float32
        )
        return product + self.bias.array.astype(jnp.float32)


class ScalarModel(eqx.Module):
    """A trunk and a scalar head; `model.named_parameters` and its kin take it as they take a model.

    Parameters are named `trunk/…` and `head/…`.
    """

    trunk: LmHeadModel
    head: ScalarHead

    @staticmethod
    def of(model: LmHeadModel, key: Array | None = None, std: float = 0.0) -> "ScalarModel":
        """A new head on the trunk of `model`, whose own output head is left out.

        For a template, shapes in place of arrays, the result is to be made by
        `equinox.filter_eval_shape(ScalarModel.of, template)`.
        """
        return ScalarModel(trunk_of(model), ScalarHead.init(model.Embed.size, key, std))

    def __call__(
        self,
        token_ids_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """The number of every token, given itself and those before it in its segment."""
        return self.head(final_states(self.trunk, token_ids_BT, segment_ids_BT, positions_BT))


class SquaredProbabilities(eqx.Module):
    """The sum over the vocabulary of squared probabilities, of the token after every state.

    `words` are the output head's weights, [V, E]; probabilities are softmax(logits / temperature).
    """

    words: Float[Array, "V E"]
    temperature: float = eqx.field(static=True)

    @staticmethod
    def of(model: LmHeadModel, temperature: float) -> "SquaredProbabilities":
        """Return the head of a model's own predictions, as a reference to its array."""
        return SquaredProbabilities(model.get_lm_head().array, temperature)

    def __call__(self, states: Float[Array, "*N E"]) -> Float[Array, "*N"]:
        """Return the sum for every state, in float32."""
        logits = jnp.einsum("...e,ve->...v", states, self.words, preferred_element_type=jnp.float32)
        return jnp.sum(jnp.square(jax.nn.softmax(logits / self.temperature, axis=-1)), axis=-1)


def trunk_of(model: LmHeadModel) -> LmHeadModel:
    """The model without an output head of its own; one of tied embeddings as it is."""
    found: Any = model
    if found.lm_head is None:
        return model
    return eqx.tree_at(lambda m: m.lm_head, found, None)
