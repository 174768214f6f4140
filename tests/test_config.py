"""The configuration tree: what it accepts, what it refuses and how it says so."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.config import (
    Config,
    content,
    differences,
    free_keys,
    known_keys,
    load_config,
    override,
    parse_config,
)
from marin_rl.errors import ConfigError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_file_loads_and_round_trips(path):
    config = load_config(path)
    assert parse_config(config.model_dump(mode="json")) == config


def test_there_are_the_shipped_files_a_user_is_told_of():
    assert {"demo", "prod", "debug"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"training": {"lerning_rate": 1}}, "did you mean training.learning_rate?"),
        ({"learning_rate": 1}, "did you mean training.learning_rate?"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate"),
        ({"rollouts": {"group_size": 1}}, "rollouts.group_size"),
        ({"rounds": 0}, "rounds"),
        ({"run_id": "../escape"}, "run_id"),
        ({"policy": {"init": "hf"}}, "hf_path"),
        ({"policy": {"context_length": 8}}, "leaves no room for a prompt"),
        ({"rollouts": {"shards_per_round": 17}}, "at least one group"),
        ({"training": {"schedule": "cosine"}}, "schedule_steps"),
        ({"batching": {"length_buckets": [64, 32]}}, "ascend"),
        ({"batching": {"length_buckets": [32, 64]}}, "must reach policy.context_length (128)"),
        ({"mesh": {"data": -1, "fsdp": -1}}, "only one of them may be -1"),
        ({"policy": {"model": {"heads": 4, "kv_heads": 3}}}, "kv_heads must divide heads"),
        ({"sft": {"environment": {"nam": "echo"}}}, "did you mean sft.environment.name?"),
    ],
)
def test_a_wrong_key_or_value_is_named(tree, expected):
    with pytest.raises(ConfigError, match=r"(?s).*") as caught:
        parse_config(tree)
    assert expected in str(caught.value)


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_config({"rounds": 0, "seed": -1, "policy": {"init": "magic"}})
    assert len(str(caught.value).splitlines()) == 4


def test_overrides_reach_into_sections_and_read_numbers(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("rounds: 3\ntraining: {beta1: 0.5}\n")
    config = load_config(
        path, ["training.learning_rate=1e-4", "rounds=7", "inference.endpoints=[http://a/v1]"]
    )
    assert config.training.learning_rate == 1e-4
    assert config.training.beta1 == 0.5
    assert config.rounds == 7
    assert config.inference.endpoints == ("http://a/v1",)


@pytest.mark.parametrize("item", ["rounds", "=3", "rounds.deeper=3", "rounds=[unclosed"])
def test_a_malformed_override_is_refused(item):
    with pytest.raises(ConfigError):
        override({"rounds": 3}, [item])


@pytest.mark.parametrize("text", ["- a list", "key: [unclosed", "\x00"])
def test_a_file_that_is_no_tree_is_refused_by_name(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file at .*absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_values_cannot_change_after_loading():
    with pytest.raises(ValueError, match="frozen"):
        Config().rounds = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_free_keys_are_outside_the_content_and_all_others_inside():
    def leaves(tree, prefix=""):
        for key, value in tree.items():
            yield prefix + key
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{key}.")

    inside = set(leaves(content(Config())))
    free = set(free_keys())
    assert not inside & free
    whole_sections = {key.rpartition(".")[0] for key in free} | {"mesh", "trackers", "flow"}
    for key in set(known_keys()) - inside - free:
        assert key in whole_sections or key.startswith("sft.environment."), key


@given(st.integers(1, 10_000), st.floats(1e-8, 1e-1))
def test_differences_name_exactly_what_differs(groups, rate):
    old = content(Config())
    new = content(
        parse_config(
            {"rollouts": {"groups_per_round": groups}, "training": {"learning_rate": rate}}
        )
    )
    names = [line.split(":")[0] for line in differences(old, new)]
    assert ("rollouts.groups_per_round" in names) == (groups != 16)
    assert ("training.learning_rate" in names) == (rate != 3e-4)
    assert len(names) <= 2


def test_numbers_in_scientific_notation_load_from_yaml():
    tree = yaml.safe_load("training: {learning_rate: 3e-4}")
    assert parse_config(tree).training.learning_rate == 3e-4
