"""Plans multiplied out by hand."""

import dataclasses
import json
from pathlib import Path

import pytest

from marin_rl.config import load_config, parse_config
from marin_rl.errors import InputError
from marin_rl.planning import Architecture, architecture_of, plan


def test_a_small_run_multiplies_out():
    config = parse_config(
        {
            "rounds": 2,
            "policy": {
                "context_length": 32,
                "model": {
                    "hidden_size": 8,
                    "layers": 1,
                    "heads": 2,
                    "kv_heads": 1,
                    "intermediate_size": 16,
                    "vocab_size": 10,
                },
            },
            "sampling": {"max_tokens": 4},
            "rollouts": {"groups_per_round": 3, "group_size": 5, "shards_per_round": 3},
            "inference": {"engine": {"slots": 2}},
        }
    )
    result = plan(config)
    assert (result.shards, result.rollouts, result.tokens_sampled_max) == (6, 30, 120)
    # embedding 80, q and o 64 each, k and v 32 each, MLP 3*128, norms 3*8
    assert result.parameters == 80 + 2 * 64 + 2 * 32 + 384 + 24
    assert result.training_bytes == 16 * result.parameters
    assert result.engine_cache_bytes == 2 * 1 * 1 * 4 * (2 * 32) * 4
    # 16 rows of 32 tokens, float32: of the layer its input, 5 * 8, 2 * 3 heads of 4, 3 * 16
    assert result.activation_bytes == 4 * 16 * 32 * (8 + 40 + 24 + 48)
    assert result.checkpoint_disk_bytes == 3 * 12 * result.parameters


def test_episodes_sample_in_each_turn_as_far_as_the_context_goes():
    settings = {"rounds": 1, "rollouts": {"groups_per_round": 1, "group_size": 2}}
    sampling, policy = {"max_tokens": 4}, {"context_length": 32}
    for turns, expected in ((None, 8), (3, 24), (100, 64)):
        environment = {"name": "game", "turns_max": turns}
        tree = settings | {"sampling": sampling, "policy": policy, "environment": environment}
        assert plan(parse_config(tree)).tokens_sampled_max == expected


def test_the_production_file_plans_without_its_model():
    result = plan(load_config(Path(__file__).parent.parent / "configs/prod.yaml"))
    assert result.parameters is None
    assert result.rollouts == 500 * 128 * 8
    assert result.disk_bytes > 0


def test_a_model_folder_is_read_for_its_sizes(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3",
                "vocab_size": 151936,
                "hidden_size": 1024,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 3072,
                "tie_word_embeddings": True,
            }
        )
    )
    config = parse_config({"policy": {"init": "hf", "hf_path": str(tmp_path)}})
    architecture = architecture_of(config)
    assert architecture is not None
    assert architecture.parameters == pytest.approx(596e6, rel=0.01)  # Qwen3-0.6B


def test_a_broken_model_folder_is_refused_by_name(tmp_path):
    config = parse_config({"policy": {"init": "hf", "hf_path": str(tmp_path)}})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"config\.json.*vocab_size"):
        architecture_of(config)
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    with pytest.raises(InputError, match=r"'gemma3_text'.*gemma, llama, mistral, qwen2, qwen3"):
        architecture_of(config)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json.*expected"):
        architecture_of(config)


SIZES = {
    "0.5B, as Qwen2.5": (151_936, 896, 24, 14, 2, 64, 4864, True),
    "1.5B, as Qwen2.5": (151_936, 1536, 28, 12, 2, 128, 8960, True),
    "4B, as Qwen3": (151_936, 2560, 36, 32, 8, 128, 9728, True),
    "8B, as Llama 3.1": (128_256, 4096, 32, 32, 8, 128, 14_336, False),
}


def test_the_table_of_sizes_in_the_docs_is_computed():
    """8 rows of 2,048 tokens a microbatch, 64 sequence slots, bfloat16."""
    names = [field.name for field in dataclasses.fields(Architecture)]
    rows = []
    for name, values in SIZES.items():
        model, tokens = Architecture(**dict(zip(names, values, strict=True))), 8 * 2048
        kept, recomputed = (
            model.activation_bytes(tokens, 2, recomputed=recomputed) for recomputed in (False, True)
        )
        cells = (
            16 * model.parameters,
            kept,
            recomputed,
            model.cache_bytes(64 * 2048, 2),
            12 * model.parameters,
        )
        sizes = " | ".join(f"{cell / 1e9:.1f} GB" for cell in cells)
        rows.append(f"| {name} | {model.parameters / 1e9:.2f} B | {sizes} |")
    page = Path(__file__).parent.parent / "docs/hugging-face-models.md"
    assert "\n".join(rows) in page.read_text(encoding="utf-8"), "\n".join(rows)


def test_a_critic_of_its_own_trunk_counts_twice():
    debug = Path(__file__).parent.parent / "configs/debug.yaml"
    alone, shared, own = (
        plan(load_config(debug, ["objective.ratio_level=token", *more]))
        for more in (
            (),
            ("objective.advantage=gae", "training.critic.trunk=shared"),
            ("objective.advantage=gae", "training.critic.trunk=own"),
        )
    )
    assert alone.training_bytes is not None
    assert alone.checkpoint_disk_bytes is not None
    assert shared == alone
    assert own.training_bytes == 2 * alone.training_bytes
    assert own.checkpoint_disk_bytes == 2 * alone.checkpoint_disk_bytes
