"""Optional per-slot state: on the host always, on the device only while a request uses it.

Owns the arrays of bias, penalties, masks and reports: filled as samples are scheduled, emptied as
they leave. Each group has a neutral twin on the device, made once: while no slot uses it in a lane,
its chunk copies nothing. Leaves out what they mean (`sampling`, `logprobs`).

Axes: S slots, B biased tokens, T positions of a slot, W words of 32 tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import UInt32

from marin_rl.cpu_streams import Lanes
from marin_rl.inference.generation import LOGIT_BIAS_MAX, GenerationRequest
from marin_rl.inference.logprobs import Asked
from marin_rl.inference.sampling import Bias, LogitsParams, Mask, Penalties

WORD_BITS = 32


class Extras(NamedTuple):
    """Arguments of a lane's chunk in addition to its inputs; every array lies on the device."""

    wishes: LogitsParams
    asked: Asked


class ExtraRows:
    """One row per slot of all lanes. `put` commits arrays to where the engine computes."""

    def __init__(
        self, lanes: Lanes, length: int, vocabulary: int, put: Callable[[Any], Any]
    ) -> None:
        self._put = put
        self._lanes = lanes
        slots = lanes.slots
        self._vocabulary = vocabulary
        words = -(-vocabulary // WORD_BITS)
        self._rows: dict[str, Any] = {
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
            "asked": Asked(np.zeros(slots, np.bool_), np.zeros(slots, np.int32)),
        }
        # all lanes are alike before anybody asks
        self._idle = {name: self._copied(0, rows) for name, rows in self._rows.items()}
        self._blank = {name: [np.array(a[0]) for a in rows] for name, rows in self._rows.items()}
        self._asking: dict[str, set[int]] = {name: set() for name in self._rows}
        self._held: dict[tuple[str, int], Any] = {}

    @property
    def constrained(self) -> bool:
        """True if any slot has a mask, which holds for one token."""
        return bool(self._asking["mask"])

    @property
    def reported(self) -> bool:
        """True if any slot wants raw or top logprobs."""
        return bool(self._asking["asked"])

    def seat(self, slot: int, request: GenerationRequest) -> None:
        """Note what a new sample asks for."""
        if request.logit_bias:
            bias: Bias = self._touch("bias", slot)
            count = len(request.logit_bias)
            ids, values = zip(*request.logit_bias, strict=True)
            bias.asked_S[slot] = True
            bias.ids_SB[slot, :count], bias.values_SB[slot, :count] = ids, values
        if _penalised(request):
            rows: Penalties = self._touch("penalties", slot)
            prompt = request.prompt_ids
            rows.repetition_S[slot] = request.repetition_penalty
            rows.presence_S[slot] = request.presence_penalty
            rows.frequency_S[slot] = request.frequency_penalty
            rows.prompt_S[slot] = len(prompt)
            rows.history_ST[slot, : len(prompt)] = prompt
        if request.raw_logprobs or request.top_logprobs:
            asked: Asked = self._touch("asked", slot)
            asked.raw_S[slot], asked.top_S[slot] = request.raw_logprobs, request.top_logprobs

    def constrain(self, slot: int, words: UInt32[np.ndarray, " W"]) -> None:
        """Set the mask for the slot's next token."""
        mask: Mask = self._touch("mask", slot)
        mask.asked_S[slot] = True
        mask.words_SW[slot] = words

    def extend(self, slot: int, position: int, tokens: list[int]) -> None:
        """Note tokens that were sampled; the first stands at `position`."""
        if slot in self._asking["penalties"]:
            rows: Penalties = self._touch("penalties", slot)
            rows.history_ST[slot, position : position + len(tokens)] = tokens

    def empty(self, slot: int) -> None:
        """Ask for nothing any more."""
        for name, slots in self._asking.items():
            if slot not in slots:
                continue
            for array, blank in zip(self._touch(name, slot), self._blank[name], strict=True):
                array[slot] = blank
            slots.remove(slot)

    def on_device(self, lane: int) -> Extras:
        """The arrays for a lane's next chunk: copied only where asked for and changed."""
        held = {name: self._on_device(name, lane) for name in self._rows}
        return Extras(LogitsParams(held["bias"], held["penalties"], held["mask"]), held["asked"])

    def _touch(self, name: str, slot: int) -> Any:
        self._held.pop((name, self._lanes.of(slot)), None)
        self._asking[name].add(slot)
        return self._rows[name]

    def _on_device(self, name: str, lane: int) -> Any:
        if not any(self._lanes.of(slot) == lane for slot in self._asking[name]):
            return self._idle[name]
        if (name, lane) not in self._held:
            self._held[name, lane] = self._copied(lane, self._rows[name])
        return self._held[name, lane]

    def _copied(self, lane: int, rows: Any) -> Any:
        # copies: the device's arrays must not see what the host writes later
        return self._put(jax.tree.map(np.array, self._lanes.part(lane, rows)))


def _penalised(request: GenerationRequest) -> bool:
    return (
        request.repetition_penalty != 1
        or request.presence_penalty != 0
        or request.frequency_penalty != 0
    )


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
        out[-1] &= np.uint32(2 ** (vocabulary % WORD_BITS) - 1)
    if not out.any():
        raise ValueError("the mask allows no token at all")
    return out
