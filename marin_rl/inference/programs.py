"""The compiled programs of the engine: a chunk of decode steps, a prefill, a copy between rows.

Static are the model's sizes, the steps of a chunk and the dtype; donated is the cache, which is
updated in place. Everything else is an argument, so that new weights,
new requests, every lane and any load run the same programs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from marin_rl.inference import decoder
from marin_rl.inference.batch import SlotInputs
from marin_rl.inference.kv_cache import Blocks, Cache, copy_prompt
from marin_rl.inference.logits_state import Extras
from marin_rl.inference.logprobs import Report, empty_report, report
from marin_rl.inference.placement import constrain
from marin_rl.inference.sampling import UNKNOWN, Asked, TokenHistory, adjust, sample, uniforms
from marin_rl.inference.weights import Decoder, Ends, Layer
from marin_rl.models.spec import LayerKind, Spec

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


class SlotState(NamedTuple):
    """State of every row after a chunk, which the next one can begin from unread."""

    token_S: Int32[Array | np.ndarray, " S"]
    position_S: Int32[Array | np.ndarray, " S"]
    remaining_S: Int32[Array | np.ndarray, " S"]


class ChunkInputs(NamedTuple):
    """Inputs of a chunk other than weights and cache.

    Of rows that are `unread`, the host does not know yet what the last chunk added: they begin from
    `last`, and of their inputs only whether some are remaining counts.
    """

    slots: SlotInputs
    extras: Extras
    limits: Limits
    last: SlotState | None = None
    unread_S: Bool[Array | np.ndarray, " S"] | None = None


class SampledChunk(NamedTuple):
    """Tokens that a chunk's steps sampled; the first `counts_S` of each row's column are real."""

    tokens_CS: Int32[Array, "C S"]
    logprobs_CS: Float32[Array, "C S"]
    reports: Report
    counts_S: Int32[Array, " S"]
    steps: Int32[Array, ""]
    after: SlotState | None = None


class State(NamedTuple):
    """State passed from step to step; `idle` counts slot-steps that other samples waited for."""

    token_S: Array
    position_S: Array
    remaining_S: Array
    idle: Array
    sampled: SampledChunk


@partial(jax.jit, static_argnames=("spec", "steps", "sharing", "asked"), donate_argnames="cache")
def decode_chunk(
    fused: Decoder,
    cache: Cache,
    chunk: ChunkInputs,
    *,
    spec: Spec,
    steps: int,
    sharing: bool = False,
    asked: Asked = UNKNOWN,
) -> tuple[Cache, SampledChunk]:
    """Up to `limits.steps` <= `steps` tokens for every row that has some remaining.

    `limits.shared` counts only with `sharing`. Ends early when no row has any remaining, and when
    waiting samples are better served by going back to the host.
    """
    chunk = joined(chunk)
    inputs = chunk.slots
    uniform_CS, began = uniforms_of(inputs, steps), first_state(inputs, steps, spec.vocabulary)

    def body(carried: tuple[Cache, State]) -> tuple[Cache, State]:
        cache, state = carried
        logits, cache = decoder.decode_step(
            spec,
            fused,
            cache,
            state.token_S,
            written_at(state),
            jnp.asarray(chunk.limits.shared) if sharing else None,
            None if inputs.adapter_S is None else jnp.asarray(inputs.adapter_S),
        )
        return cache, next_state(state, logits, uniform_CS, chunk, asked)

    def proceeds(carried: tuple[Cache, State]) -> Array:
        return goes_on(carried[1], chunk.limits)

    if chunk.last is not None:  # of which only the device knows who has ended
        began = began._replace(remaining_S=jnp.asarray(chunk.last.remaining_S))
    cache, state = jax.lax.while_loop(proceeds, body, (cache, began))
    # spread as the first chunk's are, so that all chunks are one program
    after = map(constrain, (state.token_S, state.position_S, state.remaining_S))
    return cache, state.sampled._replace(after=SlotState(*after))


def joined(chunk: ChunkInputs) -> ChunkInputs:
    """The same chunk, in which every row's inputs are what the device knows of it."""
    if chunk.last is None or chunk.unread_S is None:
        return chunk
    known = [getattr(chunk.slots, name) for name in SlotState._fields]
    last = SlotState(*map(partial(jnp.where, chunk.unread_S), chunk.last, known))
    # not what remains: waiting samples count the rows that the host took for busy
    slots = chunk.slots._replace(token_S=last.token_S, position_S=last.position_S)
    return chunk._replace(slots=slots, last=last)


def uniforms_of(inputs: SlotInputs, steps: int) -> Float32[Array, "C S"]:
    """Random numbers of a whole chunk, by the positions that its tokens will stand at.

    At once, which costs little more than one step's.
    """
    positions_CS = jnp.asarray(inputs.position_S) + 1 + jnp.arange(steps)[:, None]
    return jax.vmap(uniforms, (None, 0))(inputs.sampling.seed_S2, positions_CS)


def goes_on(state: State, limits: Limits) -> Array:
    idle_max = max(1, int(RETURN_COST_STEPS * len(state.token_S)))
    busy = jnp.any(state.remaining_S > 0) & (state.idle < idle_max)
    return busy & (state.sampled.steps < limits.steps)


def written_at(state: State) -> Int32[Array, " S"]:
    # negative where nothing is written: the cache of a row that has ended may still be shared
    return jnp.where(state.remaining_S > 0, state.position_S, -1)


def next_state(
    state: State,
    logits: Float32[Array, "S V"],
    uniform_CS: Array,
    chunk: ChunkInputs,
    asked: Asked = UNKNOWN,
) -> State:
    """The state after tokens are sampled from a step's logits."""
    inputs, extras, limits = chunk.slots, chunk.extras, chunk.limits
    active_S = state.remaining_S > 0
    sampled, index = state.sampled, state.sampled.steps
    past = TokenHistory(inputs.position_S, sampled.tokens_CS, index)
    adjusted = adjust(logits, extras.params, past, known=asked.extras)
    drawn = sample(adjusted, inputs.sampling, uniform_CS[index], asked)
    reports_S = report(logits, drawn, extras.request, known=asked.extras)
    # the stop token itself is sampled and counted: its logprob is part of the completion
    stopped_S = jnp.any(drawn.tokens_S[:, None] == inputs.stops_SN, axis=1)
    remaining_S = jnp.where(active_S & ~stopped_S, state.remaining_S - 1, 0)
    freed = jnp.sum(inputs.remaining_S > 0) - jnp.sum(remaining_S > 0)
    return State(
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


def first_state(inputs: SlotInputs, steps: int, vocabulary: int) -> State:
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
    return State(
        token_S=jnp.asarray(inputs.token_S),
        position_S=jnp.asarray(inputs.position_S),
        remaining_S=jnp.asarray(inputs.remaining_S),
        idle=jnp.int32(0),
        sampled=nothing,
    )


class LayerPrograms:
    """Programs that run a decoder some layers at a time: one for all runs of the same kinds.

    They compile in a fifth of the time of programs of thirty layers. A program a layer would be
    faster still to compile, and decode an eighth slower, for what it costs a CPU to start one.
    `steps` are those of the longest chunk; `put` commits arrays to where the engine computes.
    """

    def __init__(self, spec: Spec, steps: int, put: Callable[[Any], Any]) -> None:
        self._spec, self._runs, self._put = spec, runs_of(spec.kinds), put

        def begin(inputs: SlotInputs) -> tuple[State, Array]:
            return first_state(inputs, steps, spec.vocabulary), uniforms_of(inputs, steps)

        def inputs(ends: Ends, state: State) -> tuple[Array, decoder.Turns, decoder.Step]:
            positions_S = written_at(state)
            x_SD, turns = decoder.step_inputs(spec, ends, state.token_S, positions_S)
            return x_SD, turns, decoder.Step(positions_S, jnp.max(positions_S))

        def sampled(
            ends: Ends,
            x_SD: Array,
            state: State,
            uniform_CS: Array,
            chunk: ChunkInputs,
            asked: Asked,
        ) -> tuple[State, Array]:
            state = next_state(state, decoder.logits(spec, ends, x_SD), uniform_CS, chunk, asked)
            return state, goes_on(state, chunk.limits)

        self._begin, self._inputs = map(jax.jit, (begin, inputs))
        self._sampled = jax.jit(sampled, static_argnames="asked")
        self._prompt_inputs = jax.jit(partial(decoder.prompt_inputs, spec))
        kinds = dict.fromkeys(spec.kinds[run] for run in self._runs)
        compiled = partial(jax.jit, donate_argnums=1)
        self._steps = {run: compiled(partial(_run, decoder.step_layer, spec, run)) for run in kinds}
        self._prompts = {run: compiled(partial(_run, _prompt_layer, spec, run)) for run in kinds}

    def decode(
        self, fused: Decoder, cache: list[Blocks], chunk: ChunkInputs, asked: Asked
    ) -> SampledChunk:
        """As `decode_chunk`; `cache` has its layers replaced."""
        ends, slots = fused.ends, chunk.slots
        # Committed to a device as later states are, or the first would be a program of its own.
        state, uniform_CS = self._put(self._begin(slots))
        steps = min(int(chunk.limits.steps), int(np.max(slots.remaining_S)))
        more = True
        for _ in range(steps):
            x_SD, turns, step = self._inputs(ends, state)
            x_SD = self._through(self._steps, fused, cache, x_SD, turns, step)
            following, after = self._sampled(ends, x_SD, state, uniform_CS, chunk, asked=asked)
            # Read a step late, so that the device never waits for the host: where sequences ended,
            # this step wrote nothing that another will not write again.
            if not more:
                break
            state, more = following, after
        return state.sampled

    def prefill(
        self, fused: Decoder, cache: list[Blocks], tokens_RP: Int32[np.ndarray, "R P"]
    ) -> None:
        """Run prompts into the first rows of the cache, whose layers are replaced."""
        x_RPD, turns = self._prompt_inputs(fused.ends, tokens_RP)
        self._through(self._prompts, fused, cache, x_RPD, turns)

    def _through(
        self, programs: Any, fused: Decoder, cache: list[Blocks], x: Array, *inputs: Any
    ) -> Array:
        spec = self._spec
        layers = [fused.layer(spec, index) for index in range(spec.layers)]
        for run in self._runs:
            program = programs[spec.kinds[run]]
            x, cache[run] = program(layers[run], tuple(cache[run]), x, *inputs)
        return x


def runs_of(kinds: tuple[LayerKind, ...]) -> list[slice]:
    """Runs of layers, as long as leaves the fewest layers to compile."""

    def cut(size: int) -> list[slice]:
        return [slice(at, at + size) for at in range(0, len(kinds), size)]

    return min(
        map(cut, (6, 5, 4)), key=lambda runs: sum(map(len, dict.fromkeys(kinds[r] for r in runs)))
    )


def _run(
    layer: Any, spec: Spec, kinds: Any, layers: Any, cache: Any, x: Array, *inputs: Any
) -> tuple[Array, tuple[Blocks, ...]]:
    written = []
    for kind, own, blocks in zip(kinds, layers, cache, strict=True):
        x, after = layer(spec, kind, own, blocks, x, *inputs)
        written.append(after)
    return x, tuple(written)


def _prompt_layer(
    spec: Spec, kind: LayerKind, layer: Layer, blocks: Blocks, x: Array, turns: decoder.Turns
) -> tuple[Array, Blocks]:
    x, pair = decoder.prompt_layer(spec, kind, layer, x, turns)
    for row in range(len(x)):
        blocks = copy_prompt(blocks, *pair, row, row)
    return x, blocks


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
