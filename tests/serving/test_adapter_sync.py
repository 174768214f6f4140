"""Weight sync by adapter: a name for each version, old ones unloaded, by vLLM's route or SGLang's.

The endpoint is our own server, which speaks both; where one is to speak SGLang's alone, requests to
vLLM's get the 404 that SGLang gives.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.engine_adapters import adapter_for, merged
from support.models import full_logprobs, tiny_model
from support.policy_runs import small_run, weights_of
from support.servers import ENGINE, serving

from marin_rl.config import ServerConfig
from marin_rl.errors import InputError, StalePolicy
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.lora.adapter import Adapter, policy_digest
from marin_rl.lora.peft import write_peft
from marin_rl.serving.server import PolicyServer
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import character_tokenizer
from marin_rl.types import Message, Sampling
from marin_rl.weight_sync import AsAdapter, Weights

pytestmark = pytest.mark.slow
BASE_DIGEST = "0123456789"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[PolicyServer]:
    roomy = ENGINE.model_copy(update={"adapters_max": 4, "adapter_rank_max": 8})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARIN_RL_ADMIN_KEY", "of-the-admin")
        with serving(ServerConfig(update_roots=(str(root),)), engine=roomy) as server:
            yield server


@pytest.fixture(autouse=True)
def environment(server: PolicyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MARIN_RL_ADMIN_KEY", "of-the-admin")
    yield
    for name in server.adapters.names:
        server.adapters.unload(name)


def run_of(root: Path, server: PolicyServer, name: str) -> Run:
    """A run whose endpoint gets adapters."""
    return small_run(
        root,
        f"run_id={name}",
        f"inference.endpoints=[{server.base_url}]",
        "inference.publish=lora_adapter",
        "policy.lora.rank=4",
        "inference.request_attempts_max=1",
    )


def published(run: Run, version: int, adapter: Adapter) -> str:
    digest = policy_digest(BASE_DIGEST, adapter.modules, adapter.digest)
    return transport(run, adapter).publish(weights_of(version, digest)).model


def transport(run: Run, adapter: Adapter) -> AsAdapter:
    """Publish an adapter that no checkpoint has."""

    class Writing(AsAdapter):
        def save(self, weights: Weights, folder: Path) -> None:
            write_peft(folder, adapter)

    return Writing(run, character_tokenizer())


def check_samples(run: Run, model: str, adapter: Adapter) -> None:
    """Answers under this id are drawn by the base merged with the adapter."""

    async def ask():
        async with PolicyClient(endpoints=run.config.inference.endpoints, model=model) as client:
            messages = (Message(role="user", content="abc"),)
            return await client.chat(messages, 2, Sampling(max_tokens=4, seed=1))

    answer = asyncio.run(ask())
    for completion in answer.completions:
        expected = full_logprobs(
            merged(tiny_model(), adapter), answer.prompt_token_ids, completion.token_ids
        )
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-4)


def test_each_version_has_a_name_and_old_ones_go(root, server):
    run, adapters = run_of(root, server, "one"), [adapter_for(tiny_model(), n) for n in range(4)]
    names = []
    for version, adapter in enumerate(adapters):
        names.append(published(run, version, adapter))
        check_samples(run, names[-1], adapter)
        assert server.adapters.names == names[-2:]
    assert [name.partition("-")[0] for name in names] == [f"policy@{n:05d}" for n in range(4)]
    # the answer to a load may be lost: the next attempt finds the adapter there
    assert published(run, 3, adapters[3]) == names[-1]
    exported = sorted(path.name for path in (root / "one/exports").iterdir())
    assert [name[:11] for name in exported] == ["round-00002", "round-00003"]


def test_two_runs_share_a_server_and_leave_each_other_alone(root, server):
    runs = [run_of(root, server, name) for name in ("left", "right")]
    for version in range(3):
        for seed, run in enumerate(runs):
            adapter = adapter_for(tiny_model(), 10 * version + seed)
            check_samples(run, published(run, version, adapter), adapter)
    assert [name.partition("-")[0] for name in server.adapters.names] == [
        "policy@00001", "policy@00001", "policy@00002", "policy@00002",
    ]  # fmt: skip


def test_an_endpoint_that_speaks_as_sglang_does(root, server, monkeypatch):
    run, adapter = run_of(root, server, "sglang"), adapter_for(tiny_model(), 30)
    for route in ("/v1/load", "/v1/unload"):
        _without_routes(server, monkeypatch, route)
    model = published(run, 0, adapter)
    assert model == f"policy:{server.adapters.names[0]}"
    assert published(run, 0, adapter) == model
    published(run, 2, adapter_for(tiny_model(), 31))
    assert [name.partition("-")[0] for name in server.adapters.names] == ["policy@00002"]


def _without_routes(server: PolicyServer, monkeypatch: pytest.MonkeyPatch, paths: str) -> None:
    """Have the server answer 404 to routes whose paths begin with this."""
    router = server._router
    kept = [route for route in router.routes if not route.path.startswith(paths)]
    monkeypatch.setattr(router, "routes", kept)


def test_another_base_is_refused_by_the_digest_of_the_policy(root, server):
    run, adapter = run_of(root, server, "stale"), adapter_for(tiny_model(), 40)
    digest = policy_digest("another base", adapter.modules, adapter.digest)
    with pytest.raises(StalePolicy, match="trained on another base"):
        transport(run, adapter).publish(weights_of(0, digest))
    assert server.adapters.names == []


def test_an_endpoint_without_room_says_what_to_start_it_with(root, server):
    run = run_of(root, server, "full")
    for seed in range(4):
        server.adapters.load(f"taken-{seed}", adapter_for(tiny_model(), seed))
    with pytest.raises(InputError, match=r"refuses the adapter .* at most 4 adapters"):
        published(run, 0, adapter_for(tiny_model(), 50))


def test_an_endpoint_that_cannot_load_adapters_says_how_to_start_it(root, server, monkeypatch):
    for route in ("/v1/load", "/v1/unload", "/load", "/unload"):
        _without_routes(server, monkeypatch, route)
    with pytest.raises(InputError, match="start vLLM with --enable-lora"):
        published(run_of(root, server, "none"), 0, adapter_for(tiny_model(), 60))
