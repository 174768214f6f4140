"""Keys of other libraries: errors and the page of migration have one table."""

import re
from pathlib import Path

import pytest

from marin_rl.config import load_config, parse_config
from marin_rl.config.peers import peer_rows
from marin_rl.errors import ConfigError

PAGE = Path(__file__).parent.parent / "docs/coming-from-trl-verl.md"

# Their keys at places where users put them, a value, and the key here.
CASES = [
    ("num_generations", 8, "rollouts.group_size"),
    ("rollouts.num_generations", 8, "rollouts.group_size"),
    ("objective.beta", 0.1, "objective.kl_coefficient"),
    ("beta", 0.1, "objective.kl_coefficient"),
    ("training.gradient_accumulation_steps", 4, "batching.sequences_per_step"),
    ("rollouts.n", 5, "rollouts.group_size"),
    ("evaluation.n", 5, "evaluation.samples"),
    ("training.lr", 1e-6, "training.learning_rate"),
    ("training.critic.lr", 1e-6, "training.critic.learning_rate"),
    ("algorithm.kl_coef", 0.1, "objective.kl_coefficient"),
    ("max_completion_length", 256, "sampling.max_tokens"),
    ("per_device_train_batch_size", 8, "training.microbatch_sequences"),
    ("training.per_device_train_batch_size", 8, "training.microbatch_sequences"),
    ("epsilon", 0.2, "objective.clip_low"),
    ("epsilon_high", 0.28, "objective.clip_high"),
    ("loss_type", "dr_grpo", "objective.aggregation: sequence_mean_token_sum_norm"),
    ("loss_type", "dapo", "objective.aggregation: token_mean"),
    ("scale_rewards", "none", "objective.advantage: dr_grpo"),
    ("algorithm.adv_estimator", "gae", "objective.advantage: gae"),
    ("training.lr_scheduler_type", "linear", "training.schedule"),
    ("steps_per_generation", 4, "batching.sequences_per_step"),
    ("actor_rollout_ref.rollout.n", 5, "rollouts.group_size"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", 64, "batching.sequences_per_step"),
    ("trainer.n_gpus_per_node", 8, "mesh.data"),
    ("rollouts_per_example", 8, "rollouts.group_size"),
    ("n_samples_per_prompt", 8, "rollouts.group_size"),
    ("save_total_limit", 2, "retention.checkpoints_last"),
]


def refusal(key, value):
    """The error for one key."""
    tree = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    if key.startswith("training.critic"):
        tree["training"]["critic"]["trunk"] = "own"
    with pytest.raises(ConfigError) as refused:
        parse_config(tree)
    return str(refused.value)


def test_the_page_has_every_row_of_the_table() -> None:
    rows = [f"| {row['theirs']} | {row['here']} | {row['note']} |" for row in peer_rows()]
    page = PAGE.read_text()
    assert [row for row in rows if re.sub(r" +\|", " |", row) not in page] == []


@pytest.mark.parametrize(("key", "value", "here"), CASES)
def test_a_key_of_another_library_is_answered_with_ours(key, value, here):
    message = refusal(key, value)
    assert re.search(rf"{re.escape(key)} is {re.escape(here)}\b.* here \(docs/coming-from", message)
    assert "did you mean" not in message


def test_each_key_of_an_unknown_section_is_answered():
    actor = {"optim": {"lr": 1e-6}, "clip_ratio_c": 3.0}
    message = refusal("actor_rollout_ref", {"actor": actor, "rollout": {"n": 8}})
    for key in ("training.learning_rate", "objective.clip_dual", "rollouts.group_size"):
        assert f" is {key} here" in message


def test_overrides_are_answered_too():
    demo = PAGE.parent.parent / "configs/debug.yaml"
    with pytest.raises(ConfigError, match=r"training\.lr is training\.learning_rate here"):
        load_config(demo, ["training.lr=1e-6"])


@pytest.mark.parametrize(
    ("key", "trap"),
    [
        ("sampling.min_tokens", "max_tokens"),
        ("objective.clip_hihg", "clip_low"),
        ("retention.checkpoints_first", "checkpoints_last"),
        ("num_generation_steps", "retention"),
        ("objective.betas", "dro_beta"),
    ],
)
def test_no_key_of_another_meaning_is_suggested(key, trap):
    assert f"did you mean {trap}" not in refusal(key, 1).replace("objective.", "")
    assert f"did you mean sampling.{trap}" not in refusal(key, 1)
    assert f"did you mean retention.{trap}" not in refusal(key, 1)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"policy": {"context_length": 16}}, 8),
        ({"policy": {"context_length": 32}}, 16),
        ({"policy": {"context_length": 33}}, 32),
        ({"policy": {"context_length": 16}, "sampling": {"temperature": 0.5}}, 8),
        ({"policy": {"context_length": 16}, "sampling": {"max_tokens": 9}}, 9),
        ({}, 32),
    ],
)
def test_the_default_of_new_tokens_follows_a_short_context(tree, expected):
    assert parse_config(tree).sampling.max_tokens == expected


def test_chosen_lengths_that_do_not_fit_are_refused():
    tree = {"policy": {"context_length": 16}, "sampling": {"max_tokens": 16}}
    with pytest.raises(ConfigError, match=r"sampling.max_tokens \(16\) leaves no room"):
        parse_config(tree)
