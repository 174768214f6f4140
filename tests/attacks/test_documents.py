"""JSON and YAML that somebody else wrote: read in bounded time, as written, or refused in words."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marin_rl.config import Config, as_overrides, load_config, override
from marin_rl.config.yaml_files import parse_yaml
from marin_rl.environments.code_problems import read_tests
from marin_rl.environments.row_files import open_rows
from marin_rl.errors import ConfigError, CorruptObject, InputError
from marin_rl.plain_files import read_object
from marin_rl.storage.array_files import header_of, tensors_of
from marin_rl.storage.fleet import heartbeat_age_s
from marin_rl.storage.tables.pairs import read_pairs
from marin_rl.user_code import pin
from schemas import Malformed
from schemas.strict_json import JsonLimits, parse_json

# Nine levels of nine aliases each.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = b"[" * 100_000

HOSTILE_YAML = {
    "bomb": (BOMB, "values, those of aliases included"),
    "comment": ("#" + "x" * 60_000_000, "expected at most 1048576 bytes, found 60000001"),
    "wide": ("a: [" + "1," * 30_000 + "]", "expected at most 20000 values"),
    "lists": ("[" * 100_000, "at most 64 levels"),
    "dashes": ("- " * 100_000, "at most 64 levels"),
    "half a character": ('root: "runs-\\ud800"', r"without NUL, found '\\ud800'"),
    "nul": ('environment: {options: {path: "a\\0b"}}', r"without NUL, found '\\x00'"),
    "itself": ("&x [*x]", r"the alias \*x stands inside of what it stands for"),
    "binary": ("run_id: !!binary aGVsbG8=", "the tag 'tag:yaml.org,2002:binary' is not read"),
    "python": ("run_id: !!python/object:os.system x", "the tag .* is not read"),
    "twice": ("rounds: 8\nseed: 1\nrounds: 99", "the key 'rounds' is there twice, first in line 1"),
    "merges": ("a: {<<: {b: 1}, <<: {b: 2}}", "the key '<<' is there twice"),
    "base 60": ("rounds: 1:30", "1:30 is in base 60 in YAML 1.1"),
    "octal": ("rounds: 010", "010 is octal in YAML 1.1: write the decimal number, or quotes"),
    "infinite": ("training: {learning_rate: .inf}", "a finite decimal number, found .inf"),
    "digits": ("rounds: " + "9" * 5_000, "expected an integer, found 9{40}…"),
    "a switch as key": ("environment: {options: {yes: 1}}", "expected a text as key"),
    "a list as key": ("? [a]\n: 1", "expected a text as key"),
    "documents": ("a: 1\n---\nb: 2", "single document"),
    "unknown keys": ("".join(f"a{number}: 1\n" for number in range(5_000)), "and 4980 more"),
}


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_hostile_configurations_are_refused_soon(tmp_path: Path, name: str) -> None:
    text, words = HOSTILE_YAML[name]
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file)


@pytest.mark.parametrize("value", ["010", "1:30", "&x [*x]", "{a: 1, a: 2}", "!!binary aGk="])
def test_values_of_overrides_are_read_in_the_same_way(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--set .*: the value is not valid YAML: "):
        override({}, [f"environment.options.a={value}"])


def test_values_are_read_as_they_are_written() -> None:
    tree = parse_yaml(
        "day: 2024-01-01\ntext: !!str 010\nquoted: '1:30'\nlarge: 1_000\nhex: 0x10\n"
        "base: &base {a: 1, b: 2}\nown: {<<: *base, b: 3}\n1: one\nsame: [*base, *base]\n"
        "next: {<<: [*base], c: 4}\nnegative: -7\nnothing: ~\n"
    )
    assert tree == {
        "day": "2024-01-01", "text": "010", "quoted": "1:30", "large": 1000, "hex": 16,
        "base": {"a": 1, "b": 2}, "own": {"a": 1, "b": 3}, 1: "one",
        "same": [{"a": 1, "b": 2}] * 2, "next": {"a": 1, "b": 2, "c": 4}, "negative": -7,
        "nothing": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "tree", [{"run_id": b"a"}, {"environment": {"options": {"a": float("nan")}}}, {"a": {1, 2}}]
)
def test_mappings_have_values_of_json_alone(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected values that JSON has"):
        Config.load(tree)
    endless: dict[str, Any] = {}
    endless["a"] = endless
    with pytest.raises(ConfigError, match="overrides: Circular reference"):
        as_overrides({"environment.options": endless})


HOSTILE_JSON = {
    "deep list": (DEEP, "at most 200 levels"),
    "a name twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "found 'c' twice"),
    "an endless integer": (b'{"a": ' + b"9" * 4_400 + b"}", "4300 digits"),
    "a number beyond float64": (b'{"a": 1e400}', "expected a finite number, found 1e400"),
    "not a number": (b'{"a": NaN}', "expected a finite number, found NaN"),
    "half a character": (b'{"a": "\\ud800"}', "surrogates not allowed"),
    "no UTF-8": (b'{"a": "\xff"}', "can't decode"),
    "byte order mark": ('\ufeff{"a": 1}'.encode(), "a byte order mark, found one"),
    "a part": (b'{"a": ', "Expecting value"),
    "nothing": (b"", "Expecting value"),
}


@pytest.mark.parametrize("name", HOSTILE_JSON)
def test_hostile_json_is_refused_at_each_door(tmp_path: Path, name: str) -> None:
    data, words = HOSTILE_JSON[name]
    with pytest.raises(Malformed, match=words):
        parse_json(data)
    file = tmp_path / "adapter_config.json"
    file.write_bytes(data)
    with pytest.raises(InputError, match=words):
        read_object(file)
    assert heartbeat_age_s(".fleet/a.heartbeat.json", data, 0.0) is None
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"prompt": "a"}\n' + data)
    if data:
        with pytest.raises(InputError, match=f"line 2 is not JSON: .*{words}"):
            list(open_rows(str(rows)).scan(()))
        with pytest.raises(InputError, match=f"line 2 is not JSON: .*{words}|line 1"):
            read_pairs(rows)


def test_json_is_exact_and_bounded() -> None:
    text = '{"a": 123456789012345678901234567890, "b": ["\\ud83d\\ude00", 1.5e300, -0.0, {}]}'
    assert parse_json(text.encode()) == json.loads(text)
    assert parse_json(json.dumps("[{,:" * 10**6).encode()) == "[{,:" * 10**6
    for limits in (JsonLimits(bytes_max=7), JsonLimits(values_max=3), JsonLimits(depth_max=1)):
        with pytest.raises(Malformed, match="expected at most"):
            parse_json(b"[1,[2,3]]", limits)


def test_strange_numbers_and_names_in_records_are_no_tracebacks(tmp_path: Path) -> None:
    for value in (b"[]", b'{"heartbeat": 3}', b'{"heartbeat": {"beat_at": %s}}' % (b"9" * 400)):
        assert heartbeat_age_s(".fleet/a.heartbeat.json", value, 0.0) is None
    name = json.dumps("[" * 5_000).encode()
    header = b'{%s:{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' % name
    data = memoryview(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptObject, match="expected a tree of arrays"):
        tensors_of(header_of(data, "file"), "file")
    for value in ("[" * 5_000, "9" * 5_000):
        case = {"input": value, "output": "1", "testtype": "functional"}
        for row in ({"input_output": value}, {"fn_name": "f", "tests": [case]}):
            with pytest.raises(ValueError, match="expected"):
                read_tests(row)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("make", [fifo, device, sparse, Path.mkdir])
def test_files_that_are_none_are_not_opened(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "thing.py"
    make(path)
    said = "expected a regular file, found|expected at most|no file thing"
    for work, error in (
        (lambda: load_config(path), ConfigError),
        (lambda: read_object(path), InputError),
        (lambda: pin("thing.py:reward", tmp_path, "environment.options.reward"), ConfigError),
    ):
        with pytest.raises(error, match=said):
            work()
    if make in (fifo, device):
        with pytest.raises(InputError, match=said):
            open_rows(str(path))
