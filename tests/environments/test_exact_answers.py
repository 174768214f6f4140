r"""Numbers and mathematics compared as exact arithmetic says, and the argument of \boxed."""

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from support.cases import asked, printed_seed

from marin_rl.environments.answers import last_number, number_match
from marin_rl.environments.math_problems import Math, boxed
from marin_rl.environments.registry import construct
from marin_rl.errors import RewardFault

BIG = str(2**53)
PAIRS = 3000


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("123", "1,2,3", 0),
        ("3", "1,2,3", 1),
        ("1234567", "1,234,567", 1),
        ("1234567", "12,34,567", 0),
        ("1234", "12,34", 0),
        ("12345", "1,2345", 0),
        ("123", "0,123", 1),
        (BIG, str(2**53 + 1), 0),
        ("1" + "0" * 5000, "1" + "0" * 4999 + "1", 0),
        ("9" * 5000, "it is " + "9" * 5000, 1),
        ("0.3", "0.30000000000000004", 0),
        ("1234567890123", "1234567890124", 0),
        ("-5", "\u22125", 1),
        ("5", "-5", 0),
        ("2", "5 - 3 is 5-3, that is 2", 1),
        ("3", "5-3", 1),
        ("-7", "-$7.00", 1),
        ("0", "-0.0", 1),
        ("0.5", ".5", 1),
        ("100000", "1e5", 1),
        ("100000", "The answer is 1e5.", 1),
        ("5", "The answer is 1e5.", 0),
        ("50", "50%", 1),
        ("5", "5 km.", 1),
        ("1e999999999999", "1e999999999998", 0),
        ("1", "1e" + "9" * 30, 0),
        ("none", "none", 0),
    ],
)
def test_the_last_numbers_are_equal_or_not(answer: str, completion: str, right: int):
    assert number_match(asked(answer), completion) == right


def test_the_last_number_is_written_in_one_way():
    texts = ("so 1,200.00", "1200", "1.2e3", "-0", "2^60 is 1152921504606846976", "1e2000")
    assert [last_number(text) for text in texts] == [
        "1200", "1200", "1200", "0", "1152921504606846976", "1E+2000",
    ]  # fmt: skip


def _near(draw: random.Random, value: Fraction) -> Fraction:
    """A number at a distance from `value` that is 0 in a third of all cases, and often tiny."""
    if draw.random() < 1 / 3:
        return value
    return value + Fraction(draw.choice((-1, 1)) * draw.randrange(1, 9), 10 ** draw.randrange(25))


def _decimal(draw: random.Random, value: Fraction) -> str:
    """All digits of a number that has finitely many, written in one of many ways."""
    digits = f"{abs(value.numerator) * 10**40 // value.denominator:041d}"
    whole, fraction = digits[:-40], digits[-40:].rstrip("0")
    fraction += "0" * draw.randrange(3)
    if draw.random() < 0.5:
        whole = f"{int(whole):,}"
    sign = draw.choice(("-", "\u2212")) if value < 0 else draw.choice(("", "", "+"))
    return f"{sign}{whole}.{fraction}" if fraction else sign + whole


def _fraction(draw: random.Random, value: Fraction) -> str:
    factor = draw.choice((1, 1, 2, 15))
    top, bottom = value.numerator * factor, value.denominator * factor
    return draw.choice((rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}"))


def _pairs(count: int, *, math: bool) -> list[tuple[str, str, bool]]:
    """Two texts of exact numbers, and the verdict of exact arithmetic."""
    draw = random.Random(printed_seed())
    pairs = list[tuple[str, str, bool]]()
    for _ in range(count):
        size = 10 ** draw.randrange(1, 25)
        value = Fraction(draw.randrange(-size, size), 10 ** draw.randrange(0, 20))
        other = _near(draw, value)
        ways = (_decimal, _fraction) if math else (_decimal,)
        a, b = (draw.choice(ways)(draw, number) for number in (value, other))
        pairs.append((a, b, value == other))
    return pairs


@pytest.mark.parametrize("count", [PAIRS, pytest.param(100_000, marks=pytest.mark.slow, id="many")])
@pytest.mark.parametrize("kind", ["numbers", "mathematics"])
def test_pairs_near_and_far_are_right_as_exact_arithmetic_says(kind, count, sample):
    math = kind == "mathematics"
    environment = sample() if math else None
    wrong = []
    for a, b, same in _pairs(count, math=math):
        if environment is None:
            paid = number_match(asked(a), f"so it is {b}")
        else:
            paid = environment.score(asked(a), rf"\boxed{{{b}}}")[0].value
        if paid != same:
            wrong.append((a, b, same))
    assert not wrong, wrong[:5]


@pytest.fixture(scope="module")
def sample() -> Callable[[], Math]:
    """The environment `math`, where its library is installed."""

    def made() -> Math:
        pytest.importorskip("math_verify", reason="needs the extra `math`")
        from marin_rl.config import EnvironmentConfig

        environment: Any = construct(EnvironmentConfig(name="math"))
        environment.load_scorer()
        return environment

    return made


@pytest.mark.parametrize(
    ("answer", "inside", "right"),
    [
        ("0.0000001", "0.0000002", 0),
        ("0.0000001", r"10^{-7}", 1),
        (r"\sqrt{2}\cdot 10^{-20}", r"2\sqrt{2}\cdot 10^{-20}", 0),
        ("x=0.0000001", "x=0.0000002", 0),
        ("x<0.0000001", "x<0.0000002", 0),
        ("(0.0000001, 1)", "(0.0000002, 1)", 0),
        ("[0, 0.0000001]", "[0, 0.0000002]", 0),
        ("0.0000001x", "0.0000002x", 0),
        ("0.5x", r"\frac{x}{2}", 1),
        (r"10^{30}+0.1", r"10^{30}+0.2", 0),
        (r"\sqrt{10^{40}+1}", "10^{20}", 0),
        ("1234567.1", "1234567.2", 0),
        ("0.1", "0.10000000000000000001", 0),
        ("0.0000001", "1e-7", 1),
        ("1e-7", "2e-7", 0),
        ("10000000000000000000000", "1E+22", 1),
        ("1/3", "3.33333e-1", 1),
        ("1/3", "0.333333", 1),
        ("1/3", "0.33333", 0),
        (r"\frac{1}{3\cdot 10^9}", "0.0000000003333333", 1),
        (r"\frac{1}{3\cdot 10^9}", "0.0000000003", 0),
        (r"\pi", "3.141593", 1),
        (r"\pi", "3.14", 0),
        (r"0.5\pi", "1.570796", 1),
        (r"\sqrt{8}", r"2\sqrt{2}", 1),
        (r"50\%", r"\frac12", 1),
        (r"50\%", "50", 1),
        (r"9.5\%", "0.095", 1),
        ("0", "1 000", 0),
        ("10000", r"10,\!000", 1),
        ("123", "1,2,3", 0),
        ("9" * 5000, "9" * 5000, 1),
        ("9" * 5000, "9" * 4999 + "8", 0),
        ("9" * 5000, "x", 0),
        ("42", "9" * 5000 + "x", 0),
        ("42", "{" * 3000 + "42" + "}" * 3000, 1),
        ("42", "(" * 3000 + "42" + ")" * 3000, 0),
        ("x+1", "1/0", 0),
    ],
)
def test_expressions_are_compared_by_value(answer, inside, right, sample):
    assert sample().score(asked(answer), rf"so \boxed{{{inside}}}")[0].value == right


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"$\boxed 2$", "2"),
        (r"\boxed 12", "1"),
        (r"$\boxed\frac12$", r"\frac12"),
        (r"\boxed\frac{1}{2}.", r"\frac{1}{2}"),
        (r"\boxed\pi", r"\pi"),
        (r"\boxed\sqrt[3]{2}+1", r"\sqrt[3]{2}"),
        (r"\boxed\text{A}", r"\text{A}"),
        ("\\boxed\n {3}", "3"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\fbox{1} then \boxed{2}", "2"),
        (r"\boxed{2} then \fbox 1", "1"),
        (r"\boxed{a} \boxed{b", "a"),
        (r"\boxed{a} \boxed$", "a"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxedx", None),
        (r"\boxed", None),
        (r"\boxed{}", None),
        (r"\boxed\frac{1}", None),
        ("\\boxed{" * 20_000, None),
        ("\\boxed" * 5000, None),
        ("\\boxed\\sqrt" * 2000, None),
    ],
)
def test_the_argument_of_a_box_is_the_next_token_or_group(text: str, inside: str | None):
    assert boxed(text) == inside


def test_an_answer_of_a_row_that_is_no_mathematics_is_named(sample: Callable[[], Math]):
    with pytest.raises(RewardFault, match=r"the row's answer '\(\(\(.* is no mathematics"):
        sample().score(asked("(" * 100 + "x" + ")" * 100), r"\boxed{1}")
