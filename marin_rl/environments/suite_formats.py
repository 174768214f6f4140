"""Benchmarks by name (`suites.yaml`): their rows, the prompts around a row, and their files.

Leaves out sampling and scores (`suites`).
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from marin_rl.config import Section
from marin_rl.environments.math_problems import gold_answer, written_number
from marin_rl.environments.row_files import missing
from marin_rl.errors import ConfigError, InputError

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
