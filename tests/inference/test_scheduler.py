"""The scheduler: order of requests, and whose keys and values may be copied."""

from concurrent.futures import Future

import numpy as np
from support.engine_adapters import loaded_of

from marin_rl.inference.batch import RunningBatch
from marin_rl.inference.generation import GenerationRequest, Job, PrefixKey, WeightsKey
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.scheduler import JobQueue, Lanes, Schedule, schedule
from marin_rl.types import Sampling

PROMPT = np.array([5, 6, 7], np.int32)
LANES = Lanes(1, 4)
BUCKET = 16


def job_of(n: int = 1, adapter: int = 0, *, probe: bool = False) -> Job:
    request = GenerationRequest(
        prompt_ids=PROMPT, n=n, sampling=Sampling(max_tokens=4), probe=probe
    )
    adapted = loaded_of(adapter)
    return Job(request=request, future=Future(), seed=1, stop_tokens=(), adapter=adapted)


def batch_of() -> RunningBatch:
    return RunningBatch(LANES.slots, 8, None, ExtraRows(LANES, 32, 8, lambda arrays: arrays))


def scheduled(batch: RunningBatch, queue: JobQueue, weights: WeightsKey) -> Schedule:
    return schedule(queue, batch, LANES, weights, lambda _: BUCKET, np.inf)


def test_a_request_copies_its_prompt_from_its_own_samples_under_the_same_weights() -> None:
    batch, queue, weights = batch_of(), JobQueue(), WeightsKey()
    job, other = job_of(6), job_of(1)
    queue.append(job)
    plan = scheduled(batch, queue, weights)
    assert [(prompt.tolist(), slots) for prompt, slots in plan.prompts[BUCKET, 0]] == [
        ([5, 6], [0, 1, 2, 3])
    ]
    key = PrefixKey(job.key, weights, 0)
    prefixes = batch.cached(key)
    assert [(p.lane, p.seq_slot, p.token_ids.tolist()) for p in prefixes] == [
        (0, slot, [5, 6]) for slot in range(4)
    ]
    # a place that gets free takes the next sample, whose prompt is copied from the first's
    batch._empty(2)
    assert scheduled(batch, queue, weights).copies == [(3, 2)]
    # after a swap nothing that the old weights computed is copied
    batch._empty(2)
    plan = scheduled(batch, queue, WeightsKey())
    assert (plan.copies, [slots for _, slots in plan.prompts[BUCKET, 0]]) == ([], [[2]])
    # nor from another request, though its prompt has the same tokens
    queue.append(other)
    batch._empty(1)
    assert scheduled(batch, queue, weights).copies == []


def test_adapters_share_no_prefix() -> None:
    batch, queue, weights = batch_of(), JobQueue(), WeightsKey()
    base, adapted = job_of(2), job_of(2, adapter=1)
    for job in (base, adapted):
        queue.append(job)
    plan = scheduled(batch, queue, weights)
    assert [slots for _, slots in plan.prompts[BUCKET, 0]] == [[0, 1], [2, 3]]
    for job, adapter, slots in ((base, 0, [0, 1]), (adapted, 1, [2, 3])):
        key = PrefixKey(job.key, weights, adapter)
        assert [prefix.seq_slot for prefix in batch.cached(key)] == slots
        assert batch.cached(key._replace(adapter=1 - adapter)) == []
    # positions are shared only where all slots side by side have one key
    assert batch.shared_positions(2) == len(PROMPT)
    assert batch.shared_positions(4) == 0


def test_probes_go_before_what_waits_and_after_earlier_probes() -> None:
    queue = JobQueue()
    jobs = [job_of(4), job_of(), job_of(probe=True), job_of(), job_of(probe=True)]
    first, second, probe, third, later = jobs
    queue.append(first)
    queue.take(2)  # the others of its samples wait on
    for each in jobs[1:]:
        queue.append(each)
    assert [*queue] == [probe, later, first, second, third]
    assert queue.waiting == 6
    queue.take(1)
    queue.take(1)
    assert queue.head is first
    assert queue.waiting == 4
