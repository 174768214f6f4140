"""Experts of a layer: those that a token takes, their products, sorted by expert, and their loads.

A device multiplies each token with the experts that it takes alone (`grouped_sum`) where a kernel
does that, and with all of them (in `block`) elsewhere; `takes_grouped` decides. Nothing is dropped
in either form, and a token's numbers depend on no other token.

Axes: N tokens, k experts that a token takes, X experts, D width, F width of an expert, P parts of F
on the mesh's tensor axis, f = F / P.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax.nn.ragged_dot import ragged_dot
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from marin_rl.models.axes import CONTEXT, ROWS, TENSOR, dividing, free_axes, on_each_device
from marin_rl.models.spec import Spec

# With fewer tokens, all products take an accelerator less time than reading the weights does, and
# they need no sorting: an H100 multiplies about 300 times with a number in 16 bits while it reads
# one.
GROUPED_TOKENS_MIN = 256
# Tiles of the kernel on GPUs, which masks no columns: Pallas' lowering to Triton bounds no access.
TILE = 128


class Routing(NamedTuple):
    """Experts that tokens take, and shares of their outputs."""

    experts: Int[Array, "... k"]
    shares: Float32[Array, "... k"]


class ExpertWeights(NamedTuple):
    """Matrices and biases of all experts, as `grouped_sum` reads them."""

    gate: Float[Array, "P X f D"]
    up: Float[Array, "P X f D"]
    down: Float[Array, "P X f D"]
    gate_bias: Float[Array, "P X f"] | None = None
    up_bias: Float[Array, "P X f"] | None = None


class ExpertLoads(NamedTuple):
    """Use of the experts of one layer, or of several [L], by some tokens.

    `counts`: tokens that take each; `probabilities`: sums of softmax(scores).
    """

    tokens: Float32[Array, "*L"]
    counts: Float32[Array, "*L X"]
    probabilities: Float32[Array, "*L X"] | None


def routing_of(spec: Spec, scores: Float32[Array, "... X"]) -> Routing:
    """The experts of the highest scores; shares by the family's rule."""
    if spec.choose_first:
        best, at = jax.lax.top_k(scores, spec.experts_chosen)
        return Routing(at, jax.nn.softmax(best, axis=-1))
    taken, at = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), spec.experts_chosen)
    if spec.renormalise:
        taken = taken / jnp.sum(taken, axis=-1, keepdims=True)
    return Routing(at, taken)


def shares_of_all(spec: Spec, routing: Routing) -> Float32[Array, "... X"]:
    """Shares of all experts; 0 of those that a token does not take."""
    taken = jax.nn.one_hot(routing.experts, spec.experts, dtype=jnp.float32)
    return jnp.sum(routing.shares[..., None] * taken, axis=-2)


def loads_of(spec: Spec, scores: Float32[Array, "... X"], mask: Bool[Array, "..."]) -> ExpertLoads:
    """Loads of a layer's experts over the tokens of a mask."""
    over = tuple(range(mask.ndim))
    at = routing_of(spec, scores).experts
    taken = jnp.sum(jax.nn.one_hot(at, spec.experts, dtype=jnp.float32), axis=-2)
    counts, probabilities = (
        jnp.sum(jnp.where(mask[..., None], each, 0.0), axis=over)
        for each in (taken, jax.nn.softmax(scores, axis=-1))
    )
    return ExpertLoads(jnp.sum(mask, dtype=jnp.float32), counts, probabilities)


def balance_loss(loads: ExpertLoads) -> Float32[Array, ""]:
    """Load-balancing loss (Switch Transformer, arXiv:2101.03961, equation 4): X sum_x f_x P_x.

    f_x is the share of tokens that take expert x and P_x the router's mean probability of it, both
    over all layers together, as transformers has it: k where all experts are taken alike.
    """
    assert loads.probabilities is not None
    tokens = jnp.maximum(jnp.sum(loads.tokens), 1.0)
    shares, means = (jnp.sum(each, axis=0) / tokens for each in (loads.counts, loads.probabilities))
    return shares.size * jnp.sum(shares * means)


def load_metrics(loads: ExpertLoads) -> dict[str, Array]:
    """Metrics of the experts' loads, [L, X]."""
    counts = loads.counts
    mean = jnp.maximum(jnp.mean(counts, axis=-1), 1 / counts.shape[-1])
    return {
        "experts/load_max": jnp.mean(jnp.max(counts, axis=-1) / mean),
        "experts/unused": jnp.mean((counts == 0).astype(jnp.float32)),
    }


def takes_grouped(spec: Spec, x: Float[Array, "... D"]) -> bool:
    """True where this process's devices have a kernel for products by group that is worth it.

    XLA's own `jax.lax.ragged_dot` is none on CPUs and GPUs. In jax 0.10.2 (`_src/lax/lax.py`) it
    lowers on a CPU to one product of all rows with all groups, whose other rows are masked, which
    takes k times the products of all experts for every token; on GPUs and TPUs to
    `chlo.ragged_dot`, which XLA for NVIDIA's GPUs expands in the same way unless
    `xla_gpu_experimental_use_ragged_dot_fusion` is set (off in jaxlib 0.10.2). The setting
    `jax_ragged_dot_use_gpu_pallas_triton_lowering` imports a module that the wheel does not have.
    Haliax has a kernel in Triton for GPUs, with its derivatives, and takes megablox on TPUs.
    """
    backend = jax.default_backend()
    if backend == "cpu" or math.prod(x.shape[:-1]) < GROUPED_TOKENS_MIN:
        return False
    if backend != "gpu":
        return True
    inner = spec.mlp_width // pieces(spec.mlp_width)
    # Of 32 bits the kernel would multiply 19.
    return spec.width % TILE == 0 and inner % TILE == 0 and x.dtype.itemsize == 2


def pieces(size: int) -> int:
    """Number of pieces, inside a program, that the mesh's tensor axis cuts `size` into; else 1."""
    count = dict(jax.sharding.get_abstract_mesh().shape).get(TENSOR, 1)
    # A dimension that does not divide stays whole.
    return 1 if size % count else count


def by_piece(array: Float[Array, "X F ..."], count: int) -> Float[Array, "P X f ..."]:
    """An array of all experts, F cut into `count` pieces, all experts' first pieces first."""
    X, F, *others = array.shape
    return array.reshape(X, count, F // count, *others).swapaxes(0, 1)


def grouped_sum(
    spec: Spec,
    weights: ExpertWeights,
    x: Float[Array, "... D"],
    routing: Routing,
    activated: Callable[[Array, Array], Array],
) -> Float[Array, "... D"]:
    """Outputs of the experts that each token takes, by its shares, without biases of `down`.

    On a mesh each device sorts its own tokens, multiplies with its part of every expert, and the
    parts are summed.
    """
    over = TENSOR if TENSOR in free_axes() and len(weights.gate) > 1 else None

    def own(weights: ExpertWeights, x: Array, routing: Routing) -> Array:
        out = _grouped_sum(spec, jax.tree.map(lambda part: part[0], weights), x, routing, activated)
        return out if over is None else jax.lax.psum(out, over)

    # Rows that devices do not share out evenly are computed by all.
    positions = dividing((CONTEXT,), x.shape[1]) if x.ndim > 2 else ()
    of_rows, of_weights = PartitionSpec(dividing(ROWS, len(x)), positions), PartitionSpec(over)
    # Over all axes that are left: XLA cannot cut a kernel, nor a product by group, by itself.
    spread = on_each_device(own, (of_weights, of_rows, of_rows), of_rows)
    return spread(weights, x, routing)


def _grouped_sum(
    spec: Spec,
    weights: ExpertWeights,
    x: Array,
    routing: Routing,
    activated: Callable[[Array, Array], Array],
) -> Array:
    *lead, width = x.shape
    k, flat = spec.experts_chosen, routing.experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=spec.experts).astype(jnp.int32)

    def sorted_rows(rows: Array) -> Array:
        return rows.at[order].get(mode="promise_in_bounds", unique_indices=True)

    def product(rows: Array, matrix: Array, bias: Array | None) -> Array:
        out = ragged_dot(rows, matrix, sizes)
        return out if bias is None else out + bias[sorted_rows(flat)]

    # A copy for each expert, and then sorted, so that no gradient is a sum by index, whose order
    # on a GPU is another one each time.
    rows = jnp.broadcast_to(x.reshape(-1, 1, width), (flat.size // k, k, width))
    rows = sorted_rows(rows.reshape(-1, width))
    gate = product(rows, weights.gate.swapaxes(1, 2), weights.gate_bias)
    up = product(rows, weights.up.swapaxes(1, 2), weights.up_bias)
    shares = sorted_rows(routing.shares.reshape(-1, 1)).astype(x.dtype)
    out = product(activated(gate, up) * shares, weights.down, None)
    back = jnp.argsort(order)
    out = out.at[back].get(mode="promise_in_bounds", unique_indices=True)
    # In float32: the order of a token's experts in the sum is another one than without sorting.
    summed = jnp.sum(out.reshape(*lead, k, width).astype(jnp.float32), axis=-2)
    return summed.astype(x.dtype)
