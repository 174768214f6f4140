"""The running batch on the host: which sample is in which sequence slot.

Owns the small arrays that every chunk starts from, what each sequence has produced so far, the
prefix that each slot's cache begins with, and when a sequence is finished: a stop token, a stop
string, or its limit of tokens. Leaves out the device (`decoder`, `sampling`) and the order in which
requests come (`engine`, `scheduler`).

Axes: S sequence slots, C steps of a chunk, N stop tokens of a sequence, K likeliest tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from marin_rl.inference.generation import STOP_TOKENS_MAX, Delta
from marin_rl.inference.jobs import CachedPrefix, Job, PrefixKey, RunningSequence, WeightsKey
from marin_rl.inference.kept_prefixes import KeptPrefixes
from marin_rl.inference.logits_state import ExtraRows, checked_mask
from marin_rl.inference.logprobs import Report
from marin_rl.inference.sampling import SlotSampling, seed_words
from marin_rl.inference.stops import Decode, StopWatch

NO_TOKEN = -1


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
    weight_version: int
    parameters_digest: str
    reports: tuple[Report, ...]

    def report(self) -> Report:
        """Reports of every row, on the host."""
        return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *self.reports)


class RunningBatch:
    """The sequence slots and what is in them. Used by the engine's thread alone."""

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
        self._kept = KeptPrefixes(slots)
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
        """Sequence slots in use."""
        return sum(running is not None for running in self._running)

    @property
    def begun(self) -> list[int]:
        """Sequence slots of samples that have no token yet."""
        each = enumerate(self._running)
        return [slot for slot, running in each if running is not None and not running.tokens]

    def streams_alone(self, most: int) -> bool:
        """True if at most `most` sequences run, each of a request that is streamed."""
        running = [each for each in self._running if each is not None]
        return len(running) <= most and all(each.job.streams for each in running)

    def free(self) -> list[int]:
        """Empty sequence slots: those without a kept prefix, then the least recently used."""
        empty = [seq_slot for seq_slot, running in enumerate(self._running) if running is None]
        return sorted(empty, key=self._kept.used_S.__getitem__)

    def kept_for(self, job: Job, weights: WeightsKey) -> tuple[int, int] | None:
        """The free slot that has most of a request's prompt, and how many of its positions.

        Of these weights and this adapter alone; None where no slot has any.
        """
        return self._kept.longest(job.request.prompt_ids, weights, job.load)

    def forget_prefixes(self, except_of: WeightsKey | None = None) -> None:
        """Drop what finished sequences left in the cache, but for what these weights computed."""
        self._kept.drop_all(except_of)

    def _keep(self, seq_slot: int, running: RunningSequence, weights: WeightsKey) -> None:
        prefix = running.prefix
        # a swap on the way left a cache that no single policy would have computed
        if prefix is None or prefix.key.weights is not weights:
            return
        # the last token was sampled, and never went through the model
        length = int(self.inputs.position_S[seq_slot])
        tokens = np.concatenate([running.job.request.prompt_ids, running.tokens])[:length]
        if len(tokens):
            self._kept.put(
                seq_slot,
                tokens.astype(np.int32),
                weights=weights,
                adapter=prefix.key.adapter,
                used=running.used,
            )

    def jobs(self) -> list[Job]:
        """Requests that have a running sequence, each once."""
        return list(dict.fromkeys(r.job for r in self._running if r is not None))

    def assign(
        self, prefix: CachedPrefix, job: Job, index: int, *, continues: bool = False
    ) -> None:
        """Put the job's sample `index` into the slot whose cache will begin with `prefix`.

        The last token of the prompt is what the sample's first step works on. What the slot had
        kept is evicted, unless the sample `continues` it.
        """
        seq_slot = prefix.seq_slot
        assert self._running[seq_slot] is None
        if self._kept.drop(seq_slot) and not continues:
            self.evictions += 1
        # once for each time that a request gets slots: its samples are equally recent
        self._used += index == job.handed_out
        sampling, prompt = job.request.sampling, job.request.prompt_ids
        inputs = self.inputs
        watch = None
        if sampling.stop:
            assert self._decode is not None
            watch = StopWatch(self._decode, sampling.stop)
        self._running[seq_slot] = RunningSequence(
            job=job, index=index, prefix=prefix, stop_watch=watch, used=self._used
        )
        # also of slots that will be empty: sharing compares a slot with the first of its group, in
        # use or not
        self._prefixes[seq_slot] = prefix
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
        inputs.sampling.min_p_S[seq_slot] = job.request.min_p
        # by sample, not by slot: the same tokens wherever it is scheduled
        inputs.sampling.seed_S2[seq_slot] = seed_words(job.seed + index)
        self.extras.assign(seq_slot, job.request)

    def outdated(self, weights: WeightsKey) -> list[CachedPrefix]:
        """Sequences whose cache other weights began, each with all tokens that are in it.

        From now on they count as computed by `weights`, which the caller does next.
        """
        prefixes: list[CachedPrefix] = []
        for seq_slot, running in enumerate(self._running):
            if running is None or running.prefix is None or running.prefix.key.weights is weights:
                continue
            # the token at the position itself goes through the next step
            length = int(self.inputs.position_S[seq_slot])
            ids = np.concatenate([running.job.request.prompt_ids, running.tokens])[:length]
            # an owner of its own: siblings have other tokens, and other shapes computed them
            key = PrefixKey(object(), weights, running.prefix.key.adapter)
            running.prefix = running.prefix._replace(token_ids=ids.astype(np.int32), key=key)
            self._prefixes[seq_slot] = running.prefix
            prefixes.append(running.prefix)
        return prefixes

    def cached(self, key: PrefixKey) -> list[CachedPrefix]:
        """Prefixes with this key in the slots that are in use."""
        return [
            running.prefix
            for running in self._running
            if running is not None and running.prefix is not None and running.prefix.key == key
        ]

    def shared_positions(self, share: int) -> int:
        """Positions below which the caches of every `share` slots side by side are alike.

        A slot in use needs the first of its `share`, in use or not, to begin with the same prefix.
        """
        shortest = 0
        for seq_slot, running in enumerate(self._running):
            if running is None:
                continue
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
        for seq_slot, running in enumerate(self._running):
            if running is None or running.job.request.constraint is None:
                continue
            try:
                self.extras.constrain(seq_slot, checked_mask(_next_mask(running), self._vocabulary))
            except Exception as error:  # noqa: BLE001 - it is other people's code
                failed.append((running.job, error))
        return failed

    def release(self, job: Job) -> None:
        """Free the sequence slots of a cancelled or failed job."""
        for seq_slot, running in enumerate(self._running):
            if running is not None and running.job is job:
                self._empty(seq_slot)

    def _empty(self, seq_slot: int) -> None:
        # `_prefixes` keeps its entry: the cache begins with it until the slot is assigned again
        self._running[seq_slot] = None
        self.inputs.remaining_S[seq_slot] = 0
        # neutral values: a filter that any row asks for is computed for every row
        self.inputs.sampling.temperature_S[seq_slot] = 1
        self.inputs.sampling.top_p_S[seq_slot] = 1
        self.inputs.sampling.top_k_S[seq_slot] = 0
        self.inputs.sampling.min_p_S[seq_slot] = 0
        self.extras.empty(seq_slot)

    def advance(self, chunk: Chunk, weights: WeightsKey | None = None) -> list[tuple[Job, Delta]]:
        """Append a chunk to the running sequences; return each one's delta, by sequence slot.

        What those that ended leave in the cache is kept if `weights` computed all of it. A job
        whose last sample ended in it has all of them in `finished`.
        """
        added: list[tuple[Job, Delta]] = []
        # copied from the device only for requests that read them
        report = chunk.report() if self.extras.reported else None
        for seq_slot, running in enumerate(self._running):
            count = int(chunk.counts_S[seq_slot])
            if running is None or count == 0:
                continue
            kept = self._extend(seq_slot, running, chunk.tokens_SC[seq_slot, :count].tolist())
            delta = _delta(chunk, report, seq_slot, kept, running)
            running.deltas.append(delta)
            added.append((running.job, delta))
            if running.finish_reason:
                if weights is not None:
                    self._keep(seq_slot, running, weights)
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
        if running.stop_watch is not None:
            end = running.stop_watch.first_end(running.tokens, before)
            if end is not None:
                # a stop string may end within a chunk: what was sampled after it is no completion
                del running.tokens[end:]
                running.finish_reason = "stop"
        return len(running.tokens) - before

    def finite(self, chunk: Chunk) -> Bool[np.ndarray, " S"]:
        """True for each row of a chunk whose logprobs are all finite."""
        sampled = np.arange(chunk.logprobs_SC.shape[1]) < chunk.counts_S[:, None]
        # columns past a row's count were not sampled, and what they hold means nothing
        return (np.isfinite(chunk.logprobs_SC) | ~sampled).all(axis=1)

    def job_in(self, seq_slot: int) -> Job | None:
        """The job of a sequence slot; None for an empty one."""
        running = self._running[seq_slot]
        return None if running is None else running.job


def _next_mask(running: RunningSequence) -> np.ndarray:
    """The mask after all tokens so far; the first call makes the constraint."""
    if running.constraint is None:
        assert running.job.request.constraint is not None
        running.constraint = running.job.request.constraint()
    # a constraint keeps a state of its own, so that each token is passed on exactly once
    for token in running.tokens[running.accepted :]:
        running.constraint.accept(token)
    running.accepted = len(running.tokens)
    return np.asarray(running.constraint.mask())


def _delta(
    chunk: Chunk, report: Report | None, seq_slot: int, kept: int, running: RunningSequence
) -> Delta:
    """The first `kept` tokens of a row; copies, so that the chunk's large arrays can go."""
    # a lane reports on all its rows as soon as one request wants it: only that one gets them
    request, adapter = running.job.request, running.job.adapter
    policy = chunk if adapter is None else adapter
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
        adapter_name="" if adapter is None else adapter.name,
        finish_reason=running.finish_reason,
        prompt_scores=None if running.deltas else running.job.prompt_scores,
    )
