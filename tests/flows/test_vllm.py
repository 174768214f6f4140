"""A whole run on a real vLLM, killed and restarted in its middle: `make test-vllm`.

MARIN_RL_VLLM names the Python of an environment with vLLM. The CPU build takes minutes to start and
3 GB of memory, so this is for those who ask for it.
"""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from support.flow_runs import debug
from support.models import full_logprobs
from support.streams import checked

from flows.rl_loop import start
from flows.server import free_port
from marin_rl.config import Config
from marin_rl.errors import StalePolicy
from marin_rl.progress import ProgressEvent, listening
from marin_rl.runtime import RunRuntime
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint
from marin_rl.storage.runs import Run, committed_checkpoint
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.model import build_model

PYTHON = os.environ.get("MARIN_RL_VLLM", "")
STARTS_S = 1500
ROUNDS, RANK = 3, 8
# vLLM's attention on a CPU begins at heads of 32. Its reload leaves a tied head there with the
# packed copy of the old weights, which the canary names.
# Positions, so that new weights come in the middle of completions.
LONG = ("policy.context_length=128", "batching.length_buckets=[128]")
WIDE = ("policy.model.hidden_size=64", "policy.model.tie_embeddings=false")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not PYTHON, reason="MARIN_RL_VLLM names no Python with vLLM"),
]


class Vllm:
    """vLLM's own server on one port, started from a folder as often as it is killed."""

    def __init__(self, folder: Path, context: int) -> None:
        self.folder, self._context, self._port = folder, context, free_port()
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self.log = folder.parent / "vllm.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, without waiting."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("XLA")},
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [
            *(PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(self.folder)),
            *("--served-model-name", "policy", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(self._context), "--max-num-seqs", "16"),
            *("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2"),
            "--enable-scale-out",  # for /inference/v1/generate
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
        ]
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        """Return once it answers."""
        deadline = time.monotonic() + STARTS_S
        while not self._answers():
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL to the server and the processes of its engine."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return httpx.get(self.url + "/models", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A vLLM with random weights of the runs' shape."""
    folder = tmp_path_factory.mktemp("vllm")
    config = debug(folder / "unused", *WIDE, *LONG)
    tokenizer = tokenizer_for(config.policy)
    save_hf(build_model(config.policy, len(tokenizer), seed=99), tokenizer, folder / "start")
    started = Vllm(folder / "start", config.policy.context_length)
    started.start()
    try:
        started.wait()
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="module")
def adapted(api: str, server: Vllm) -> tuple[Config, list[str]]:
    """A run that sends vLLM its adapter alone, over the weights it was started with.

    Also the models that vLLM names at its end.
    """
    config = debug(
        server.folder.parent / "adapted",
        f"rounds={ROUNDS}",
        f"inference.endpoints={server.url}",
        "inference.publish=lora_adapter",
        "policy.init=hf",
        f"policy.hf_path={server.folder}",
        f"policy.lora.rank={RANK}",
    )
    start(config)
    return config, [item["id"] for item in httpx.get(f"{server.url}/models").json()["data"]]


@pytest.fixture(scope="module")
def played(api: str, server: Vllm, adapted: tuple[Config, list[str]]) -> Config:
    """A run that sends vLLM all weights, each round; vLLM is killed and started in round 1."""
    config = debug(
        server.folder.parent / "runs",
        *WIDE,
        f"rounds={ROUNDS}",
        f"inference.endpoints={server.url}",
        "inference.publish=vllm_reload",
        "inference.fleet_timeout_s=1800",
        "flow.shards_in_flight_max=1",  # so that it is killed between two shards of a round
    )
    killed: list[int] = []

    def listen(event: ProgressEvent) -> None:
        if event.stage == "generate" and event.round == 1 and event.done and not killed:
            killed.append(event.round or 0)
            server.kill()
            server.start()  # with the weights of its folder, under the same name

    with listening(listen):
        start(config)
    assert killed == [1]
    return config


def check_rounds(config: Config) -> None:
    """Each round's log-probabilities are the trainer's, and every rollout is accounted for."""
    run = Run.open(config.root, config.run_id)
    assert all(found.balanced for found in audit_run(run))
    rows = read_metrics(run).to_pylist()
    assert [row["round"] for row in rows[:ROUNDS]] == list(range(ROUNDS))
    gaps = [row["sampling/logp_difference/max"] for row in rows[:ROUNDS]]
    print(
        f"{config.inference.publish}: log-probabilities of {ROUNDS} rounds differ by up to {gaps}"
    )
    assert max(gaps) < 1e-4, gaps
    assert all(row["weights/bytes"] > 0 for row in rows[:ROUNDS])


def test_every_round_is_sampled_with_its_adapter(adapted: tuple[Config, list[str]]) -> None:
    config, models = adapted
    check_rounds(config)
    versions = sorted(name.partition("-")[0] for name in models if "@" in name)
    assert versions == [f"policy@{ROUNDS - 1:05d}", f"policy@{ROUNDS:05d}"], "older ones are gone"


def test_every_round_is_sampled_with_its_weights(played: Config) -> None:
    """Also the one in which the server came back with other weights."""
    check_rounds(played)


def test_other_weights_under_the_right_name_are_caught(played: Config, server: Vllm) -> None:
    """Loaded behind the run's back, with the version of the right ones left in place."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(server.folder)}}
    assert httpx.post(f"{root(server)}/collective_rpc", json=body, timeout=300).status_code == 200
    right = played.model_copy(
        update={"inference": played.inference.model_copy(update={"publish": "none"})}
    )
    run = Run.create_or_open(right)
    ref = committed_checkpoint(run, ROUNDS)
    assert ref is not None
    runtime = RunRuntime(run)
    with pytest.raises(StalePolicy, match="does not sample from"):
        runtime.serve(ref)
    runtime.close()


def test_answers_are_those_of_the_documentation(played: Config, server: Vllm) -> None:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 4,
        "logprobs": True,
        "return_token_ids": True,
        "seed": 1,
    }
    (choice,) = httpx.post(f"{server.url}/chat/completions", json=body, timeout=300).json()[
        "choices"
    ]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    sampled = {"max_tokens": 4, "logprobs": 0, "ignore_eos": True}
    prompt = {"token_ids": [5, 6, 7], "sampling_params": sampled}
    generated = httpx.post(
        f"{root(server)}/inference/v1/generate", json={"model": "policy", **prompt}, timeout=300
    ).json()["choices"][0]
    content: list[Mapping[str, Any]] = generated["logprobs"]["content"]
    assert [item["token_id"] for item in content] == generated["token_ids"]
    assert np.isfinite([item["logprob"] for item in content]).all()
    version = info(server)["weight_version"]
    assert generated["weight_versions"] == [{"version": version, "start": 0, "end": 4}]
    assert "weight_versions" not in choice, "chat names none"


@pytest.fixture(scope="module")
def changing(api: str, server: Vllm, played: Config) -> Config:
    """A window of groups whose completions go on with each round's weights."""
    config = debug(
        server.folder.parent / "changing",
        *WIDE,
        *LONG,
        f"rounds={ROUNDS}",
        "policy.init=random",
        f"inference.endpoints={server.url}",
        "inference.publish=vllm_reload",
        "inference.route=vllm_generate",
        "asynchrony.max_staleness=2",
        "asynchrony.sampler=windowed",
        "asynchrony.in_flight_updates=true",
        "sampling.max_tokens=100",
    )
    start(config)
    return config


def test_a_window_takes_tokens_of_the_weights_that_their_labels_name(changing: Config) -> None:
    run = checked(changing)
    columns = ["token_ids", "loss_mask", "logprobs", "policy_versions", "policy_version_min"]
    tables = [table for round in range(ROUNDS) for table in iter_shards(run, round, columns)]
    rows = pa.concat_tables(tables).to_pylist()
    models = {version: read_checkpoint(run, version).model for version in range(ROUNDS + 1)}
    gaps = [gap_of(row, models) for row in rows]
    mixed = [row for row in rows if row["policy_versions"] is not None]
    print(f"{len(mixed)} of {len(rows)} rollouts have several policies; gaps up to {max(gaps)}")
    assert max(gaps) < 1e-4


def gap_of(row: Mapping[str, Any], models: Mapping[int, Any]) -> float:
    """Largest distance of a token's log-probability from that by the policy it is of, in nats."""
    ids, sampled = np.asarray(row["token_ids"]), np.asarray(row["loss_mask"]) == 1
    versions = row["policy_versions"]
    if versions is None:
        versions = np.full(len(ids), row["policy_version_min"])
    own, logprobs = np.asarray(versions)[sampled], np.asarray(row["logprobs"])[sampled]
    assert (np.diff(own) >= 0).all()
    gaps = [
        np.abs(logprobs - full_logprobs(models[version], ids[~sampled], ids[sampled]))[
            own == version
        ].max()
        for version in set(own.tolist())
    ]
    return float(max(gaps))


def root(server: Vllm) -> str:
    return server.url.removesuffix("/v1")


def info(server: Vllm) -> dict[str, Any]:
    return httpx.get(f"{root(server)}/weight_info", timeout=30).json()
