"""Hidden states of rows by the layers' own function, as far as positions exchange anything.

Rows that are packed, or share prompts, run with an attention that computes only the pairs in sight
(`attention`). Leaves out what each token does by itself at the end (`logprobs`).

Axes: B sequences, T positions, E embedding, K key heads, G query heads of each, H head size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from marin_rl.models.axes import table_rows
from marin_rl.models.block import (
    Rotation,
    after_attention,
    after_mlp,
    angles_of,
    embedded,
    expert_loads,
    queries_keys_values,
    scaled,
)
from marin_rl.models.experts import ExpertLoads
from marin_rl.models.fused_attention import attend_fused, takes_fused
from marin_rl.models.module import DecoderLayer, LanguageModel, Layers, TrainedLinears
from marin_rl.models.spec import LayerKind, Rope, Spec
from marin_rl.training.adapters import Blocks, Sums
from marin_rl.training.attention import (
    Tokens,
    attend,
    attend_by_levanter,
    attend_plainly,
    on_tpu,
    pairs_in_sight,
    pairs_of,
    sight_of,
)
from marin_rl.training.context import (
    attend_pieces,
    attend_pieces_fused,
    context_size,
    in_pieces,
    sights_of_pieces,
)

# More layers than this are scanned. Against a scan, running few layers one after the other spares a
# CPU 8 %; a scan of many spares the compiler minutes.
UNROLLED_LAYERS_MAX = 8

# Longest rows that plain attention computes on a GPU: of each head it keeps an array of positions
# by positions.
PLAIN_POSITIONS_MAX_GPU = 1024

AXES = ("batch", "position")
# What gradient checkpointing keeps of a layer, its input, goes to the host's memory.
LAYER_INPUT = "layer_input"
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device", offload_dst="pinned_host",
)  # fmt: skip
# Operations whose results cost less to make again than to keep. A sum is kept, in place of the
# products that it is of: an adapter's layer has two.
CHEAP = frozenset({
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "div", "erf", "exp",
    "integer_pow", "logistic", "max", "min", "mul", "neg", "pow", "reduce_max", "reduce_sum",
    "reshape", "rsqrt", "select_n", "slice", "sqrt", "square", "squeeze", "stop_gradient", "sub",
    "tanh", "transpose",
})  # fmt: skip
# Attention of a layer of this kind over queries, keys, values and sinks, to [B, T, K, G, H].
Attend = Callable[[LayerKind, Array, Array, Array, Array | None], Array]
Turn = Callable[[Rope], Rotation]


def states_before_last_mlp(
    model: LanguageModel,
    token_ids_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    prompts_BT: Int[Array, "B T"] | None,
    counted_BT: Bool[Array, "B T"] | None = None,
    *,
    alone: bool = False,
) -> tuple[Float[Array, "B T E"], DecoderLayer, ExpertLoads | None]:
    """Activations up to where positions stop exchanging anything; the last layer; experts' loads.

    `alone`: every row is one sequence, followed by padding. Loads are by layer, of the tokens that
    are `counted`; None without experts. What is given is in the order of the row; the activations
    are in pieces on a mesh with `context` (`context.in_pieces`).
    """
    spec, n = model.spec, context_size()
    whole = segment_ids_BT, positions_BT, prompts_BT
    token_ids_BT, positions_BT = in_pieces(token_ids_BT, n), in_pieces(positions_BT, n)
    if counted_BT is not None:
        counted_BT = in_pieces(counted_BT, n)
    tables = model.embedding, positions_BT, model.positions
    states = embedded(spec, token_ids_BT, *tables, take=table_rows)
    states = hax.auto_sharded(hax.named(states, (*AXES, "embed"))).array
    if (
        n == 1
        and prompts_BT is None
        and jax.default_backend() == "gpu"
        and token_ids_BT.shape[1] > PLAIN_POSITIONS_MAX_GPU
    ):
        prompts_BT = segment_ids_BT
    if n > 1:
        attention = _attention_of_pieces(spec, states.dtype, *whole)
    else:
        attention = _attention(
            spec, states.dtype, segment_ids_BT, positions_BT, prompts_BT, alone=alone
        )
    # Positions within a sequence and not within the row: a packed completion is rotated as it was
    # when it was sampled.
    turn = _turn(spec, positions_BT, shared=prompts_BT is not None)
    blocks = Blocks(model.layers)
    last = blocks.take(spec.layers - 1)
    states, loads = _through_layers(model, blocks, states, attention, turn, counted_BT)
    # Without the last MLP, which works on each token by itself: `_Tail` runs it on the mask only.
    states = _attended(spec, spec.kinds[-1], last, states, attention, turn)
    loads.append(expert_loads(spec, TrainedLinears(spec, last, AXES), states, counted_BT))
    return states, last, jax.tree.map(lambda *parts: jnp.concatenate(parts), *loads)


def _turn(spec: Spec, positions_BT: Int[Array, "B T"], *, shared: bool) -> Turn:
    """Angles of a rotary embedding; `shared`: computed once for all layers.

    Else XLA computes them in every layer, next to what they are used for, and again in the backward
    pass, which takes a CPU 6 % of a small model's step. But it rounds the rotation differently in
    the last bit where the table is an operand, so rows of one sequence, whose steps must replay to
    the bits of earlier runs, keep that way.
    """
    if not shared:
        return lambda rope: Rotation(*angles_of(rope, positions_BT))
    tables = {
        rope: Rotation(*jax.lax.optimization_barrier(angles_of(rope, positions_BT)), shared=True)
        for rope in spec.ropes
    }
    return tables.__getitem__


def _attention(
    spec: Spec,
    dtype: Any,
    segments_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    prompts_BT: Int[Array, "B T"] | None,
    *,
    alone: bool,
) -> Attend:
    """The attention of these rows on this device."""
    shares_windowed = prompts_BT is not None and any(kind.window for kind in spec.kinds)
    if takes_fused(spec, dtype) and not shares_windowed:
        seen_BTT = None if alone else pairs_of(segments_BT, prompts_BT)

        def fused(kind: LayerKind, q: Array, k: Array, v: Array, _: Array | None) -> Array:
            return attend_fused(scaled(spec, q), k, v, seen_BTT, kind.window)

        return fused
    if prompts_BT is not None:
        sight = sight_of(segments_BT, prompts_BT, positions_BT)

        def in_blocks(kind: LayerKind, q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
            return attend(scaled(spec, q), k, v, sight, kind.window, spec.cap, sinks)

        return in_blocks
    if on_tpu() and not spec.sinks:

        def by_levanter(kind: LayerKind, q: Array, k: Array, v: Array, _: Array | None) -> Array:
            return attend_by_levanter(scaled(spec, q), k, v, segments_BT, kind.window, spec.cap)

        return by_levanter

    # By segment as well as causal: neighbours in a packed row must not see one another.
    def plainly(kind: LayerKind, q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        return attend_plainly(q, k, v, pairs_in_sight(segments_BT, kind.window), spec, sinks)

    return plainly


def _attention_of_pieces(
    spec: Spec,
    dtype: Any,
    segments_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    prompts_BT: Int[Array, "B T"] | None,
) -> Attend:
    """The attention of rows that devices share, by which all read the keys of whole rows."""
    whole = Tokens(segments_BT, segments_BT if prompts_BT is None else prompts_BT, positions_BT)
    if takes_fused(spec, dtype):

        def fused(kind: LayerKind, q: Array, k: Array, v: Array, _: Array | None) -> Array:
            return attend_pieces_fused(scaled(spec, q), k, v, whole, kind.window)

        return fused
    sights = sights_of_pieces(whole)

    def in_blocks(kind: LayerKind, q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        return attend_pieces(scaled(spec, q), k, v, sights, kind.window, spec.cap, sinks)

    return in_blocks


def _attended(
    spec: Spec,
    kind: LayerKind,
    layer: DecoderLayer,
    states: Array,
    attention: Attend,
    turn: Turn,
) -> Array:
    linears = TrainedLinears(spec, layer, AXES)
    angles = None if kind.rope is None else turn(kind.rope)
    query, key, value = queries_keys_values(spec, kind, linears, states, angles)
    attended = attention(kind, query, key, value, linears.sinks)
    attended = attended.reshape(*attended.shape[:2], -1).astype(states.dtype)
    return after_attention(spec, linears, states, attended)


Loads = list[ExpertLoads | None]


def _through_layers(
    model: LanguageModel,
    blocks: Blocks,
    states: Array,
    attention: Attend,
    turn: Turn,
    counted_BT: Array | None,
) -> tuple[Array, Loads]:
    """The states after all layers but the last, many of which run in a scan, and their loads."""
    spec, layers, count = model.spec, model.layers, model.spec.layers - 1

    def run(
        states: Array, layer: DecoderLayer, kind: LayerKind
    ) -> tuple[Array, ExpertLoads | None]:
        if layers.recomputed == "offload":
            states = checkpoint_name(states, LAYER_INPUT)
        states = _attended(spec, kind, layer, states, attention, turn)
        linears = TrainedLinears(spec, layer, AXES)
        loads = expert_loads(spec, linears, states, counted_BT)
        return after_mlp(spec, linears, states), loads

    all_loads: Loads = []
    if not in_scan(model):
        for layer, kind in zip(blocks.first(count), spec.kinds, strict=False):
            states, loads = run(states, layer, kind)
            all_loads.append(loads)
        return states, all_loads
    kept = partial(jax.checkpoint, prevent_cse=False, policy=_policy(layers, blocks))
    # What is left of the last period, or of the only one, runs layer by layer.
    scanned = count - count % spec.period
    if scanned:
        states, loads = _scanned(model, blocks, scanned, states, run, kept)
        all_loads.append(loads)
    for index in range(scanned, count):
        step = kept(partial(run, kind=spec.kinds[index]))
        states, loads = step(states, blocks.take(index))
        all_loads.append(loads)
    return blocks.begin_sums(states), all_loads


def in_scan(model: LanguageModel) -> bool:
    """True for a model whose layers run in a scan, and the last ones one by one."""
    return model.spec.layers > UNROLLED_LAYERS_MAX or bool(model.layers.recomputed)


def _policy(layers: Layers, blocks: Blocks) -> Callable[..., Any] | None:
    """Values that are kept of each layer for the backward pass: its input, or those `saved`.

    A scan computes nothing forward that its backward pass could share.
    """
    shapes = {(), *(shape for a in blocks.arrays for shape in (a.shape, a.shape[1:]))}

    def saved(primitive: Any, *operands: Any, **_: Any) -> bool:
        """False for what is cheap, and what weights alone give: the backward pass reads these."""
        return primitive.name not in CHEAP and any(o.shape not in shapes for o in operands)

    return {False: saved, True: None, "offload": OFFLOADED}[layers.recomputed]


def _scanned(
    model: LanguageModel,
    blocks: Blocks,
    count: int,
    states: Array,
    run: Callable[[Array, DecoderLayer, LayerKind], tuple[Array, ExpertLoads | None]],
    kept: Callable[[Any], Any],
) -> tuple[Array, ExpertLoads | None]:
    """The states after `count` layers, in a scan over periods: what is compiled is one of them."""
    spec, period = model.spec, model.spec.period

    def body(carry: tuple[Array, Sums], first: Array) -> tuple[tuple[Array, Sums], Any]:
        loads: Loads = []
        for place, kind in enumerate(spec.kinds[:period]):

            def step(carry: tuple[Array, Sums], layer: Array, of: LayerKind = kind) -> Any:
                states, sums = carry
                block, sums = blocks.at(layer, sums)
                states, loads = run(states, block, of)
                return (states, sums), loads

            carry, of_layer = kept(step)(carry, first + place)
            loads.append(of_layer)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *loads)

    carry, loads = jax.lax.scan(body, (states, blocks.sums), jnp.arange(0, count, period))
    states, blocks.sums = carry
    return states, jax.tree.map(lambda array: array.reshape(count, *array.shape[2:]), loads)
