"""An engine's programs before its first request: compiled, or traced by shapes alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np

from marin_rl.config import EngineConfig
from marin_rl.cpu_streams import Lanes
from marin_rl.inference.adapters import BankSizes, bank_shapes, with_bank
from marin_rl.inference.batch import RunningBatch, SlotInputs
from marin_rl.inference.execution_plan import ExecutionPlan
from marin_rl.inference.generation import Policy
from marin_rl.inference.kv_cache import cache_length, empty_cache
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.logprobs import score_tokens
from marin_rl.inference.pieces import Extension, packed, piece_size
from marin_rl.inference.programs import (
    ChunkInputs,
    Limits,
    copy_slots,
    decode_chunk,
    extend_slots,
    prefill_slots,
)
from marin_rl.inference.runner import NextChunk, Runner
from marin_rl.inference.sampling import UNKNOWN, Asked
from marin_rl.inference.weights import fused_weights, read_model, rotary_table
from marin_rl.machine import give_back_freed_memory
from marin_rl.models.module import LanguageModel

# No operand's dtype depends on these: as few as take every way through the programs. Layers are
# written out one after the other there, and all of them are alike.
SLOTS, PROMPT_TOKENS, LAYERS_MAX = 2, 16, 2


def programs_of(runner: Runner) -> int:
    """Number of programs that `warm_up` compiles."""
    plan, buckets = runner.plan, len(runner.buckets)
    # a copy of half of the bank, and a chunk with that half
    halves = 2 if plan.invariance.few_adapters and plan.bank_sizes.adapters > 1 else 0
    # chunks, a copy, and for each bucket one that scores; one that extends, or prefills by bucket
    prompts = 1 if plan.keeps_prefixes else buckets
    return len(chunks_of(plan)) + halves + 1 + buckets + prompts


def chunks_of(plan: ExecutionPlan) -> Mapping[str, Asked]:
    """Programs of a chunk: of a host one, of an accelerator one for each thing that is asked."""
    sequences = f"decoding of {plan.lanes.size} at a time"
    if not plan.whole:
        return {sequences: UNKNOWN}
    return {
        sequences: Asked(filters=False, extras=False),
        f"{sequences}, with filters": Asked(filters=True, extras=False),
        f"{sequences}, with all that may be asked": Asked(filters=True, extras=True),
    }


def warm_up(
    runner: Runner,
    policy: Policy,
    inputs: SlotInputs,
    extras: ExtraRows,
    announce: Callable[[str], None],
) -> None:
    """Compile every program, for every bucket, with a line for each; changes nothing else.

    The largest goes first, while the caches are not there, and what compiling freed goes back after
    each: so none of them needs its memory on top of another's.
    """
    total, numbers = programs_of(runner), count(1)

    def begin(program: str) -> None:
        give_back_freed_memory()
        announce(f"compiling {next(numbers)} of {total} programs: {program}")

    # limits are data: a chunk of 0 steps is the same program as any other
    nothing = NextChunk(inputs, extras, Limits(np.int32(0), np.int32(0)))
    keeps_prefixes = runner.plan.keeps_prefixes
    # for caches of these shapes, which are freed as long as they compile
    runner.memory.wake()
    shape_of = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    cache = jax.tree.map(shape_of, runner.memory.caches[0])
    runner.memory.release(caches=True)
    for program, asked in chunks_of(runner.plan).items():
        begin(program)
        runner.compile_chunk(policy, cache, nothing, asked)
    give_back_freed_memory()
    runner.decode(policy, nothing)()
    if runner.bank is not None:
        begin("decoding with all adapters")
        # slots on as many adapters as they can use take another program than those on a few
        slots = np.arange(runner.lanes.slots)
        row_S = (1 + slots % runner.plan.bank_sizes.adapters).astype(np.int32)
        on_all = inputs._replace(adapter_S=row_S, remaining_S=np.ones_like(row_S))
        runner.decode(policy, nothing._replace(inputs=on_all))()
    if keeps_prefixes:
        begin("prefill in pieces")
        # a position that is padding: the program runs, and writes nothing
        nowhere = Extension(0, -1, np.zeros(1, np.int32))
        runner.extend(policy, [nowhere], inputs.adapter_S)
    for bucket in reversed(runner.buckets):
        if not keeps_prefixes:
            begin(f"prefill of {bucket} tokens")
            nothing_to_run = {(bucket, 0): [(np.zeros(0, np.int32), [])]}
            runner.prefill(policy, nothing_to_run, inputs.adapter_S)
        begin(f"scores of {bucket} tokens")
        runner.score(policy, np.zeros(bucket, np.int32), 0)
    begin("copies between slots")
    runner.copy([(0, 0)])
    # until the first request: a trainer in this process may want the memory
    runner.memory.release()


def trace_engine(
    model: LanguageModel,
    config: EngineConfig,
    context_length: int,
    dtype: jnp.dtype,
    bank: BankSizes | None = None,
) -> None:
    """Trace the programs of an engine for a model, with room for adapters where there is a `bank`.

    Raises InputError for a model that the engine cannot decode, and what tracing raises.
    """
    spec, weights = read_model(model)
    spec = replace(spec, kinds=spec.kinds[:LAYERS_MAX])
    cache = empty_cache(spec, SLOTS, context_length, dtype)
    length = cache_length(cache)
    fused = fused_weights(spec, weights, dtype, rotary_table(spec, length))
    adapter = None
    if bank is not None:
        shapes = bank_shapes(spec, bank, dtype, masked=bank.masked)
        fused = with_bank(
            fused, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        )
        adapter = np.zeros(SLOTS, np.int32)
    tokens_RP, source_S = np.zeros((1, PROMPT_TOKENS), np.int32), np.zeros(SLOTS, np.int32)
    one = None if adapter is None else adapter[:1]
    cache = prefill_slots(spec, fused, cache, tokens_RP, np.int32(1), source_S, one)
    (pieces,) = packed([Extension(0, 0, tokens_RP[0, :1])], SLOTS, piece_size(SLOTS))
    cache = extend_slots(spec, fused, cache, pieces, adapter)
    cache = copy_slots(cache, source_S, source_S, np.int32(1))
    rows = ExtraRows(Lanes(1, SLOTS), length, spec.vocabulary, lambda arrays: arrays)
    batch = RunningBatch(SLOTS, spec.vocabulary, None, rows, has_adapters=bank is not None)
    chunk = ChunkInputs(batch.inputs, rows.on_device(0), Limits(np.int32(1), np.int32(0)))
    decode_chunk(fused, cache, chunk, spec=spec, steps=config.chunk_steps)
    score_tokens(fused, tokens_RP[0], np.bool_(1), one, spec=spec)
