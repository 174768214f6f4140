"""The compiled programs of the engine: a chunk of decode steps, a prefill, a copy between rows.

Static are the model's sizes, the steps of a chunk and the dtype; donated is the cache, which is
updated in place. Everything else is an argument, so that new weights,
new requests, every lane and any load run the same programs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from marin_rl.inference import decoder
from marin_rl.inference.batch import SlotInputs
from marin_rl.inference.kv_cache import Cache
from marin_rl.inference.logits_state import Extras
from marin_rl.inference.logprobs import Report, empty_report, report
from marin_rl.inference.sampling import TokenHistory, adjust, sample, uniforms
from marin_rl.inference.weights import (
    Decoder,
    Rotary,
)
from marin_rl.models.spec import Spec

# Cost of going back to the host, in steps of all rows. A chunk with samples waiting ends once the
# rows that are free for them have idled for that long together: the break-even rule of ski rental,
# which never wastes more than twice the least possible.
RETURN_COST_STEPS = 0.5


class Limits(NamedTuple):
    """Limits of a chunk: its steps, and the samples that wait for a free row.

    Below position `shared` the caches of every `attention.SHARE` rows side by side are alike.
    """

    steps: Int32[Array | np.ndarray | np.int32, ""]
    waiting: Int32[Array | np.ndarray | np.int32, ""]
    shared: Int32[Array | np.ndarray | np.int32, ""] = np.int32(0)


class ChunkInputs(NamedTuple):
    """Inputs of a chunk other than weights and cache."""

    slots: SlotInputs
    extras: Extras
    limits: Limits


class SampledChunk(NamedTuple):
    """Tokens that a chunk's steps sampled; the first `counts_S` of each row's column are real."""

    tokens_CS: Int32[Array, "C S"]
    logprobs_CS: Float32[Array, "C S"]
    reports: Report
    counts_S: Int32[Array, " S"]
    steps: Int32[Array, ""]


class _State(NamedTuple):
    """State passed from step to step; `idle` counts slot-steps that other samples waited for."""

    cache: Cache
    token_S: Array
    position_S: Array
    remaining_S: Array
    idle: Array
    sampled: SampledChunk


@partial(jax.jit, static_argnames=("spec", "steps", "sharing"), donate_argnames="cache")
def decode_chunk(
    fused: Decoder,
    rotary: Rotary,
    cache: Cache,
    chunk: ChunkInputs,
    *,
    spec: Spec,
    steps: int,
    sharing: bool = False,
) -> tuple[Cache, SampledChunk]:
    """Up to `limits.steps` <= `steps` tokens for every row that has some remaining.

    `limits.shared` counts only with `sharing`. Ends early when no row has any remaining, and when
    waiting samples are better served by going back to the host.
    """
    inputs, extras, limits = chunk
    slots = inputs.token_S.shape[0]
    idle_max = max(1, int(RETURN_COST_STEPS * slots))
    began = jnp.sum(inputs.remaining_S > 0)
    # random numbers of the whole chunk at once: one call costs little more than one step's
    # (a token's number belongs to the position that it will stand at)
    uniform_CS = jax.vmap(uniforms, (None, 0))(
        inputs.sampling.seed_S2, jnp.asarray(inputs.position_S) + 1 + jnp.arange(steps)[:, None]
    )

    def goes_on(state: _State) -> Array:
        busy = jnp.any(state.remaining_S > 0) & (state.idle < idle_max)
        return busy & (state.sampled.steps < limits.steps)

    def body(state: _State) -> _State:
        active_S = state.remaining_S > 0
        sampled, index = state.sampled, state.sampled.steps
        logits, cache = decoder.decode_step(
            spec,
            fused,
            rotary,
            state.cache,
            state.token_S,
            # a negative position writes nothing: the cache of an ended row may still be shared
            jnp.where(active_S, state.position_S, -1),
            jnp.asarray(limits.shared) if sharing else None,
            None if inputs.adapter_S is None else jnp.asarray(inputs.adapter_S),
        )
        past = TokenHistory(inputs.position_S, sampled.tokens_CS, index)
        drawn = sample(adjust(logits, extras.params, past), inputs.sampling, uniform_CS[index])
        reports_S = report(logits, drawn, extras.request)
        # the stop token itself is sampled and counted: its logprob is part of the completion
        stopped_S = jnp.any(drawn.tokens_S[:, None] == inputs.stops_SN, axis=1)
        remaining_S = jnp.where(active_S & ~stopped_S, state.remaining_S - 1, 0)
        freed = began - jnp.sum(remaining_S > 0)
        return _State(
            cache=cache,
            token_S=jnp.where(active_S, drawn.tokens_S, state.token_S),
            position_S=state.position_S + active_S,
            remaining_S=remaining_S,
            # a free row without a sample that waits for it loses nothing
            idle=state.idle + jnp.minimum(freed, limits.waiting),
            sampled=SampledChunk(
                # of all rows: `counts_S` says which of them were real
                sampled.tokens_CS.at[index].set(drawn.tokens_S),
                sampled.logprobs_CS.at[index].set(drawn.logprobs_S),
                jax.tree.map(lambda of_C, row: of_C.at[index].set(row), sampled.reports, reports_S),
                sampled.counts_S + active_S,
                index + 1,
            ),
        )

    state = jax.lax.while_loop(goes_on, body, _before(cache, inputs, steps, spec.vocabulary))
    return state.cache, state.sampled


def _before(cache: Cache, inputs: SlotInputs, steps: int, vocabulary: int) -> _State:
    """The state of a chunk in which nothing has been sampled yet."""
    slots = inputs.token_S.shape[0]
    reports = jax.tree.map(
        lambda row: jnp.zeros((steps, *row.shape), row.dtype), empty_report(slots, vocabulary)
    )
    # of the longest chunk: a shorter one leaves its end unused, and is the same program
    nothing = SampledChunk(
        tokens_CS=jnp.zeros((steps, slots), jnp.int32),
        logprobs_CS=jnp.zeros((steps, slots), jnp.float32),
        reports=reports,
        counts_S=jnp.zeros(slots, jnp.int32),
        steps=jnp.int32(0),
    )
    return _State(
        cache=cache,
        token_S=jnp.asarray(inputs.token_S),
        position_S=jnp.asarray(inputs.position_S),
        remaining_S=jnp.asarray(inputs.remaining_S),
        idle=jnp.int32(0),
        sampled=nothing,
    )


prefill_slots = jax.jit(decoder.prefill, static_argnames="spec", donate_argnames="cache")
extend_slots = jax.jit(decoder.extend, static_argnames="spec", donate_argnames="cache")


@partial(jax.jit, donate_argnames="cache")
def copy_slots(
    cache: Cache,
    source_S: Int32[Array, " S"],
    target_S: Int32[Array, " S"],
    count: Int32[Array, ""],
) -> Cache:
    """Copy row `source_S[i]` to row `target_S[i]` for the first `count` i, in order."""

    # one after the other: a gather of all rows at once would take the memory of a second cache
    def body(index: Any, cache: Cache) -> Cache:
        source, target = source_S[index], target_S[index]
        return jax.tree.map(
            lambda array: jax.lax.dynamic_update_slice_in_dim(
                array, jax.lax.dynamic_slice_in_dim(array, source, 1), target, 0
            ),
            cache,
        )

    return jax.lax.fori_loop(0, count, body, cache)
