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


def two_rows(row: str) -> str:
    """A row of a table of the page, and one like it with another sum."""
    other = row.replace("2 + 2", "2 + 3").replace('"4"', '"5"').replace('"id": "a"', '"id": "b"')
    return f"{row}\n{other}\n"


ROWS = [two_rows(row) for row in re.findall(r"^\| .* \| `(\{.*\})` \|$", PAGE, re.MULTILINE)]
PRINTED = blocks("text")[-1].splitlines()
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


def row_error(path: Path, *rows: str) -> str:
    def check() -> None:
        environment = loaded(path / "prompts.jsonl", "\n".join(rows), eval_fraction=1e-9)
        environment.check_demonstrations(0, 2)

    with pytest.raises(InputError) as caught:
        check()
    return str(caught.value).removeprefix(f"{path}/")


def test_errors_of_rows_are_as_printed(tmp_path: Path) -> None:
    assert row_error(tmp_path, '{"prompt": "a", "label": "1", "target": "2"}') == PRINTED[0]
    assert row_error(tmp_path, '{"query": "a", "gold": "b"}') == (
        "prompts.jsonl, line 1: expected a prompt in one of the columns messages, prompt, "
        "question, problem, instruction, input; its columns are query, gold; name it by "
        "environment.options.prompt_key"
    )
    demonstrated = '{"prompt": "a", "answer": "b"}', '{"prompt": "c", "hint": "d"}'
    assert row_error(tmp_path, *demonstrated) == (
        "prompts.jsonl, line 2: a warm start needs a demonstration: expected a column completion, "
        "messages that end with the assistant's, or a column answer; its columns are prompt, hint. "
        "Name one by options.completion_key or options.answer_key, or choose another "
        "sft.environment"
    )


def test_errors_of_rewards_are_as_printed(tmp_path: Path) -> None:
    environment = loaded(tmp_path / "p.jsonl", ROWS[0])
    example = examples(environment)[0]

    def error(function: Any, name: str, n: int) -> str:
        environment._rewards = [(environment._entries[0], RewardFunction(function, name))]
        environment.reward_name = name
        fault, *_ = score_here(environment, example, ["4"] * n)
        return re.sub(r"example \w+", "example", str(fault))

    printed = re.sub(r"example \w+", "example", PRINTED[1])
    assert error(lambda completions, **_: [1.0], "rewards.py:right", 8) == printed
    exact = "rewards.py:exact, example: ValueError: expected"
    assert error(lambda example, completion: "1.0", "rewards.py:exact", 1) == (
        f"{exact} a number, found '1.0'"
    )
    assert error(lambda example, completion: float("nan"), "rewards.py:exact", 1) == (
        f"{exact} finite numbers, found reward = nan with weight 1.0"
    )
