"""Plans multiplied out by hand."""

import json
from pathlib import Path

import pytest

from marin_rl.config import load_config, parse_config
from marin_rl.errors import InputError
from marin_rl.planning import PROCESS_BYTES, Devices, architecture_of, plan


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
    assert result.training_bytes == 12 * result.parameters
    assert result.engine_cache_bytes == 2 * 1 * 1 * 4 * (2 * 32) * 4
    # 15 rows of 32 tokens, float32: the last layer's MLP is computed again, its 3 tables are kept
    assert result.activation_bytes == 4 * 15 * 32 * (3 * 2 * 32)
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
    assert result.rollout_disk_bytes > 0


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
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(InputError, match=r"'mamba'.*llama, mistral, mixtral"):
        architecture_of(config)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json.*expected"):
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
    assert alone.step_bytes is not None
    assert own.training_bytes == 2 * alone.training_bytes
    assert own.step_bytes == 2 * alone.step_bytes
    assert own.checkpoint_disk_bytes == 2 * alone.checkpoint_disk_bytes


def test_a_teacher_in_this_process_counts_with_its_forward_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    debug = Path(__file__).parent.parent / "configs/debug.yaml"

    def planned(*more: str):
        return plan(
            load_config(
                debug, ["training.microbatch_sequences=16", "objective.ratio_level=token", *more]
            )
        )

    alone, own = planned(), planned("distillation={}")
    assert planned("distillation.endpoint=http://a:1/v1") == alone
    assert own.training_bytes == alone.training_bytes + 4 * alone.parameters
    assert own.step_bytes == alone.step_bytes + 4 * alone.parameters
    # 16 rows of 64 tokens: a layer's 10 x 32 + 6 x 64 + 6 heads of 16, 2 tables of 2 heads, and
    # logits of 256 tokens over 128 characters
    forward = 4 * 16 * 64 * (320 + 384 + 96 + 2 * 2 * 64) + 4 * 256 * 128
    beside = planned("distillation={loss: {beta: 0.5}}")
    assert beside.training_bytes == own.training_bytes
    assert beside.step_bytes == own.step_bytes + forward
    sizes = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    # embedding 400, attention 192, MLP 384, norms 24
    folder = planned(f"distillation.folder={tmp_path}")
    assert folder.training_bytes == alone.training_bytes + 4 * 1000


def test_a_plan_for_devices_that_are_not_here():
    sizes = {"hidden_size": 512, "layers": 12, "heads": 8, "kv_heads": 4, "intermediate_size": 2048}
    tree = {
        "policy": {"context_length": 512, "model": sizes, "compute_dtype": "bfloat16"},
        "mesh": {"fsdp": -1},
        "inference": {"engine": {"slots": 16}},
        "distributed": {"processes": 4},
    }
    one, many = (plan(parse_config(tree), Devices("H100", count)) for count in (4, 32))
    assert (one.devices, many.devices) == (4, 32)
    assert one.training_bytes == 8 * (many.training_bytes or 0)
    assert one.engine_weight_bytes == many.engine_weight_bytes  # whole on every device
    # 16 slots in each process, which has one device, or eight
    assert one.engine_cache_bytes == 8 * (many.engine_cache_bytes or 0)
    assert many.peak_bytes is not None
    assert many.peak_bytes < PROCESS_BYTES  # Python is on the host
    assert one.host_bytes == PROCESS_BYTES + round(1.3 * (one.checkpoint_bytes or 0) / 4)
    tree["training"] = {"optimizer": "adamw_offload"}
    offloaded = plan(parse_config(tree), Devices("H100", 4))
    assert one.training_bytes == 3 * (offloaded.training_bytes or 0)  # 4 bytes of 12
    assert offloaded.host_bytes == one.host_bytes
    with pytest.raises(InputError, match="takes 3 devices, and --on has 8"):
        plan(parse_config(tree | {"mesh": {"fsdp": 3}}), Devices.named("V5P:8"))
    for text in ("H100", "H100:0", "H100:x", "H99:1"):
        with pytest.raises(InputError, match="expected KIND:COUNT, such as H100:8"):
            Devices.named(text)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        ({}, 21),  # checkpoint 0, and one for each round
        ({"checkpoints_last": 2}, 3),  # the newest is there before the oldest goes
        ({"checkpoints_last": 50}, 21),
        # besides the last ones, of rounds 0 to 17, which are older, every fifth
        ({"checkpoints_last": 2, "checkpoints_every": 5}, 7),
        ({"checkpoints_last": 2, "best": "eval/accuracy"}, 4),
    ],
)
def test_checkpoints_are_counted_with_retention(retention, kept):
    result = plan(parse_config({"rounds": 20, "retention": retention}))
    assert result.parameters is not None
    assert result.checkpoints_kept == kept
    assert result.checkpoint_bytes == 12 * result.parameters
    assert result.checkpoint_disk_bytes == kept * result.checkpoint_bytes
    assert result.checkpoint_written_bytes == 21 * 12 * result.parameters


def test_devices_share_weights_and_rows(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    sizes = {"hidden_size": 512, "layers": 12, "heads": 8, "kv_heads": 4, "intermediate_size": 2048}
    tree = {"policy": {"context_length": 512, "model": sizes}}
    meshes = {"fsdp": 1}, {"fsdp": 4}, {"context": 4}
    alone, spread, shared = (plan(parse_config(tree | {"mesh": mesh})) for mesh in meshes)
    assert (alone.devices, spread.devices, shared.devices) == (1, 4, 4)
    assert alone.training_bytes is not None
    assert alone.activation_bytes is not None
    assert spread.training_bytes == alone.training_bytes // 4
    assert spread.activation_bytes == pytest.approx(alone.activation_bytes / 4)
    assert shared.training_bytes == spread.training_bytes
    assert shared.activation_bytes is not None
    # besides, no table of scores is there
    assert shared.activation_bytes < spread.activation_bytes
