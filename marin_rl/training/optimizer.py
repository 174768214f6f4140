"""AdamW with warm-up and decay of the learning rate, also with 8-bit moments, and Muon.

Weight decay is decoupled and applies to matrices only. The gradient is clipped by its global norm
before it enters the moments. Muon (Jordan 2024) orthogonalises the momentum of each layer's matrix;
its update is scaled to the size of AdamW's, as Levanter's `use_kimi_scaling` (arXiv:2502.16982, eq.
4), so that both have one learning rate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from marin_rl.config import LoraConfig, PairTrainingConfig, SFTConfig, TrainingConfig
from marin_rl.lora.adapter import LinearShape
from marin_rl.training.adam_8bit import scale_by_adam_8bit

Schedule = Callable[[ArrayLike], Array]
Moments = Literal["device", "host", "8bit"]
MOMENTS: Mapping[str, Moments] = {"adamw_offload": "host", "adamw_8bit": "8bit"}
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Everything that decides an update besides the gradient. `decay_steps` counts from step 0.

    With `muon` it is the optimizer of what is no matrix of a layer.
    """

    learning_rate: float
    warmup_steps: int
    schedule: str
    decay_steps: int | None
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip_norm: float
    restarts: int = 0
    muon: bool = False
    moments: Moments = "device"


def policy_adamw(training: TrainingConfig) -> AdamW:
    return sft_adamw(training, training)


def with_adapter_rate(settings: AdamW, lora: LoraConfig | None) -> AdamW:
    """The optimizer of what is trained: an adapter's step size is a multiple of the configured."""
    if lora is None:
        return settings
    return replace(settings, learning_rate=settings.learning_rate * lora.learning_rate_factor)


def sft_adamw(
    settings: TrainingConfig | SFTConfig | PairTrainingConfig, training: TrainingConfig
) -> AdamW:
    """The optimizer of a phase, of segments or of rounds; moments decay as in training."""
    of_rounds = isinstance(settings, TrainingConfig)
    return AdamW(
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        schedule=settings.schedule,
        decay_steps=settings.schedule_steps if of_rounds else settings.steps,
        beta1=training.beta1,
        beta2=training.beta2,
        epsilon=training.epsilon,
        weight_decay=settings.weight_decay,
        clip_norm=settings.gradient_clip_norm,
        restarts=settings.schedule_restarts or 0,
        muon=training.optimizer == "muon",
        moments=MOMENTS.get(training.optimizer or "adamw", "device"),
    )


def learning_rate_schedule(settings: AdamW) -> Schedule:
    """The learning rate at step 0, 1, …

    Warm-up of W steps gives (t + 1) / W of the peak, so that no step is wasted at 0. Decay then
    falls from the peak at step W to 0 at `decay_steps`, in a line or a half cosine; with restarts,
    in each of as many equal parts and one (arXiv:1608.03983, eq. 5).
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
            if settings.restarts:
                passed = jnp.where(passed < 1.0, passed * (settings.restarts + 1) % 1.0, passed)
            linear = settings.schedule == "linear"
            factor *= 1.0 - passed if linear else 0.5 * (1.0 + jnp.cos(jnp.pi * passed))
        return peak * factor

    return at


def make_optimizer(
    settings: AdamW, decays: Mapping[str, bool], linears: Mapping[str, LinearShape] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation for any of the parameters keyed by path in `decays`.

    `decays` is True for matrices, which weight decay applies to; `linears` are those of layers,
    which Muon updates where the settings have it.
    """

    def mask(parameters: Mapping[str, Any]) -> dict[str, bool]:
        # Of the tree that optax has: its names may be only some of `decays`.
        return {name: decays[name] for name in parameters}

    def labels(tree: Any) -> dict[str, bool]:
        # No names where optax asks which leaves of a state are of parameters.
        return {name: name in (linears or {}) for name in tree} if isinstance(tree, dict) else {}

    adams = {"device": optax.scale_by_adam, "host": scale_by_adam_offloaded}
    adam = adams.get(settings.moments, scale_by_adam_8bit)
    # Decay is decoupled from the gradient (arXiv:1711.05101).
    decay = optax.add_decayed_weights(settings.weight_decay, mask)
    rate = optax.scale_by_learning_rate(learning_rate_schedule(settings))
    update = optax.chain(adam(settings.beta1, settings.beta2, settings.epsilon), decay, rate)
    if settings.muon and linears:
        muon = optax.chain(_orthogonalised(linears), decay, rate)
        update = optax.partition({True: muon, False: update}, labels)
    # First in the chain: a gradient that is clipped only after Adam would stay in its moments.
    chained = optax.chain(optax.clip_by_global_norm(settings.clip_norm), update)
    return optax.with_extra_args_support(chained)


def scale_by_adam_offloaded(
    b1: float, b2: float, eps: float
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction, as `optax.scale_by_adam`, with the moments in the host's memory.

    Those of a layer are on the device while it is updated. Its `update` takes `ok`: False keeps
    them, since no program outside can compare what is on the host.
    """
    adam: Any = optax.scale_by_adam(b1, b2, eps)

    def init(params: optax.Params) -> Any:
        state = adam.init(params)
        return state._replace(**jax.device_put({"mu": state.mu, "nu": state.nu}, HOST))

    def update(
        updates: Any, state: Any, params: Any = None, *, ok: Array, **_: Any
    ) -> tuple[Any, Any]:
        def moved(arrays: Sequence[Array]) -> tuple[Any, Any]:
            gradient, *moments = arrays
            mu, nu = jax.device_put(moments, DEVICE)
            direction, after = adam.update(gradient, state._replace(mu=mu, nu=nu))
            kept = guarded(ok, (after.mu, after.nu), (mu, nu))
            return direction, jax.device_put(kept, HOST)

        def of_array(*arrays: Array) -> tuple[Any, Any]:
            # Stacked by layer: a loop's slices are all that is on the device at once.
            return jax.lax.map(moved, arrays) if arrays[0].ndim > 2 else moved(arrays)

        found = {name: of_array(g, state.mu[name], state.nu[name]) for name, g in updates.items()}
        mu, nu = ({name: kept[each] for name, (_, kept) in found.items()} for each in (0, 1))
        after = state._replace(count=state.count + 1, mu=mu, nu=nu)
        return {name: direction for name, (direction, _) in found.items()}, after

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def guarded(ok: Array, after: Any, before: Any) -> Any:
    """Return `after` where it is `ok`, else `before`; what is on the host is guarded already.

    Multiplying an update by 0 would keep its NaN; `where` does not.
    """

    def chosen(new: Array, old: Array) -> Array:
        on_host = jax.typeof(new).memory_space == HOST
        return new if on_host else jnp.where(ok, new, old)

    return jax.tree.map(chosen, after, before)


def _orthogonalised(linears: Mapping[str, LinearShape]) -> optax.GradientTransformation:
    """Muon's momentum, orthogonalised for each layer, of the size of Adam's updates."""

    def axes(linear: LinearShape) -> MuonDimensionNumbers:
        inputs = 1 + len(linear.outputs)  # weights are [L, out..., in...]
        last = inputs + len(linear.inputs)
        return MuonDimensionNumbers(tuple(range(inputs, last)), tuple(range(1, inputs)))

    numbers: Any = lambda tree: {
        name: axes(linears[name]) if name in linears else optax.MaskedNode() for name in tree
    }
    # scale_by_muon multiplies by sqrt(max(1, out / in)), and 0.2 sqrt(max(out, in)) is wanted.
    size = {name: 0.2 * math.sqrt(math.prod(each.inputs)) for name, each in linears.items()}
    scaled: Any = lambda updates, _: {
        name: update * size[name] if name in size else update for name, update in updates.items()
    }
    return optax.chain(scale_by_muon(weight_dimension_numbers=numbers), optax.stateless(scaled))


def first_moments(
    optimizer: optax.GradientTransformationExtraArgs,
    parameters: Mapping[str, Any],
    shardings: Any = None,
) -> Any:
    """The optimizer's state before the first update, by one program and not one for each shape."""
    return jax.jit(optimizer.init, out_shardings=shardings)(parameters)


def guarded_update(
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Any,
    parameters: Any,
    moments: Any,
    ok: Array,
) -> tuple[Any, Any]:
    """Parameters and moments after an update; as they were where it is not `ok`."""
    updates, after = optimizer.update(gradients, moments, parameters, ok=ok)
    # The moments are guarded too: a NaN in them would spoil every later update.
    moved = optax.apply_updates(parameters, updates)
    return guarded(ok, (moved, after), (parameters, moments))
