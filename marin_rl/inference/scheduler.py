"""Scheduler: bounds and queue of requests, sequence slots for waiting samples, prefills and copies.

Owns the check of a request against what the engine could ever serve, the queue of requests, the
order (first come, first served, and probes before all others), the choice of a lane, the sharing of
a prompt among the samples of one request in a lane, and the bound on prompts that are let in at
once. Leaves out running anything (`runner`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from jaxtyping import Int32
from numpy import ndarray

from marin_rl.cpu_streams import Lanes
from marin_rl.inference.batch import RunningBatch
from marin_rl.inference.generation import CachedPrefix, Job, PrefixKey, WeightsKey
from marin_rl.inference.pieces import Extension

# A prompt's tokens (each of its own length), and the sequence slots that start from it; by bucket
# and lane.
Prompt = tuple[Int32[ndarray, " _P"], list[int]]
Prompts = dict[tuple[int, int], list[Prompt]]


class JobQueue:
    """Requests with samples that wait, first come first served, and probes before all others.

    Not locked: its owner is.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self.waiting = 0  # samples

    @property
    def head(self) -> Job:
        return self._jobs[0]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def append(self, job: Job) -> None:
        """Let a new request wait; a probe only for the probes before it."""
        if job.request.probe:
            probes = sum(each.request.probe for each in self._jobs)
            self._jobs.insert(probes, job)
        else:
            self._jobs.append(job)
        self.waiting += job.waiting

    def take(self, samples: int) -> None:
        """Note that so many samples of the head left the queue, which it leaves with its last."""
        job = self._jobs[0]
        job.handed_out += samples
        self.waiting -= samples
        if job.waiting == 0:
            self._jobs.popleft()

    def discard(self, jobs: list[Job]) -> None:
        """Remove cancelled or failed requests from the queue, as far as they are in it."""
        gone = set(jobs)
        kept = [job for job in self._jobs if job not in gone]
        if len(kept) < len(self._jobs):
            self._jobs = deque(kept)
            # counted again: requests may leave from anywhere, with some samples handed out
            self.waiting = sum(job.waiting for job in kept)


@dataclass(slots=True, kw_only=True)
class Schedule:
    """Work for newly scheduled samples.

    `prompts` are to be run, by bucket and lane, each with the sequence slots that start from it;
    with a prefix cache `extensions` instead, the tokens that slots do not have yet. Then `copies`
    go from one slot to another of its lane. `cached_tokens` of `continued` prompts are in kept
    prefixes.
    """

    jobs: list[Job] = field(default_factory=list)
    to_score: list[Job] = field(default_factory=list)
    prompts: Prompts = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)
    cached_tokens: int = 0
    continued: int = 0


def schedule(
    queue: JobQueue,
    batch: RunningBatch,
    lanes: Lanes,
    weights: WeightsKey,
    bucket: Callable[[int], int],
    tokens: float | int,
    *,
    keeps_prefixes: bool = False,
) -> Schedule:
    """Assign samples until slots or samples run out, or prompts of `tokens` padded tokens are in.

    A prefix that a slot of the same lane has in its cache, with the same key, is copied from there.
    With `keeps_prefixes`, a dialogue goes on in the slot that has its last turn, if that is free
    still. A request that only wants its prompt scored waits its turn, and takes no slot.
    """
    plan = Schedule()
    free, kept = _free_and_kept(queue, batch, lanes, weights)
    # a prompt may exceed what is left of `tokens`, so that the longest is let in too
    while queue and tokens > 0:
        job = queue.head
        scores_only = job.request.sampling.max_tokens == 0
        # first come first served: a small request behind a large one waits with it, so none is
        # starved
        if not any(free) and not scores_only:
            break
        if not job.started_at:
            job.started_at = time.monotonic()
        # scored again after a swap: a sample's scores are by the weights of its first token
        if job.request.score_prompt and job.scored_by is not weights:
            job.scored_by = weights
            plan.to_score.append(job)
            tokens -= bucket(len(job.request.prompt_ids))
        if scores_only:
            queue.take(job.waiting)
            continue
        key = PrefixKey(job.key, weights, job.load)
        # looked up before the new slots, whose caches are not computed yet, are among them
        cached = {prefix.lane: prefix for prefix in batch.cached(key)}
        first, start = _continue(plan, job, lanes, free, {} if cached else kept)
        lane = lanes.of(first) if start else _lane_of(free, cached)
        # all in one lane, where the prompt runs once; what is left gets another lane in the next
        # iteration
        slots = [free[lane].pop(0) for _ in range(min(job.waiting, len(free[lane])))]
        for index, seq_slot in enumerate(slots, start=job.handed_out):
            # the last prompt token goes through the first decode step, which gives its logits
            prefix = CachedPrefix(lane, seq_slot, job.request.prompt_ids[:-1], key)
            batch.assign(prefix, job, index, continues=start > 0 and seq_slot == first)
        queue.take(len(slots))
        plan.jobs.append(job)
        if keeps_prefixes and lane not in cached:
            tokens -= _extend(plan, job, slots, start)
        else:
            tokens -= _prepare(plan, job, slots, lane, cached.get(lane), bucket)
    return plan


def _continue(
    plan: Schedule,
    job: Job,
    lanes: Lanes,
    free: list[list[int]],
    kept: Mapping[Job, tuple[int, int]],
) -> tuple[int, int]:
    """Move the slot that has a request's last turn to the front of its lane, if it is free still.

    Returns the slot, and how many positions of the prompt it has; 0 where no slot has any.
    """
    seq_slot, start = kept.get(job, (0, 0))
    slots = free[lanes.of(seq_slot)]
    if not start or seq_slot not in slots:
        return 0, 0
    slots.remove(seq_slot)
    slots.insert(0, seq_slot)
    if not job.handed_out:  # later samples may find what the first ones left
        job.cached_tokens = start
    plan.cached_tokens += start
    plan.continued += 1
    return seq_slot, start


def _extend(plan: Schedule, job: Job, slots: list[int], start: int) -> int:
    """Plan how the first slot gets the prompt from `start` on, and the others from it.

    Returns the tokens that must run for it.
    """
    new = job.request.prompt_ids[start:-1]
    if len(new):
        plan.extensions.append(Extension(slots[0], start, new))
    if len(job.request.prompt_ids) > 1:
        plan.copies += [(slots[0], seq_slot) for seq_slot in slots[1:]]
    return len(new)


def _prepare(
    plan: Schedule,
    job: Job,
    slots: list[int],
    lane: int,
    cached: CachedPrefix | None,
    bucket: Callable[[int], int],
) -> int:
    """Plan how the slots get the prompt; return the padded tokens that must run for it."""
    prompt = job.request.prompt_ids[:-1]
    # a prompt of one token has nothing to prefill: the first decode step takes that token
    if len(prompt) == 0:
        return 0
    if cached is not None:
        # a copy runs no tokens, so it takes nothing of the step's budget
        plan.copies += [(cached.seq_slot, seq_slot) for seq_slot in slots]
        return 0
    size = bucket(len(prompt))
    plan.prompts.setdefault((size, lane), []).append((prompt, slots))
    return size


def _free_and_kept(
    queue: JobQueue, batch: RunningBatch, lanes: Lanes, weights: WeightsKey
) -> tuple[list[list[int]], dict[Job, tuple[int, int]]]:
    """Free slots by lane, and the kept prefix of each of the next requests: slot, positions."""
    batch.kept.drop_all(except_of=weights)
    empty = batch.free()
    # looked up for as many requests as there are slots: no more can begin in this step
    kept: dict[Job, tuple[int, int]] = {}
    for job in islice(queue, len(empty)):
        match = batch.kept.longest(job.request.prompt_ids, weights, job.load)
        if match is not None:
            kept[job] = match
    wanted = {seq_slot for seq_slot, _ in kept.values()}
    free: list[list[int]] = [[] for _ in range(lanes.count)]
    # slots with a kept prefix come last, so that no other request of this step takes them
    for seq_slot in sorted(empty, key=wanted.__contains__):
        free[lanes.of(seq_slot)].append(seq_slot)
    return free, kept


def _lane_of(free: list[list[int]], cached: Mapping[int, CachedPrefix]) -> int:
    """A lane with room that has the prompt in its cache, else the emptiest one."""
    # a copy within a lane is cheaper than running the prompt again in another
    merit = lambda lane: (lane in cached and bool(free[lane]), len(free[lane]))
    return max(range(len(free)), key=merit)
