"""Ours against Levanter's own modules where those are exact, and behind its interface."""

from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from levanter.layers.attention import AttentionMask
from levanter.models.gemma import GemmaConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig, LmExample
from levanter.models.mistral import MistralConfig
from levanter.models.qwen import Qwen3Config, QwenConfig
from support.cases import others_slow
from support.family_folders import golden, tokens, write_folder
from support.run_factories import character_tokenizer
from transformers import AutoConfig

from marin_rl.errors import InputError
from marin_rl.training import hidden_states, logprobs
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.levanter_model import HfFolderConfig, LevanterModel
from marin_rl.training.logprobs import Packing, token_logprobs
from marin_rl.training.model import named_parameters, with_parameters

GOLDEN = golden()
THEIRS: dict[str, Any] = {
    "smollm2-135m": LlamaConfig,
    "qwen2.5-0.5b": QwenConfig,
    "qwen3-8b": Qwen3Config,
    "mistral-7b-v0.3": MistralConfig,
    "gemma-7b": GemmaConfig,
}

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    case = GOLDEN[request.param]
    write_folder(tmp_path, case["config"], case["shapes"])
    character_tokenizer().save_pretrained(str(tmp_path))
    return tmp_path


def ids_of_batch() -> hax.NamedArray:
    return hax.named(jnp.asarray(tokens()), ("batch", "position"))


@pytest.mark.parametrize(
    ("name", "folder"),
    others_slow([(name, name) for name in THEIRS if name != "gemma-7b"], first=1, several=True),
    indirect=["folder"],
)
def test_our_logits_are_those_of_levanters_own_module(name: str, folder: Path) -> None:
    case = GOLDEN[name]
    config = THEIRS[name].from_hf_config(AutoConfig.for_model(**case["config"]))
    vocab = hax.Axis("vocab", case["config"]["vocab_size"])
    empty = eqx.filter_eval_shape(config.model_type.init, vocab, config, key=jax.random.key(0))
    run = eqx.filter_jit(lambda model: model(ids_of_batch(), attn_mask=AttentionMask.causal()))
    ours = HfFolderConfig(hf_path=str(folder)).load()
    theirs = with_parameters(empty, named_parameters(ours.model))  # the names are the same
    found, expected = (
        run(model).rearrange(("batch", "position", "vocab")).array for model in (ours, theirs)
    )
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["smollm2-135m"], indirect=True)
def test_levanter_trains_a_model_of_ours(folder: Path) -> None:
    config = LmConfig.get_choice_class("marin_rl")(hf_path=str(folder))
    model = config.build(hax.Axis("vocab", 112), key=jax.random.key(0))
    assert isinstance(model, LevanterModel)
    example = LmExample.causal(hax.named(ids_of_batch().array[0], "position"))
    loss_of = eqx.filter_value_and_grad(lambda m: m.compute_next_token_loss(example).scalar())
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradient = loss_of(model)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, updates), state, loss

    state, losses = eqx.filter_jit(optimizer.init)(eqx.filter(model, eqx.is_array)), []
    for _ in range(8):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(112), rel=0.2)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("folder", ["smollm2-135m"], indirect=True)
def test_masks_that_are_not_causal_are_refused(folder: Path) -> None:
    model = HfFolderConfig(hf_path=str(folder)).load()
    with pytest.raises(InputError, match="expected a causal mask"):
        model(ids_of_batch(), attn_mask=AttentionMask(is_causal=False))


@pytest.mark.parametrize("packed", others_slow([0, 1], 1))
@pytest.mark.parametrize("folder", ["gemma-2-2b"], indirect=True)
def test_rows_score_by_the_attention_of_a_tpu_as_by_that_of_a_cpu(folder, packed, monkeypatch):
    """Levanter chooses an attention that runs on a CPU in the place of the TPU's kernel."""
    model, ids = load_hf(folder), jnp.asarray(tokens())
    segments = 1 + (jnp.arange(ids.shape[1]) > 20) * packed
    positions = jnp.arange(ids.shape[1]) - 21 * (segments > 1)
    rows = (ids, *(jnp.broadcast_to(a, ids.shape) for a in (segments, positions, positions > 0)))
    packing = Packing(packed_rows=bool(packed))
    # Traced anew each time: what is traced depends on where it is to run.
    scored = lambda: eqx.filter_jit(lambda m: token_logprobs(m, *rows, packing=packing))(model)
    expected = scored()
    for module in (hidden_states, logprobs):
        monkeypatch.setattr(module, "on_tpu", lambda: True)
    found = scored()
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
