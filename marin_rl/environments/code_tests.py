"""Tests of programming problems: their columns, and the comparison of an output with the expected.

Reads the rows of APPS, TACO and LiveCodeBench as they are published. What is expected of a program
never enters its sandbox. Leaves out running programs (`code_problems`).
"""

import base64
import binascii
import itertools
import json
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

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


def has_tests(row: Mapping[str, Any]) -> bool:
    return any(row.get(name) not in (None, "", [], "[]", "{}", "null") for name in COLUMNS)


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
