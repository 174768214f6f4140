"""The examples of docs/data-and-rewards.md: rows load, functions score, errors are as printed."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from marin_rl.config import EnvironmentConfig, load_config, parse_config
from marin_rl.environments.chat import Chat, ChatOptions
from marin_rl.environments.registry import construct, parse_options
from marin_rl.environments.reward_functions import RewardFunction
from marin_rl.environments.scoring import score_here
from marin_rl.errors import InputError, RewardFault
from marin_rl.types import Example

PAGE = (Path(__file__).parents[2] / "docs/data-and-rewards.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Code blocks of the page in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


ROWS = blocks("jsonl")
SECTIONS = [yaml.safe_load(text) for text in blocks("yaml")]


def loaded(path: Path, text: str, **options: Any) -> Chat:
    path.write_text(text)
    options = {"path": str(path), "eval_fraction": 1.0, **options}
    environment = construct(EnvironmentConfig(name="chat", options=options))
    assert isinstance(environment, Chat)
    environment.load_examples()
    return environment


def examples(environment: Chat) -> list[Example]:
    n = environment.eval_size
    return sorted(
        (environment.example(0, index, "eval") for index in range(n)),
        key=lambda e: e.messages[0].content,
    )


@pytest.mark.parametrize("text", ROWS)
def test_rows_of_the_page_give_two_examples(tmp_path: Path, text: str) -> None:
    environment = loaded(tmp_path / "p.jsonl", text)
    first, second = examples(environment)
    assert [e.messages[-1].content for e in (first, second)] == ["2 + 2?", "2 + 3?"]
    assert [environment.demonstration(e) for e in (first, second)] == ["4", "5"]
    if text in ROWS[:7]:
        assert [e.answer for e in (first, second)] == ["4", "5"]


@pytest.mark.parametrize("number", range(4))
def test_functions_of_the_page_score_rows_of_the_page(tmp_path: Path, number: int) -> None:
    """The first scores our rows, the second TRL's, the third verl's, the fourth ours."""
    names: dict[str, Any] = {}
    exec(blocks("python")[number], names)
    (function,) = [v for k, v in names.items() if callable(v) and not k.startswith("__")]
    environment = loaded(tmp_path / "p.jsonl", ROWS[(6, 0, 2, 6)[number]])
    environment._rewards = [(environment._entries[0], RewardFunction(function, "rewards:function"))]
    example = examples(environment)[0]
    right, wrong = score_here(environment, example, ["4 ", "5"])
    assert not isinstance(right, RewardFault)
    assert not isinstance(wrong, RewardFault)
    assert [component.value for component in right][-1 if number == 3 else 0] == 1.0
    assert [component.value for component in wrong][-1 if number == 3 else 0] == 0.0
    if number == 2:
        assert [(c.name, c.weight) for c in right] == [("score", 1.0), ("length", 0.0)]
    if number == 3:
        assert [c.name for c in right] == ["format", "correct"]


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_of_the_page_are_valid(section: dict[str, Any]) -> None:
    tree = load_config("configs/debug.yaml").model_dump(mode="json")
    for name, values in section.items():
        tree[name] |= values
    config = parse_config(tree)
    chosen = [config.environment, config.sft.environment, *(config.evaluation.sets or {}).values()]
    for environment in chosen:
        if environment is not None and environment.name == "chat":
            options = parse_options(ChatOptions, environment).model_dump(mode="json")
            assert environment.options.items() <= options.items()


def test_errors_of_rows_are_as_printed(tmp_path: Path) -> None:
    printed = blocks("text")[-2].splitlines()
    rows = [
        '{"query": "a", "gold": "b"}',
        '{"prompt": "a", "label": "1", "target": "2"}',
    ]
    for line, row in zip(printed, rows, strict=False):
        with pytest.raises(InputError) as caught:
            loaded(tmp_path / "prompts.jsonl", row)
        assert str(caught.value).removeprefix(f"{tmp_path}/") == line
    text = '{"prompt": "a", "answer": "b"}\n{"prompt": "c", "hint": "d"}\n'
    environment = loaded(tmp_path / "prompts.jsonl", text, eval_fraction=1e-9)
    with pytest.raises(InputError) as caught:
        environment.check_demonstrations(0, 2)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == printed[2]


def test_errors_of_rewards_are_as_printed(tmp_path: Path) -> None:
    environment = loaded(tmp_path / "p.jsonl", ROWS[0])
    example = examples(environment)[0]
    printed = [re.sub(r"example \w+", "example", line) for line in blocks("text")[-1].splitlines()]

    def error(function: Any, name: str, n: int) -> str:
        environment._rewards = [(environment._entries[0], RewardFunction(function, name))]
        environment.reward_name = name
        fault, *_ = score_here(environment, example, ["4"] * n)
        return re.sub(r"example \w+", "example", str(fault))

    assert error(lambda completions, **_: [1.0], "rewards.py:right", 8) == printed[0]
    assert error(lambda example, completion: "1.0", "rewards.py:exact", 1) == printed[1]
    assert error(lambda example, completion: float("nan"), "rewards.py:exact", 1) == printed[2]
