"""Plans multiplied out by hand."""

import json
from pathlib import Path

import pytest

from marin_rl.config import load_config, parse_config
from marin_rl.errors import InputError
from marin_rl.planning import architecture_of, plan


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
    assert result.checkpoint_disk_bytes == 3 * 12 * result.parameters


def test_the_production_file_plans_without_its_model():
    result = plan(load_config(Path(__file__).parent.parent / "configs/prod.yaml"))
    assert result.parameters is None
    assert result.rollouts == 500 * 128 * 8
    assert result.disk_bytes > 0


def test_a_model_folder_is_read_for_its_sizes(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
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
    (tmp_path / "config.json").write_text("{}")
    config = parse_config({"policy": {"init": "hf", "hf_path": str(tmp_path)}})
    with pytest.raises(InputError, match=r"config\.json.*vocab_size"):
        architecture_of(config)


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
