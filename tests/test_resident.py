"""What a process keeps between tasks, and the proof that what is served is what was trained."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from marin_rl.config import Config, load_config
from marin_rl.errors import StalePolicy
from marin_rl.inference.canary import prove
from marin_rl.inference.server import PolicyServer
from marin_rl.resident import Resident
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.model import build_model, parameters_digest

DEBUG = Path(__file__).parent.parent / "configs/debug.yaml"


def debug(root: Path, *overrides: str) -> Config:
    return load_config(DEBUG, [f"root={root}", *overrides])


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resident]:
    resident = Resident(Run.create_or_open(debug(tmp_path_factory.mktemp("runs"))))
    yield resident
    resident.close()


@pytest.fixture(scope="module")
def remote() -> Iterator[PolicyServer]:
    """A server on its own, with weights that no run has trained."""
    config = load_config(DEBUG)
    tokenizer = character_tokenizer()
    model = build_model(config.policy, len(tokenizer), seed=99)
    server = PolicyServer(
        model,
        tokenizer,
        config.inference,
        context_length=config.policy.context_length,
        parameters_digest=parameters_digest(model),
    )
    server.start()
    yield server
    server.stop()


def test_what_is_served_is_the_checkpoint_and_the_canary_agrees(embedded: Resident) -> None:
    policy = embedded.serve(embedded.init_policy())
    assert policy.parameters_digest == parameters_digest(embedded.trainer.model)
    assert policy.model == f"policy@00000-{policy.parameters_digest[:8]}"
    config = debug(Path("unused")).inference
    assert prove(policy, embedded.trainer.model, config) < 1e-4


def test_other_weights_under_the_right_id_are_found_out(embedded: Resident) -> None:
    checkpoint = embedded.init_policy()
    policy = embedded.serve(checkpoint)
    config = debug(Path("unused"))
    other = build_model(config.policy, len(embedded.tokenizer), seed=7)
    server = embedded._server
    assert server is not None
    server.swap(other, policy.weight_version, policy.parameters_digest)
    with pytest.raises(StalePolicy, match=r"expected a log-probability of .* found .*tolerance"):
        prove(policy, embedded.trainer.model, config.inference)
    assert embedded.serve(checkpoint) == policy


def test_a_round_of_the_past_is_not_served_for_the_present(embedded: Resident) -> None:
    checkpoint = embedded.init_policy()
    policy = embedded.serve(checkpoint)
    server = embedded._server
    assert server is not None
    server.swap(embedded.trainer.model, 1, "f" * 64)
    with pytest.raises(StalePolicy, match="policy@00001-ffffffff") as caught:
        prove(policy, embedded.trainer.model, debug(Path("unused")).inference)
    assert policy.model in str(caught.value)
    embedded.serve(checkpoint)


def test_a_remote_endpoint_is_given_the_weights_and_proves_them(
    tmp_path: Path, remote: PolicyServer
) -> None:
    config = debug(
        tmp_path,
        f"inference.endpoints=[{remote.base_url}]",
        "inference.publish=update_weights_from_disk",
    )
    resident = Resident(Run.create_or_open(config))
    policy = resident.serve(resident.init_policy())
    assert policy.endpoints == (remote.base_url,)
    assert policy.model == remote.model_id == f"policy@00000-{policy.parameters_digest[:8]}"
    exported = [path.name for path in (tmp_path / "debug/exports").iterdir()]
    assert exported == [f"round-00000-{policy.parameters_digest[:16]}"]


def test_a_remote_endpoint_with_other_weights_is_refused(
    tmp_path: Path, remote: PolicyServer
) -> None:
    config = debug(tmp_path, f"inference.endpoints=[{remote.base_url}]", "seed=5")
    resident = Resident(Run.create_or_open(config))
    with pytest.raises(StalePolicy):
        resident.serve(resident.init_policy())
