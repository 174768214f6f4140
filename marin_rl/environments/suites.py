"""Benchmarks by name, from the files that they are published as: `environment.name: suite`.

Owns the shape of rows and the words of prompts (suites.yaml), the options, the examples, and how an
answer is scored. `environment_version` of the rows has the prompt and the SHA-256 of the files of
rows and of worked examples.
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.answers import last_number, number_match
from marin_rl.environments.chat import ProblemOptions, Problems
from marin_rl.environments.code_problems import call, last_block
from marin_rl.environments.math_problems import (
    boxed,
    equal_answers,
    gold_answer,
    load_grader,
    require_math_verify,
    written_number,
)
from marin_rl.environments.prompt_files import Columns
from marin_rl.environments.registry import parse_options, register
from marin_rl.environments.row_files import Rows, missing, rows_of
from marin_rl.environments.sandbox_tools import SandboxOptions
from marin_rl.errors import ConfigError, InputError
from marin_rl.types import Example, Message, RewardComponent, Split

LETTERS = ("A", "B", "C", "D")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz")
_SPLITS = {"test", "train", "dev", "val", "validation"}
_WHOLE = {"main", "all"}  # folders of the rows that are meant where there are parts of them too

Fields = Mapping[str, Any]


class Prompt(Section):
    """Words of a prompt: `ask` around a row's fields, after `head` and `shots` rows with `answer`.

    A `plain` prompt goes without the chat template. With `choices` the answer is the one that is
    likeliest as the next token. `max_tokens` is the usual limit.
    """

    ask: str
    max_tokens: int
    answer: str = ""
    head: str = ""
    shots: int = 0
    plain: bool = False
    choices: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()

    def text(self, row: Fields, shots: Sequence[Fields]) -> str:
        shown = [self.ask.format_map(shot) + self.answer.format_map(shot) for shot in shots]
        return self.head.format_map(row) + "\n\n".join([*shown, self.ask.format_map(row)])


class SuiteFormat(Section):
    """Rows and prompts of a suite."""

    columns: tuple[str, ...]
    prompts: dict[str, Prompt]
    answer: str | None = None
    id: str | None = None
    header: tuple[str, ...] = ()
    split: str = "test"
    shots_split: str = "train"


SUITES = {
    name: SuiteFormat.model_validate(entry)
    for name, entry in yaml.safe_load(Path(__file__).with_name("suites.yaml").read_text()).items()
}


def prompt_of(suite: str, name: str | None) -> tuple[str, Prompt]:
    """A suite's prompt of a name, or its first. Raises ConfigError that names the nearest."""
    if suite == "ifeval":
        raise ConfigError(
            "ifeval is not among the suites: its checks need nltk and langdetect, which are no "
            "dependencies here; lm-evaluation-harness has them (docs/serving.md)"
        )
    _check_known(suite, [*SUITES], "suite")
    prompts = SUITES[suite].prompts
    chosen = name or next(iter(prompts))
    _check_known(chosen, [*prompts], f"prompt of {suite}")
    return chosen, prompts[chosen]


def _check_known(name: str, known: Sequence[str], key: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{key}: expected one of {', '.join(known)}, found {name!r:.80}{hint}")


def read_fields(suite: str, row: Any, path: Path) -> dict[str, Any]:
    """Fields of a row, with the right answer as `gold`. Raises ValueError for other rows."""
    columns = SUITES[suite].columns
    if not isinstance(row, dict) or any(row.get(name) is None for name in columns):
        found = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)
        raise ValueError(
            f"expected a row of {suite} with the columns {', '.join(columns)}, found "
            f"{found or 'none':.200}"
        )
    return {**row, "gold": None, **_FIELDS[suite](row, path)}


def _gsm8k(row: Fields, path: Path) -> Fields:
    gold = gold_answer(row["answer"])
    if "####" not in str(row["answer"]) or gold is None or written_number(gold) is None:
        raise ValueError(
            f"answer: expected a solution that ends in '#### NUMBER', found {row['answer']!r:.80}"
        )
    return {"gold": gold}


def _humaneval(row: Fields, path: Path) -> Fields:
    name = str(row["entry_point"])
    if not name.isidentifier() or f"def {name}" not in str(row["prompt"]):
        raise ValueError(f"prompt: expected it to begin the function {name!r:.80} (entry_point)")
    if "def check(" not in str(row["test"]):
        raise ValueError(f"test: expected a function check(candidate), found {row['test']!r:.80}")
    return {}


def _mmlu(row: Fields, path: Path) -> Fields:
    # rows of the CSV files have the choices in four columns, and their subject in the file's name
    choices, gold = row.get("choices") or [row.get(each) for each in LETTERS], row["answer"]
    if not isinstance(choices, list) or len(choices) != len(LETTERS) or None in choices:
        raise ValueError(f"choices: expected {len(LETTERS)} of them, found {choices!r:.80}")
    if type(gold) is int and 0 <= gold < len(LETTERS):
        gold = LETTERS[gold]
    if gold not in LETTERS:
        raise ValueError(f"answer: expected 0 to 3 or A to D, found {gold!r:.80}")
    subject = str(row.get("subject") or re.sub(r"_(test|dev|val)$", "", path.stem))
    question, shown = str(row["question"]).strip(), subject.replace("_", " ")
    return {"question": question, "choices": choices, "gold": gold, "subject": shown}


_FIELDS: Mapping[str, Callable[[Fields, Path], Fields]] = {
    "gsm8k": _gsm8k,
    "math500": lambda row, path: {"gold": str(row["answer"])},
    "humaneval": _humaneval,
    "mmlu": _mmlu,
}


def _words(path: Path | str) -> list[str]:
    return re.findall("[a-z0-9]+", str(path).lower())


def files_of(suite: str, text: str, split: str | None = None) -> list[Path]:
    """A suite's files: one, those of a pattern, or in a folder by its name and the split's.

    Files of another `split` than the suite's are found by its name alone; there may be none. Raises
    InputError where several could be meant.
    """
    place, wanted = Path(text).absolute(), split or SUITES[suite].split
    if place.exists() and not place.is_dir():
        return [place]
    if "*" in place.name and (found := sorted(place.parent.glob(place.name))):
        return found
    if not place.is_dir():
        raise missing(place, str(place))
    files = [file for file in sorted(place.rglob("*")) if file.name.endswith(SUFFIXES)]
    words = {file: _words(file.relative_to(place)) for file in files}
    here = "".join(_words(place.name))
    own = [file for file in files if suite in here + "".join(words[file])] or files
    own = [file for file in own if _WHOLE & {*words[file]}] or own
    chosen = [file for file in own if wanted in words[file]]
    if chosen or split:
        return chosen
    chosen = [file for file in own if not _SPLITS & {*words[file]}]
    if len(chosen) != 1:
        found = ", ".join(str(file.relative_to(place)) for file in own[:8]) or "none"
        raise InputError(
            f"{place}: expected one file of {suite}, or files of its split {wanted!r} (both names "
            f"in their paths, ending in {', '.join(SUFFIXES)}), found {found}; name one by --data "
            "FILE (options.path)"
        )
    return chosen


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
