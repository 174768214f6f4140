"""Prompts cut into the pieces that `decoder.extend` computes.

A piece is up to T consecutive positions of one sequence slot. A step computes N pieces, of one
prompt or of several, and N x T is the number of slots of a lane: the shapes of a decode step, so
that a position has the bits that decoding would have given it, wherever a prompt is cut. Owns the
size of a piece and how pieces fill steps. Leaves out what they compute (`decoder`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from marin_rl.inference.decoder import Pieces
from marin_rl.inference.kv_cache import SHARE

# Steps of one call: the arrays have one size, whatever there is to prefill.
CALL_STEPS = 16


class Extension(NamedTuple):
    """Tokens to be written into the cache of a slot, from position `start` on."""

    seq_slot: int
    start: int
    token_ids: Int32[np.ndarray, " n"]


def piece_size(slots: int) -> int:
    """Most positions of a piece, which read a slot's cache together: divides a lane's slots."""
    return max(size for size in range(1, SHARE + 1) if slots % size == 0)


def packed(
    extensions: Sequence[Extension], slots: int, size: int, first: int = 0
) -> Iterator[Pieces]:
    """Calls of at most CALL_STEPS steps that together compute all `extensions`.

    Each is cut into pieces of `size`, the first of them of `first` positions if that is given.
    """
    pieces = [piece for one in extensions for piece in _cut(one, size, first or size)]
    per_step = slots // size
    # full arrays, of which `steps` are run: any number of tokens is one program
    per_call = per_step * CALL_STEPS
    for begin in range(0, len(pieces), per_call):
        own = pieces[begin : begin + per_call]
        tokens = np.zeros((per_call, size), np.int32)
        # -1 is padding: it is written nowhere, and attends to nothing
        positions = np.full((per_call, size), -1, np.int32)
        seq_slot = np.zeros(per_call, np.int32)
        for row, (slot, start, ids) in enumerate(own):
            tokens[row, : len(ids)] = ids
            positions[row, : len(ids)] = np.arange(start, start + len(ids))
            seq_slot[row] = slot
        shape = CALL_STEPS, per_step
        yield Pieces(
            tokens.reshape(*shape, size),
            positions.reshape(*shape, size),
            seq_slot.reshape(shape),
            np.int32(-(-len(own) // per_step)),
        )


def _cut(extension: Extension, size: int, first: int) -> Iterator[Extension]:
    seq_slot, start, ids = extension
    # a first piece of another size lets trials cut a prompt elsewhere
    begin, end = 0, first
    while begin < len(ids):
        yield Extension(seq_slot, start + begin, ids[begin:end])
        begin, end = end, end + size
