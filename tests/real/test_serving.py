"""`marin-rl serve --model` with its defaults: a stream token by token, in little memory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MEMORY_BYTES_MAX = 10**9  # above the weights
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@contextmanager
def served(real_model: Path) -> Iterator[tuple[str, int, int]]:
    """Base URL, process id, and bytes of the weights of a server in another process."""
    command = [sys.executable, "-m", "marin_rl", "serve", "--model", str(real_model), "--port", "0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if match := re.match(r"serving \S+ at (http\S+)$", line):
                    weights = re.search(r"^weights ([\d.]+) GB", said, re.M)
                    assert weights is not None, said
                    yield match[1], process.pid, int(float(weights[1]) * 1e9)
                    break
            else:
                raise AssertionError(said)
        finally:
            process.kill()


def streamed(url: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, in order."""
    body = {"model": "policy", "messages": [QUESTION], "temperature": 0, "stream": True, **fields}
    with httpx2.Client(timeout=600) as http:
        text = http.post(f"{url}/chat/completions", json=body).raise_for_status().text
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]


def test_a_lone_stream_comes_token_by_token_with_the_right_text(real_model: Path) -> None:
    with served(real_model) as (url, _, _):
        choices = streamed(url, max_tokens=12, return_token_ids=True)
    assert [len(choice["token_ids"]) for choice in choices] == [1] * len(choices)
    assert len(choices) > 4
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text.startswith("The capital of France is Paris"), text


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_above_the_weights_is_small(real_model: Path) -> None:
    with served(real_model) as (url, _, _):
        streamed(url, max_tokens=4)  # compiling takes memory too: the next one finds its programs
    with served(real_model) as (url, pid, weights):
        assert streamed(url, max_tokens=4)
        status = Path(f"/proc/{pid}/status").read_text()
    # without the pages of files, most of which are the code of libraries
    anonymous = int(status.partition("RssAnon:")[2].split()[0]) * 1024
    print(f"{anonymous / 1e9:.2f} GB, of which {weights / 1e9:.2f} GB of weights")
    assert anonymous - weights < MEMORY_BYTES_MAX
