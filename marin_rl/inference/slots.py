"""Who sits in which slot: the host's side of the batch.

Owns the small arrays that every chunk starts from, what each sequence has produced so far, and when
it is finished: a stop token, a stop string, or its limit of tokens. Leaves out the device
(`decoder`, `sampling`) and the order in which requests come (`engine`).

Axes: S slots, C steps of a chunk, N stop tokens of a slot.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from marin_rl.inference.sampling import SlotSampling, seed_words
from marin_rl.types import Sampling

# Stop tokens that a slot can watch for, the model's own included.
STOP_TOKENS_MAX = 16
NO_TOKEN = -1

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """`n` samples of one prompt; sample i draws with `sampling.seed + i`.

    `stop_token_ids` are watched for beside the engine's own; a seed of None is drawn by the engine.
    """

    prompt_ids: Int32[np.ndarray, " P"]
    n: int = 1
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion: ids with a final stop token included, a logprob (nats) for each.

    `text` is set only where a stop string was looked for: what precedes it. `policy_versions` is
    None where every token was sampled with the result's `weight_version`.
    """

    token_ids: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    finish_reason: str
    text: str | None = None
    policy_versions: Int32[np.ndarray, " T"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """All samples of a request, and the policy that was loaded when the last of them ended."""

    samples: tuple[Sample, ...]
    weight_version: int
    parameters_digest: str
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(slots=True, kw_only=True)
class Job:
    """A request on its way: samples are handed out to slots in order of their index."""

    request: GenerationRequest
    future: "Future[GenerationResult]"
    seed: int
    stop_tokens: tuple[int, ...]
    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    prefilled_at: float = 0.0
    handed_out: int = 0
    finished: "dict[int, Running]" = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Samples that have no slot yet."""
        return self.request.n - self.handed_out


@dataclass(slots=True, kw_only=True)
class Running:
    """One sample in a slot: its tokens by chunk, each chunk with the version that sampled it."""

    job: Job
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Float32[np.ndarray, " c"]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = ""
    text: str | None = None

    def sample(self, final_version: int) -> Sample:
        """The finished completion, as seen from the version that the request ended with."""
        versions = np.repeat(*np.array(self.versions, np.int32).reshape(-1, 2).T)
        length = len(self.tokens)
        return Sample(
            token_ids=np.array(self.tokens, np.int32),
            logprobs=np.concatenate(self.logprobs)[:length],
            finish_reason=self.finish_reason,
            text=self.text,
            policy_versions=None if (versions == final_version).all() else versions[:length],
        )


class SlotInputs(NamedTuple):
    """What a chunk starts from: `token` stands at `position`; `remaining` 0 is an empty slot."""

    token_S: Int32[Array | np.ndarray, " S"]
    position_S: Int32[Array | np.ndarray, " S"]
    remaining_S: Int32[Array | np.ndarray, " S"]
    stops_SN: Int32[Array | np.ndarray, "S N"]
    sampling: SlotSampling


class SlotTable:
    """The slots and their sequences. Used by the engine's thread alone."""

    def __init__(self, slots: int, decode: Decode | None) -> None:
        self._decode = decode
        self._running: list[Running | None] = [None] * slots
        self.inputs = SlotInputs(
            token_S=np.zeros(slots, np.int32),
            position_S=np.zeros(slots, np.int32),
            remaining_S=np.zeros(slots, np.int32),
            stops_SN=np.full((slots, STOP_TOKENS_MAX), NO_TOKEN, np.int32),
            sampling=SlotSampling(
                temperature_S=np.ones(slots, np.float32),
                top_p_S=np.ones(slots, np.float32),
                top_k_S=np.zeros(slots, np.int32),
                seed_S2=np.zeros((slots, 2), np.uint32),
            ),
        )

    @property
    def active(self) -> int:
        """Slots with a sequence in them."""
        return sum(running is not None for running in self._running)

    def free(self) -> list[int]:
        """Numbers of the empty slots, ascending."""
        return [slot for slot, running in enumerate(self._running) if running is None]

    def jobs(self) -> list[Job]:
        """Every request that has a sequence in a slot, once."""
        return list({id(r.job): r.job for r in self._running if r is not None}.values())

    def assign(self, slot: int, job: Job) -> None:
        """Seat the job's next sample; its last prompt token is what the first step computes on."""
        assert self._running[slot] is None
        assert job.waiting > 0
        sampling, prompt = job.request.sampling, job.request.prompt_ids
        inputs = self.inputs
        self._running[slot] = Running(job=job, index=job.handed_out)
        inputs.token_S[slot] = prompt[-1]
        inputs.position_S[slot] = len(prompt) - 1
        inputs.remaining_S[slot] = sampling.max_tokens
        inputs.stops_SN[slot] = NO_TOKEN
        inputs.stops_SN[slot, : len(job.stop_tokens)] = job.stop_tokens
        inputs.sampling.temperature_S[slot] = sampling.temperature
        inputs.sampling.top_p_S[slot] = sampling.top_p
        inputs.sampling.top_k_S[slot] = sampling.top_k
        inputs.sampling.seed_S2[slot] = seed_words(job.seed + job.handed_out)
        job.handed_out += 1

    def release(self, job: Job) -> None:
        """Empty every slot of a job that is given up."""
        for slot, running in enumerate(self._running):
            if running is not None and running.job is job:
                self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._running[slot] = None
        self.inputs.remaining_S[slot] = 0
        # an empty slot asks for nothing that costs the others
        self.inputs.sampling.temperature_S[slot] = 1
        self.inputs.sampling.top_p_S[slot] = 1
        self.inputs.sampling.top_k_S[slot] = 0

    def advance(
        self,
        tokens_SC: Int32[np.ndarray, "S C"],
        logprobs_SC: Float32[np.ndarray, "S C"],
        counts_S: Int32[np.ndarray, " S"],
        version: int,
    ) -> list[Job]:
        """Take in a chunk; returns the jobs whose last sample ended in it."""
        done: list[Job] = []
        for slot, running in enumerate(self._running):
            count = int(counts_S[slot])
            if running is None or count == 0:
                continue
            self._extend(slot, running, tokens_SC[slot, :count].tolist(), version)
            running.logprobs.append(logprobs_SC[slot, :count].copy())
            if running.finish_reason:
                self._empty(slot)
                running.job.finished[running.index] = running
                if len(running.job.finished) == running.job.request.n:
                    done.append(running.job)
        return done

    def _extend(self, slot: int, running: Running, tokens: list[int], version: int) -> None:
        inputs = self.inputs
        running.versions.append((version, len(tokens)))
        before = len(running.tokens)
        running.tokens += tokens
        inputs.token_S[slot] = tokens[-1]
        inputs.position_S[slot] += len(tokens)
        inputs.remaining_S[slot] -= len(tokens)
        if tokens[-1] in running.job.stop_tokens:
            running.finish_reason = "stop"
        elif inputs.remaining_S[slot] == 0:
            running.finish_reason = "length"
        if running.job.request.sampling.stop:
            self._look_for_stop_strings(running, before)

    def _look_for_stop_strings(self, running: Running, before: int) -> None:
        """Cut at the first token that completes a stop string, if one is there."""
        assert self._decode is not None
        stop = running.job.request.sampling.stop
        if first_stop(self._text(running, len(running.tokens)), stop) is None:
            if running.finish_reason:
                running.text = self._text(running, len(running.tokens))
            return
        for length in range(before + 1, len(running.tokens) + 1):
            text = self._text(running, length)
            cut = first_stop(text, stop)
            if cut is not None:
                del running.tokens[length:]
                running.text, running.finish_reason = text[:cut], "stop"
                return
        raise AssertionError("a stop string was found in the whole but in no prefix")

    def _text(self, running: Running, length: int) -> str:
        assert self._decode is not None
        return self._decode(running.tokens[:length])

    def finite(self, logprobs_SC: np.ndarray, counts_S: np.ndarray) -> Bool[np.ndarray, " S"]:
        """Whether all logprobs that each slot sampled in a chunk are finite."""
        sampled = np.arange(logprobs_SC.shape[1]) < counts_S[:, None]
        return (np.isfinite(logprobs_SC) | ~sampled).all(axis=1)

    def job_in(self, slot: int) -> Job | None:
        """The job that the slot works for."""
        running = self._running[slot]
        return None if running is None else running.job


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the earliest of the stop strings begins in the text."""
    found = [at for at in (text.find(string) for string in stop) if at >= 0]
    return min(found, default=None)
