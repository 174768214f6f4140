"""Benchmarks by name, from the files that they are published as: `environment.name: suite`.

Owns the options, the examples, and how an answer is scored. `environment_version` of the rows has
the prompt and the SHA-256 of the files of rows and of worked examples. Leaves out the shape of rows
and the words of prompts (`suite_formats`).
"""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.answers import last_number, number_match
from marin_rl.environments.chat import ProblemOptions, Problems
from marin_rl.environments.code_problems import call, last_block
from marin_rl.environments.math_problems import (
    boxed,
    equal_answers,
    load_grader,
    require_math_verify,
)
from marin_rl.environments.prompt_files import Columns
from marin_rl.environments.registry import parse_options, register
from marin_rl.environments.row_files import Rows, rows_of
from marin_rl.environments.sandbox_tools import SandboxOptions
from marin_rl.environments.suite_formats import SUITES, files_of, prompt_of, read_fields
from marin_rl.errors import ConfigError, InputError
from marin_rl.types import Example, Message, RewardComponent, Split

_ANSWER_IS = re.compile(r"answer\W+(?:is\W+)?([A-D])\b", re.IGNORECASE)
_VERDICT = "\ndef passed():\n    check({name})\n    return True\n"


class SuiteOptions(SandboxOptions, ProblemOptions):
    """Options of `suite`: benchmarks by name (docs/reading-runs.md)."""

    suite: str = Field(description=f"one of {', '.join(SUITES)}")
    path: str | None = Field(
        default=None, description="file or pattern, or a folder that has it by the suite's name"
    )
    shots_path: str | None = Field(
        default=None, description="file of worked examples; null: that of their split, next to it"
    )
    prompt: str | None = Field(default=None, description="a prompt's name; null: the suite's first")
    max_tokens: int | None = Field(
        default=None, ge=1, description="new tokens per completion; null: sampling.max_tokens"
    )
    eval_fraction: float = Field(
        default=1.0, gt=0, le=1, description="share of rows that are held out; 1: a fixed set"
    )
    program_timeout_s: float = Field(
        default=4.0, gt=0, le=3600, description="seconds of a program of humaneval with its tests"
    )


@register("suite", SuiteOptions)
class Suite(Problems):
    """Rewards a right answer, by the rules of the suite."""

    name = "suite"

    def __init__(self, config: EnvironmentConfig) -> None:
        self._options = options = parse_options(SuiteOptions, config)
        self.prompt_name, self.prompt = prompt_of(options.suite, options.prompt)
        self.format = SUITES[options.suite]
        if options.path is None:
            raise ConfigError(f"environment.options.path: expected that of {options.suite}")
        if unused := {"prompt_key", "id_key", "instruction"} & options.model_fields_set:
            raise ConfigError(f"environment.options.{min(unused)}: prompts of a suite have a name")
        if options.program_timeout_s >= config.reward_timeout_s:
            raise ConfigError(
                "environment.options.program_timeout_s: expected less than "
                f"environment.reward_timeout_s {config.reward_timeout_s:g}"
            )
        if options.suite == "math500":
            require_math_verify()
        columns = Columns(
            prompt=self.format.columns[0], answer=self.format.answer, id=self.format.id
        )
        super().__init__(config, options, Path(), columns)
        self.plain_prompts, self.stop = self.prompt.plain, self.prompt.stop
        self.choices = self.prompt.choices
        self.new_tokens_max = 1 if self.choices else options.max_tokens

    def load_examples(self) -> None:
        """Check every row before anything is sampled, and read the worked examples."""
        options = self._options
        if options.suite == "humaneval":
            options.check_sandbox()
        files = files_of(options.suite, self._path)
        self._rows = rows_of(files, self.format.header)
        fields = [self._fields(self._rows, index) for index in range(len(self._rows))]
        if not fields:
            raise InputError(
                f"{files[0]} has no rows: expected those of {options.suite}, with the columns "
                f"{', '.join(self.format.columns)}"
            )
        super().load_examples()
        self.version = f"{options.suite} {self.prompt_name} {self._rows.sha256}"
        shown = {"rows": ", ".join(map(str, files[:3])), "sha256": self._rows.sha256}
        self.record = {"prompt": self.prompt_name, **shown}
        if self.prompt.shots:
            self._read_shots({row.get("subject", "") for row in fields})

    def _open(self) -> Rows:
        return self._rows

    def _fields(self, rows: Rows, index: int) -> dict[str, Any]:
        row = rows.row(index)
        try:
            return read_fields(self._options.suite, row, rows.path(index))
        except ValueError as error:
            raise InputError(f"{rows.place(index)}: {error}") from None

    def _read_shots(self, subjects: Collection[str]) -> None:
        """Keep the first rows of another split; of each subject where there are subjects."""
        suite, split, needed = self._options.suite, self.format.shots_split, self.prompt.shots
        folder = self._path if Path(self._path).is_dir() else str(Path(self._path).parent)
        files = files_of(suite, self._options.shots_path or folder, split)
        rows = rows_of(files, self.format.header)
        self._shots: dict[str, list[dict[str, Any]]] = {subject: [] for subject in subjects}
        for index in range(len(rows)):
            fields = self._fields(rows, index)
            self._shots.get(fields.get("subject", ""), []).append(fields)
        for subject, shots in self._shots.items():
            if len(shots) < needed:
                raise InputError(
                    f"prompt {self.prompt_name} of {suite} needs {needed} worked examples "
                    f"{subject and f'of {subject} '}from the split {split!r}: found {len(shots)} "
                    f"in {', '.join(map(str, files[:3])) or folder}; name their file by "
                    f"options.shots_path, or choose one of {', '.join(self.format.prompts)}"
                )
            del shots[needed:]
        shown = {"shots": ", ".join(map(str, files[:3])), "shots_sha256": rows.sha256}
        self.record = {**self.record, **shown}
        self.version += f" {rows.sha256}"

    def example(self, seed: int, index: int, split: Split) -> Example:
        if split == "train" and self.prompt.plain:
            raise ConfigError(
                f"environment.options.prompt: {self.prompt_name} is for evaluations, without the "
                f"chat template; expected {next(iter(self.format.prompts))} for training"
            )
        example = super().example(seed, index, split)
        fields = self._fields(self._rows, self.row_number(seed, index, split))
        shots = self._shots[fields.get("subject", "")] if self.prompt.shots else ()
        *system, _ = example.messages
        asked = Message(role="user", content=self.prompt.text(fields, shots))
        more = {"prompt": fields["prompt"]} if self._options.suite == "humaneval" else {}
        return replace(
            example,
            messages=(asked,) if self.prompt.plain else (*system, asked),
            answer=fields["gold"],
            metadata={**example.metadata, **more},
        )

    def extract(self, completion: str) -> str | None:
        """The answer that a completion gives: a number, a letter, a program, or its text."""
        match self._options.suite:
            case "gsm8k":
                return last_number(boxed(completion) or completion)
            case "math500":
                return boxed(completion) or (completion.strip().splitlines() or [""])[-1] or None
            case "mmlu":
                return letter_of(completion)
            case _:
                return last_block(completion) or completion.strip() or None

    def load_scorer(self) -> None:
        if self._options.suite == "math500":
            load_grader()
        if self._options.suite == "humaneval":
            self._box = self._options.box(self._options.program_timeout_s)

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        match self._options.suite:
            case "gsm8k":
                return _correct(number_match(example, boxed(completion) or completion) == 1)
            case "math500":
                answer = boxed(completion)
                whole = answer is None and self.prompt.plain
                right = (answer is not None or whole) and equal_answers(
                    example.answer or "", answer or completion, whole=whole
                )
                return _correct(right)
            case "mmlu":
                return _correct(letter_of(completion) == example.answer)
            case _:
                return _correct(self._passes(example, completion))

    def score_of_limit(self, completion: str, limit: str) -> tuple[RewardComponent, ...]:
        """0: an answer that sympy does not get done with is wrong."""
        return (RewardComponent(name="correct", value=0.0, detail=limit),)

    def _passes(self, example: Example, completion: str) -> bool:
        """Run the row's assertions; a program may have all of the function, or only its body."""
        row, text = example.metadata, completion
        if not self.prompt.plain:
            text = f"\n{last_block(completion) or ''}\n"
        verdict = _VERDICT.format(name=row["entry_point"])
        program = f"{row['prompt']}{text}\n{row['test']}\n{verdict}"
        return call(self._box, program, "passed", ()) == (True,)


def letter_of(completion: str) -> str | None:
    """The letter that an answer begins with, that it says the answer is, or that it has at last."""
    text = boxed(completion) or completion
    if first := re.match(r"\W*([A-D])\b(?!\W[a-z])", text):
        return first[1]
    said = _ANSWER_IS.findall(text) or re.findall(r"\b([A-D])\b", text)
    return said[-1].upper() if said else None


def _correct(right: bool) -> tuple[RewardComponent, ...]:  # noqa: FBT001
    return (RewardComponent(name="correct", value=float(right)),)
