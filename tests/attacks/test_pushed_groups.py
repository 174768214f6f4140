"""Groups that environments push: all or nothing, once, and not without end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.run_factories import checkpoint
from support.trajectories import push, pushed_config, receiving, registration, scored

from marin_rl.integrations.atropos import receiver
from marin_rl.storage.runs import Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(receiver, "LOOK_S", 0.0)
    run = Run.create_or_open(pushed_config(tmp_path))
    checkpoint(run, 0, extra={"parameters_digest": "a" * 64})
    return run


@pytest.fixture
def client(run: Run) -> Iterator[httpx.Client]:
    with receiving(run) as client:
        client.post("/register-env", json=registration())
        yield client


def with_last(name: str, value: Any) -> dict[str, Any]:
    """A group whose last entry of an array is `value`."""
    group = scored()
    group[name][1][-1] = value
    return group


HOSTILE: dict[str, Any] = {
    "not a number": scored(generation_params={"x": float("nan")}),
    "infinite": scored(group_overrides={"x": float("inf")}),
    "a large integer": scored(generation_params={"x": 10**400}),
    "an id beyond int64": with_last("tokens", 2**63),
    "a mask beyond int64": with_last("masks", -(2**70)),
    "an id beyond int32": with_last("tokens", 2**31),
    "a logprob beyond float32": with_last("inference_logprobs", -1e39),
    "half a character": scored(generation_params={"x": "\ud800"}),
    "no text": scored(messages=3),
    "deep": scored(generation_params={"x": json.loads("[" * 300 + "]" * 300)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_of_a_list_is_committed_where_one_is_refused(
    client: httpx.Client, run: Run, name: str
) -> None:
    for groups in ([scored(), HOSTILE[name]], [HOSTILE[name], scored()]):
        answer = client.post("/scored_data_list", content=json.dumps(groups))
        assert answer.status_code == 422, answer.text
    twice = json.dumps(scored())[:-1] + ', "env_id": 0}'
    assert client.post("/scored_data", content=twice).status_code == 422
    assert client.get("/status").json()["queue_size"] == 0
    assert not [key for key in run.store.list("rollouts") if key.endswith(".parquet")]
    push(client, [20])
    assert client.get("/status").json()["queue_size"] == 1


def test_an_environment_that_ignores_the_queue_is_asked_to_wait(
    run: Run, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "QUEUE_ROUNDS_MAX", 1)
    most = run.config.rollouts.groups_per_round * 2 * (1 + run.config.batching.staleness_rounds_max)
    push(client, range(20, 20 + most))
    answer = client.post("/scored_data", json=scored(first=20 + most))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert f"{most} groups wait" in answer.text
    assert client.get("/status").json()["queue_size"] == most
