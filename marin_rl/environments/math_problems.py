r"""Mathematics with one right answer: rows of GSM8K, MATH and OlympiadBench, and math-verify.

Answers are compared as mathematics: 1/2, 0.5 and \frac{1}{2} are equal. math-verify parses any text
that a model writes with sympy, which may take for ever, so it runs in worker processes with a time
limit. Leaves out files and the split (`chat`), and the processes (`scoring`).
"""

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.problems import ProblemOptions, Problems
from marin_rl.environments.prompt_files import Rows, open_rows
from marin_rl.environments.prompt_rows import OTHER_PROMPT_COLUMNS, PROMPT_COLUMNS
from marin_rl.environments.registry import parse_options, register
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.types import Example, RewardComponent, Split

SAMPLE = Path(__file__).parent / "samples" / "math.jsonl"
ANSWER_COLUMNS = ("final_answer", "answer", "solution", "ground_truth", "target", "label")
INSTRUCTION = r"Reason step by step, and put the final answer in \boxed{}."
_GSM8K = "####"


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


@register("math")
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
        """Read and check every row. Raises InputError for one without an answer or with images."""
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
        """Row at `index`, as a problem that ends with the instruction."""
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
        r"""The row's solution, ending with the answer in \boxed{}."""
        solution = example.metadata.get("solution") or example.metadata.get("reference") or ""
        text = "\n\n".join(solution) if isinstance(solution, list) else str(solution)
        text = text.partition(_GSM8K)[0].strip()
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
        """Import math-verify, once in each worker."""
        _verifier()

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """Components `correct` and `format`. Raises RewardFault for an unfit reference answer."""
        parse, verify = _verifier()
        gold = parse(rf"\boxed{{{example.answer}}}")
        if not gold:
            raise RewardFault(f"the answer {example.answer!r:.80} is no mathematics")
        formed = boxed(completion) is not None
        answer = None
        if formed:
            answer = parse(rf"\boxed{{{boxed(completion)}}}")
        elif self._math.answer_in == "any":
            answer = parse(completion)
        correct = bool(answer) and verify(gold, answer)
        return (
            RewardComponent(name="correct", value=float(correct), weight=self._math.correct_weight),
            RewardComponent(name="format", value=float(formed), weight=self._math.format_weight),
        )


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


_WORDS_MAX = 24


def boxed(text: str) -> str | None:
    r"""Content of the last \boxed{…} of a text, None where none is there and closed."""
    for start in reversed(list(_starts(text))):
        depth = 0
        for place in range(start, len(text)):
            if text[place] == "{" and text[place - 1] != "\\":
                depth += 1
            elif text[place] == "}" and text[place - 1] != "\\":
                depth -= 1
                if depth == 0:
                    return text[start + 1 : place].strip() or None
    return None


def _starts(text: str) -> Iterator[int]:
    """Places of the opening braces."""
    for macro in (r"\boxed{", r"\fbox{"):
        place = text.find(macro)
        while place >= 0:
            yield place + len(macro) - 1
            place = text.find(macro, place + 1)


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
def _verifier() -> Any:
    """Return math-verify's `parse` and `verify` without their alarms: workers have limits."""
    library = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that alarms are off

    def parse(text: str) -> Any:
        return library.parse(text, parsing_timeout=None)

    def verify(gold: Any, answer: Any) -> bool:
        return library.verify(gold, answer, timeout_seconds=None)

    return parse, verify
