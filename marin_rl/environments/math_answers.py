r"""Answers of mathematics as texts: the argument of \boxed, and numbers compared exactly.

Nothing is evaluated: numbers are written out, of any size, as integers, decimals or fractions of
integers. Leaves out every other expression (`math_grader`), and rows (`math_problems`).
"""

import re
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

# A decimal that stands for a number without an end of its digits, such as 0.333333 for 1/3, may be
# off by this share of it.
RELATIVE_TOLERANCE = Fraction(1, 10**6)

_GSM8K = "####"
_WORDS_MAX = 24
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_TOKEN = re.compile(r"\\([a-zA-Z]+|.)|\S", re.DOTALL)
_ROOT = re.compile(r"\s*\[[^\]{}$]*\]")  # which root a \sqrt is
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Arguments of control sequences that may stand in a box without braces; others have none.
_ARGUMENTS = {
    **dict.fromkeys(("frac", "dfrac", "tfrac", "cfrac", "binom", "dbinom", "tbinom"), 2),
    **dict.fromkeys(("sqrt", "text", "textbf", "mathrm", "mathbf", "mathbb", "mathcal"), 1),
    **dict.fromkeys(("operatorname", "overline", "underline", "vec", "bar", "hat", "boxed"), 1),
}
_FRACTION_DIGITS_MAX = 4000
_TOKENS_MAX = 32  # of an argument without braces

_ARGUMENT = r"(?:\{{\s*(?P<{0}>-?\d+)\s*\}}|\s*(?P<{0}_digit>\d))"
_SEPARATOR = r"(?:,|\{,\}|,\\!|\\[,;: ]|[ ~\u00a0\u202f])"  # of groups of three digits
_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212])?\s*(?:"
    rf"\\[dt]?frac{_ARGUMENT.format('top')}{_ARGUMENT.format('bottom')}"
    r"|(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    rf"|(?P<whole>[1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}})+|\d+)(?P<fraction>\.\d*)?"
    r"(?P<exponent>[eE][-+]?\d{1,3})?"
    r"|(?P<share>\.\d+))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenNumber:
    """A number as it is written: a fraction of two integers, or digits with a decimal point."""

    top: Decimal
    bottom: Decimal = Decimal(1)
    decimal: bool = False


def boxed(text: str) -> str | None:
    r"""Return the argument of the last \boxed or \fbox that has one, None without any.

    As in TeX it is the next token or the next group in braces. A control sequence that takes
    arguments of its own brings them along: \boxed\frac12 is \frac12.
    """
    closing = _closing_braces(text)
    for box in reversed(list(_BOX.finditer(text))):
        argument = _argument(text, box.end(), closing)
        if argument is not None:
            return argument.strip() or None
    return None


def unbraced(text: str) -> str:
    """Return a text without the braces around all of it."""
    closing, outer = _closing_braces(text), 0
    while closing.get(outer) == len(text) - 1 - outer:
        outer += 1
    return text[outer : len(text) - outer]


def nesting(text: str) -> int:
    """Return how deep the braces and brackets of a text are nested."""
    depth = deepest = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "])}":
            depth -= 1
    return deepest


def gold_answer(value: Any) -> str | None:
    r"""The answer in a column: after `####`, in the last \boxed{}, or all of it.

    A list, as OlympiadBench has them, is all its answers.
    """
    if isinstance(value, list):
        answers = [str(each).strip().strip("$") for each in value if str(each).strip()]
        return ", ".join(answers) or None
    if value is None:
        return None
    text = str(value)
    if _GSM8K in text:
        return text.rpartition(_GSM8K)[2].strip() or None
    inside = boxed(text)
    if inside is None and len(text.split()) > _WORDS_MAX:
        return None  # a solution that states no answer
    return (text.strip().strip("$") if inside is None else inside.strip()) or None


def before_answer(text: str) -> str:
    """Return a solution of GSM8K without its last line; other texts as they are."""
    return text.partition(_GSM8K)[0].strip()


def written_number(text: str) -> WrittenNumber | None:
    """Return the number that is all of a text, None for any other expression."""
    match = _NUMBER.fullmatch(text.strip().strip("$").strip())
    if match is None:
        return None
    sign = "-" if match["sign"] in ("-", "\u2212") else ""
    top = match["top"] or match["top_digit"] or match["over"]
    if top is None:
        digits = re.sub(r"\D", "", match["whole"] or "0")
        point = match["fraction"] or match["share"] or ""
        exponent = match["exponent"] or ""
        return WrittenNumber(
            top=Decimal(f"{sign}{digits}{point}{exponent}"), decimal=len(point + exponent) > 1
        )
    top = Decimal(top).copy_negate() if sign else Decimal(top)
    bottom = Decimal(match["bottom"] or match["bottom_digit"] or match["under"])
    return WrittenNumber(top=top, bottom=bottom) if bottom else None


def same_number(a: WrittenNumber, b: WrittenNumber) -> bool:
    """Compare two numbers exactly; a decimal and a fraction without an end within a tolerance."""
    digits = sum(len(part.as_tuple().digits) for part in (a.top, a.bottom, b.top, b.bottom))
    exact = Context(prec=digits)
    if exact.multiply(a.top, b.bottom) == exact.multiply(b.top, a.bottom):
        return True
    if a.decimal == b.decimal or digits > _FRACTION_DIGITS_MAX:
        return False
    endless, written = (_fraction(b), _fraction(a)) if a.decimal else (_fraction(a), _fraction(b))
    return not terminates(endless.denominator) and near(endless, written)


def terminates(denominator: int) -> bool:
    """Return True where fractions of this denominator have finitely many decimal digits."""
    return pow(10, denominator.bit_length(), denominator) == 0


def near(a: Fraction, b: Fraction) -> bool:
    return abs(a - b) <= RELATIVE_TOLERANCE * max(abs(a), abs(b))


def _fraction(number: WrittenNumber) -> Fraction:
    return Fraction(number.top) / Fraction(number.bottom)


def _closing_braces(text: str) -> dict[int, int]:
    """Return the place of the closing brace of each opening one that is closed."""
    opened, closing = list[int](), dict[int, int]()
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def _argument(text: str, start: int, closing: dict[int, int]) -> str | None:
    """Return the argument of a control sequence that ends at `start`, None where it is missing."""
    missing, place, begin, end = 1, start, start, start
    for _ in range(_TOKENS_MAX):
        token = _TOKEN.search(text, place)
        if token is None or token[0] in "}$&#":
            return None
        if place == start:
            begin = token.start()
        missing -= 1
        place = end = token.end()
        if token[0] == "{":
            if token.start() not in closing:
                return None
            place = end = closing[token.start()] + 1
        elif token[1]:
            missing += _ARGUMENTS.get(token[1], 0)
            root = _ROOT.match(text, place) if token[1] == "sqrt" else None
            place = root.end() if root else place
        if not missing:
            return text[begin + 1 : end - 1] if closing.get(begin) == end - 1 else text[begin:end]
    return None
