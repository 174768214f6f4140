"""Optional state of each sequence slot: on the device only while a request uses it.

Owns the arrays of bias, penalties, masks and reports: filled as samples are scheduled, emptied as
they leave. Each group has a neutral twin on the device, made once: while no row uses it in a lane,
its chunk copies nothing. Leaves out what they mean (`sampling`, `logprobs`).

Axes: S sequence slots (rows), B biased tokens, T positions of a row, W words of 32 tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32, UInt32

from marin_rl.cpu_streams import Lanes
from marin_rl.inference.generation import LOGIT_BIAS_MAX, GenerationRequest
from marin_rl.inference.logprobs import ReportRequest
from marin_rl.inference.sampling import Bias, LogitsParams, Mask, Penalties

WORD_BITS = 32


class Extras(NamedTuple):
    """Arguments of a lane's chunk in addition to its inputs; every array lies on the device."""

    params: LogitsParams
    request: ReportRequest


class ExtraRows:
    """Rows of all sequence slots. `put` commits arrays to where the engine computes."""

    def __init__(
        self, lanes: Lanes, length: int, vocabulary: int, put: Callable[[Any], Any]
    ) -> None:
        self._put = put
        self._lanes = lanes
        slots = lanes.slots
        self._vocabulary = vocabulary
        words = -(-vocabulary // WORD_BITS)
        self._rows: dict[str, Any] = {
            # Ids of unused places are one past the vocabulary: a scatter drops them.
            "bias": Bias(
                np.zeros(slots, np.bool_),
                np.full((slots, LOGIT_BIAS_MAX), vocabulary, np.int32),
                np.zeros((slots, LOGIT_BIAS_MAX), np.float32),
            ),
            "penalties": Penalties(
                np.ones(slots, np.float32),
                np.zeros(slots, np.float32),
                np.zeros(slots, np.float32),
                np.zeros(slots, np.int32),
                np.zeros((slots, length), np.int32),
            ),
            "mask": Mask(np.zeros(slots, np.bool_), np.zeros((slots, words), np.uint32)),
            "reports": ReportRequest(np.zeros(slots, np.bool_), np.zeros(slots, np.int32)),
        }
        # row 0 before any request: the values that `empty` goes back to
        self._blank = {name: [np.array(a[0]) for a in rows] for name, rows in self._rows.items()}
        self._users: dict[str, set[int]] = {name: set() for name in self._rows}
        self._device_rows: dict[tuple[str, int], Any] = {}  # by name and lane
        self._neutral_rows: dict[tuple[str, int], Any] = {}  # by name and number of rows

    @property
    def constrained(self) -> bool:
        """True if any row has a mask, which holds for one token."""
        return bool(self._users["mask"])

    @property
    def used(self) -> bool:
        """True if any row uses any of it."""
        return any(self._users.values())

    @property
    def needs_tokens(self) -> bool:
        """True if the next chunk needs the tokens of this one from the host."""
        return bool(self._users["mask"] or self._users["penalties"])

    @property
    def reported(self) -> bool:
        return bool(self._users["reports"])

    def assign(self, seq_slot: int, request: GenerationRequest) -> None:
        if request.logit_bias:
            bias: Bias = self._touch("bias", seq_slot)
            count = len(request.logit_bias)
            ids, values = zip(*request.logit_bias, strict=True)
            bias.asked_S[seq_slot] = True
            bias.ids_SB[seq_slot, :count], bias.values_SB[seq_slot, :count] = ids, values
        repetition = request.sampling.repetition_penalty or 1
        if repetition != 1 or request.presence_penalty or request.frequency_penalty:
            rows: Penalties = self._touch("penalties", seq_slot)
            prompt = request.prompt_ids
            rows.repetition_S[seq_slot] = repetition
            rows.presence_S[seq_slot] = request.presence_penalty
            rows.frequency_S[seq_slot] = request.frequency_penalty
            rows.prompt_S[seq_slot] = len(prompt)
            rows.history_ST[seq_slot, : len(prompt)] = prompt
        if request.raw_logprobs or request.top_logprobs:
            reports: ReportRequest = self._touch("reports", seq_slot)
            reports.raw_S[seq_slot] = request.raw_logprobs
            reports.top_S[seq_slot] = request.top_logprobs

    def constrain(self, seq_slot: int, words: UInt32[np.ndarray, " W"]) -> None:
        mask: Mask = self._touch("mask", seq_slot)
        mask.asked_S[seq_slot] = True
        mask.words_SW[seq_slot] = words

    def extend(self, seq_slot: int, position: int, tokens: list[int]) -> None:
        """Append sampled tokens to the history of penalties; the first stands at `position`."""
        # Only those rows have a history: it is as long as the context, for each slot.
        if seq_slot in self._users["penalties"]:
            rows: Penalties = self._touch("penalties", seq_slot)
            rows.history_ST[seq_slot, position : position + len(tokens)] = tokens

    def empty(self, seq_slot: int) -> None:
        for name, slots in self._users.items():
            if seq_slot not in slots:
                continue
            for array, blank in zip(self._touch(name, seq_slot), self._blank[name], strict=True):
                array[seq_slot] = blank
            slots.remove(seq_slot)

    def on_device(self, lane: int) -> Extras:
        """The arrays for a lane's next chunk: copied only where used and changed."""
        return _extras({name: self._on_device(name, lane) for name in self._rows})

    def of_slots(self, slot_R: Int32[np.ndarray, " R"]) -> Extras:
        """The same for a chunk of these slots in this order, whichever lanes they are of."""
        return _extras({name: self._rows_of(name, slot_R) for name in self._rows})

    def _rows_of(self, name: str, slot_R: Int32[np.ndarray, " R"]) -> Any:
        if self._users[name].isdisjoint(slot_R.tolist()):
            return self._neutral(name, len(slot_R))
        return self._put(jax.tree.map(lambda leaf: leaf[slot_R], self._rows[name]))

    def _neutral(self, name: str, count: int) -> Any:
        """Rows that ask for nothing; those of most requests, which share this one copy."""
        if (name, count) not in self._neutral_rows:
            rows = [np.repeat(blank[None], count, 0) for blank in self._blank[name]]
            self._neutral_rows[name, count] = self._put(type(self._rows[name])(*rows))
        return self._neutral_rows[name, count]

    def _touch(self, name: str, seq_slot: int) -> Any:
        # The copy on the device is stale now; the other lane's is not.
        self._device_rows.pop((name, self._lanes.of(seq_slot)), None)
        self._users[name].add(seq_slot)
        return self._rows[name]

    def _on_device(self, name: str, lane: int) -> Any:
        if not any(self._lanes.of(seq_slot) == lane for seq_slot in self._users[name]):
            return self._neutral(name, self._lanes.size)
        if (name, lane) not in self._device_rows:
            # copies: the device's arrays must not see what the host writes later
            rows = jax.tree.map(np.array, self._lanes.part(lane, self._rows[name]))
            self._device_rows[name, lane] = self._put(rows)
        return self._device_rows[name, lane]


def _extras(arrays: dict[str, Any]) -> Extras:
    params = LogitsParams(arrays["bias"], arrays["penalties"], arrays["mask"])
    return Extras(params, arrays["reports"])


def checked_mask(words: np.ndarray, vocabulary: int) -> UInt32[np.ndarray, " W"]:
    """A constraint's words, filled up with zeros to the whole vocabulary.

    Raises ValueError where no token is allowed, or for anything but a row of uint32.
    """
    full = -(-vocabulary // WORD_BITS)
    if words.dtype != np.uint32 or words.ndim != 1 or len(words) > full:
        raise ValueError(
            f"expected a mask of at most {full} words of uint32, found {words.dtype} of shape "
            f"{words.shape}"
        )
    out = np.zeros(full, np.uint32)
    out[: len(words)] = words
    if vocabulary % WORD_BITS:
        # Bits beyond the vocabulary would allow tokens that have no logit.
        out[-1] &= np.uint32(2 ** (vocabulary % WORD_BITS) - 1)
    if not out.any():
        raise ValueError("the mask allows no token at all")
    return out
