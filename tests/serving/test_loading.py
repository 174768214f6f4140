"""New weights: which are accepted, and the messages of refusals."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.models import tiny_model
from support.policy_runs import commit, small_run, weights

from marin_rl.config import EngineConfig, InferenceConfig
from marin_rl.errors import InferenceError, InputError, ObjectMissing, StalePolicy
from marin_rl.models.spec import Rope
from marin_rl.serving.launch import proven_server
from marin_rl.serving.weights.canary import canary_ids, rehearse
from marin_rl.serving.weights.checkpoint_loader import Served, folder, read_checkpoint, read_folder
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import TokenizerIdentity, character_tokenizer
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.hf_weights import begin_reading
from marin_rl.training.model import named_parameters, parameter_shapes, parameters_digest

CONFIG = InferenceConfig(engine=EngineConfig(slots=2, chunk_steps=2, prefill_rows=1))


def test_weights_that_are_read_early_are_checked_as_others(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_hf(weights(small_run(tmp_path), 1), character_tokenizer(), path)
    early, late = read_folder(str(path), begun=begin_reading(path)), read_folder(str(path))
    assert early.parameters_digest == late.parameters_digest == parameters_digest(late.model)
    with pytest.raises(StalePolicy, match="expected parameters with the digest 00, found"):
        read_folder(str(path), "00", begun=begin_reading(path))
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, file)
    refusals = set[str]()
    for begun in (None, begin_reading(path)):
        with pytest.raises(InputError, match=r"model.norm.weight has 1 values of") as refused:
            read_folder(str(path), begun=begun)
        refusals.add(str(refused.value))
    (path / "config.json").unlink()
    for begun in (None, begin_reading(path)):
        with pytest.raises(InputError, match=r"config\.json") as refused:
            read_folder(str(path), begun=begun)
        refusals.add(str(refused.value))
    assert len(refusals) == 2


def test_an_architecture_is_all_but_the_weights() -> None:
    model, names = tiny_model(), TokenizerIdentity.of(character_tokenizer())
    shapes = parameter_shapes(model)
    served = Served(tokenizer=names, spec=model.spec, shapes=shapes, positions=64)
    served.check_model(tiny_model(seed=9))
    with pytest.raises(InputError, match=r"parameter lm_head/weight expected .* found absent"):
        served.check_model(tiny_model(tied=True))
    with pytest.raises(InputError, match="norm_epsilon expected 1e-05, found"):
        served.check_model(tiny_model(norm_epsilon=0.1))
    with pytest.raises(InputError, match=r"k_proj/weight expected \(2, 2, .* found \(2, 1, "):
        served.check_model(tiny_model("llama3-rope"))
    with pytest.raises(InputError, match=r"layer 0 expected .*10000.0.*, found .*500000.0"):
        served.check_model(tiny_model(rope=Rope(theta=5e5, size=8)))
    with pytest.raises(InputError, match=r"at least 64 positions, .* found one for 32"):
        served.check_model(tiny_model(context_length=32))


def test_a_folder_and_a_checkpoint_of_the_same_weights_are_the_same(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    ref = commit(run, 3, weights(run, 1))
    save_hf(weights(run, 1), character_tokenizer(), tmp_path / "model")
    digest = parameters_digest(weights(run, 1))
    by_folder = read_folder(str(tmp_path / "model"), digest)
    by_run = read_checkpoint(run, 3, digest)
    assert by_folder.parameters_digest == by_run.parameters_digest == digest
    assert (by_folder.round, by_run.round) == (None, 3)
    assert by_folder.bytes == by_run.bytes
    for name, array in named_parameters(by_run.model).items():
        np.testing.assert_array_equal(array, named_parameters(by_folder.model)[name])
    assert ref.slot == "checkpoints/round-00003"
    with pytest.raises(StalePolicy, match=f"expected .* digest {'0' * 64}, found {digest}"):
        read_checkpoint(run, None, "0" * 64)
    with pytest.raises(ObjectMissing, match="no checkpoint of round 4"):
        read_checkpoint(run, 4)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("cannot read {}/a.json: no", "cannot read {}/a.json: no"),
        ("cannot read /home/other/model/a.json: no", "cannot read …/a.json: no"),
        ("('/home/other/key', 3)", "('…/key', 3)"),
        ("s3://bucket/run/round-00001 is not there", "s3://bucket/run/round-00001 is not there"),
        ("1/2 of it, and/or more", "1/2 of it, and/or more"),
    ],
)
def test_errors_show_only_places_that_the_caller_named(tmp_path, message, told):
    source = folder(str(tmp_path))
    assert source.error_text(InputError(message.format(tmp_path))) == told.format(tmp_path)


def test_errors_show_a_place_as_the_caller_wrote_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert folder("model").error_text(InputError(f"in {tmp_path}/model/x")) == "in model/x"
    up = f"{'../' * len(tmp_path.parts)}elsewhere"
    for message in (f"no {up}/a.json: really", f"no {up}", "no runs/elsewhere"):
        assert folder(up).error_text(InputError(message)) == message
    assert folder(up).error_text(InputError("no /elsewhere/a.json")) == f"no {up}/a.json"


def test_a_root_without_the_run_is_an_error_with_a_few_names(tmp_path: Path) -> None:
    for number in range(100, 130):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(ObjectMissing, match=r"found there: 100, .*, 109 and 20 more$"):
        Run.open(str(tmp_path), "other")


@pytest.mark.slow
def test_the_rehearsal_tells_an_engine_that_computes_something_else(tmp_path: Path) -> None:
    model = tiny_model()
    ids = canary_ids(character_tokenizer())
    assert rehearse(model, ids, CONFIG, jnp.float32) < 1e-4
    exact = CONFIG.model_copy(update={"canary_tolerance": 1e-5})
    with pytest.raises(InferenceError, match=r"expected a log-probability .* found .* bfloat16"):
        rehearse(model, ids, exact, jnp.bfloat16)


@pytest.mark.slow
def test_a_server_of_weights_that_the_engine_gets_wrong_does_not_start(tmp_path: Path) -> None:
    run = small_run(tmp_path, "policy.compute_dtype=bfloat16", "inference.canary_tolerance=1e-6")
    commit(run, 0)
    with pytest.raises(InferenceError, match="does not compute what the trainer computes"):
        proven_server(read_checkpoint(run, 0), character_tokenizer(), run.config)
