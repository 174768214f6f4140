"""Mathematics by columns as published: answers that are equal, and rows that are refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.cases import asked

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import reward_of
from marin_rl.environments.checks import make_environment
from marin_rl.environments.math_problems import Math, gold_answer
from marin_rl.environments.registry import construct, loaded_environment
from marin_rl.environments.scoring import Scorer
from marin_rl.errors import ConfigError, InputError, RewardFault

pytest.importorskip("math_verify", reason="needs the extra `math`")

ROWS = {
    "gsm8k": {"question": "Twice 21?", "answer": "It is <<2*21=42>>42.\n#### 42"},
    "math": {
        "problem": "Half?",
        "solution": r"First \boxed{1}, then \boxed{\frac{1}{2}}.",
        "level": "Level 1",
        "type": "Algebra",
    },
    "olympiad": {
        "question": "Roots of $x^2=4$?",
        "context": "Let $x$ be real.",
        "solution": ["Two of them."],
        "final_answer": ["$2$", "$-2$"],
        "is_multiple_answer": True,
        "modality": "Text-only",
        "image_1": None,
    },
    "math-500": {"problem": "Third?", "solution": r"\boxed{x}", "answer": r"\frac{1}{3}"},
}
GOLD = {"gsm8k": "42", "math": r"\frac{1}{2}", "olympiad": "2, -2", "math-500": r"\frac{1}{3}"}


def config(tmp_path: Path, rows: list[Any], **options: Any) -> EnvironmentConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EnvironmentConfig(name="math", options={"path": str(path), **options})


@pytest.mark.parametrize("kind", ROWS)
def test_columns_as_they_are_published(kind: str, tmp_path: Path):
    rows = [ROWS[kind] | {"id": str(i)} for i in range(3)]
    environment = loaded_environment(config(tmp_path, rows, eval_fraction=0.01), "train")
    example = environment.example(0, 0, "train")
    assert example.answer == GOLD[kind]
    assert example.messages[-1].content.endswith(r"put the final answer in \boxed{}.")
    if kind == "olympiad":
        assert example.messages[-1].content.startswith("Let $x$ be real.\n\nRoots")
    shown = environment.demonstration(example)
    assert shown is not None
    environment.load_scorer()
    assert [part.value for part in environment.score(example, shown)] == [
        float(kind != "math-500"),
        1,
    ]


@pytest.fixture(scope="module")
def sample() -> Math:
    environment = construct(EnvironmentConfig(name="math", options={"format_weight": 0.1}))
    environment.load_examples()
    environment.load_scorer()
    assert isinstance(environment, Math)
    return environment


@pytest.mark.parametrize(
    ("answer", "completion", "values"),
    [
        ("42", r"so \boxed{42}", [1, 1]),
        ("42", r"\boxed{41} no, \boxed{42.0}", [1, 1]),
        ("42", "so it is 42", [0, 0]),
        ("42", r"\boxed{}", [0, 0]),
        ("42", r"\boxed{42", [0, 0]),
        (r"\frac{1}{2}", r"\boxed{0.5}", [1, 1]),
        ("1024", r"\boxed{1{,}024}", [1, 1]),
        (r"6\sqrt{2}", r"\boxed{\sqrt{72}}", [1, 1]),
        ("(x-2)(x-3)", r"\boxed{x^2-5x+6}", [1, 1]),
        (r"9\pi", r"\boxed{3\pi}", [0, 1]),
        ("2, -2", r"\boxed{-2, 2}", [1, 1]),
        ("2, -2", r"\boxed{2}", [0, 1]),
    ],
)
def test_answers_are_compared_as_mathematics(sample: Math, answer, completion, values):
    components = sample.score(asked(answer), completion)
    assert [part.value for part in components] == values
    assert reward_of(components) == pytest.approx(values[0] + 0.1 * values[1])


def test_an_answer_outside_of_a_box_counts_where_asked(tmp_path: Path):
    environment = construct(config(tmp_path, [ROWS["gsm8k"]], answer_in="any", eval_fraction=0.01))
    environment.load_examples()
    environment.load_scorer()
    example = environment.example(0, 0, "train")
    assert [part.value for part in environment.score(example, "The answer is 42.")] == [1, 0]
    assert [part.value for part in environment.score(example, "The answer is 41.")] == [0, 0]


def test_the_sample_runs_offline_and_every_solution_of_it_is_right(sample: Math):
    splits = {sample.example(0, i, "train").example_id for i in range(sample.size or 0)}
    held_out = {sample.example(0, i, "eval").example_id for i in range(sample.eval_size)}
    assert len(splits) + len(held_out) == 24
    assert not splits & held_out
    assert held_out
    for index in range(sample.size or 0):
        example = sample.example(0, index, "train")
        shown = sample.demonstration(example)
        assert shown is not None
        assert reward_of(sample.score(example, shown)) == pytest.approx(1.1), example


@pytest.mark.slow
def test_an_answer_that_hangs_is_wrong():
    hanging = EnvironmentConfig(name="math", reward_timeout_s=5)
    environment = make_environment(hanging)
    example = environment.example(0, 0, "train")
    scorer = Scorer(environment, hanging)
    try:
        power = r"\boxed{9^{9^{9^{9^{9}}}}}"
        scores = asyncio.run(scorer.score(example, [power, rf"\boxed{{{example.answer}}}"]))
    finally:
        scorer.close()
    assert not isinstance(scores[0], RewardFault)
    assert [part.value for part in scores[0]] == [0, 1]
    assert "took longer than 5 s" in str(scores[0][0].detail)
    assert not isinstance(scores[1], RewardFault)
    assert scores[1][0].value == 1


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"question": "a", "label_": 1}],
            {},
            r"line 1: expected a problem .*columns are question",
        ),
        ([{"theorem": "a", "answer": "1"}], {}, "line 1: expected a prompt in one of the columns"),
        (
            [ROWS["math"], {"problem": "b", "solution": "word " * 30}],
            {},
            "line 2: expected an answer",
        ),
        ([ROWS["gsm8k"], {"question": "b"}], {}, "line 2: expected an answer .*answer_key"),
        ([ROWS["olympiad"] | {"modality": "Multimodal"}], {}, "line 1: the problem has images"),
        ([ROWS["gsm8k"]], {"answer_key": "gold"}, "no row has a column 'gold'"),
    ],
)
def test_rows_without_what_is_needed_are_refused(rows, options, message, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        construct(config(tmp_path, rows, **options)).load_examples()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    from marin_rl.environments import math_problems

    monkeypatch.setattr(math_problems.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'marin-rl\[math\]'"):
        construct(EnvironmentConfig(name="math"))


def test_answers_in_a_list_are_all_answers():
    assert gold_answer(["$x$"]) == "x"
    assert gold_answer([]) is None
