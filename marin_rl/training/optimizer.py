"""AdamW with warm-up and decay of the learning rate, built from the configuration.

Weight decay is decoupled and applies to matrices only. The gradient is clipped by its global norm
before it enters the moments.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from marin_rl.config import LoraConfig, PairTrainingConfig, SFTConfig, TrainingConfig

Schedule = Callable[[ArrayLike], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Everything that decides an update besides the gradient. `decay_steps` counts from step 0."""

    learning_rate: float
    warmup_steps: int
    schedule: str
    decay_steps: int | None
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip_norm: float


def policy_adamw(training: TrainingConfig) -> AdamW:
    return _adamw(training, training, training.schedule_steps)


def with_adapter_rate(settings: AdamW, lora: LoraConfig | None) -> AdamW:
    """The optimizer of what is trained: an adapter's step size is a multiple of the configured."""
    if lora is None:
        return settings
    return replace(settings, learning_rate=settings.learning_rate * lora.learning_rate_factor)


def sft_adamw(settings: SFTConfig | PairTrainingConfig, training: TrainingConfig) -> AdamW:
    """The optimizer of a phase of segments; moments decay as in training."""
    return _adamw(settings, training, settings.steps)


def _adamw(
    settings: TrainingConfig | SFTConfig | PairTrainingConfig,
    training: TrainingConfig,
    decay_steps: int | None,
) -> AdamW:
    return AdamW(
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        schedule=settings.schedule,
        decay_steps=decay_steps,
        beta1=training.beta1,
        beta2=training.beta2,
        epsilon=training.epsilon,
        weight_decay=settings.weight_decay,
        clip_norm=settings.gradient_clip_norm,
    )


def learning_rate_schedule(settings: AdamW) -> Schedule:
    """The learning rate at step 0, 1, …

    Warm-up of W steps gives (t + 1) / W of the peak, so that no step is wasted at 0. Decay then
    falls from the peak at step W to 0 at `decay_steps`, in a line or a half cosine.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps

    def at(step: ArrayLike) -> Array:
        t = jnp.asarray(step, jnp.float32)
        factor = jnp.minimum(1.0, (t + 1.0) / max(warmup, 1))  # no warm-up: 1 from step 0 on
        if settings.schedule != "constant":
            assert settings.decay_steps is not None
            # A schedule that ends with its warm-up would divide by 0.
            span = max(settings.decay_steps - warmup, 1)
            # Clipped, so that the rate stays 0 after the last step; the cosine would rise again.
            passed = jnp.clip((t - warmup) / span, 0.0, 1.0)
            linear = settings.schedule == "linear"
            factor *= 1.0 - passed if linear else 0.5 * (1.0 + jnp.cos(jnp.pi * passed))
        return peak * factor

    return at


def make_optimizer(
    settings: AdamW, decays: Mapping[str, bool]
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation for any of the parameters keyed by path in `decays`.

    `decays` is True for matrices, which weight decay applies to.
    """

    def mask(parameters: Mapping[str, Any]) -> dict[str, bool]:
        # Of the tree that optax has: its names may be only some of `decays`.
        return {name: decays[name] for name in parameters}

    return optax.chain(
        # First in the chain: a gradient that is clipped only after Adam would stay in its moments.
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            learning_rate_schedule(settings),
            b1=settings.beta1,
            b2=settings.beta2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,  # decoupled from the gradient (arXiv:1711.05101)
            mask=mask,
        ),
    )


def first_moments(
    optimizer: optax.GradientTransformationExtraArgs, parameters: Mapping[str, Any]
) -> Any:
    """The optimizer's state before the first update, by one program and not one for each shape."""
    return jax.jit(optimizer.init)(parameters)


def guarded_update(
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Any,
    parameters: Any,
    moments: Any,
    ok: Array,
) -> tuple[Any, Any]:
    """Parameters and moments after an update; as they were where it is not `ok`.

    Multiplying an update by 0 would keep its NaN; `where` does not.
    """
    updates, after = optimizer.update(gradients, moments, parameters)
    # The moments are guarded too: a NaN in them would spoil every later update.
    moved = optax.apply_updates(parameters, updates)
    return jax.tree.map(
        lambda new, old: jnp.where(ok, new, old), (moved, after), (parameters, moments)
    )
