"""Tokens whose keys and values finished sequences left in the KV cache, for dialogues to go on.

Owns which tokens a free slot still has, and the search for those that a prompt begins with: over
all slots at once, for an engine of 512 slots looks for 512 prompts in a step. Leaves out when
something is kept, used or evicted (`batch`, `scheduler`).

Axes: S sequence slots, P positions.
"""

import numpy as np
from jaxtyping import Int32

_FIRST = 16  # positions that are compared before all others: they rule most slots out
_NONE = -1  # in place of a token


class KeptPrefixes:
    """Tokens of free slots whose keys and values are in the cache, without their last token."""

    def __init__(self, slots: int) -> None:
        self._tokens_SP = np.full((slots, _FIRST), _NONE, np.int32)
        self._lengths_S = np.zeros(slots, np.int64)
        self._weights: list[object] = [None] * slots  # by identity
        self._adapter_S = np.zeros(slots, np.int64)
        self.used_S = np.zeros(slots, np.int64)  # by order of requests; 0: nothing is kept

    def put(
        self,
        seq_slot: int,
        token_ids: Int32[np.ndarray, " n"],
        *,
        weights: object,
        adapter: int,
        used: int,
    ) -> None:
        """Keep what these weights and this adapter computed; `used` orders it for eviction."""
        missing = len(token_ids) - self._tokens_SP.shape[1]
        if missing > 0:
            # at least doubled: dialogues grow turn by turn, and each new width is a copy
            wider = max(missing, self._tokens_SP.shape[1])
            self._tokens_SP = np.pad(self._tokens_SP, ((0, 0), (0, wider)), constant_values=_NONE)
        self._tokens_SP[seq_slot, : len(token_ids)] = token_ids
        self._tokens_SP[seq_slot, len(token_ids) :] = _NONE
        self._lengths_S[seq_slot], self.used_S[seq_slot] = len(token_ids), used
        self._weights[seq_slot], self._adapter_S[seq_slot] = weights, adapter

    def drop(self, seq_slot: int) -> bool:
        """Forget what a slot has; return False where that is nothing."""
        had = self._weights[seq_slot] is not None
        self._weights[seq_slot] = None
        self._lengths_S[seq_slot] = self.used_S[seq_slot] = 0
        return had

    def drop_all(self, except_of: object = None) -> None:
        """Forget everything but what these weights computed."""
        for seq_slot, weights in enumerate(self._weights):
            if weights is not None and weights is not except_of:
                self.drop(seq_slot)

    def longest(
        self, prompt: Int32[np.ndarray, " n"], weights: object, adapter: int
    ) -> tuple[int, int] | None:
        """The slot that has most of a prompt, and how many of its positions; None where none has.

        The prompt's last position is never read from a cache. A slot of which less than half would
        be used does not count: its own dialogue may still come for it.
        """
        kept = np.flatnonzero(self._lengths_S)
        for size in (_FIRST, len(prompt) - 1):
            width = min(size, len(prompt) - 1, self._tokens_SP.shape[1])
            if not len(kept) or width < 1:
                return None
            equal = self._tokens_SP[kept, :width] == prompt[:width]
            common = np.where(equal.all(axis=1), width, equal.argmin(axis=1))
            kept, common = kept[common > 0], common[common > 0]
        usable = 2 * common >= self._lengths_S[kept]
        # of equals the lower slot, so that equal runs choose alike
        order = np.argsort(-common[usable], kind="stable")
        for seq_slot, positions in zip(kept[usable][order], common[usable][order], strict=True):
            if self._weights[seq_slot] is weights and self._adapter_S[seq_slot] == adapter:
                return int(seq_slot), int(positions)
        return None
