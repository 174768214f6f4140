"""Prompts from files, scored by a Python function of the user's own.

Owns the options, the split into training and evaluation, and the examples, also of problems whose
answers this package checks. Rows are split by a hash of their id, so growing the file moves no row
from one to the other. Leaves out files (`row_files`), the meaning of a row (`prompt_files`),
the reward function (`reward_functions`), and right answers (`math_problems`, `code_problems`).
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.base import SHIPPED, Environment
from marin_rl.environments.prompt_files import (
    OPTIONS,
    TOOLS,
    TRAINED,
    Columns,
    PromptRow,
    demonstration_in,
    metadata_of,
    options_in,
    read_row,
    tools_in,
)
from marin_rl.environments.registry import parse_options, register
from marin_rl.environments.reward_functions import FunctionOptions, FunctionScored
from marin_rl.environments.row_files import Rows, open_rows
from marin_rl.errors import InputError
from marin_rl.types import Demonstration, Example, Message, Split

ROWS_CHECKED_MAX = 4096  # of each split, in the order of the run; some seconds


class RowOptions(Section):
    """Options of environments whose examples are rows of files."""

    prompt_key: str | None = Field(
        default=None,
        min_length=1,
        description="column of the prompt, a text or a list of messages; dotted where it lies in "
        "another; null: messages or prompt, else question, problem, instruction or input",
    )
    id_key: str | None = Field(
        default=None,
        min_length=1,
        description="column of a row's unique id; null: id, else a hash of the prompt",
    )
    system_prompt: str | None = Field(
        default=None, description="system message of rows that have none of their own"
    )
    eval_fraction: float = Field(
        default=0.1, gt=0, le=1, description="share of rows that are held out; 1: a fixed set"
    )


class RowEnvironment(Environment):
    """Examples out of rows of files; a subclass scores them."""

    def __init__(
        self, config: EnvironmentConfig, options: RowOptions, path: str, columns: Columns
    ) -> None:
        self._path, self._columns = path, columns
        self._system_prompt, self._eval_fraction = options.system_prompt, options.eval_fraction
        self._left_out = config.long_prompts if isinstance(config.long_prompts, tuple) else ()
        self._prompts: PromptSet | None = None
        self._order = lru_cache(maxsize=8)(_shuffled)
        self.eval_size = 0  # until examples are loaded

    def load_examples(self) -> None:
        rows = self._open()
        self._prompts = prompts = read_prompts(
            rows, self._columns, self._path, self._eval_fraction, self._left_out
        )
        # prompts that end before the assistant's last message are others than version 1 had
        self.version = f"{2 if prompts.counts['ends_with_assistant'] else 1}+{rows.digest}"
        self.rows_digest = rows.digest
        self._measure()

    def _open(self) -> Rows:
        return open_rows(self._path)

    def _measure(self) -> None:
        self.size, self.eval_size = (len(self._loaded.of_split[s]) for s in ("train", "eval"))

    def example(self, seed: int, index: int, split: Split) -> Example:
        """Row at `index`, in an order that is shuffled by `seed` again in each pass."""
        prompts = self._loaded
        number_of_row = self.row_number(seed, index, split)
        raw = prompts.rows.row(number_of_row)
        row = read_row(raw, self._columns)
        where = prompts.rows.place(number_of_row)
        system = ()
        if self._system_prompt is not None and row.messages[0].role != "system":
            system = (Message(role="system", content=self._system_prompt),)
        return Example(
            environment=self.name,
            environment_version=self.version,
            example_id=row.row_id + prompts.suffixes.get(number_of_row, ""),
            split=split,
            seed=seed + index,
            messages=(*system, *row.messages),
            answer=None if row.answer is None else str(row.answer),
            metadata=metadata_of(raw, row, self._columns, where),
        )

    def first_of_each_split(self, config: EnvironmentConfig) -> list[tuple[str, Example]]:
        """Return the first examples of a run and of its evaluation, by place, in file order."""
        numbered = self.numbered(config, ROWS_CHECKED_MAX)
        return [(self._loaded.rows.place(row), example) for row, example in numbered]

    def numbered(self, config: EnvironmentConfig, most: int) -> list[tuple[int, Example]]:
        """Return the first `most` examples of both splits by the numbers of their rows, sorted."""
        splits: dict[Split, tuple[int, int | None]] = {
            "train": (config.train_seed, self.size),
            "eval": (config.eval_seed, self.eval_size),
        }
        chosen = [
            (self.row_number(seed, index, split), self.example(seed, index, split))
            for split, (seed, size) in splits.items()
            for index in range(min(size or 0, most))
        ]
        return sorted(chosen, key=lambda pair: pair[0])

    def row_number(self, seed: int, index: int, split: Split) -> int:
        """Number of the row of the example at `index`. Raises InputError for an empty split."""
        prompts = self._loaded
        chosen = prompts.of_split[split]
        if not len(chosen):
            raise InputError(
                f"{self._path}: none of its {len(prompts.rows)} rows is for split "
                f"{split!r}; change environment.options.eval_fraction "
                f"({self._eval_fraction}) or add rows"
            )
        epoch, place = divmod(index, len(chosen))
        return int(chosen[int(self._order(len(chosen), seed, epoch)[place])])

    def place(self, seed: int, index: int, split: Split) -> str:
        return self._loaded.rows.place(self.row_number(seed, index, split))

    def demonstration(self, example: Example) -> str | None:
        shown = demonstration_in(example.metadata, self._columns)
        return example.answer if shown is None else shown.content

    def demonstrated(self, example: Example) -> Demonstration | None:
        learned = super().demonstrated(example)
        if learned is None:
            return None
        try:
            answer = demonstration_in(example.metadata, self._columns) or learned.answer
            tools, options = tools_in(example.metadata), options_in(example.metadata)
        except ValueError as error:
            raise InputError(f"{learned.name}: {error}") from None
        trained = example.metadata.get(TRAINED)
        return replace(learned, answer=answer, tools=tools, trained=trained, options=options)

    def check_demonstrations(self, seed: int, count: int) -> None:
        prompts = self._loaded
        chosen = prompts.of_split["train"]
        order = self._order(len(chosen), seed, 0)[:count]
        without = chosen[order][~prompts.demonstrated[chosen[order]]]
        if len(without):
            index, columns = int(without.min()), self._columns
            raise InputError(
                f"{prompts.rows.place(index)}: a warm start needs a demonstration: expected a "
                f"column {columns.completion or 'completion'}, messages that end with the "
                f"assistant's, or a column {columns.answer or 'answer'}; its columns are "
                f"{', '.join(prompts.rows.row(index))}. Name one by options.completion_key or "
                "options.answer_key, or choose another sft.environment"
            )
        learned = np.sort(chosen[order])
        others = learned[prompts.forms[learned] != prompts.forms[learned[:1]]]
        if len(others):
            first, other = int(learned[0]), int(others[0])
            named = (read_row(prompts.rows.row(n), self._columns).form for n in (first, other))
            raise InputError(
                f"{prompts.rows.place(other)}: expected a row of {next(named)}, as "
                f"{prompts.rows.place(first)}, found {next(named)}: a warm start learns rows of "
                "one form; give a file for each, or write them alike"
            )

    def check_prompts(self) -> None:
        """Raise InputError where a prompt, which completions would be sampled for, calls tools."""
        rows = self._loaded.calling
        if len(rows):
            raise InputError(
                f"{self._loaded.rows.place(int(rows[0]))}: its messages call tools, which a warm "
                f"start learns alone ({len(rows)} of {len(self._loaded.rows)} rows do): name such "
                "rows in sft.environment, and sample from prompts without calls, or from an "
                "environment with tools of its own (docs/your-environment.md)"
            )

    def notices(self, *, scored: bool = True) -> list[str]:
        sentences = {
            "ends_with_assistant": "end with an assistant's message: it is the demonstration of a "
            "warm start and no part of the prompt",
            "tools": "have a column tools, which a warm start reads; sampling offers none: a class "
            "of tools offers its own (docs/your-environment.md)",
            "options": f"have a column {OPTIONS}, which a warm start reads; prompts are sampled by "
            "environment.chat_template_options",
            "repeated": "repeat the prompt of another row",
        }
        counts = self._loaded.counts
        return [
            self._notice(counts[name], words) for name, words in sentences.items() if counts[name]
        ]

    def _notice(self, count: int, sentence: str) -> str:
        return f"{self._path}: {count} of {len(self._loaded.rows)} rows {sentence}"

    @property
    def _loaded(self) -> "PromptSet":
        if self._prompts is None:
            raise InputError(f"{self._path} is not read yet: call load_examples first")
        return self._prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Rows with the numbers of those of each split, checked.

    `suffixes` make the ids of repeated prompts differ, by the number of the row; `demonstrated`
    rows are those that a warm start can learn from, `calling` ones have prompts that call tools;
    `forms` number each row's `PromptRow.form`; `counts` are for `notices`.
    """

    rows: Rows
    of_split: dict[Split, np.ndarray]
    suffixes: dict[int, str]
    demonstrated: np.ndarray
    calling: np.ndarray
    forms: np.ndarray
    counts: dict[str, int]


def read_prompts(
    rows: Rows, columns: Columns, path: str, eval_fraction: float, left_out: Sequence[int] = ()
) -> PromptSet:
    """Read every row once. Raises InputError that names the file, the row and the remedy."""
    facts = np.zeros((7, len(rows)), bool)
    held_out, answered, demonstrated, ending, tools, options, calling = facts
    forms, numbered = np.zeros(len(rows), np.int8), dict[str, int]()
    suffixes: dict[int, str] = {}
    seen: dict[str, int] = {}
    for index, (raw, row) in enumerate(_checked_rows(rows, columns)):
        times = seen[row.row_id] = seen.get(row.row_id, 0) + 1
        if times > 1 and row.id_given:  # rows without ids may repeat a prompt
            raise InputError(
                f"{rows.place(index)}: the id {row.row_id!r} is there twice; name a column of "
                "unique ids by environment.options.id_key"
            )
        if times > 1:
            suffixes[index] = f"-{times}"
        facts[:, index] = (
            is_held_out(row.row_id, eval_fraction),
            row.answer is not None,
            row.demonstration is not None,
            row.ends_with_assistant,
            bool(raw.get(TOOLS)),
            bool(raw.get(OPTIONS)),
            any(message.tool_calls for message in row.messages),
        )
        forms[index] = numbered.setdefault(row.form, len(numbered))
    if not seen:
        raise InputError(f"{path} has no rows: expected at least two prompts")
    if columns.answer is not None and not answered.any():
        raise InputError(
            f"{rows.place(0)}: no row has a column {columns.answer!r}, which environment.options."
            f"answer_key names; its columns are {', '.join(rows.row(0))}"
        )
    numbers: dict[Split, np.ndarray] = {
        split: np.setdiff1d(np.flatnonzero(held_out == (split == "eval")), left_out)
        for split in ("train", "eval")
    }
    if left_out and not held_out.all() and not len(numbers["train"]):
        raise InputError(
            f"{path}: no row is left for training, for environment.long_prompts leaves out "
            f"{len(left_out)} of {len(rows)}: raise policy.context_length or lower "
            "sampling.max_tokens"
        )
    return PromptSet(
        rows=rows,
        of_split=numbers,
        suffixes=suffixes,
        demonstrated=answered | demonstrated,
        calling=np.flatnonzero(calling),
        forms=forms,
        counts={
            "ends_with_assistant": int(ending.sum()),
            "unanswered": int((~answered).sum()),
            "tools": int(tools.sum()),
            "options": int(options.sum()),
            "repeated": len(suffixes),
        },
    )


def _checked_rows(rows: Rows, columns: Columns) -> Iterator[tuple[Any, PromptRow]]:
    for index, raw in enumerate(rows.scan(columns.read)):
        try:
            yield raw, read_row(raw, columns)
        except ValueError as error:
            reason = error
            try:
                read_row(rows.row(index), columns)
            except ValueError as in_full:  # with all its columns, which it may list
                reason = in_full
            raise InputError(f"{rows.place(index)}: {reason}") from None


def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def is_held_out(row_id: str, eval_fraction: float) -> bool:
    part = int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8], "big") / 2**64
    return part < eval_fraction


class ChatOptions(FunctionOptions, RowOptions):
    """Options of `chat`: prompts from files, and a reward function (docs/data-and-rewards.md)."""

    path: str = Field(
        description="prompts: a JSONL or Parquet file, a folder of Parquet files, a pattern such "
        "as data/train-*.parquet, or a folder saved by datasets.save_to_disk"
    )
    answer_key: str | None = Field(
        default=None,
        min_length=1,
        description="column of the answer; null: answer, else ground_truth, solution, label, "
        "target or reward_model.ground_truth",
    )
    completion_key: str | None = Field(
        default=None,
        min_length=1,
        description="column of the demonstration for a warm start; null: completion, else the "
        "assistant's message that messages end with, else the answer",
    )


@register("chat", ChatOptions)
class Chat(FunctionScored, RowEnvironment):
    """Rewards what the function returns: a number, or a mapping of names to numbers."""

    name = "chat"

    def __init__(self, config: EnvironmentConfig, options: ChatOptions | None = None) -> None:
        options = parse_options(ChatOptions, config) if options is None else options
        FunctionScored.__init__(self, options)
        columns = Columns(
            prompt=options.prompt_key,
            answer=options.answer_key,
            completion=options.completion_key,
            id=options.id_key,
        )
        RowEnvironment.__init__(self, config, options, options.path, columns)

    def notices(self, *, scored: bool = True) -> list[str]:
        notices, n = super().notices(scored=scored), self._loaded.counts["unanswered"]
        if scored and n and self._functions.reward in SHIPPED:  # compares with the row's answer
            reward = self.reward_name.partition(":")[2]
            notices.append(self._notice(n, f"have no answer: {reward} gives them 0"))
        return notices


class ProblemOptions(RowOptions):
    """Options of environments of problems from files."""

    path: str | None = Field(
        default=None, description="problems, as `path` of chat; null: a sample that comes along"
    )
    instruction: str = Field(default="", description="text after every problem; empty: none")
    reward_workers: int = Field(default=1, ge=1, le=64, description="processes that check answers")


class Problems(RowEnvironment):
    """Problems from files, whose answers this package checks, one completion at a time.

    A subclass defines `extract`, `load_scorer` and `score`.
    """

    extracts_here = True

    def __init__(
        self, config: EnvironmentConfig, options: ProblemOptions, sample: Path, columns: Columns
    ) -> None:
        super().__init__(config, options, options.path or str(sample), columns)
        self.workers, self.reward_name = options.reward_workers, self.name

    def problem(self, example: Example, *after: str, context: str | None = None) -> Example:
        """Return `example` with texts before and after its last, an empty line between them."""
        *before, problem = example.messages
        text = "\n\n".join(filter(None, (context, problem.content, *after)))
        return replace(example, messages=(*before, Message(role=problem.role, content=text)))
