"""The engine's programs, traced by shapes alone: a check that an engine can be built at all.

To be called within `jax.eval_shape`, which allocates and computes nothing. Leaves out what the
programs compute (`programs`) and how an engine calls them (`runner`).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from levanter.models.lm_model import LmHeadModel

from marin_rl.config import EngineConfig
from marin_rl.cpu_streams import Lanes
from marin_rl.inference.adapters import BankSizes, bank_shapes, with_bank
from marin_rl.inference.batch import RunningBatch
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
    fused_weights,
    prefill_slots,
)
from marin_rl.inference.weights import read_model, rotary_table

# No operand's dtype depends on these: as few as take every way through the programs. Layers are
# written out one after the other there, and all of them are alike.
SLOTS, PROMPT_TOKENS, LAYERS_MAX = 2, 16, 2


def trace_engine(
    model: LmHeadModel,
    config: EngineConfig,
    context_length: int,
    dtype: jnp.dtype,
    bank: BankSizes | None = None,
) -> None:
    """Trace the programs of an engine for a model, with room for adapters where there is a `bank`.

    Raises InputError for a model that the engine cannot decode, and what tracing raises.
    """
    spec, weights = read_model(model)
    spec = replace(spec, layers=min(spec.layers, LAYERS_MAX))
    fused = fused_weights(spec, weights, dtype)
    cache = empty_cache(spec, SLOTS, context_length, dtype)
    length = cache_length(cache)
    rotary = rotary_table(model, length)
    adapter = None
    if bank is not None:
        width = model.config.intermediate_dim
        shapes = bank_shapes(spec, bank, width, dtype, masked=bank.masked)
        fused = with_bank(
            fused, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        )
        adapter = np.zeros(SLOTS, np.int32)
    tokens_RP, source_S = np.zeros((1, PROMPT_TOKENS), np.int32), np.zeros(SLOTS, np.int32)
    one = None if adapter is None else adapter[:1]
    cache = prefill_slots(spec, fused, rotary, cache, tokens_RP, np.int32(1), source_S, one)
    (pieces,) = packed([Extension(0, 0, tokens_RP[0, :1])], SLOTS, piece_size(SLOTS))
    cache = extend_slots(spec, fused, rotary, cache, pieces, adapter)
    cache = copy_slots(cache, source_S, source_S, np.int32(1))
    rows = ExtraRows(Lanes(1, SLOTS), length, spec.vocabulary, lambda arrays: arrays)
    batch = RunningBatch(SLOTS, spec.vocabulary, None, rows, has_adapters=bank is not None)
    chunk = ChunkInputs(batch.inputs, rows.on_device(0), Limits(np.int32(1), np.int32(0)))
    decode_chunk(fused, rotary, cache, chunk, spec=spec, steps=config.chunk_steps)
    score_tokens(fused, rotary, tokens_RP[0], np.bool_(1), one, spec=spec)
