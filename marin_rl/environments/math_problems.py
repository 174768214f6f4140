r"""Mathematics with one right answer: rows of GSM8K, MATH and OlympiadBench, and math-verify.

Answers are compared as mathematics: 1/2, 0.5 and \frac{1}{2} are equal. math-verify parses any text
that a model writes with sympy, which may take for ever, so it runs in worker processes with a time
limit. Leaves out files and the split (`chat`), and the processes (`scoring`).
"""

import importlib
import importlib.util
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.math_answers import (
    before_answer,
    boxed,
    gold_answer,
    nesting,
    same_number,
    unbraced,
    written_number,
)
from marin_rl.environments.problems import ProblemOptions, Problems
from marin_rl.environments.prompt_files import Rows, open_rows
from marin_rl.environments.prompt_rows import OTHER_PROMPT_COLUMNS, PROMPT_COLUMNS
from marin_rl.environments.registry import parse_options, register
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
    """Rewards an answer that equals the row's, and in a component of its own the form of it."""

    name = "math"

    def __init__(self, config: EnvironmentConfig, options: MathOptions | None = None) -> None:
        options = parse_options(MathOptions, config) if options is None else options
        self._math = options
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "environment math needs math-verify: pip install 'marin-rl[math]', with the "
                "constraints.txt of this version"
            )
        super().__init__(config, options.chat_options(SAMPLE, answer_key=options.answer_key))

    def load_examples(self) -> None:
        rows = open_rows(self._options.path)
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
        text = before_answer(text)
        if boxed(text) is not None:
            return text
        final = rf"\boxed{{{example.answer}}}"
        return final if text in ("", example.answer) else f"{text}\n\n{final}"

    def extract(self, completion: str) -> str | None:
        r"""Content of the last \boxed{}; for `answer_in: any` without one, the last line."""
        answer = boxed(completion)
        if answer is None and self._math.answer_in == "any":
            answer = (completion.strip().splitlines() or [""])[-1]
        return answer or None

    def load_scorer(self) -> None:
        _grader()

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        answer = boxed(completion)
        if answer is None and self._math.answer_in == "any":
            right = _equal(example.answer or "", completion, whole=True)
        else:
            right = answer is not None and _equal(example.answer or "", answer)
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


def _equal(gold: str, answer: str, *, whole: bool = False) -> bool:
    """Compare an answer, or the last expression of a whole text, with the row's.

    Raises RewardFault where the row's is no mathematics; an answer that is none is wrong.
    """
    gold, answer = unbraced(gold), unbraced(answer)
    expected, actual = written_number(gold), written_number(answer)
    if expected is not None and actual is not None:
        return same_number(expected, actual)
    if expected is not None and _is_unfit(gold):
        return False  # an integer that is too long for expressions to equal it
    if _is_unfit(gold) or not (meanings := _grader().parsed(rf"\boxed{{{gold}}}")):
        raise RewardFault(
            f"the row's answer {gold!r:.80} is no mathematics: expected an expression of at most "
            f"{_CHARACTERS_MAX} characters and {_NESTING_MAX} levels of brackets"
        )
    if _is_unfit(answer):
        return False
    try:
        return _grader().equal(
            meanings, _grader().parsed(answer if whole else rf"\boxed{{{answer}}}")
        )
    except Exception:  # noqa: BLE001 - no text of a model may be left out for what sympy raises
        return False


def _is_unfit(text: str) -> bool:
    return len(text) > _CHARACTERS_MAX or nesting(text) > _NESTING_MAX


def _with_answer(columns: Any, rows: Rows) -> Any:
    """Choose the column of answers by the first row. Raises InputError where there is none."""
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
def _grader() -> Any:
    """Return the comparison by math-verify, which is imported where it scores."""
    return importlib.import_module("marin_rl.environments.math_grader")
