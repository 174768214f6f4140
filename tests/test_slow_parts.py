"""Parts of the slow suite: all together have each test once."""

import re
from itertools import chain
from operator import itemgetter

import pytest
from support.slow_parts import Part


@pytest.mark.parametrize("parts", [1, 2, 5, 12])
def test_all_parts_together_have_each_test_once(parts: int) -> None:
    tests = [f"test_{number}" for number in range(11)]
    of_parts = [Part(number, parts).of(tests, str) for number in range(1, parts + 1)]
    assert sorted(chain.from_iterable(of_parts)) == sorted(tests)


def test_a_part_has_tests_of_every_file() -> None:
    tests = [(file, number) for file in "abc" for number in range(5)]
    assert [file for file, _ in Part(2, 5).of(tests, tuple)] == ["a", "b", "c"]


def test_tests_of_one_unit_are_in_one_part() -> None:
    of_parts = [
        Part(number, 2).of(["a1", "b1", "b2", "b3", "c1"], itemgetter(0)) for number in (1, 2)
    ]
    assert of_parts == [["a1", "c1"], ["b1", "b2", "b3"]]


@pytest.mark.parametrize("text", ["", "2", "0/5", "6/5", "-1/5", "2/5 ", "1.0/5", "a/b"])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=re.escape(repr(text))):
        Part.parse(text)
