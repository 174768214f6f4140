"""The two compiled programs of the engine: a chunk of decode steps, and a prefill.

Owns what is static in them (the model's sizes, the steps of a chunk, the dtype) and what is given
away (the cache, which is updated in place). Everything else is an argument, so that new weights,
new requests and any load run the same programs.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from marin_rl.inference import decoder
from marin_rl.inference.decoder import Cache
from marin_rl.inference.sampling import sample
from marin_rl.inference.slots import SlotInputs
from marin_rl.inference.weights import DecoderSpec, Rotary, Weights, fuse


@partial(jax.jit, static_argnames=("spec", "steps", "dtype"), donate_argnames="cache")
def decode_chunk(
    weights: Weights,
    rotary: Rotary,
    cache: Cache,
    inputs: SlotInputs,
    *,
    spec: DecoderSpec,
    steps: int,
    dtype: jnp.dtype,
) -> tuple[Cache, Int32[Array, "C S"], Float32[Array, "C S"], Int32[Array, " S"]]:
    """Up to `steps` tokens for every slot that has some remaining; ends early when none has.

    Returns the cache, tokens, their logprobs, and how many of them each slot really sampled.
    """
    fused = fuse(spec, weights, dtype)
    slots = inputs.token_S.shape[0]

    def going(state):
        return (state[0] < steps) & jnp.any(state[4] > 0)

    def step(state):
        index, cache, token, position, remaining, tokens, logprobs, counts = state
        active = remaining > 0
        logits, cache = decoder.decode_step(
            spec, fused, rotary, cache, token, jnp.where(active, position, -1)
        )
        drawn, logprob = sample(logits, inputs.sampling, position + 1)
        stopped = jnp.any(drawn[:, None] == inputs.stops_SN, axis=1)
        return (
            index + 1,
            cache,
            jnp.where(active, drawn, token),
            position + active,
            jnp.where(active & ~stopped, remaining - 1, 0),
            tokens.at[index].set(drawn),
            logprobs.at[index].set(logprob),
            counts + active,
        )

    state = (
        jnp.int32(0),
        cache,
        inputs.token_S,
        inputs.position_S,
        inputs.remaining_S,
        jnp.zeros((steps, slots), jnp.int32),
        jnp.zeros((steps, slots), jnp.float32),
        jnp.zeros(slots, jnp.int32),
    )
    _, cache, _, _, _, tokens, logprobs, counts = jax.lax.while_loop(going, step, state)
    return cache, tokens, logprobs, counts


@partial(jax.jit, static_argnames=("spec", "dtype"), donate_argnames="cache")
def prefill_slots(
    weights: Weights,
    rotary: Rotary,
    cache: Cache,
    tokens_RP: Int32[Array, "R P"],
    rows: Int32[Array, ""],
    source_S: Int32[Array, " S"],
    *,
    spec: DecoderSpec,
    dtype: jnp.dtype,
) -> Cache:
    """The compiled form of `decoder.prefill`."""
    fused = fuse(spec, weights, dtype)
    return decoder.prefill(spec, fused, rotary, cache, tokens_RP, rows, source_S)
