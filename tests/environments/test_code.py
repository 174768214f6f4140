"""Programs against tests: columns as published, verdicts, and rows that are refused."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.sandboxes import reason_to_skip

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.code_problems import Code, _answer, read_tests, same_output, same_value
from marin_rl.environments.registry import construct
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.isolated.sandbox import SandboxResult
from marin_rl.types import RewardComponent

ADD = "a, b = map(int, input().split())\nprint(a + b)"
APPS = {
    "problem_id": 1,
    "question": "Add two numbers.",
    "input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
    "solutions": json.dumps([ADD]),
}
FUNCTION = {
    "question": "Add.",
    "starter_code": "def add(a, b):",
    "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}),
}


def packed(value: Any) -> str:
    """Return a text as LiveCodeBench packs private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


LIVE = {
    "question_content": "Add two numbers.",
    "public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]),
    "private_test_cases": packed([{"input": "3 4", "output": "7", "testtype": "stdin"}]),
    "metadata": "{}",
}
LIVE_FUNCTION = {
    "question_content": "Add.",
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}


def environment(
    folder: Path,
    row: dict[str, Any],
    other: dict[str, Any] | None = None,
    *,
    timeout_s: float = 300,
    **options: Any,
):
    """An environment of two rows whose time limits no busy machine reaches, ready to score."""
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps((other or row) | {"id": "other"}) + "\n")
    options = {"path": str(path), "test_timeout_s": 60, "eval_fraction": 0.01, **options}
    config = EnvironmentConfig(name="code", options=options, reward_timeout_s=timeout_s)
    made = construct(config)
    assert isinstance(made, Code)
    made.load_examples()
    made.load_scorer()
    return made


def block(program: str) -> str:
    return f"I think:\n```python\n{program}\n```\nDone."


def values(made: Code, completion: str) -> dict[str, float]:
    components: tuple[RewardComponent, ...] = made.score(made.example(0, 0, "train"), completion)
    return {part.name: part.value for part in components}


@pytest.mark.parametrize("row", [APPS, LIVE], ids=["apps", "livecodebench"])
def test_programs_are_run_on_standard_input(row, tmp_path: Path):
    made = environment(tmp_path, row)
    example = made.example(0, 0, "train")
    assert example.messages[-1].content.startswith("Add two numbers.\n\nWrite a program")
    stored = json.dumps(dict(example.metadata))
    assert "input_output" not in stored
    assert "test_cases" not in stored
    right = {"correct": 1.0, "format": 1.0, "tests_passed": 1.0}
    assert values(made, block(ADD)) == right
    assert values(made, block("print(3)")) == right | {"correct": 0.0, "tests_passed": 0.5}
    assert values(made, ADD) == dict.fromkeys(right, 0.0)
    if row is APPS:
        shown = made.demonstration(example)
        assert shown is not None
        assert values(made, shown) == right


@pytest.mark.parametrize(
    ("row", "program"),
    [
        (FUNCTION, "def add(a, b):\n    print('noise')\n    return a + b"),
        (LIVE_FUNCTION, "class Solution:\n    def add(self, a, b):\n        return a + b"),
    ],
    ids=["apps", "livecodebench"],
)
def test_functions_are_called(row, program, tmp_path: Path):
    made = environment(tmp_path, row)
    assert row["starter_code"] in made.example(0, 0, "train").messages[-1].content
    assert values(made, block(program))["correct"] == 1
    assert values(made, block(program.replace("a + b", "a - b")))["correct"] == 0


def test_a_program_cannot_fake_a_verdict(tmp_path: Path):
    made = environment(tmp_path, FUNCTION)
    attempts = (
        "import os\nos.write(1, b'3\\n')\nos._exit(0)",
        "import os\nfor d in range(64):\n    try: os.write(d, b'3\\n')\n    except OSError: pass\n"
        "os._exit(0)",
        "import sys\ndef add(a, b): sys.exit(0)",
        "class Always:\n    def __eq__(self, other): return True\ndef add(a, b): return Always()",
        "import sys\nprint(sys._getframe(1).f_globals['call'])\ndef add(a, b): return None",
    )
    for program in attempts:
        assert values(made, block(program))["correct"] == 0, program


def test_partial_credit_is_the_share_of_tests(tmp_path: Path):
    made = environment(tmp_path, APPS, partial_credit=True, format_weight=0.5)
    assert values(made, block("print(7)"))["correct"] == 0.5
    assert made.score(made.example(0, 0, "train"), block(ADD))[1].weight == 0.5


def test_a_program_that_does_not_end_is_wrong_and_no_fault(tmp_path: Path):
    made = environment(tmp_path, APPS, test_timeout_s=1)
    assert values(made, block("while True: pass"))["correct"] == 0


def test_another_file_of_tests_is_a_fault(tmp_path: Path):
    made = environment(tmp_path, APPS)
    example = made.example(0, 0, "train")
    environment(tmp_path, APPS | {"question": "Another."})
    made.load_scorer()
    with pytest.raises(RewardFault, match="another file"):
        made.score(example, block(ADD))


def test_every_solution_of_the_sample_is_right():
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    options = {"test_timeout_s": 60, "eval_fraction": 0.2}
    config = EnvironmentConfig(name="code", options=options, reward_timeout_s=300)
    made = construct(config)
    made.load_examples()
    made.load_scorer()
    assert made.size is not None
    for index in range(made.size):
        example = made.example(0, index, "train")
        shown = made.demonstration(example)
        assert shown is not None
        assert made.score(example, shown)[0].value == 1, example


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"question": "a", "answer": "1"},
            {},
            r"line 1: expected tests .*input_output.*2 of 2 rows",
        ),
        (APPS | {"input_output": ""}, {}, r"untested: leave_out"),
        (APPS | {"input_output": ""}, {"untested": "leave_out"}, "none of its 2 rows has tests"),
        (APPS | {"input_output": "{"}, {}, r"line 1: input_output: expected JSON"),
        (APPS | {"input_output": '{"inputs": ["1"], "outputs": []}'}, {}, "as many inputs as"),
        ({"task": "a", "input_output": "{}"}, {}, "expected a prompt in one of the columns"),
    ],
)
def test_rows_without_tests_are_refused(row, options, message, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        environment(tmp_path, row, **options)


def test_rows_without_tests_are_left_out_of_a_fixed_set(tmp_path: Path):
    untested = APPS | {"input_output": ""}
    options = {"untested": "leave_out", "eval_fraction": 1.0}
    made = environment(tmp_path, untested, APPS, **options)
    assert (made.size, made.eval_size) == (0, 1)
    assert made.example(0, 0, "eval").example_id == "other"


def test_time_limits_that_cannot_be_kept_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"test_timeout_s is 60, .*reward_timeout_s 10"):
        environment(tmp_path, APPS, timeout_s=10)


def test_a_packed_object_is_not_unpickled():
    class Hostile:
        def __reduce__(self):
            return (print, ("executed",))

    data = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
    with pytest.raises(ValueError, match="private_test_cases: expected JSON"):
        read_tests({"private_test_cases": data})


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2\n", " 1 2 \n\n", True),
        ("0.50", "0.5", True),
        ("1e3 a", "1000 a", True),
        ("1\n2", "1 2", False),
        ("1", "2", False),
        ("a", "", False),
        ("nan", "NaN", False),
        ("inf", "Infinity", False),
        ("1000", "1_000", False),
        ("3", "\u0663", False),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("1", "1" * 1_000_000 + "x", False),  # at once: no digit is tried twice
        ("1", "1e" + "9" * 15, False),
        ("-.5", "-0.50e0", True),
    ],
)
def test_outputs_are_compared_line_by_line(expected, actual, same):
    assert same_output(expected, actual) is same


def test_values_are_compared_as_json_has_them():
    assert same_value([1, 2], [1, 2])
    assert same_value([3], 3)
    assert same_value(2**70, 2**70)
    assert not same_value(1, True)
    assert not same_value([1, 2], [1])
    assert same_value({"a": 1.0}, {"a": 1})


@pytest.mark.parametrize(
    "text", ["[" * 3000 + "]" * 3000, "9" * 6000, "[1", "nan", ""], ids=range(5)
)
def test_a_value_that_cannot_be_read_fails_its_test(text: str):
    """It is a wrong answer, and not one that is left out of training."""
    result = SandboxResult(
        exit_status=0, limit=None, stdout=f"number{text}".encode(), stderr=b"", wall_s=0.1
    )
    answer = _answer(result, "number")
    assert answer is None or not same_value([1], answer[0])


def test_a_value_that_is_nested_deeper_than_python_compares_is_wrong():
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    other: list[Any] = []
    for _ in range(20_000):
        other = [other]
    assert not same_value(deep, other)
