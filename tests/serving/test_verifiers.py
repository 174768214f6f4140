"""The `verifiers` library against our server: what it records is what the engine sampled.

It wants other versions of what we stand on, so it runs in an environment of its own:

    uv venv --python 3.11 bench/.venv-verifiers
    VIRTUAL_ENV=bench/.venv-verifiers uv pip install verifiers==0.3.1 openai==3.52.0
"""

import json
import os
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.servers import serving

from marin_rl.inference.generation import GenerationRequest, Sample
from marin_rl.serving.server import PolicyServer
from marin_rl.types import Sampling

HERE = Path(__file__).parents[1]
PYTHON = HERE.parent / "bench" / ".venv-verifiers" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"verifiers is not installed in {PYTHON.parents[1]}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving(context_length=160) as server:
        yield server


@pytest.fixture(scope="module")
def found(server) -> dict[str, Any]:
    done = subprocess.run(
        [
            str(PYTHON),
            str(HERE / "support/verifiers_transcripts.py"),
            server.base_url,
            server.model_id,
        ],
        env=os.environ | {"MARIN_RL_API_KEY": "none", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def sampled(server: PolicyServer, prompt: list[int]) -> Sample:
    """Sample of the engine for a prompt with the sampling of `verifiers_transcripts`."""
    request = GenerationRequest(
        prompt_ids=np.array(prompt, np.int32),
        sampling=Sampling(temperature=0.8, max_tokens=12, seed=5),
    )
    (sample,) = server.engine.submit(request).result(timeout=60).samples
    return sample


def agrees(server: PolicyServer, tokens: dict[str, Any]) -> bool:
    sample = sampled(server, tokens["prompt_ids"])
    np.testing.assert_array_equal(tokens["completion_ids"], sample.token_ids)
    given = np.array(tokens["completion_logprobs"], np.float32)
    np.testing.assert_allclose(given, sample.logprobs, atol=1e-5)
    return len(given) > 0


def test_a_single_turn_environment_records_what_was_sampled(server, found):
    assert len(found["single"]) == 3 * 2
    for turn in found["single"]:
        tokens = turn["tokens"]
        assert agrees(server, tokens)
        assert tokens["completion_mask"] == [1] * len(tokens["completion_ids"])
        assert tokens["prompt_mask"] == [0] * len(tokens["prompt_ids"])


def test_later_turns_go_on_from_the_very_ids_of_the_earlier(server, found):
    """Except where a turn was cut off by its limit: then the library renders the talk again."""
    turns, stitched = found["multi"], 0
    assert len(turns) == 3 * 2 * 3
    for before, after in pairwise(turns):
        assert agrees(server, after["tokens"])
        if after["turn"] == 0 or before["tokens"]["is_truncated"]:
            continue
        earlier = before["tokens"]["prompt_ids"] + before["tokens"]["completion_ids"]
        if before["tokens"]["completion_ids"][-1] == 1:
            assert after["tokens"]["prompt_ids"][: len(earlier)] == earlier
            stitched += 1
    assert stitched > 0


def test_the_token_path_of_newer_clients(server, found):
    tokens = found["tokens"]
    assert agrees(server, tokens)
    assert tokens["request_id"]
    assert tokens["finish_reason"] in ("stop", "length")
