"""Scheduler: gives free slots to waiting samples, and plans the prefills and copies they need.

Owns the order (first come, first served), the choice of a lane, the sharing of a prompt among the
samples of one request in a lane, and the bound on prompts that are let in at once. Leaves out
running anything (`runner`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxtyping import Int32
from numpy import ndarray

from marin_rl.inference.batch import Job, RunningBatch
from marin_rl.inference.cpu_streams import Lanes
from marin_rl.inference.job_queue import JobQueue

# A prompt's tokens (each of its own length), and the slots that start from it; by bucket and lane.
Prompt = tuple[Int32[ndarray, " _P"], list[int]]
Prompts = dict[tuple[int, int], list[Prompt]]


@dataclass(slots=True, kw_only=True)
class Schedule:
    """Work for newly scheduled samples: prompts to run, by bucket and lane, each with the slots
    that start from it; copies, from a slot to a slot of its lane; and prompts to score.
    """

    jobs: list[Job] = field(default_factory=list)
    to_score: list[Job] = field(default_factory=list)
    prompts: Prompts = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)


def schedule(
    queue: JobQueue,
    table: RunningBatch,
    lanes: Lanes,
    policy_key: object,
    bucket: Callable[[int], int],
    tokens: float | int,
) -> Schedule:
    """Seat samples until slots or samples run out, or prompts of `tokens` padded tokens are in.

    A prompt that a sibling's slot holds in the same lane, as computed by the very same weights, is
    copied from there. A request that only wants its prompt scored takes its turn, and no slot.
    """
    seating = Schedule()
    free = _by_lane(lanes, table.free())
    while queue and tokens > 0:
        job = queue.head
        scores_only = job.request.sampling.max_tokens == 0
        if not any(free) and not scores_only:
            break
        if not job.started_at:
            job.started_at = time.monotonic()
        # again where others' weights scored it: a sample's scores are those of its first token's
        if job.request.score_prompt and job.scored_by is not policy_key:
            job.scored_by = policy_key
            seating.to_score.append(job)
            tokens -= bucket(len(job.request.prompt_ids))
        if scores_only:
            queue.take(job.waiting)
            continue
        # looked for before the job's own new slots are among its siblings
        siblings = {lanes.of(slot): slot for slot in table.siblings(job, policy_key)}
        lane = _lane_of(free, siblings)
        slots = [free[lane].pop(0) for _ in range(min(job.waiting, len(free[lane])))]
        for index, slot in enumerate(slots, start=job.handed_out):
            table.assign(slot, job, index, policy_key)
        queue.take(len(slots))
        seating.jobs.append(job)
        tokens -= _prepare(seating, job, slots, lane, siblings.get(lane), bucket)
    return seating


def _prepare(
    seating: Schedule,
    job: Job,
    slots: list[int],
    lane: int,
    sibling: int | None,
    bucket: Callable[[int], int],
) -> int:
    """Note how the slots get the prompt; the padded tokens that must run for it."""
    # the last prompt token goes through the first decode step, which gives its logits
    prompt = job.request.prompt_ids[:-1]
    if len(prompt) == 0:
        return 0
    if sibling is not None:
        seating.copies += [(sibling, slot) for slot in slots]
        return 0
    size = bucket(len(prompt))
    seating.prompts.setdefault((size, lane), []).append((prompt, slots))
    return size


def _by_lane(lanes: Lanes, slots: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(lanes.count)]
    for slot in slots:
        found[lanes.of(slot)].append(slot)
    return found


def _lane_of(free: list[list[int]], siblings: Mapping[int, int]) -> int:
    """A lane with room: one that holds the prompt already, else the emptiest one."""

    def merit(lane: int) -> tuple[bool, int]:
        return lane in siblings and bool(free[lane]), len(free[lane])

    return max(range(len(free)), key=merit)
