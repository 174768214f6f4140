"""Runtime of a run between tasks, and the proof that the served weights are the trained ones."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engine_adapters import adapter_for
from support.fakes import FakePolicyServer
from support.policy_runs import commit, embedded_server, in_memory, small_run

from marin_rl.config import Config, load_config
from marin_rl.errors import BadResponse, ConfigError, ObjectMissing, StalePolicy
from marin_rl.lora.peft import write_peft
from marin_rl.models.module import LanguageModel
from marin_rl.rounds import transfer_metrics
from marin_rl.runtime import RunRuntime
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.canary import prove
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint, with_update_root
from marin_rl.serving.weights.weight_updates import Update, WeightUpdater
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.logprobs import token_logprobs
from marin_rl.training.model import (
    build_model,
    named_parameters,
    parameters_digest,
    with_parameters,
)
from marin_rl.types import SlotRef


class RawLogprobs(FakePolicyServer):
    """One that tells what the logits say of a token before temperature, as vLLM does by default."""

    def __init__(self, model_id: str, model: LanguageModel) -> None:
        super().__init__(model_id)
        prompt, sampled = np.arange(10, 15), np.arange(20, 24)
        ids = np.concatenate([prompt, sampled])[None].astype(np.int32)
        places = np.arange(ids.size, dtype=np.int32)[None]
        rows = map(jnp.asarray, (ids, np.ones_like(ids), places, places >= prompt.size))
        logprobs = jax.jit(token_logprobs)(model, *rows).logprobs[0, prompt.size :]
        self._prompt, self._choice_said = (
            prompt.tolist(),
            {
                "token_ids": sampled.tolist(),
                "token_logprobs": np.asarray(logprobs).tolist(),
                "finish_reason": "length",
            },
        )

    def answer(self, body: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
        """The same tokens for every request."""
        answer = super().answer(body, fault) | {"prompt_token_ids": self._prompt}
        for choice in answer["choices"]:
            choice |= self._choice_said
        return answer


# Programs as users have them are not the subject here, and take twice as long to compile.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

DEBUG = Path(__file__).parent.parent / "configs/debug.yaml"


def debug(root: Path, *overrides: str) -> Config:
    return load_config(DEBUG, [f"root={root}", *overrides])


@pytest.fixture(scope="module", autouse=True)
def admin_key() -> Iterator[None]:
    """Key that remote endpoints require before they take new weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARIN_RL_ADMIN_KEY", "manage")
        yield


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunRuntime]:
    runtime = RunRuntime(Run.create_or_open(debug(tmp_path_factory.mktemp("runs"))))
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyServer]:
    """A server on its own, with weights that no run has trained."""
    config = load_config(DEBUG)
    tokenizer = character_tokenizer()
    model = build_model(config.policy, len(tokenizer), seed=99)
    server = PolicyServer(
        model,
        tokenizer,
        with_update_root(config.inference, tmp_path_factory.getbasetemp()),
        context_length=config.policy.context_length,
        parameters_digest=parameters_digest(model),
    )
    server.start()
    yield server
    server.stop()


def test_the_checkpoint_is_served_and_the_canary_agrees(embedded: RunRuntime) -> None:
    policy = embedded.serve(embedded.init_policy())
    assert policy.parameters_digest == parameters_digest(embedded.trainer.models()[0])
    assert policy.model == f"policy@00000-{policy.parameters_digest[:8]}"
    config = debug(Path("unused")).inference
    assert prove(policy, embedded.trainer.models()[0], config).nats < 1e-4
    assert prove(policy, embedded.trainer.models()[0], config, temperature=0.7).nats < 1e-4


def test_an_endpoint_without_temperature_in_its_logprobs_is_not_called_stale(embedded):
    policy, config = embedded.serve(embedded.init_policy()), debug(Path("unused")).inference
    model = embedded.trainer.models()[0]
    other = build_model(debug(Path("unused")).policy, len(embedded.tokenizer), seed=7)
    with RawLogprobs(policy.model, model) as raw, RawLogprobs(policy.model, other) as stale:
        policy = dataclasses.replace(policy, endpoints=(raw.url,))
        assert prove(policy, model, config).nats < 1e-4
        with pytest.raises(BadResponse, match=r"before temperature.*\(0\.7\).*processed_logprobs"):
            prove(policy, model, config, temperature=0.7)
        policy = dataclasses.replace(policy, endpoints=(stale.url,))
        with pytest.raises(StalePolicy, match="found others"):
            prove(policy, model, config, temperature=0.7)


def test_a_small_difference_may_be_rounding_and_a_large_one_is_other_weights(embedded):
    policy, config = embedded.serve(embedded.init_policy()), debug(Path("unused")).inference
    model = embedded.trainer.models()[0]
    for factor, rounding in ((1.01, True), (30.0, False)):
        scaled = {name: factor * array for name, array in named_parameters(model).items()}
        with pytest.raises(StalePolicy, match="does not sample from") as error:
            prove(policy, with_parameters(model, scaled), config)
        assert ("TF32 or bfloat16 makes" in str(error.value)) == rounding, str(error.value)


def test_transfers_that_failed_are_counted_with_the_one_that_did_not(embedded: RunRuntime) -> None:
    checkpoint = embedded.init_policy()
    missing = SlotRef(slot=checkpoint_slot(7), sha256="0" * 64)
    for _ in range(2):
        with pytest.raises(ObjectMissing, match=r"round-00007 is not committed"):
            embedded.serve(missing)
    policy = embedded.serve(checkpoint)
    told = transfer_metrics(policy.transfer, steps=2)
    assert told["weights/failures"] == 2
    assert told["weights/transfers_per_step"] == 0.5
    assert (
        told["weights/bytes"]
        == sum(a.nbytes for a in named_parameters(embedded.trainer.models()[0]).values())
        > 0
    )
    assert told["weights/seconds"] > 0
    again = transfer_metrics(embedded.serve(checkpoint).transfer, steps=2)
    assert again["weights/failures"] == 0  # they were of the round before


def test_other_weights_under_the_right_id_are_detected(embedded: RunRuntime) -> None:
    checkpoint = embedded.init_policy()
    policy = embedded.serve(checkpoint)
    config = debug(Path("unused"))
    other = build_model(config.policy, len(embedded.tokenizer), seed=7)
    embedded_server(embedded).updater.swap(other, policy.weight_version, policy.parameters_digest)
    with pytest.raises(StalePolicy, match=r"expected a log-probability of .* found .*tolerance"):
        prove(policy, embedded.trainer.models()[0], config.inference)
    assert embedded.serve(checkpoint) == policy


def test_a_round_of_the_past_is_not_served_for_the_present(embedded: RunRuntime) -> None:
    checkpoint = embedded.init_policy()
    policy = embedded.serve(checkpoint)
    embedded_server(embedded).updater.swap(embedded.trainer.models()[0], 1, "f" * 64)
    with pytest.raises(StalePolicy, match="policy@00001-ffffffff") as caught:
        prove(policy, embedded.trainer.models()[0], debug(Path("unused")).inference)
    assert policy.model in str(caught.value)
    embedded.serve(checkpoint)


@pytest.mark.slow
def test_a_remote_endpoint_is_given_the_weights_and_proves_them(tmp_path, remote):
    config = debug(
        tmp_path,
        f"inference.endpoints=[{remote.base_url}]",
        "inference.publish=update_weights_from_disk",
    )
    runtime = RunRuntime(Run.create_or_open(config))
    policy = runtime.serve(runtime.init_policy())
    assert policy.endpoints == (remote.base_url,)
    assert policy.model == remote.model_id == f"policy@00000-{policy.parameters_digest[:8]}"
    exported = [path.name for path in (tmp_path / "debug/exports").iterdir()]
    assert exported == [f"round-00000-{policy.parameters_digest[:16]}"]


@pytest.mark.slow
def test_a_remote_endpoint_is_given_the_adapter_and_proves_the_policy(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    base = build_model(load_config(DEBUG).policy, len(tokenizer), seed=0)
    write_peft(tmp_path / "peft", adapter_for(base))
    roomy = load_config(DEBUG, ["inference.engine.adapters_max=2"]).inference
    server = PolicyServer(
        base,
        tokenizer,
        with_update_root(roomy, tmp_path),
        context_length=64,
        parameters_digest=parameters_digest(base),
    )
    server.start()
    config = debug(
        tmp_path,
        f"inference.endpoints=[{server.base_url}]",
        "inference.publish=lora_adapter",
        f"policy.lora.init_from={tmp_path / 'peft'}",
    )
    runtime = RunRuntime(Run.create_or_open(config))
    try:
        policy = runtime.serve(runtime.init_policy())
        assert policy.parameters_digest != parameters_digest(base)
        assert policy.model == f"policy@00000-{policy.parameters_digest[:8]}"
        assert list(server.adapters.names) == [policy.model]
        with pytest.raises(StalePolicy):  # the base alone is another policy
            prove(
                dataclasses.replace(policy, model=server.model_id),
                runtime.trainer.models()[0],
                roomy,
            )
    finally:
        runtime.close()
        server.stop()


def test_a_run_of_all_parameters_has_no_adapter_to_publish(tmp_path: Path) -> None:
    config = debug(
        tmp_path, "inference.endpoints=[http://127.0.0.1:9/v1]", "inference.publish=lora_adapter"
    )
    runtime = RunRuntime(Run.create_or_open(config))
    with pytest.raises(ConfigError, match="is for runs that train an adapter"):
        runtime.serve(runtime.init_policy())


class Deaf(WeightUpdater):
    """An updater that acknowledges new weights and goes on with the old ones."""

    first: LanguageModel

    def swap(self, model: LanguageModel, *args: Any, **options: Any) -> Update:
        return super().swap(self.first, *args, **options)


def deaf_server(run: Run, round: int) -> PolicyServer:
    """A started one, of a round's checkpoint."""
    loaded, inference = read_checkpoint(run, round), run.config.inference
    model, tokenizer = loaded.model, character_tokenizer()
    server = PolicyServer(
        model,
        tokenizer,
        inference,
        context_length=run.config.policy.context_length,
        weight_version=round,
        parameters_digest=loaded.parameters_digest,
    )
    deaf = Deaf(server.engine, model, tokenizer, inference, jnp.float32, server.telemetry)
    deaf.first = model
    server.updater = deaf
    server.start()
    return server


def check_told(message: str, run: Run, *, expected: int, found: int) -> None:
    """The message has both digests, the checkpoint, and what to do."""
    for round in (expected, found):
        assert read_checkpoint(run, round).parameters_digest[:16] in message
    assert f"load checkpoints/round-{expected:05d} at the endpoint" in message
    assert "Nothing was sampled for training" in message


def test_the_last_rounds_weights_under_this_rounds_id_stop_the_loop(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    runtime = RunRuntime(run)
    first, second = runtime.init_policy(), commit(run, 1)
    in_memory(runtime).server = server = deaf_server(run, 0)
    try:
        runtime.serve(first)
        with pytest.raises(StalePolicy, match=r"found those of round 0, .* above") as caught:
            runtime.serve(second)
        assert not caught.value.transient  # no task is tried again for it
        assert server.model_id.startswith("policy@00001-")
        check_told(str(caught.value), run, expected=1, found=0)
    finally:
        runtime.close()


def test_a_server_whose_engine_ended_is_replaced(tmp_path: Path) -> None:
    runtime = RunRuntime(small_run(tmp_path))
    try:
        checkpoint = runtime.init_policy()
        first = runtime.serve(checkpoint)
        ended = embedded_server(runtime)
        ended.engine.close()
        again = runtime.serve(checkpoint)
        assert embedded_server(runtime) is not ended
        assert again.model == first.model
        assert again.endpoints != first.endpoints
    finally:
        runtime.close()
