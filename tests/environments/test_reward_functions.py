"""Functions written for TRL, verl and this project are called as their authors expect."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cases import asked

from marin_rl.config import EnvironmentConfig, pin_code
from marin_rl.environments.registry import construct
from marin_rl.environments.reward_functions import RewardFunction, typed_answer
from marin_rl.environments.scoring import Scorer
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.types import Message, RewardComponent, ToolCall

USER = {"role": "user", "content": "?"}


def said(*texts: str) -> list[tuple[Message, ...]]:
    """Dialogues of one turn."""
    return [(Message(role="assistant", content=text),) for text in texts]


def wrapped(function: Callable[..., Any]) -> RewardFunction:
    return RewardFunction(function, "rewards:score")


class Scores:
    """A reward with a state of its own."""

    def __call__(self, example, completion): ...


CONVENTIONS: dict[str, list[Callable[..., Any]]] = {
    "trl": [
        lambda completions, **kwargs: [],
        lambda prompts, completions, answer: [],
        lambda completion_ids, **kwargs: [],
    ],
    "verl": [
        lambda data_source, solution_str, ground_truth, extra_info=None: 0,
        lambda solution_str, ground_truth, method="strict": 0,
    ],
    "example": [
        lambda example, completion: 0,
        lambda row, text, *, strict=True: 0,
        lambda *arguments: 0,
        Scores(),
        max,
    ],
}


def test_conventions_are_known_by_their_parameters() -> None:
    for convention, functions in CONVENTIONS.items():
        assert {wrapped(function).convention for function in functions} == {convention}
    reads = [wrapped(function).wants_completion_ids for function in CONVENTIONS["trl"]]
    assert reads == [True, False, True]


def test_other_parameters_are_an_error_that_shows_the_signatures() -> None:
    def one(completion): ...
    def three(example, completion, tokenizer): ...
    def verl_more(solution_str, ground_truth, tokenizer): ...
    def turned(completion, answer): ...
    def second(row, answer): ...

    cases = {one: r"takes \(completion\)", three: "takes", verl_more: "token"}
    cases |= {turned: r"takes \(completion, answer\)", second: r"takes \(row, answer\)"}
    for function, words in cases.items():
        with pytest.raises(InputError, match=words) as caught:
            wrapped(function)
        text = str(caught.value)
        assert all(part in text for part in ("rewards:score", "(TRL)", "(verl)", "example, comp"))


def test_ours_gives_a_number_or_parts() -> None:
    number = wrapped(lambda example, completion: example.answer == completion)
    assert number.of_completion(asked("4"), "4") == [RewardComponent(name="reward", value=1.0)]
    parts = wrapped(lambda example, completion: {"form": 1, "length": len(completion)})
    assert parts.of_completion(asked("4"), "four")[1] == RewardComponent(name="length", value=4.0)

    some = wrapped(lambda example, completion: {"form": 1, "proof": None})
    assert some.of_completion(asked("4"), "four") == [RewardComponent(name="form", value=1.0)]
    for nothing in ({"form": None}, {}, None):
        none = wrapped(lambda example, completion, value=nothing: value)
        assert none.of_completion(asked("4"), "") == []

    async def later(example, completion):
        await asyncio.sleep(0)
        return 0.5

    assert wrapped(later).of_completion(asked("4"), "") == [
        RewardComponent(name="reward", value=0.5)
    ]


def test_trl_gets_columns_and_texts_or_messages() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts, completions, completion_ids, solution, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids)
        seen.update(solution=solution, columns=columns)
        return [1.0, None][: len(completions)]

    function = wrapped(reward)
    row = asked("4", solution=4, level="easy", completion="4")
    assert function.of_group(row, ["a", "b"], [[1], [2, 3]], said("a", "b")) == [1.0, None]
    assert seen["prompts"] == ["?"] * 2
    assert seen["completions"] == ["a", "b"]
    assert seen["ids"] == [[1], [2, 3]]
    assert seen["solution"] == [4, 4]
    assert seen["columns"] == {"answer": ["4", "4"], "level": ["easy", "easy"]}
    function.of_group(asked("4", solution=4, conversational=True), ["a"], [[]], said("a"))
    assert seen["prompts"] == [[USER]]
    assert seen["completions"] == [[{"role": "assistant", "content": "a"}]]


def test_trl_gets_whole_dialogues_with_their_tools() -> None:
    def calls(completions, **columns):
        return [sum(len(m.get("tool_calls", ())) for m in messages) for messages in completions]

    seen: list[Any] = []
    call = ToolCall(id="c1", name="add", arguments='{"a": 1}')
    dialogue = (
        Message(role="assistant", content="", tool_calls=(call, call)),
        Message(role="tool", content="2", tool_call_id="c1", name="add"),
        Message(role="assistant", content="2"),
    )
    row = asked("4", conversational=True)
    values = wrapped(calls).of_group(row, ["2", "3"], [[], []], [dialogue, *said("3")])
    assert values == [2, 0]
    wrapped(lambda completions: seen.append(completions[0]) or [0]).of_group(
        row, ["2"], [[]], [dialogue]
    )
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert seen == [
        [
            {"role": "assistant", "content": "", "tool_calls": [called, called]},
            {"role": "tool", "content": "2", "name": "add"},
            {"role": "assistant", "content": "2"},
        ]
    ]


def test_a_trl_function_without_keywords_gets_what_it_takes() -> None:
    def exact(completions, answer):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    assert wrapped(exact).of_group(asked("4", level=1), ["4", "5"], [[], []], said("4", "5")) == [
        1.0,
        0.0,
    ]

    async def later(completions, **columns):
        return [len(text) for text in completions]

    assert wrapped(later).of_group(asked("4"), ["a", "bb"], [[], []], said("a", "bb")) == [1, 2]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0], r"expected a list of 2 numbers, found 1: \[1.0\]"),
        ("no", "expected a list of 2 numbers, found 'no'"),
        (0.5, "expected a list of 2 numbers, found 0.5"),
        ({"a": 1, "b": 2}, "expected a list of 2 numbers"),
    ],
)
def test_unfit_returns_of_a_group(returned: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrapped(lambda completions, **_: returned).of_group(
            asked("4"), ["a", "b"], [[], []], said("a", "b")
        )


def test_a_column_that_the_row_does_not_have() -> None:
    def reward(completions, solutions): ...
    def verl(data_source, solution_str, ground_truth): ...

    with pytest.raises(ValueError, match=r"takes solutions, which the row .*level"):
        wrapped(reward).of_group(asked("4", level=1), ["a"], [[]], said("a"))
    with pytest.raises(ValueError, match=r"takes data_source, which.*it has level"):
        wrapped(verl).of_completion(asked("4", level=1), "a")


def test_verl_gets_its_row_and_may_return_a_mapping() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        assert (data_source, ground_truth) == ("sums", {"target": 4})
        return {"score": 0.5, "acc": extra_info["index"] == 3, "pred": solution_str}

    truth = {"target": 4}
    columns = {"data_source": "sums", "extra_info": {"index": 3}}
    row = asked(str(truth), reward_model={"style": "rule", "ground_truth": truth}, **columns)
    score, accuracy = wrapped(compute_score).of_completion(row, "4")
    assert score == RewardComponent(name="score", value=0.5)
    assert accuracy == RewardComponent(name="acc", value=1.0, weight=0.0)
    plain = wrapped(lambda solution_str, ground_truth: solution_str == ground_truth)
    assert plain.of_completion(asked("4"), "4") == [RewardComponent(name="score", value=1.0)]
    with pytest.raises(ValueError, match="a mapping with 'score'"):
        wrapped(lambda solution_str, ground_truth: {"acc": 1}).of_completion(asked("4"), "4")


def test_answers_keep_the_type_of_their_row() -> None:
    assert typed_answer(asked("4", answer=4)) == 4
    assert typed_answer(asked("4", solution="long")) == "4"
    assert typed_answer(asked("[1]", reward_model={"ground_truth": [1]})) == [1]
    assert typed_answer(asked(None)) is None


REWARDS = """
def correct(example, completion):
    return float(completion == example.answer)

def short(prompts, completions, **columns):
    return [None if text == "" else -float(len(text)) for text in completions]

def compute_score(solution_str, ground_truth, extra_info=None):
    if solution_str == "4!":
        raise KeyError("level")
    return {"score": 2.0, "length": float(len(solution_str))}

def never(example, completion):
    return None
"""


def several(folder: Path, *entries: Any, **options: Any) -> EnvironmentConfig:
    (folder / "rewards.py").write_text(REWARDS)
    settings = {"path": "no file", "reward": list(entries), **options}
    tree = pin_code({"environment": {"name": "chat", "options": settings}}, folder)
    return EnvironmentConfig(**tree["environment"])


def scored(config: EnvironmentConfig, *completions: str) -> list[Any]:
    scorer = Scorer(construct(config), config)
    try:
        return asyncio.run(scorer.score(asked("4"), completions))
    finally:
        scorer.close()


def test_several_functions_of_every_convention_add_up_with_their_weights(tmp_path: Path) -> None:
    entries = (
        "rewards.py:correct",
        {"function": "rewards.py:short", "weight": 0.5, "name": "brief"},
        {"function": "rewards.py:compute_score", "weight": 0.1},
        "rewards.py:never",
    )
    config = several(tmp_path, *entries, reward_weights={"correct": 3.0})
    right, empty, failed = scored(config, "4", "", "4!")
    assert right == (
        RewardComponent(name="correct", value=1.0, weight=3.0),
        RewardComponent(name="brief", value=-1.0, weight=0.5),
        RewardComponent(name="compute_score", value=2.0, weight=0.1),
        RewardComponent(name="compute_score.length", value=1.0, weight=0.0),
    )
    # What does not apply is no component, so means are over the completions where it does.
    assert [part.name for part in empty] == ["correct", "compute_score", "compute_score.length"]
    assert isinstance(failed, RewardFault)
    assert "KeyError: 'level' (rewards.py, line 10)" in str(failed)


def test_a_completion_that_no_function_applies_to_has_no_reward(tmp_path: Path) -> None:
    (score,) = scored(several(tmp_path, "rewards.py:never"), "4")
    assert isinstance(score, RewardFault)
    assert "does not apply" in str(score)


def test_lists_of_functions_that_are_refused(tmp_path: Path) -> None:
    twice = ("rewards.py:correct", {"function": "rewards.py:correct", "weight": 2.0})
    for entries, words in ((twice, "component 'correct'.*name"), ((), "at least one function")):
        with pytest.raises(ConfigError, match=words):
            construct(several(tmp_path, *entries))
    with pytest.raises(ConfigError, match=r"defines no 'corect'.*did you mean rewards.py:correct"):
        several(tmp_path, {"function": "rewards.py:corect"})
