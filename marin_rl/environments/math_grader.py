"""Expressions compared as mathematics by math-verify, with numbers by their exact values.

math-verify parses LaTeX with sympy and compares equations, sets, intervals and matrices part by
part. It rounds numbers to six decimals and drops differences below 1e-15, so that all small numbers
are equal; here two functions of its grader are replaced. Parsing may take for ever: workers have
limits.
"""

import logging
from fractions import Fraction
from typing import Any

from math_verify import grader, parse, verify
from sympy import Basic, Float, Integer, MatrixBase, MatrixExpr, Rational

from marin_rl.environments.math_problems import RELATIVE_TOLERANCE, near, terminates

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that alarms are off

_MATRICES = (MatrixBase, MatrixExpr)
_numbers_of_matrices, _symbolic = grader.sympy_numeric_eq, grader.sympy_symbolic_eq
_ACCURACY_DIGITS, _WORKING_DIGITS_MAX = 15, 400


def parsed(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def equal(gold: list[Any], answer: list[Any]) -> bool:
    return bool(answer) and verify(gold, answer, timeout_seconds=None)


def _same_numbers(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Compare numbers exactly, and where a decimal stands for an endless one by their ratio."""
    if isinstance(a, _MATRICES) or isinstance(b, _MATRICES):
        return _numbers_of_matrices(a, b, float_rounding, numeric_precision)
    if all(grader.is_atomic_or_pct_atomic(each, Integer) for each in (a, b)):
        return grader.get_pct_val(a, a) == grader.get_pct_val(b, b)  # 9% equals 9
    try:
        x, y = _exact(a).doit(), _exact(b).doit()
        if _vanishes(x - y):
            return True
        written = a.has(Float) or b.has(Float)
        return written and not (_has_end(x) and _has_end(y)) and _near(x, y)
    except Exception:  # noqa: BLE001 - sympy raises anything for what is no number, as its callers know
        return False


def _same_symbols(a: Any, b: Any) -> bool:
    """Compare expressions symbolically, decimals as the exact numbers that they are."""
    try:
        return _symbolic(_exact(a), _exact(b))
    except Exception:  # noqa: BLE001 - as above
        return False


grader.sympy_numeric_eq, grader.sympy_symbolic_eq = _same_numbers, _same_symbols


def _exact(expression: Basic | MatrixBase) -> Any:
    """Return an expression with its decimals as fractions of powers of ten."""
    return expression.replace(lambda part: isinstance(part, Float), lambda x: Rational(str(x)))


def _vanishes(difference: Any) -> bool:
    """Return True for 0, and for a number that no digits tell from it."""
    if difference == 0 or difference.is_Rational or difference.free_symbols:
        return difference == 0
    value = difference.evalf(_ACCURACY_DIGITS, maxn=_WORKING_DIGITS_MAX)
    return all(part == 0 or part._prec == 1 for part in value.as_real_imag())


def _has_end(number: Any) -> bool:
    """Return True for a rational number with finitely many decimal digits."""
    return bool(number.is_Rational) and terminates(int(number.q))


def _near(a: Any, b: Any) -> bool:
    if a.is_Rational and b.is_Rational:
        return near(Fraction(int(a.p), int(a.q)), Fraction(int(b.p), int(b.q)))
    largest = max(abs(a.evalf()), abs(b.evalf()))
    return bool(abs((a - b).evalf(_ACCURACY_DIGITS)) <= float(RELATIVE_TOLERANCE) * largest)
