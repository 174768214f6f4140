r"""Mathematics with one right answer: rows of GSM8K, MATH and OlympiadBench, and math-verify.

Answers are compared as mathematics: 1/2, 0.5 and \frac{1}{2} are equal. math-verify parses any text
that a model writes with sympy, which may take for ever, so it runs in worker processes with a time
limit. Numbers are compared here, exactly: written out, of any size, as integers, decimals or
fractions of integers; nothing is evaluated. Leaves out all other expressions (`math_grader`), files
and the split (`chat`), and the processes (`scoring`).
"""

import importlib
import importlib.util
import re
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.chat import ProblemOptions, Problems
from marin_rl.environments.prompt_files import OTHER_PROMPT_COLUMNS, PROMPT_COLUMNS, Columns
from marin_rl.environments.registry import parse_options, register
from marin_rl.environments.row_files import Rows, open_rows
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.types import Example, RewardComponent, Split

SAMPLE = Path(__file__).parent / "samples" / "math.jsonl"
ANSWER_COLUMNS = ("final_answer", "answer", "solution", "ground_truth", "target", "label")
INSTRUCTION = r"Reason step by step, and put the final answer in \boxed{}."
_NESTING_MAX = 24  # parsing takes seconds from here on
_CHARACTERS_MAX = 2000  # of an expression that is no number


class MathOptions(ProblemOptions):
    """Options of `math`: problems with one right answer (docs/environments.md)."""

    answer_key: str | None = Field(
        default=None,
        min_length=1,
        description="column of the answer; null: final_answer, answer or solution",
    )
    instruction: str = Field(
        default=INSTRUCTION, description="text after every problem; empty: none"
    )
    answer_in: Literal["boxed", "any"] = Field(
        default="boxed",
        description=r"boxed: only an answer in \boxed{} is right; any: also the last expression",
    )
    correct_weight: float = Field(default=1.0, description="weight of the component correct")
    format_weight: float = Field(
        default=0.0, description=r"weight of the component format: 1 for an answer in \boxed{}"
    )


@register("math", MathOptions)
class Math(Problems):
    """Rewards an answer that equals the row's, and separately its form."""

    name = "math"

    def __init__(self, config: EnvironmentConfig, options: MathOptions | None = None) -> None:
        options = parse_options(MathOptions, config) if options is None else options
        self._math = options
        require_math_verify()
        columns = Columns(prompt=options.prompt_key, answer=options.answer_key, id=options.id_key)
        super().__init__(config, options, SAMPLE, columns)

    def load_examples(self) -> None:
        rows = open_rows(self._path)
        self._columns = _with_answer(self._columns, rows)
        super().load_examples()
        known = {*ANSWER_COLUMNS, self._columns.answer} - {None, ""}
        for index, raw in enumerate(rows.scan(frozenset(known))):
            if not gold_answer(raw.get(self._columns.answer)):
                raise InputError(
                    f"{rows.place(index)}: expected an answer in the column "
                    f"{self._columns.answer!r} (a text, the text after ####, or the last "
                    f"\\boxed{{}}), found {raw.get(self._columns.answer)!r:.80}; remove the row, "
                    "or name another column by environment.options.answer_key"
                )
        for index, raw in enumerate(rows.scan(frozenset({"modality", "image_1"}))):
            if raw.get("image_1") or raw.get("modality") == "Multimodal":
                raise InputError(
                    f"{rows.place(index)}: the problem has images, which cannot be shown to the "
                    "model: choose a file of text alone, such as OE_TO_maths_en_COMP"
                )

    def example(self, seed: int, index: int, split: Split) -> Example:
        example = super().example(seed, index, split)
        context = example.metadata.get("context")  # of OlympiadBench's problems in physics
        metadata = dict(example.metadata)
        answer = gold_answer(metadata.get(self._columns.answer or "", example.answer))
        return replace(
            self.problem(example, self._math.instruction, context=context),
            answer=answer,
            metadata={**metadata, "reference": example.answer},
        )

    def demonstration(self, example: Example) -> str | None:
        solution = example.metadata.get("solution") or example.metadata.get("reference") or ""
        text = "\n\n".join(solution) if isinstance(solution, list) else str(solution)
        text = text.partition(_GSM8K)[0].strip()
        if boxed(text) is not None:
            return text
        final = rf"\boxed{{{example.answer}}}"
        return final if text in ("", example.answer) else f"{text}\n\n{final}"

    def extract(self, completion: str) -> str | None:
        answer = boxed(completion)
        if answer is None and self._math.answer_in == "any":
            answer = (completion.strip().splitlines() or [""])[-1]
        return answer or None

    def load_scorer(self) -> None:
        load_grader()

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        answer = boxed(completion)
        if answer is None and self._math.answer_in == "any":
            right = equal_answers(example.answer or "", completion, whole=True)
        else:
            right = answer is not None and equal_answers(example.answer or "", answer)
        return self._components(completion, right=right)

    def score_of_limit(self, completion: str, limit: str) -> tuple[RewardComponent, ...]:
        """Components of an answer that sympy does not get done with: it is wrong."""
        return self._components(completion, right=False, detail=limit)

    def _components(
        self, completion: str, *, right: bool, detail: str | None = None
    ) -> tuple[RewardComponent, ...]:
        formed = float(boxed(completion) is not None)
        correct, form = self._math.correct_weight, self._math.format_weight
        return (
            RewardComponent(name="correct", value=float(right), weight=correct, detail=detail),
            RewardComponent(name="format", value=formed, weight=form),
        )


def require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "environment math needs math-verify: pip install 'marin-rl[math]', with the "
            "constraints.txt of this version"
        )


def equal_answers(gold: str, answer: str, *, whole: bool = False) -> bool:
    """Compare an answer, or a whole text's last expression, with the row's. Raises RewardFault."""
    gold, answer = unbraced(gold), unbraced(answer)
    expected, actual = written_number(gold), written_number(answer)
    if expected is not None and actual is not None:
        return same_number(expected, actual)
    if expected is not None and _is_unfit(gold):
        return False  # an integer that is too long for expressions to equal it
    if _is_unfit(gold) or not (meanings := load_grader().parsed(rf"\boxed{{{gold}}}")):
        raise RewardFault(
            f"the row's answer {gold!r:.80} is no mathematics: expected an expression of at most "
            f"{_CHARACTERS_MAX} characters and {_NESTING_MAX} levels of brackets"
        )
    if _is_unfit(answer):
        return False
    try:
        return load_grader().equal(
            meanings, load_grader().parsed(answer if whole else rf"\boxed{{{answer}}}")
        )
    except Exception:  # noqa: BLE001 - no text of a model may be left out for what sympy raises
        return False


def _is_unfit(text: str) -> bool:
    return len(text) > _CHARACTERS_MAX or nesting(text) > _NESTING_MAX


def _with_answer(columns: Any, rows: Rows) -> Any:
    """Choose the answer column by the first row. Raises InputError if the row has no answer."""
    if columns.answer is not None or not len(rows):
        return columns
    first = rows.row(0)
    present = [name for name in ANSWER_COLUMNS if isinstance(first, dict) and first.get(name)]
    if not present:
        names = ", ".join(first) if isinstance(first, dict) else "none"
        prompts = ", ".join((*OTHER_PROMPT_COLUMNS[:2], *PROMPT_COLUMNS))
        raise InputError(
            f"{rows.place(0)}: expected a problem in one of the columns {prompts} and its answer "
            f"in one of {', '.join(ANSWER_COLUMNS)}; its columns are {names}. Name one by "
            "environment.options.answer_key"
        )
    return replace(columns, answer=present[0])


@lru_cache(maxsize=1)
def load_grader() -> Any:
    """Return the comparison by math-verify, which is imported where it scores."""
    return importlib.import_module("marin_rl.environments.math_grader")


# Answers as texts: the argument of \boxed, and numbers

# A decimal that stands for a number without an end of its digits, such as 0.333333 for 1/3, may be
# off by this share of it.
RELATIVE_TOLERANCE = Fraction(1, 10**6)

_GSM8K = "####"
_WORDS_MAX = 24
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_TOKEN = re.compile(r"\\([a-zA-Z]+|.)|\S", re.DOTALL)
_ROOT = re.compile(r"\s*\[[^\]{}$]*\]")  # which root a \sqrt is
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Number of arguments of control sequences that may stand in a box without braces; else 0.
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
