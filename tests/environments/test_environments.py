"""Examples are pure functions of (seed, index, split), and wrong options are refused by name."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import asked

from marin_rl.config import Config, EnvironmentConfig, load_config, override, parse_config
from marin_rl.environments.base import checked_components, reward_of
from marin_rl.environments.checks import check_seeds_apart, environment_of, make_environment
from marin_rl.environments.echo import Echo
from marin_rl.environments.registry import known_environments, register
from marin_rl.errors import ConfigError, InputError
from marin_rl.types import Example, Message, RewardComponent, Split


def configured(name: str, **options: Any) -> EnvironmentConfig:
    return EnvironmentConfig(name=name, options=options)


# ---- the registry and the seeds


def test_unknown_names_are_reported_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"chat, .*echo, .*reasoning_gym.*did you mean echo\?"):
        make_environment(configured("ecko"))


def test_an_environment_can_be_registered() -> None:
    @register("silent")
    class Silent(Echo):
        def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
            return (RewardComponent(name="silence", value=float(not completion)),)

    environment = make_environment(configured("silent"))
    assert "silent" in known_environments()
    assert environment.score(environment.example(0, 0, "train"), "")[0].value == 1.0


def test_seeds_that_meet_are_refused() -> None:
    config = EnvironmentConfig(train_seed=100, eval_seed=200)
    make_environment(config, train_examples=100, eval_examples=1000)
    with pytest.raises(ConfigError, match="reaches 200 with 101 training examples"):
        make_environment(config, train_examples=101)
    turned = EnvironmentConfig(train_seed=200, eval_seed=100)
    make_environment(turned, train_examples=1000, eval_examples=100)
    with pytest.raises(ConfigError, match="reaches 200 with 101 held-out"):
        make_environment(turned, eval_examples=101)


SHORT = EnvironmentConfig(name="reasoning_gym", options={"dataset": "pool_matrix"})
SEEDS = st.integers(0, 2**63 - 1) | st.integers(0, 40) | st.integers(2**31 - 40, 2**31 + 40)


@given(
    SEEDS,
    SEEDS,
    st.integers(1, 30),
    st.integers(1, 30),
    st.sampled_from([SHORT, EnvironmentConfig()]),
)
def test_ranges_that_are_let_through_share_no_seed_folded_or_not(
    train: int, held_out: int, trained: int, asked: int, base: EnvironmentConfig
) -> None:
    config = base.model_copy(update={"train_seed": train, "eval_seed": held_out})
    period = 2**31 if base is SHORT else 2**64
    seeds = {(train + index) % period for index in range(trained)}
    others = {(held_out + index) % period for index in range(asked)}
    too_large = max(train + trained, held_out + asked) > 2**63
    try:
        check_seeds_apart(config, config, train_examples=trained, eval_examples=asked)
        refused = False
    except ConfigError:
        refused = True
    assert refused == (too_large or bool(seeds & others))


@pytest.mark.parametrize("dataset", ["pool_matrix", "leg_counting"])
def test_seeds_of_63_bits_make_examples(dataset: str) -> None:
    seed = 2**63 - 100
    config = EnvironmentConfig(name="reasoning_gym", options={"dataset": dataset}, eval_seed=seed)
    environment = make_environment(config, eval_examples=100)
    examples = [environment.example(seed, index, "eval") for index in range(4)]
    assert len({example.messages[0].content for example in examples}) > 1
    assert [example.seed for example in examples] == [seed + index for index in range(4)]
    assert environment.score(examples[3], examples[3].answer or "")[0].value == 1.0
    with pytest.raises(ConfigError, match=r"expected seeds below 2\*\*63"):
        make_environment(config, eval_examples=101)


def test_a_run_counts_all_the_examples_it_may_use() -> None:
    tree = load_config("configs/debug.yaml").model_dump(mode="json")

    def run(*items: str) -> Config:
        return parse_config(override(tree, items))

    assert environment_of(run("environment.eval_seed=12")).name == "echo"
    with pytest.raises(ConfigError, match="reaches 12 with 13"):
        environment_of(
            run(
                "environment.eval_seed=12",
                "rounds=13",
                "rollouts.groups_per_round=1",
                "rollouts.shards_per_round=1",
            )
        )
    warm = ("policy.init=sft", "sft.steps=4", "sft.sequences_per_step=8")
    with pytest.raises(ConfigError, match="reaches 31 with 32"):
        environment_of(run("environment.eval_seed=20", *warm))
    other = ("environment.eval_seed=2000", "sft.environment={name: echo, train_seed: 1990}")
    with pytest.raises(ConfigError, match=r"sft\.environment\.train_seed 1990 reaches 2021"):
        environment_of(run(*other, *warm))


# ---- rewards


def test_values_that_count_as_a_reward() -> None:
    parts = (
        RewardComponent(name="a", value=1.0, weight=0.5),
        RewardComponent(name="b", value=-2.0),
    )
    assert reward_of(checked_components(parts)) == -1.5
    huge = RewardComponent(name="a", value=1e308, weight=1.0)
    for wrong in ((), [parts[0]], (1.0,), (huge, huge)):
        with pytest.raises(ValueError, match=r"expected|not finite"):
            checked_components(wrong)


# ---- echo


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.sampled_from(["train", "eval"]))
def test_echo_is_a_pure_function(seed: int, index: int, split: Split) -> None:
    environment = Echo(configured("echo"))
    example = environment.example(seed, index, split)
    assert example == Echo(configured("echo")).example(seed, index, split)
    assert example.messages[0].content == f"repeat {example.answer}"
    assert example.answer is not None
    assert 1 <= len(example.answer) <= 4
    assert environment.score(example, example.answer)[0].value == 1.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [("abcd", 1.0), (" abcd\n", 1.0), ("abxd", 0.75), ("abcdabcd", 0.5), ("", 0.0), ("dcba", 0.0)],
)
def test_echo_counts_characters_in_place(completion: str, value: float) -> None:
    assert Echo(configured("echo")).score(asked("abcd"), completion)[0].value == value


# ---- chat


@pytest.fixture
def rewards(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "chat_rewards.py").write_text("def length(example, completion): return 1\n")
    sys.path.insert(0, str(tmp_path))
    yield "chat_rewards:length"
    sys.path.remove(str(tmp_path))


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"p{i}", "prompt": f"{i} + 1?", "answer": str(i + 1), "n": i} for i in range(count)
    ]


def test_a_prompt_file(tmp_path: Path, rewards: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows(100)) + "\n\n")
    config = configured("chat", path=str(path), reward=rewards, eval_fraction=0.2)
    environment = make_environment(config)
    size = environment.size
    assert size is not None
    train = [environment.example(5, i, "train") for i in range(size)]
    held_out = {environment.example(5, i, "eval").example_id for i in range(100 - size)}
    assert {e.example_id for e in train} | held_out == {f"p{i}" for i in range(100)}
    assert not {e.example_id for e in train} & held_out
    assert abs(len(held_out) - 20) < 16  # standard deviation 4
    first = train[0]
    assert first.messages == (Message(role="user", content=f"{first.metadata['n']} + 1?"),)
    assert first.answer == str(first.metadata["n"] + 1)
    again = [environment.example(5, size + i, "train").example_id for i in range(size)]
    assert sorted(again) == sorted(e.example_id for e in train)
    assert again != [e.example_id for e in train]


def test_growing_the_file_moves_nothing(tmp_path: Path, rewards: str) -> None:
    def held_out(count: int) -> set[str]:
        path = tmp_path / f"{count}.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows(count)))
        environment = make_environment(configured("chat", path=str(path), reward=rewards))
        assert environment.size is not None
        names = range(count - environment.size)
        return {environment.example(0, i, "eval").example_id for i in names}

    assert held_out(50) == {name for name in held_out(200) if int(name[1:]) < 50}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no rows"),
        ('{"prompt": 3}', "expected a text or a list of messages"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "'1' is there twice"),
        ('{"prompt": "a"}', "is for split"),
    ],
)
def test_unfit_prompt_files(tmp_path: Path, rewards: str, text: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        make_environment(configured("chat", path=str(path), reward=rewards))
