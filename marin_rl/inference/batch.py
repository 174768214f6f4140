"""The running batch on the host: which sample is in which sequence slot.

Owns the small arrays that every chunk starts from, what each sequence has produced so far, when it
is finished, and the prefix that each slot's cache has, also after its sequence ended. Leaves out
the device (`decoder`, `sampling`) and the order in which requests come (`scheduler`).

Axes: S sequence slots, C steps of a chunk, N stop tokens of a sequence, P positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from marin_rl.inference.generation import (
    STOP_TOKENS_MAX,
    CachedPrefix,
    Delta,
    Job,
    Policy,
    PrefixKey,
    RunningSequence,
    WeightsKey,
)
from marin_rl.inference.logits_state import ExtraRows, checked_mask
from marin_rl.inference.logprobs import Report
from marin_rl.inference.sampling import SlotSampling, seed_words
from marin_rl.inference.stops import Decode, StopStringScanner

NO_TOKEN = -1
_FIRST = 16  # positions that are compared before all others: they rule most slots out


class KeptPrefixes:
    """Tokens of free slots whose keys and values are in the cache, without their last token."""

    def __init__(self, slots: int) -> None:
        self._tokens_SP = np.full((slots, _FIRST), NO_TOKEN, np.int32)
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
        if not len(token_ids):
            return
        missing = len(token_ids) - self._tokens_SP.shape[1]
        if missing > 0:
            # at least doubled: dialogues grow turn by turn, and each new width is a copy
            wider = (0, 0), (0, max(missing, self._tokens_SP.shape[1]))
            self._tokens_SP = np.pad(self._tokens_SP, wider, constant_values=NO_TOKEN)
        self._tokens_SP[seq_slot, : len(token_ids)] = token_ids
        self._tokens_SP[seq_slot, len(token_ids) :] = NO_TOKEN
        self._lengths_S[seq_slot], self.used_S[seq_slot] = len(token_ids), used
        self._weights[seq_slot], self._adapter_S[seq_slot] = weights, adapter

    def drop(self, seq_slot: int) -> bool:
        """Forget what a slot has; return False where that is nothing."""
        had = self._weights[seq_slot] is not None
        self._weights[seq_slot] = None
        self._lengths_S[seq_slot] = self.used_S[seq_slot] = 0
        return had

    def drop_all(self, except_of: object = None) -> None:
        """Forget what finished sequences left, but for what the weights `except_of` computed."""
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


class SlotInputs(NamedTuple):
    """Inputs of a chunk: `token` stands at `position`; `remaining` 0 is an empty sequence slot."""

    token_S: Int32[Array | np.ndarray, " S"]
    position_S: Int32[Array | np.ndarray, " S"]
    remaining_S: Int32[Array | np.ndarray, " S"]
    stops_SN: Int32[Array | np.ndarray, "S N"]
    sampling: SlotSampling
    adapter_S: Int32[Array | np.ndarray, " S"] | None = None  # rows of the bank, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens and logprobs of one decode chunk; row s holds `counts_S[s]` sampled tokens.

    `slot_steps` are the steps of all rows, empty ones too. `reports` are each lane's, with an axis
    of C in front; they are copied to the host only on request.
    """

    tokens_SC: Int32[np.ndarray, "S C"]
    logprobs_SC: Float32[np.ndarray, "S C"]
    counts_S: Int32[np.ndarray, " S"]
    slot_steps: int
    reports: tuple[Report, ...]

    def report(self) -> Report:
        return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *self.reports)


class RunningBatch:
    """Sequence slots and their running sequences. Used only by the engine's thread."""

    def __init__(
        self,
        slots: int,
        vocabulary: int,
        decode: Decode | None,
        extras: ExtraRows,
        *,
        has_adapters: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._decode = decode
        self.extras = extras
        self._running: list[RunningSequence | None] = [None] * slots
        self._prefixes: list[CachedPrefix | None] = [None] * slots
        self.kept = KeptPrefixes(slots)
        # slots of which the host has set inputs since a chunk was dispatched, all before the first
        self._set_S = np.ones(slots, np.bool_)
        self._used = 0
        self.evictions = 0
        self.inputs = SlotInputs(
            token_S=np.zeros(slots, np.int32),
            position_S=np.zeros(slots, np.int32),
            remaining_S=np.zeros(slots, np.int32),
            stops_SN=np.full((slots, STOP_TOKENS_MAX), NO_TOKEN, np.int32),
            sampling=SlotSampling(
                temperature_S=np.ones(slots, np.float32),
                top_p_S=np.ones(slots, np.float32),
                top_k_S=np.zeros(slots, np.int32),
                min_p_S=np.zeros(slots, np.float32),
                seed_S2=np.zeros((slots, 2), np.uint32),
            ),
            adapter_S=np.zeros(slots, np.int32) if has_adapters else None,
        )

    @property
    def active(self) -> int:
        return sum(running is not None for running in self._running)

    @property
    def begun(self) -> list[int]:
        """Sequence slots of samples that have no token yet."""
        return [slot for slot, running in self.sequences() if not running.tokens]

    def sequences(self) -> list[tuple[int, RunningSequence]]:
        """Running sequences with their slots, in order; a copy, as some may end meanwhile."""
        every = enumerate(self._running)
        return [(slot, running) for slot, running in every if running is not None]

    def streams_alone(self, most: int) -> bool:
        """True if at most `most` sequences run, each of a request that is streamed."""
        running = self.sequences()
        return len(running) <= most and all(each.job.streams for _, each in running)

    def free(self) -> list[int]:
        """Empty sequence slots: those without a kept prefix, then the least recently used."""
        empty = [seq_slot for seq_slot, running in enumerate(self._running) if running is None]
        return sorted(empty, key=self.kept.used_S.__getitem__)

    def jobs(self) -> list[Job]:
        return list(dict.fromkeys(running.job for _, running in self.sequences()))

    def assign(
        self, prefix: CachedPrefix, job: Job, index: int, *, continues: bool = False
    ) -> None:
        """Put the job's sample `index` into the slot whose cache will begin with `prefix`.

        What the slot had kept is evicted, unless the sample `continues` it.
        """
        seq_slot = prefix.seq_slot
        assert self._running[seq_slot] is None
        if self.kept.drop(seq_slot) and not continues:
            self.evictions += 1
        # once for each time that a request gets slots: its samples are equally recent
        self._used += index == job.handed_out
        sampling, prompt = job.request.sampling, job.request.prompt_ids
        inputs = self.inputs
        watch = None
        if sampling.stop:
            assert self._decode is not None
            watch = StopStringScanner(self._decode, sampling.stop)
        self._running[seq_slot] = RunningSequence(
            job=job, index=index, prefix=prefix, stop_scanner=watch, used=self._used
        )
        # also of slots that will be empty: sharing compares a slot with the first of its group, in
        # use or not
        self._prefixes[seq_slot] = prefix
        self._set_S[seq_slot] = True
        inputs.token_S[seq_slot] = prompt[-1]
        inputs.position_S[seq_slot] = len(prompt) - 1
        inputs.remaining_S[seq_slot] = sampling.max_tokens
        if inputs.adapter_S is not None:
            inputs.adapter_S[seq_slot] = job.row
        # NO_TOKEN equals no id, so unused places stop nothing
        inputs.stops_SN[seq_slot] = NO_TOKEN
        inputs.stops_SN[seq_slot, : len(job.stop_tokens)] = job.stop_tokens
        inputs.sampling.temperature_S[seq_slot] = sampling.temperature
        inputs.sampling.top_p_S[seq_slot] = sampling.top_p
        inputs.sampling.top_k_S[seq_slot] = sampling.top_k
        inputs.sampling.min_p_S[seq_slot] = sampling.min_p or 0
        # by sample, not by slot: the same tokens wherever it is scheduled
        inputs.sampling.seed_S2[seq_slot] = seed_words(job.seed + index)
        self.extras.assign(seq_slot, job.request)

    def outdated(self, weights: WeightsKey) -> list[CachedPrefix]:
        """Sequences whose cache other weights began, each with all tokens that are in it.

        From now on they count as computed by `weights`, which the caller does next.
        """
        prefixes: list[CachedPrefix] = []
        for seq_slot, running in self.sequences():
            if running.prefix is None or running.prefix.key.weights is weights:
                continue
            ids = self._computed(seq_slot, running)
            # a new owner: siblings have other tokens, and other shapes computed them
            key = PrefixKey(object(), weights, running.prefix.key.adapter)
            running.prefix = running.prefix._replace(token_ids=ids, key=key)
            self._prefixes[seq_slot] = running.prefix
            prefixes.append(running.prefix)
        return prefixes

    def _computed(self, seq_slot: int, running: RunningSequence) -> Int32[np.ndarray, " P"]:
        """Tokens in a slot's cache: all but the last, which goes through the next step."""
        length = int(self.inputs.position_S[seq_slot])
        ids = np.concatenate([running.job.request.prompt_ids, running.tokens])[:length]
        return ids.astype(np.int32)

    def cached(self, key: PrefixKey) -> list[CachedPrefix]:
        """Prefixes with this key in the slots that are in use."""
        prefixes = [running.prefix for _, running in self.sequences()]
        return [prefix for prefix in prefixes if prefix is not None and prefix.key == key]

    def shared_positions(self, share: int) -> int:
        """Positions below which the caches of every `share` slots side by side are alike.

        A slot in use needs the first of its `share`, in use or not, to begin with the same prefix.
        """
        shortest = 0
        for seq_slot, running in self.sequences():
            first = self._prefixes[seq_slot - seq_slot % share]
            if running.prefix is None or first is None or running.prefix.key != first.key:
                # the bound is one number for all slots, so one that differs rules sharing out for
                # all
                return 0
            # the prompt's last position too: each slot writes the same there in its first step
            length = len(running.job.request.prompt_ids)
            shortest = min(shortest or length, length)
        return shortest

    def constrain(self) -> list[tuple[Job, Exception]]:
        """Ask every constraint for its next mask; return the jobs where one failed, and why."""
        failed: list[tuple[Job, Exception]] = []
        for seq_slot, running in self.sequences():
            if running.job.request.constraint is None:
                continue
            try:
                if running.constraint is None:
                    running.constraint = running.job.request.constraint()
                # a constraint keeps a state: each token is passed on exactly once
                for token in running.tokens[running.accepted :]:
                    running.constraint.accept(token)
                running.accepted = len(running.tokens)
                mask = np.asarray(running.constraint.mask())
                self.extras.constrain(seq_slot, checked_mask(mask, self._vocabulary))
            except Exception as error:  # noqa: BLE001 - it is other people's code
                failed.append((running.job, error))
        return failed

    def release(self, job: Job) -> None:
        for seq_slot, running in self.sequences():
            if running.job is job:
                self._empty(seq_slot)

    def _empty(self, seq_slot: int) -> None:
        # `_prefixes` keeps its entry: the cache begins with it until the slot is assigned again
        self._running[seq_slot] = None
        self._set_S[seq_slot] = True
        self.inputs.remaining_S[seq_slot] = 0
        # neutral values: a filter that any row asks for is computed for every row
        sampling = self.inputs.sampling
        sampling.temperature_S[seq_slot] = sampling.top_p_S[seq_slot] = 1
        sampling.top_k_S[seq_slot] = sampling.min_p_S[seq_slot] = 0
        self.extras.empty(seq_slot)

    def take_unread(self) -> Bool[np.ndarray, " S"]:
        """Slots that go on from the chunk before the one that is dispatched now."""
        unread_S, self._set_S = ~self._set_S, np.zeros_like(self._set_S)
        return unread_S

    def still(
        self, sequences: Sequence[tuple[int, RunningSequence]]
    ) -> list[tuple[int, RunningSequence]]:
        """Those of `sequences` that run still: others have ended, or were cancelled, meanwhile."""
        return [(slot, one) for slot, one in sequences if self._running[slot] is one]

    def advance(
        self,
        chunk: Chunk,
        sequences: Sequence[tuple[int, RunningSequence]],
        policy: Policy,
        *,
        keeps: bool,
    ) -> list[tuple[Job, Delta]]:
        """Append a policy's chunk to its `sequences`; return the deltas, by sequence slot.

        With `keeps` the cache of an ended sequence is kept if these weights computed all of it.
        """
        added: list[tuple[Job, Delta]] = []
        # copied from the device only for requests that read them
        report = chunk.report() if self.extras.reported else None
        for seq_slot, running in self.still(sequences):
            count = int(chunk.counts_S[seq_slot])
            if count == 0:
                continue
            kept = self._extend(seq_slot, running, chunk.tokens_SC[seq_slot, :count].tolist())
            own = policy.with_adapter(running.job.adapter)
            delta = _delta(own, chunk, report, seq_slot, kept, running)
            running.deltas.append(delta)
            added.append((running.job, delta))
            if running.finish_reason:
                prefix = running.prefix
                # a swap on the way left a cache that no single policy would have computed
                if keeps and prefix is not None and prefix.key.weights is policy.key:
                    self.kept.put(
                        seq_slot,
                        self._computed(seq_slot, running),
                        weights=policy.key,
                        adapter=prefix.key.adapter,
                        used=running.used,
                    )
                self._empty(seq_slot)
                running.job.finished[running.index] = running
        return added

    def _extend(self, seq_slot: int, running: RunningSequence, tokens: list[int]) -> int:
        """Append tokens and look for the sample's end; return how many of them it keeps."""
        inputs = self.inputs
        before = len(running.tokens)
        running.tokens += tokens
        self.extras.extend(seq_slot, int(inputs.position_S[seq_slot]) + 1, tokens)
        inputs.token_S[seq_slot] = tokens[-1]
        inputs.position_S[seq_slot] += len(tokens)
        inputs.remaining_S[seq_slot] -= len(tokens)
        # only the last can be a stop token: the device ends a row at the first one
        if tokens[-1] in running.job.stop_tokens:
            running.finish_reason = "stop"
        elif inputs.remaining_S[seq_slot] == 0:
            running.finish_reason = "length"
        if running.stop_scanner is not None:
            end = running.stop_scanner.first_end(running.tokens, before)
            if end is not None:
                # a stop string may end within a chunk: later tokens do not belong to the completion
                del running.tokens[end:]
                running.finish_reason = "stop"
        return len(running.tokens) - before

    def not_finite(
        self, chunk: Chunk, sequences: Sequence[tuple[int, RunningSequence]]
    ) -> dict[int, Job]:
        """Requests by sequence slot of which a chunk's logprobs are not all finite."""
        # columns past a row's count were not sampled
        sampled = np.arange(chunk.logprobs_SC.shape[1]) < chunk.counts_S[:, None]
        bad_S = (sampled & ~np.isfinite(chunk.logprobs_SC)).any(axis=1)
        return {slot: running.job for slot, running in self.still(sequences) if bad_S[slot]}


def _delta(
    policy: Policy,
    chunk: Chunk,
    report: Report | None,
    seq_slot: int,
    kept: int,
    running: RunningSequence,
) -> Delta:
    """The first `kept` tokens of a row; copies, so that the chunk's large arrays can go."""
    # a lane reports on all its rows as soon as one request wants it: only that one gets them
    request = running.job.request
    raw = top_ids = top_logprobs = None
    if report is not None and request.raw_logprobs:
        raw = np.array(report.raw_S[:kept, seq_slot])
    if report is not None and request.top_logprobs:
        top_ids = np.array(report.top_ids_SK[:kept, seq_slot, : request.top_logprobs])
        top_logprobs = np.array(report.top_logprobs_SK[:kept, seq_slot, : request.top_logprobs])
    return Delta(
        index=running.index,
        token_ids=chunk.tokens_SC[seq_slot, :kept].copy(),
        logprobs=chunk.logprobs_SC[seq_slot, :kept].copy(),
        raw_logprobs=raw,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        weight_version=policy.weight_version,
        parameters_digest=policy.parameters_digest,
        adapter_name=policy.adapter_name,
        finish_reason=running.finish_reason,
        prompt_scores=None if running.deltas else running.job.prompt_scores,
    )
