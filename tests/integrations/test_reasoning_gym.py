"""Datasets of reasoning-gym: prompts, scores, mixtures and demonstrations."""

from typing import Any

import pytest

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.checks import make_environment
from marin_rl.errors import ConfigError
from marin_rl.types import RewardComponent


def configured(name: str, **options: Any) -> EnvironmentConfig:
    return EnvironmentConfig(name=name, options=options)


def spell(**more: Any) -> EnvironmentConfig:
    return configured("reasoning_gym", dataset="spell_backward", **more)


def test_a_dataset_by_name() -> None:
    environment = make_environment(spell(config={"min_word_len": 3, "max_word_len": 5}))
    example = environment.example(7, 11, "train")
    assert example.example_id == "train-7-11"
    assert example.seed == 18
    word = example.metadata["word"]
    assert 3 <= len(word) <= 5
    assert example.answer == word[::-1]
    assert example.messages[0].content.endswith(word)
    assert environment.score(example, f" {word[::-1]} ")[0] == RewardComponent(
        name="spell_backward", value=1.0
    )
    assert environment.score(example, word[::-1][:-1] + "!")[0].value < 1.0
    assert example == environment.example(7, 11, "train")
    assert example.messages == environment.example(8, 10, "eval").messages  # why seeds lie apart


def test_prompts_systems_and_tags() -> None:
    environment = make_environment(
        spell(system_prompt="Be brief.", prompt="{word} backwards:", answer_tag="answer")
    )
    example = environment.example(0, 3, "train")
    word = example.metadata["word"]
    assert [(m.role, m.content) for m in example.messages] == [
        ("system", "Be brief."),
        ("user", f"{word} backwards:"),
    ]
    assert example.answer == f"<answer>{word[::-1]}</answer>"
    values = [
        environment.score(example, text)[0].value
        for text in (
            example.answer,
            f"no <answer>zzz</answer> but <answer> {word[::-1]} </answer>.",
            word[::-1],
            f"<answer>{word[::-1]}",
        )
    ]
    assert values == [1.0, 1.0, 0.0, 0.0]


def test_a_mixture_follows_its_weights() -> None:
    mixture = [
        {"dataset": "chain_sum", "weight": 3, "config": {"min_terms": 2, "max_terms": 2}},
        {"dataset": "spell_backward", "weight": 1},
    ]
    environment = make_environment(configured("reasoning_gym", mixture=mixture))
    examples = [environment.example(0, index, "train") for index in range(400)]
    names = [example.metadata["source_dataset"] for example in examples]
    # 400 draws with p = 3/4 have a standard deviation of 8.7
    assert abs(names.count("chain_sum") - 300) < 44
    assert set(names) == {"chain_sum", "spell_backward"}
    for example in examples[:20]:
        component = environment.score(example, example.answer or "")[0]
        assert component == RewardComponent(name=example.metadata["source_dataset"], value=1.0)
    assert environment.size is None


def test_datasets_with_an_end_start_over() -> None:
    environment = make_environment(spell(config={"size": 5}))
    assert environment.size == 5
    words = [environment.example(0, index, "train").metadata["word"] for index in range(10)]
    assert words[:5] == words[5:]


@pytest.mark.parametrize("name", ["gsm_symbolic", "word_ladder", "list_functions"])
def test_datasets_that_prepare_everything_are_bounded(name: str) -> None:
    environment = make_environment(configured("reasoning_gym", dataset=name))
    assert environment.size is not None
    example = environment.example(0, 7, "train")
    assert environment.score(example, example.answer or "")[0].value == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"\n  environment\.options: give either dataset \(with config\) or mixture"),
        ({"dataset": "chain_sum", "mixture": [{"dataset": "chain_sum"}]}, "either dataset"),
        ({"dataset": "spell_backwards"}, "close to that: spell_backward"),
        ({"dataset": "chain_sum", "config": {"terms": 3}}, "it takes min_terms, max_terms"),
        ({"dataset": "chain_sum", "config": {"min_terms": 9}}, "chain_sum"),
        ({"dataset": "chain_sum", "config": {"size": 0}}, "size of at least 1"),
        ({"mixture": [{"dataset": "a"}, {"dataset": "a"}]}, "names each dataset once"),
        ({"mixture": [{"dataset": "chain_sum", "config": {"x": 1}}]}, "it takes min_terms"),
        ({"mixture": [{"dataset": "chain_sum", "weight": 0}]}, r"mixture\.0\.weight"),
        ({"dataset": "spell_backward", "prompt": "{wrod}"}, "it may use question, .*word"),
        ({"datset": "chain_sum"}, r"options\.datset"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_environment(configured("reasoning_gym", **options))


def test_demonstrations_are_drawn_by_weight_and_by_the_example_alone() -> None:
    ways = [{"text": "{answer}", "weight": 3}, {"text": '"{answer}"', "weight": 1}]
    environment = make_environment(spell(demonstrations=ways))
    examples = [environment.example(0, index, "train") for index in range(400)]
    shown = [environment.demonstration(example) for example in examples]
    assert shown == [environment.demonstration(example) for example in examples]
    quoted = [text for text in shown if text is not None and text.startswith('"')]
    assert 0.18 < len(quoted) / len(shown) < 0.32
    for example, text in zip(examples, shown, strict=True):
        assert text in (example.answer, f'"{example.answer}"')


def test_a_demonstration_may_only_name_what_the_item_has() -> None:
    environment = make_environment(spell(demonstrations=[{"text": "{nothing}"}]))
    with pytest.raises(ConfigError, match=r"demonstrations\.text.*may use .*word"):
        environment.demonstration(environment.example(0, 0, "train"))
