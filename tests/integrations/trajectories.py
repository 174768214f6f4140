"""A running server of trajectories, the groups that environments push to it, and its clients."""

import gzip
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from support.run_factories import configuration

from marin_rl.config import Config
from marin_rl.integrations.atropos.api import trajectory_server
from marin_rl.integrations.atropos.receiver import Receiver
from marin_rl.serving.http.auth import listen
from marin_rl.storage.runs import Run

SIZE = 2  # sequences of a group
START_S = 10


def pushed_config(root: object, **sections: Any) -> Config:
    """The configuration of a run of three groups a round, in two shards."""
    rollouts = {"source": "pushed", "group_size": SIZE, **sections.pop("rollouts", {})}
    return configuration(str(root), shards=2, groups=3, rollouts=rollouts, **sections)


def scored(env_id: int | None = 0, *, first: int = 20, **fields: Any) -> dict[str, Any]:
    """A group of two sequences: three tokens of a prompt, and two or one that were sampled.

    Groups of different `first` tokens differ.
    """
    return {
        "tokens": [[5, 6, 7, first, 9], [5, 6, 7, first + 1]],
        "masks": [[-100, -100, -100, first, 9], [-100, -100, -100, first + 1]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -1.0], [1.0, 1.0, 1.0, -0.25]],
        "env_id": env_id,
        **fields,
    }


def registration(name: str | None = "spell", **fields: Any) -> dict[str, Any]:
    """The body by which an environment registers."""
    return {
        "max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": SIZE,
        "min_batch_allocation": None, **fields,
    }  # fmt: skip


def zipped(body: Any) -> dict[str, Any]:
    """A body as atropos sends one of some length."""
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    return {"content": gzip.compress(json.dumps(body).encode()), "headers": headers}


@contextmanager
def receiving(run: Run) -> Iterator[httpx.Client]:
    """A client of a server of the run, which ends with the block and keeps nothing in memory."""
    server, listener = trajectory_server(Receiver(run), "127.0.0.1"), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.002)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=address, timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def push(client: httpx.Client, firsts: Sequence[int]) -> None:
    """Push groups that must be accepted."""
    for first in firsts:
        answer = client.post("/scored_data", json=scored(first=first))
        assert answer.json() == {"status": "received"}, answer.text
