"""`export --hf`: others read from the folder what we computed.

transformers needs PyTorch to compute, which is no dependency. So its own numbers, recorded in
tests/golden/hf-greedy.json, are compared with hf_models.py, and hf_models.py with what our
folders are: a forward pass in NumPy and float64 that shares no code with us.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from support.hf_models import logits_TV, write_checkpoint
from support.models import full_logits
from support.policy_runs import commit, small_run, weights
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from marin_rl.cli import app
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint
from marin_rl.tokenizers import character_tokenizer

GOLDEN = Path(__file__).parent / "golden/hf-greedy.json"
TEXT = "Say it backward: abcdefg!"


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-gqa", "llama3-rope"])
def test_the_plain_llama_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text("utf-8"))["checkpoints"][name]
    write_checkpoint(tmp_path, name, golden["seed"])
    given = golden["given"]
    tokens = np.asarray(given["tokens"])
    found = logits_TV(tmp_path, tokens)
    largest = found.max(-1, keepdims=True)
    logprobs = found - largest - np.log(np.exp(found - largest).sum(-1, keepdims=True))
    told = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(told, given["logprobs"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(found[-1], given["last_logits"], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_others_compute_from_an_exported_folder_what_we_do(tmp_path: Path) -> None:
    run = small_run(tmp_path / "runs")
    commit(run, 2, weights(run, 5))
    folder = tmp_path / "hf"
    place = ("--root", run.config.root)
    shown = CliRunner().invoke(app, ["export", run.run_id, "--hf", str(folder), *place, "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["round"] == 2
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == character_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    ours = full_logits(read_checkpoint(run, 2).model, np.asarray(ids, np.int32))
    assert ours.std() > 0.5
    theirs = logits_TV(folder, np.asarray(ids))[:, : ours.shape[1]]
    np.testing.assert_allclose(theirs, ours, atol=1e-4, rtol=0)
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.architectures) == ("llama", ["LlamaForCausalLM"])
