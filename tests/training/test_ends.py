"""The token that a template ends an answer with is learned, ends completions, and is exported."""

import json
from pathlib import Path

import pytest
from support.chat_folders import CHATML, DATED, chat_folder

from marin_rl.api.sampling import Engine
from marin_rl.config import ModelConfig, PolicyConfig
from marin_rl.rollouts.pinned import as_begun, policy_as_begun
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import end_token_ids, load_tokenizer, tokenizer_for
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.model import build_model
from marin_rl.training.sft import WarmStart

STEPS = 40
END = 2  # <|im_end|>


@pytest.mark.slow
def test_a_warm_start_on_a_base_model_ends_its_answers(debug, tmp_path: Path) -> None:
    """The files of the base say `<|endoftext|>`, its template closes turns with `<|im_end|>`."""
    folder, rows = chat_folder(tmp_path / "folder", CHATML), tmp_path / "rows.jsonl"
    shown = [{"prompt": str(digit), "completion": f"\n{digit}"} for digit in range(4)]
    rows.write_text("\n".join(map(json.dumps, shown)))
    config = debug(
        f"policy={{init: sft, tokenizer: {folder}, context_length: 64}}",
        f"sft={{steps: {STEPS}, steps_per_checkpoint: {STEPS}, learning_rate: 1.0e-2}}",
        f"sft.environment={{name: chat, options: {{path: {rows}, eval_fraction: 1.0e-9}}}}",
    )
    run = Run.create_or_open(config, as_begun)
    tokenizer = tokenizer_for(run.config.policy)
    slot = WarmStart(run, tokenizer).run_segment(0).slot
    with Engine(tmp_path / "runs" / run.run_id / slot, trust=True) as engine:
        prompt = [{"role": "user", "content": "1"}]
        completions = engine.generate([prompt], n=8, max_tokens=16)
    assert [c.finish_reason for c in completions] == ["stop"] * 8
    assert [c.token_ids[-1] for c in completions] == [END] * 8
    assert sum(c.text.startswith("\n") for c in completions) > 4


def test_an_export_ends_where_its_run_did_and_asks_for_the_day(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "tokenizer", DATED)
    model = ModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=24)
    policy = policy_as_begun(PolicyConfig(tokenizer=str(folder), model=model))
    tokenizer, export = tokenizer_for(policy), tmp_path / "model"
    save_hf(build_model(policy, len(tokenizer), 0), tokenizer, export)
    listed = json.loads((export / "generation_config.json").read_text())
    assert listed == {"eos_token_id": [0, END]}
    exported = load_tokenizer(export)
    assert end_token_ids(exported) == (0, END)
    assert exported.chat_template == DATED
    assert tokenizer.chat_template != DATED
