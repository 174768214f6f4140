"""The critic: a scalar head, the returns it learns from, and its part of a training state.

Value functions and reward models are the same module, a trunk without its output head and a
`ScalarHead`; only where they are read and how they are trained differs. The critic is a scalar head
on the policy's own trunk (`shared`), or a second model that begins as the policy (`own`). The
value of a token is that of its past, before it is chosen, so a shared trunk gives it with the
log-probability, from the same state. Advantages are in token_advantages.py, passes over the rows in
precompute.py, the update in step.py.

Axes: B rows, T positions, E embedding.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import Axis, NamedArray
from jaxtyping import Array, Bool, Float, Int

from marin_rl.compilation import device_array
from marin_rl.config import CriticConfig, TrainingConfig
from marin_rl.metrics import EXPLAINED_VARIANCE_MIN
from marin_rl.models.module import LanguageModel
from marin_rl.training.adapters import HEAD, trained_shapes
from marin_rl.training.logprobs import (
    TokenScores,
    final_states,
    token_logprobs,
    token_logprobs_and_values,
    token_values,
)
from marin_rl.training.losses import FloatArray, Values
from marin_rl.training.model import matrix_mask, named_parameters, parameter_shapes, with_parameters
from marin_rl.training.optimizer import (
    Schedule,
    first_moments,
    guarded_update,
    learning_rate_schedule,
    make_optimizer,
    policy_adamw,
)
from marin_rl.training.step_types import CriticState, Parameters, StepArrays, StepSettings

EMBED = "embed"  # as the models name the axis that mesh.py shards
TRUNK = "trunk/"  # names of a scalar model's parameters begin so, or with HEAD


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
        product = jnp.einsum(
            "...e,e->...", states, self.weight.array, preferred_element_type=jnp.float32
        )
        return product + self.bias.array.astype(jnp.float32)


class ScalarModel(eqx.Module):
    """A trunk and a scalar head; `model.named_parameters` and its kin take it as they take a model.

    Parameters are named `trunk/…` and `head/…`.
    """

    trunk: LanguageModel
    head: ScalarHead

    @staticmethod
    def of(model: LanguageModel, key: Array | None = None, std: float = 0.0) -> "ScalarModel":
        """A new head on the trunk of `model`, whose own output head is left out.

        For a template, shapes in place of arrays, the result is to be made by
        `equinox.filter_eval_shape(ScalarModel.of, template)`.
        """
        return ScalarModel(trunk_of(model), ScalarHead.init(model.spec.width, key, std))

    def __call__(
        self,
        token_ids_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        return self.head(final_states(self.trunk, token_ids_BT, segment_ids_BT, positions_BT))


def trunk_of(model: LanguageModel) -> LanguageModel:
    """The model without its output head; a model with tied embeddings as it is."""
    # A head that nothing reads would still get moments, and a place in every checkpoint.
    policy: Any = model
    return model if policy.lm_head is None else eqx.tree_at(lambda m: m.lm_head, policy, None)


FloatBT = Float[Array, "B T"]


@dataclass(frozen=True, kw_only=True)
class Critic:
    """A run's critic: its architecture with shapes in place of arrays, and its optimizer."""

    config: CriticConfig
    template: ScalarModel | ScalarHead
    optimizer: optax.GradientTransformationExtraArgs
    schedule: Schedule

    def first_state(self, policy: Parameters, policy_template: LanguageModel) -> CriticState:
        """State of the critic before its first update, for a policy with these parameters.

        Its head returns 0; its own trunk begins as a copy of the policy's.
        """
        # Weights of 0: random values would be noise in the advantages of the first rounds.
        head = named_parameters(ScalarHead.init(policy_template.spec.width))
        if self.config.trunk == "shared":
            parameters = head
        else:
            own = parameter_shapes(self.template)  # without an output head
            trunk = {f"{TRUNK}{name}": array for name, array in policy.items()}
            parameters = {name: array for name, array in trunk.items() if name in own}
            parameters |= {f"{HEAD}{name}": array for name, array in head.items()}
        # The policy's arrays are served while the critic's are donated to each step.
        parameters = {name: jnp.array(array, copy=True) for name, array in parameters.items()}
        return self._fresh(parameters)

    def _fresh(self, parameters: Parameters) -> CriticState:
        updates = device_array(np.zeros((), np.int32))
        return CriticState(parameters, first_moments(self.optimizer, parameters), updates)

    def state_like(self) -> CriticState:
        return jax.eval_shape(self._fresh, trained_shapes(self.template))

    def _module(self, parameters: Parameters, policy: LanguageModel) -> ScalarModel | ScalarHead:
        """Return the critic of these parameters; what it does not train is the policy's."""
        names = parameter_shapes(self.template)
        base = {f"{TRUNK}{name}": array for name, array in named_parameters(policy).items()}
        # References to the policy's own arrays: what the critic leaves as it is has no second copy.
        frozen = {name: array for name, array in base.items() if name in names}
        return with_parameters(self.template, {**frozen, **parameters})

    def update_metrics(self, state: CriticState, gradients: Parameters) -> dict[str, Array]:
        """Metrics of an update that are known before it is applied."""
        return {
            "critic/grad_norm": jnp.asarray(optax.global_norm(gradients)),
            # The critic counts its steps itself: it takes some while the policy waits for it.
            "critic/lr": self.schedule(state.step),
        }

    def updated(self, state: CriticState, gradients: Parameters, ok: Array) -> CriticState:
        """The next state; the old one where it is not to be updated."""
        parameters, moments = guarded_update(
            self.optimizer, gradients, state.parameters, state.optimizer, ok
        )
        # A refused update is no step of its schedule.
        return CriticState(parameters, moments, state.step + ok)

    def values(
        self,
        parameters: Parameters,
        policy: LanguageModel,
        rows: StepArrays,
        settings: StepSettings,
    ) -> FloatBT:
        """The value of every trained token of rows [R, T]; 0 elsewhere."""
        module = self._module(parameters, policy)
        if isinstance(module, ScalarHead):
            trunk, head = policy, module
        else:
            trunk, head = module.trunk, module.head
        return token_values(trunk, head, *rows.inputs, packing=settings.packing)

    def scores(
        self,
        parameters: Parameters,
        policy: LanguageModel,
        rows: StepArrays,
        settings: StepSettings,
    ) -> tuple[TokenScores, FloatBT]:
        """Scores of every trained token by the policy, and its value; from one pass if shared."""
        module = self._module(parameters, policy)
        options = {"temperature": settings.temperature, "packing": settings.packing}
        if isinstance(module, ScalarHead):
            return token_logprobs_and_values(policy, module, *rows.inputs, **options)
        # Its own trunk has other states than the policy: values need a second pass.
        scores = token_logprobs(policy, *rows.inputs, **options)
        return scores, self.values(parameters, policy, rows, settings)


def make_critic(training: TrainingConfig, template: LanguageModel) -> Critic | None:
    """The critic of a run whose policy looks like `template`; None where none is configured."""
    config = training.critic
    if config is None:
        return None
    own: ScalarModel = eqx.filter_eval_shape(ScalarModel.of, template)
    chosen = own.head if config.trunk == "shared" else own
    # All but the learning rate is the policy's: one clip norm and one schedule to configure.
    adamw = dataclasses.replace(policy_adamw(training), learning_rate=config.learning_rate)
    return Critic(
        config=config,
        template=chosen,
        optimizer=make_optimizer(adamw, matrix_mask(chosen)),
        schedule=learning_rate_schedule(adamw),
    )


def value_losses(
    values_BT: FloatArray, old_values_BT: FloatArray, returns_BT: FloatArray, clip: float | None
) -> Values:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2; c None is no bound.

    As in OpenAI's baselines and TRL; the PPO paper has the first square alone (equation 9).
    """
    # By the maximum a value that went past its bound towards the return gets no gradient, and one
    # that went away from the return still does.
    return jnp.maximum(*_squares(values_BT, old_values_BT, returns_BT, clip)) / 2


def _squares(
    values_BT: FloatArray, old_values_BT: FloatArray, returns_BT: FloatArray, clip: float | None
) -> tuple[Values, Values]:
    plain_BT = jnp.square(jnp.asarray(values_BT) - returns_BT)
    if clip is None:
        return plain_BT, plain_BT
    # Values within the bound must keep every bit, not to count as clipped.
    near_BT = jnp.clip(values_BT, old_values_BT - clip, old_values_BT + clip)
    return plain_BT, jnp.square(near_BT - returns_BT)


def value_metrics(
    config: CriticConfig,
    values_BT: FloatBT,
    old_values_BT: FloatBT,
    returns_BT: FloatBT,
    mask_BT: Bool[Array, "B T"],
) -> Mapping[str, Array]:
    """Metrics of a step's critic over its trained tokens."""

    def mean(values: Array) -> Array:
        return jnp.sum(jnp.where(mask_BT, values, 0.0)) / jnp.maximum(jnp.sum(mask_BT), 1)

    def variance(values: Array) -> Array:
        # Not E[x^2] - E[x]^2, which cancels in float32 where values are far from 0.
        return mean(jnp.square(values - mean(values)))

    plain_BT, clipped_BT = _squares(values_BT, old_values_BT, returns_BT, config.value_clip)
    # Returns that are all equal have variance 0: the constant keeps the quotient finite.
    unexplained = variance(returns_BT - values_BT) / (variance(returns_BT) + EXPLAINED_VARIANCE_MIN)
    return {
        "loss/value_avg": mean(jnp.maximum(plain_BT, clipped_BT)) / 2,
        "val/clipfrac_avg": mean((clipped_BT > plain_BT).astype(jnp.float32)),
        "critic/explained_variance": 1.0 - unexplained,
        "critic/values_mean": mean(values_BT),
        "critic/returns_mean": mean(returns_BT),
    }
