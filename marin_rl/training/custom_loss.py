"""A loss of the user's own, `objective.loss`, in the place of the surrogate.

It is a function of arrays [B, T], each asked for by its name, that returns the loss of each token,
or one number, and if it likes metrics. It is traced into the compiled step. Leaves out what is
added to it (KL, entropy) and how tokens become one number (step_loss.py). Imports JAX and nothing
of Levanter, for `run` checks such a function before it starts anything.

Axes: B rows, T positions. Arrays are 0 where nothing is trained on; logprobs are in nats.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from marin_rl.compilation import device_array
from marin_rl.config import ObjectiveConfig
from marin_rl.errors import ConfigError, InputError
from marin_rl.training.losses import on_mask
from marin_rl.user_code import load

FloatBT = Float[Array | np.ndarray, "B T"]

METRICS = "loss/custom/"  # beginning of the names of its metrics
METRIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,63}")


class LossArrays(NamedTuple):
    """The arrays that a loss may take, by the names of its parameters."""

    logprobs: FloatBT
    old_logprobs: FloatBT
    policy_logprobs: FloatBT
    advantages: FloatBT
    mask: Bool[Array | np.ndarray, "B T"]
    segment_ids: Int32[Array | np.ndarray, "B T"]


ARRAYS = LossArrays._fields


def custom_losses(
    objective: ObjectiveConfig, arrays: LossArrays
) -> tuple[Float[Array, "B T"], dict[str, Array]]:
    """Return the loss of each token, 0 off the mask, and the function's metrics by their names.

    One number counts for each trained token. Raises ConfigError as `check_loss`.
    """
    mask = arrays.mask
    given = {
        # Masked before the call: exp of padding's numbers may be infinite, and its gradient NaN.
        "logprobs": on_mask(arrays.logprobs, mask),
        "old_logprobs": on_mask(arrays.old_logprobs, mask),
        "policy_logprobs": on_mask(arrays.policy_logprobs, mask),
        "advantages": on_mask(arrays.advantages, mask),
        "mask": mask.astype(jnp.float32),
        "segment_ids": arrays.segment_ids,
    }
    function, names = _function(objective)
    returned = function(**{name: given[name] for name in names}, **(objective.loss_options or {}))
    pair = isinstance(returned, tuple) and len(returned) == 2
    loss, metrics = returned if pair else (returned, {})
    # Broadcast and masked last: one number is then the loss of each trained token, which token_mean
    # averages to itself.
    losses = _loss_of(objective, loss, mask.shape)
    return on_mask(jnp.broadcast_to(losses, mask.shape), mask), _metrics_of(objective, metrics)


def _function(objective: ObjectiveConfig) -> tuple[Callable[..., Any], list[str]]:
    """The function, and the names of the arrays that it takes. Raises ConfigError, InputError."""
    assert objective.loss is not None, "there is no loss of the user's own"
    function = load(objective.loss, "loss")
    parameters = inspect.signature(function).parameters.values()
    options = objective.loss_options or {}
    keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in keyword if p.name in ARRAYS]
    others = {p.name: p for p in keyword if p.name not in ARRAYS}
    lacking = [p.name for p in others.values() if p.default is p.empty and p.name not in options]
    unknown = [name for name in options if name not in others]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if "logprobs" not in names or lacking or unknown or positional:
        wrong = lacking + unknown + positional
        detail = f"found {', '.join(wrong)} too" if wrong else "found no logprobs"
        raise ConfigError(
            f"{_shown(objective)} takes ({', '.join(p.name for p in parameters)}): expected "
            f"logprobs and any of {', '.join(ARRAYS[1:])} by these names, and other parameters "
            f"with a default or a value in objective.loss_options; {detail}"
        )
    return function, names


def _loss_of(objective: ObjectiveConfig, loss: Any, shape: tuple[int, ...]) -> Array:
    """A loss that has a shape which can be used. Raises ConfigError."""
    try:
        array = jnp.asarray(loss, jnp.float32)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{_shown(objective)} returned {loss!r:.80}: expected the loss, an array, or the pair "
            "of it and a dict of metrics"
        ) from None
    if array.shape not in (shape, ()):
        raise ConfigError(
            f"{_shown(objective)} returned an array of shape {array.shape}: expected that of "
            f"logprobs, {shape}, or one number"
        )
    if array.shape == ():
        _check_number_fits(objective)
    return array


def _check_number_fits(objective: ObjectiveConfig) -> None:
    """Refuse one number where what is asked for needs the loss of each token."""
    wanted = {"aggregation": "token_mean", "importance_correction": "none"}
    for key, value in wanted.items():
        if (actual := getattr(objective, key)) != value:
            raise ConfigError(
                f"{_shown(objective)} returned one number, and objective.{key} {actual} needs the "
                f"loss of each token: return an array of the shape of logprobs, or set it to "
                f"{value} (microbatches are then weighted by their trained tokens)"
            )


def _metrics_of(objective: ObjectiveConfig, metrics: Any) -> dict[str, Array]:
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{_shown(objective)} returned {metrics!r:.80} as its metrics: expected a dict of "
            "numbers by name"
        )
    named: dict[str, Array] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or METRIC_NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{_shown(objective)}: expected metrics named by letters, digits and _ . / -, "
                f"found {name!r:.80}"
            )
        try:
            number = jnp.asarray(value, jnp.float32)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{_shown(objective)}: metric {name} is {value!r:.80}: expected one number"
            ) from None
        if number.shape != ():
            raise ConfigError(
                f"{_shown(objective)}: metric {name} has shape {number.shape}: expected one "
                "number, such as its sum over mask divided by mask.sum()"
            )
        # Reported, not minimised: nothing may flow back from a metric into the loss.
        named[f"{METRICS}{name}"] = jax.lax.stop_gradient(number)
    return named


def check_loss(objective: ObjectiveConfig) -> str:
    """Call the loss on a few tokens, and report its value.

    Raises ConfigError for parameters, a shape or a number that cannot be used, and for a loss whose
    gradient is 0 or not finite; InputError where the function itself raises.
    """
    batch = _tiny_batch()

    def total(logprobs: Array) -> tuple[Array, dict[str, Array]]:
        losses, metrics = custom_losses(objective, batch._replace(logprobs=logprobs))
        return jnp.sum(losses) / jnp.sum(batch.mask), metrics

    try:
        # One program: the gradient of a compiled function would be two.
        compiled = jax.jit(jax.value_and_grad(total, has_aux=True))
        (value, metrics), gradient = compiled(batch.logprobs)
    except (ConfigError, InputError):
        raise
    except Exception as error:  # of the function, or of tracing it
        detail = str(error).partition("\n")[0]
        raise ConfigError(
            f"{_shown(objective)} failed: {type(error).__name__}: {detail}"
        ) from error
    numbers = {"its value": value, "its gradient": gradient} | {
        name.removeprefix(METRICS): metric for name, metric in metrics.items()
    }
    for name, array in numbers.items():
        if not np.isfinite(array).all():
            raise ConfigError(
                f"{_shown(objective)}: {name} is not finite on a batch with ordinary numbers and "
                "padding; arrays are 0 off the mask"
            )
    if not np.any(gradient):
        raise ConfigError(
            f"{_shown(objective)}: its gradient with respect to logprobs is 0 for every token, so "
            "nothing would be learned"
        )
    names = ", ".join(metrics)
    return f"{_shown(objective)}: {float(value):.4g} on a small batch" + (names and f"; {names}")


def _tiny_batch() -> LossArrays:
    """Rows with advantages of both signs, ratios near 1, padding, and a row without tokens."""
    random = np.random.default_rng(0)
    shape = (3, 8)
    mask = np.zeros(shape, np.bool_)
    mask[0, 2:7] = mask[1, 1:4] = True
    logprobs = -random.uniform(0.1, 3.0, shape).astype(np.float32)
    old = logprobs + random.normal(0, 0.1, shape).astype(np.float32)
    # The third row is only padding, where a function that divides by a row's tokens fails.
    signs = np.asarray([[1.0], [-1.0], [0.0]], np.float32)
    arrays = LossArrays(
        logprobs=logprobs,
        old_logprobs=old,
        policy_logprobs=old + random.normal(0, 0.01, shape).astype(np.float32),
        advantages=np.broadcast_to(signs, shape).astype(np.float32),
        mask=mask,
        segment_ids=np.repeat(np.asarray([[1], [1], [0]], np.int32), shape[1], axis=1),
    )
    return jax.tree.map(device_array, arrays)


def _shown(objective: ObjectiveConfig) -> str:
    return f"objective.loss {str(objective.loss).partition('#')[0]}"
