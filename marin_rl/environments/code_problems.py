"""Programming problems: a completion's Python program is run against tests, in a sandbox.

Rows are those of APPS, TACO and LiveCodeBench as they are published. Tests stay in the file:
rollouts record the row, and each worker reads its tests from there. A program sees an input and
nothing that is expected of it. Leaves out walls and limits (`marin_rl.isolated.sandbox`).
"""

import base64
import binascii
import itertools
import json
import pickletools
import re
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.chat import ProblemOptions, Problems
from marin_rl.environments.prompt_files import Columns
from marin_rl.environments.registry import parse_options, register
from marin_rl.environments.row_files import Rows, open_rows
from marin_rl.environments.sandbox_tools import SandboxOptions
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.isolated.sandbox import Sandbox, SandboxResult
from marin_rl.types import Example, RewardComponent, Split

SAMPLE = Path(__file__).parent / "samples" / "code.jsonl"
INSTRUCTION = "Write a program in Python. Put all of it in one block:\n```python\n```"
_PROBLEMS = ("question", "question_content", "problem")
_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)```", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
_MARGIN_S = 1.0  # between the last program and the time limit of a worker

# Calls the function of a program and prints its value with a number that is drawn for this run. It
# reads the program from its input, so that no file tells the number.
_CALLER = """
import json, os, sys
call = json.loads(sys.stdin.read())
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
scope = {"__name__": "solution"}
exec(compile(call.pop("program"), "solution.py", "exec"), scope)
owner = scope["Solution"]() if "Solution" in scope else None
function = getattr(owner, call["function"], None) or scope[call["function"]]
value = function(*call["arguments"])
answers.write(call["number"] + json.dumps(value) + "\\n")
answers.flush()
"""


# Columns with tests, in the order in which they are looked for; LiveCodeBench's belong together.
COLUMNS = (
    "input_output", "tests", "test_cases", "public_test_cases", "private_test_cases",
)  # fmt: skip
_UNPACKED_BYTES_MAX = 256 << 20
# As programs print them: Decimal reads `1_000` and digits of other scripts too.
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,15})?", re.ASCII)
_TEXT_OPCODES = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE")
_FRAME_OPCODES = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTest:
    """Test of a program: text on standard input and output, or a function's arguments and value."""

    stdin: str = ""
    stdout: str = ""
    arguments: tuple[Any, ...] = ()
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTests:
    """Tests of a problem; `function` names the function that they call, None for programs."""

    tests: tuple[ProgramTest, ...]
    function: str | None


def read_tests(row: Mapping[str, Any]) -> ProgramTests:
    """Return the tests of a row. Raises ValueError saying what was expected."""
    if row.get("input_output"):
        return _apps(_parsed(row["input_output"], "input_output"), row)
    cases: list[Any] = []
    for name in COLUMNS[1:]:
        if row.get(name):
            value = _parsed(row[name], name)
            if isinstance(value, dict) and "inputs" in value:
                return _apps(value, row)
            if not isinstance(value, list):
                raise ValueError(f"{name}: expected a list of tests, found {value!r:.80}")
            cases += value
    return _cases(cases, row)


def _apps(value: Any, row: Mapping[str, Any]) -> ProgramTests:
    """Read `inputs`, `outputs` and maybe `fn_name`, as APPS and TACO have them."""
    if not isinstance(value, dict) or not {"inputs", "outputs"} <= value.keys():
        raise ValueError(f'expected an object with "inputs" and "outputs", found {value!r:.80}')
    inputs, outputs = value["inputs"], value["outputs"]
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"expected as many inputs as outputs, found {len(inputs)} and {len(outputs)}"
        )
    name = value.get("fn_name") or row.get("fn_name")
    pairs = list(zip(inputs, outputs, strict=True))
    if name is None:
        tests = [ProgramTest(stdin=_text(a), stdout=_text(b)) for a, b in pairs]
    else:
        tests = [ProgramTest(arguments=tuple(a), value=b) for a, b in pairs]
    return ProgramTests(tests=tuple(tests), function=name)


def _cases(cases: Sequence[Any], row: Mapping[str, Any]) -> ProgramTests:
    """Read tests of `input` and `output`; LiveCodeBench's are functional by their `testtype`."""
    wrong = [
        case for case in cases if not (isinstance(case, dict) and {"input", "output"} <= {*case})
    ]
    if wrong or not cases:
        raise ValueError(
            f'expected tests with "input" and "output", found {wrong[0]!r:.80}'
            if wrong
            else f"expected tests in one of the columns {', '.join(COLUMNS)}"
        )
    if cases[0].get("testtype") != "functional" and not row.get("fn_name"):
        tests = [ProgramTest(stdin=_text(c["input"]), stdout=_text(c["output"])) for c in cases]
        return ProgramTests(tests=tuple(tests), function=None)
    name = row.get("fn_name") or _parsed(row.get("metadata") or "{}", "metadata").get("func_name")
    if not name:
        raise ValueError('functional tests need a name: "func_name" in metadata, or fn_name')
    tests = [
        ProgramTest(arguments=_arguments(case["input"]), value=_value(case["output"]))
        for case in cases
    ]
    return ProgramTests(tests=tuple(tests), function=str(name))


def _arguments(value: Any) -> tuple[Any, ...]:
    """Return the arguments of a call: a list, or a JSON value a line as LiveCodeBench has them."""
    if isinstance(value, list):
        return tuple(value)
    return tuple(_value(line) for line in str(value).splitlines())


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON, found {text!r:.80}: {error}") from None


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parsed(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_unpacked(value))
    except (ValueError, RecursionError, binascii.Error, zlib.error) as error:
        raise ValueError(f"{name}: expected JSON, found {value!r:.80}: {error}") from None


def _unpacked(text: str) -> str:
    """Return the text of LiveCodeBench's private tests: base64 of zlib of a pickled text.

    Nothing is unpickled: a pickle that is a text and nothing else is read as one.
    """
    unzip = zlib.decompressobj()
    data = unzip.decompress(base64.b64decode(text, validate=True), _UNPACKED_BYTES_MAX)
    if unzip.unconsumed_tail:
        raise ValueError(f"over {_UNPACKED_BYTES_MAX >> 20} MiB of tests")
    texts = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _TEXT_OPCODES:
            texts.append(str(argument))
        elif opcode.name not in _FRAME_OPCODES:
            raise ValueError(f"expected a packed text, found the instruction {opcode.name}")
    if len(texts) != 1:
        raise ValueError(f"expected one packed text, found {len(texts)}")
    return texts[0]


def same_output(expected: str, actual: str) -> bool:
    """Compare texts line by line without white space at the ends; numbers by their values."""
    wanted, lines = ([line.split() for line in t.strip().splitlines()] for t in (expected, actual))
    return [len(line) for line in wanted] == [len(line) for line in lines] and all(
        map(_same_word, itertools.chain(*wanted), itertools.chain(*lines))
    )


def _same_word(expected: str, actual: str) -> bool:
    if expected == actual:
        return True
    numbers = _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(actual)
    return bool(numbers) and Decimal(expected) == Decimal(actual)


def same_value(expected: Any, actual: Any) -> bool:
    """Compare a function's value as JSON has it; APPS wraps some expected values in a list."""
    try:
        return _same_json(expected, actual) or (
            isinstance(expected, list) and len(expected) == 1 and _same_json(expected[0], actual)
        )
    except RecursionError:  # deeper than any expected value
        return False


def _same_json(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same_json, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_json(a[key], b[key]) for key in a)
    return a == b


class CodeOptions(SandboxOptions, ProblemOptions):
    """Options of `code`: programming problems with tests (docs/environments.md)."""

    instruction: str = Field(
        default=INSTRUCTION, description="text after every problem; empty: none"
    )
    untested: Literal["refuse", "leave_out"] = Field(
        default="refuse", description="rows without tests: an error, or not used and counted"
    )
    partial_credit: bool = Field(
        default=False, description="reward the share of tests that pass, in place of all or nothing"
    )
    format_weight: float = Field(
        default=0.0, description="weight of the component format: 1 for a block of code"
    )
    tests_max: int | None = Field(
        default=None, ge=1, description="tests of a problem that are used, the first; null: all"
    )
    test_timeout_s: float = Field(default=4.0, gt=0, le=3600, description="seconds of one test")
    test_memory_bytes_max: int = Field(
        default=512 << 20, ge=32 << 20, description="memory of a program, in bytes"
    )


@register("code", CodeOptions)
class Code(Problems):
    """Rewards a program that passes all tests, or by the share of tests that it passes."""

    name = "code"

    def __init__(self, config: EnvironmentConfig) -> None:
        self._code = options = parse_options(CodeOptions, config)
        if options.test_timeout_s + _MARGIN_S > config.reward_timeout_s:
            raise ConfigError(
                f"environment.options.test_timeout_s is {options.test_timeout_s:g}, but a worker "
                f"has environment.reward_timeout_s {config.reward_timeout_s:g} for all tests of a "
                f"completion: expected at least {options.test_timeout_s + _MARGIN_S:g}"
            )
        prompt = options.prompt_key
        if prompt is None:
            rows = open_rows(options.path or str(SAMPLE))
            columns = rows.row(0) if len(rows) else {}
            prompt = next((name for name in _PROBLEMS if name in columns), None)
        super().__init__(config, options, SAMPLE, Columns(prompt=prompt, id=options.id_key))
        self._budget_s = config.reward_timeout_s - _MARGIN_S
        self._rows: Rows | None = None
        self._sandbox: Sandbox | None = None
        self._tests = lru_cache(maxsize=16)(self._read_tests)

    def load_examples(self) -> None:
        self._code.check_sandbox()
        super().load_examples()
        prompts = self._loaded
        untested = [
            index
            for index, row in enumerate(prompts.rows.scan(frozenset(COLUMNS)))
            if all(row.get(name) in (None, "", [], "[]", "{}", "null") for name in COLUMNS)
        ]
        if untested and self._code.untested == "refuse":
            raise InputError(
                f"{prompts.rows.place(untested[0])}: expected tests in one of the columns "
                f"{', '.join(COLUMNS)}; its columns are "
                f"{', '.join(prompts.rows.row(untested[0]))}. {len(untested)} of "
                f"{len(prompts.rows)} rows have none: remove them, or set environment.options."
                "untested: leave_out"
            )
        for split, numbers in prompts.of_split.items():
            prompts.of_split[split] = numbers[~np.isin(numbers, untested)]
        self._untested = len(untested)
        self._measure()
        tested = np.setdiff1d(np.arange(len(prompts.rows)), untested)
        if not len(tested):
            raise InputError(
                f"{self._path}: none of its {len(prompts.rows)} rows has tests: expected "
                f"them in one of the columns {', '.join(COLUMNS)}"
            )
        self._read_tests(int(tested[0]), prompts.rows)

    def notices(self, *, scored: bool = True) -> list[str]:
        notices = super().notices(scored=scored)
        if self._untested:
            notices.append(self._notice(self._untested, "have no tests: left out"))
        return notices

    def example(self, seed: int, index: int, split: Split) -> Example:
        example = super().example(seed, index, split)
        metadata = {k: v for k, v in example.metadata.items() if k not in COLUMNS}
        starter = metadata.get("starter_code")
        begin = f"Begin with this code:\n```python\n{starter}\n```" if starter else ""
        return replace(
            self.problem(example, begin, self._code.instruction),
            answer=None,
            metadata={**metadata, "row": self.row_number(seed, index, split)},
        )

    def demonstration(self, example: Example) -> str | None:
        solutions = example.metadata.get("solutions") or example.metadata.get("solution")
        if isinstance(solutions, str) and solutions.startswith("["):
            solutions = json.loads(solutions)
        first = solutions[0] if isinstance(solutions, list) and solutions else solutions
        return f"```python\n{str(first).strip()}\n```" if first else None

    def extract(self, completion: str) -> str | None:
        return last_block(completion)

    def load_scorer(self) -> None:
        self._rows = open_rows(self._path)
        options = self._code
        self._sandbox = options.box(
            options.test_timeout_s,
            memory_bytes=options.test_memory_bytes_max,
            output_bytes=16 << 20,
        )

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """Components `correct`, `format`, and with weight 0 `tests_passed`, a share.

        Raises RewardFault where the file with the tests is another one than that of the example.
        """
        assert self._rows is not None, "load_scorer comes before score"
        if not example.environment_version.endswith(self._rows.digest):
            raise RewardFault(
                f"{self._path} is another file than that of the example: expected digest "
                f"{example.environment_version.rpartition('+')[2]}, found {self._rows.digest}"
            )
        problem = self._tests(int(example.metadata["row"]))
        program = self.extract(completion)
        passed = 0 if program is None else self._passed(problem, program)
        share = passed / len(problem.tests)
        correct = share if self._code.partial_credit else float(share == 1)
        formed, weight = float(program is not None), self._code.format_weight
        return (
            RewardComponent(name="correct", value=correct),
            RewardComponent(name="format", value=formed, weight=weight),
            RewardComponent(name="tests_passed", value=share, weight=0.0),
        )

    def _passed(self, problem: ProgramTests, program: str) -> int:
        """Return how many tests pass, without partial credit up to the first that fails."""
        deadline, passed = time.monotonic() + self._budget_s, 0
        for test in problem.tests:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            if self._passes(problem.function, program, test, left_s):
                passed += 1
            elif not self._code.partial_credit:
                break
        return passed

    def _passes(self, function: str | None, program: str, test: ProgramTest, left_s: float) -> bool:
        assert self._sandbox is not None, "load_scorer comes before score"
        if function is None:
            files = {"solution.py": program.encode(errors="replace")}
            source = test.stdin.encode()
            python = [self._sandbox.python, "-s", "solution.py"]
            result = self._sandbox.run(python, stdin=source, files=files, wall_s=left_s)
            output = result.stdout.decode(errors="replace")
            return result.succeeded and same_output(test.stdout, output)
        value = call(self._sandbox, program, function, test.arguments, wall_s=left_s)
        return value is not None and same_value(test.value, value[0])

    def _read_tests(self, row: int, rows: Rows | None = None) -> ProgramTests:
        rows = rows or self._rows
        assert rows is not None, "load_scorer comes before score"
        try:
            problem = read_tests(rows.row(row))
        except ValueError as error:
            raise InputError(f"{rows.place(row)}: {error}") from None
        tests = problem.tests[: self._code.tests_max]
        return ProgramTests(tests=tests, function=problem.function)


def last_block(completion: str) -> str | None:
    """The program of a completion: its last block of Python."""
    blocks = [text for kind, text in _BLOCK.findall(completion) if kind.lower() in _PYTHON]
    return blocks[-1] if blocks and blocks[-1].strip() else None


def call(
    box: Sandbox, program: str, function: str, arguments: Sequence[Any], wall_s: float | None = None
) -> tuple[Any] | None:
    """Value that a function of a program returns, as JSON has it; None where it returns none."""
    number = secrets.token_hex(16)
    asked = {"program": program, "function": function, "arguments": arguments, "number": number}
    # -I would ignore the fixed hash seed
    python = [box.python, "-s", "-c", _CALLER]
    return _answer(box.run(python, stdin=json.dumps(asked).encode(), wall_s=wall_s), number)


def _answer(result: SandboxResult, number: str) -> tuple[Any] | None:
    """Return the value that a call printed after its number, and nothing else; else None."""
    text = result.printed_after(number)
    try:
        return None if text is None else (json.loads(text),)
    except (ValueError, RecursionError):  # also integers of thousands of digits
        return None
