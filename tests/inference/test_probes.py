"""Probes: short requests that are scheduled before those that wait."""

from concurrent.futures import Future

import numpy as np

from marin_rl.inference.batch import Job
from marin_rl.inference.generation import GenerationRequest
from marin_rl.inference.scheduler import JobQueue
from marin_rl.types import Sampling


def job(*, n: int = 1, probe: bool = False) -> Job:
    request = GenerationRequest(
        prompt_ids=np.array([1, 2], np.int32), n=n, sampling=Sampling(max_tokens=4), probe=probe
    )
    return Job(request=request, future=Future(), seed=1, stop_tokens=())


def test_probes_go_before_what_waits_and_after_earlier_probes() -> None:
    queue, jobs = JobQueue(), [job(n=4), job(), job(probe=True), job(), job(probe=True)]
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
