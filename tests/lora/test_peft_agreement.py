"""Agreement with PEFT: its folders as we read them, and ours as it reads them.

tests/golden/peft.json is written by tests/golden/make_peft.py. With MARIN_RL_PEFT_PYTHON, the
interpreter of an environment with torch, transformers and peft, folders that we write are compared
too.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.peft_folders import adapter_tensors, write_folder
from safetensors.numpy import load_file
from support.adapters import random_adapter
from support.cases import others_slow
from support.hf_models import VOCABULARY, write_checkpoint
from transformers import PreTrainedTokenizerBase

from marin_rl.config import LoraConfig
from marin_rl.lora.adapter import Adapter
from marin_rl.lora.peft import read_peft, write_peft
from marin_rl.serving.weights.export import merge
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.adapters import policy_module, with_adapter
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.logprobs import token_logprobs
from marin_rl.training.model import named_parameters, parameter_shapes

MAKER = Path(__file__).parents[1] / "golden/make_peft.py"
GOLDEN: dict[str, Any] = json.loads(MAKER.with_name("peft.json").read_text("utf-8"))
PEFT = os.environ.get("MARIN_RL_PEFT_PYTHON")
TOLERANCE = 1e-4
pytestmark = pytest.mark.usefixtures("compiled_quickly")
TOKENIZER: PreTrainedTokenizerBase = character_tokenizer()


def scored(model: Any, tokens: list[int], adapter: Adapter | None = None) -> np.ndarray:
    """Logprob of each token after the first, by an adapter next to its base."""
    parameters = named_parameters(model)
    if adapter is not None:
        parameters |= {name: jnp.asarray(array) for name, array in adapter.arrays.items()}
        model = with_adapter(model, adapter.modules)
    ids = jnp.asarray([tokens], jnp.int32)
    positions = jnp.arange(len(tokens))[None]
    segments = jnp.ones_like(ids)
    mask = positions > 0
    module = policy_module(model, parameters)
    scores = jax.jit(token_logprobs)(module, ids, segments, positions, mask)
    return np.asarray(scores.logprobs)[0, 1:]


def base_at(folder: Path, name: str, seed: int) -> Path:
    """A base's folder, with a tokenizer."""
    write_checkpoint(folder, name, seed)
    TOKENIZER.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("name", others_slow(GOLDEN, "llama-gqa"))
def test_adapters_that_peft_wrote_give_its_logprobs(name: str, tmp_path: Path) -> None:
    case = GOLDEN[name]
    base = base_at(tmp_path / "base", name, case["seed"])
    write_folder(tmp_path / "adapter", case["config"], case["shapes"], case["seed"])
    model = load_hf(base)
    adapter = read_peft(tmp_path / "adapter", parameter_shapes(model))
    expected = np.array(case["logprobs"])
    assert case["moved"] > 0.1
    np.testing.assert_allclose(scored(model, case["tokens"], adapter), expected, atol=TOLERANCE)
    # Merged into a model folder by the command's function, and read back.
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    merged = load_hf(tmp_path / "merged")
    np.testing.assert_allclose(scored(merged, case["tokens"]), expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", GOLDEN)
def test_tensors_are_written_under_the_names_and_shapes_of_peft(name: str, tmp_path: Path) -> None:
    case = GOLDEN[name]
    if "model.layers.1.mlp.down_proj" in case["config"]["rank_pattern"]:
        pytest.skip("ranks that differ by layer are written as the largest")
    write_folder(tmp_path / "adapter", case["config"], case["shapes"], case["seed"])
    base = base_at(tmp_path / "base", name, case["seed"])
    adapter = read_peft(tmp_path / "adapter", parameter_shapes(load_hf(base)))
    write_peft(tmp_path / "again", adapter)
    tensors = load_file(tmp_path / "again/adapter_model.safetensors")
    expected = adapter_tensors(case["shapes"], case["seed"])
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        np.testing.assert_array_equal(tensors[key], tensor)


def by_peft(tokens: list[int], base: Path, adapter: Path | None = None) -> np.ndarray:
    """Logprobs by PEFT, in its own interpreter."""
    assert PEFT is not None
    folders = [str(folder) for folder in (base, adapter) if folder is not None]
    command = [PEFT, str(MAKER), "score", *folders]
    run = subprocess.run(
        command, input=json.dumps(tokens), capture_output=True, text=True, check=True
    )
    return np.array(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.skipif(PEFT is None, reason="MARIN_RL_PEFT_PYTHON names no interpreter")
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_peft_reads_what_we_write_to_our_logprobs(name: str, tmp_path: Path) -> None:
    base = base_at(tmp_path / "base", name, 0)
    model = load_hf(base)
    spec = LoraConfig(rank=4, alpha=0.1, ranks={"mlp.*": 3}, alphas={"o_proj": 0.05})
    adapter = random_adapter(spec, shapes=parameter_shapes(model))
    write_peft(tmp_path / "adapter", adapter)
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, 48).tolist()
    expected = scored(model, tokens, adapter)
    theirs = by_peft(tokens, base, tmp_path / "adapter")
    assert np.abs(expected - scored(model, tokens)).max() > 0.1
    np.testing.assert_allclose(theirs, expected, atol=TOLERANCE)
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    np.testing.assert_allclose(by_peft(tokens, tmp_path / "merged"), expected, atol=TOLERANCE)
