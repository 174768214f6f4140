"""Ready-made rewards and extractors for prompts with one right answer, to be named by import path.

For `chat`: `reward: marin_rl.environments.answers:exact_match`. An extractor takes a completion and
gives the answer in it, or None; votes are counted over what it gives.
"""

import re
from collections import deque
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal

from marin_rl.types import Example

# A sign belongs to a number where it does not stand between two operands: `3-2` ends with 2.
# Longer exponents than these are beyond any `Decimal`.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+\u2212])?[$€£]?"
    r"(?:(?P<whole>\d+(?:,\d+)*)(?P<fraction>\.\d+)?|(?<![\w.,])(?P<share>\.\d+))"
    r"(?P<exponent>[eE][-+]?\d{1,15}(?!\.?\d))?"
)
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+")
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
_PLAIN_DIGITS_MAX = 1000


def exact_match(example: Example, completion: str) -> float:
    """1 if completion and answer are the same text, white space at their ends aside."""
    return float(example.answer is not None and completion.strip() == example.answer.strip())


def number_match(example: Example, completion: str) -> float:
    """1 if the last number of the completion equals the last number of the answer, exactly."""
    expected, actual = _last(example.answer or ""), _last(completion)
    return float(expected is not None and expected == actual)


def last_number(completion: str) -> str | None:
    """The last number in a text, written in one way: `1,200.0` and `1200` are the same."""
    value = _last(completion)
    if value is None:
        return None
    value = _EXACT.normalize(value or Decimal())  # 0 has no sign
    plain = -_PLAIN_DIGITS_MAX < value.adjusted() < _PLAIN_DIGITS_MAX
    return f"{value:f}" if plain else str(value)


def _last(text: str) -> Decimal | None:
    """Return the last number of a text, of any size. Signs count; units and percent signs do not.

    Commas separate groups of three digits and nothing else: `1,2,3` and `12,34` end with 3 and 34.
    """
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    if not numbers:
        return None
    (last,) = numbers
    sign = "-" if last["sign"] in ("-", "\u2212") else ""
    whole = last["whole"] or "0"
    if "," in whole and not _GROUPED.fullmatch(whole):
        sign, whole = "", whole.rpartition(",")[2]
    digits = whole.replace(",", "") + (last["fraction"] or last["share"] or "")
    return Decimal(sign + digits + (last["exponent"] or ""))
