"""Prompts from a JSONL or Parquet file, scored by a Python function given by import path.

A row has `messages` (a list of role and content) or `prompt` (a string), and may have `id`,
`answer` and anything else, which becomes the example's metadata. Rows are split into training and
evaluation by a hash of their id, so growing the file moves no row from one to the other.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.base import SHIPPED, number, parse_options, plain_json, register
from marin_rl.errors import InputError
from marin_rl.types import Example, Message, RewardComponent, Split

Reward = Callable[[Example, str], Any]

_ROLES = ("system", "user", "assistant", "tool")


class ChatOptions(Section):
    """Options of `chat`."""

    path: str = Field(description="JSONL or Parquet file of prompts")
    reward: str = Field(
        default="marin_rl.environments.answers:exact_match",
        pattern=r"^[\w.]+:\w+$",
        description="module:function(example, completion) -> number",
    )
    extract: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:\w+$",
        description="module:function(completion) -> answer or None, for majority votes; null: all "
        "of the completion",
    )
    reward_weights: dict[str, float] = Field(
        default={}, description="weight by component name; 1 if not"
    )
    reward_workers: int = Field(
        default=1, ge=1, le=64, description="processes that run the function"
    )
    eval_fraction: float = Field(
        default=0.1, gt=0, le=1, description="share of rows that are held out; 1: a fixed set"
    )


@register("chat")
class Chat:
    """Rewards what the function returns: a number, or a mapping of names to numbers."""

    name = "chat"

    def __init__(self, config: EnvironmentConfig) -> None:
        self._options = parse_options(ChatOptions, config)
        check_importable(self._options.reward)
        self._path = Path(self._options.path)
        self._rows: dict[Split, list[dict[str, Any]]] = {"train": [], "eval": []}
        self._reward: Reward | None = None
        if self._options.extract is not None:
            check_importable(self._options.extract)
        self._order = lru_cache(maxsize=8)(_shuffled)
        self.version = "1"
        self.size: int | None = None
        self.workers = self._options.reward_workers

    def load_examples(self) -> None:
        """Read the file. Its digest becomes part of the version, so that a changed one is seen."""
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise InputError(
                f"environment.options.path: cannot read {self._path}: {error}"
            ) from None
        self._rows = _rows_of(self._path, data, self._options.eval_fraction)
        self.version = f"1+{hashlib.sha256(data).hexdigest()[:12]}"
        self.size = len(self._rows["train"])

    @property
    def eval_size(self) -> int:
        """Number of rows for evaluation."""
        return len(self._rows["eval"])

    def example(self, seed: int, index: int, split: Split) -> Example:
        """Row at `index`, in an order that is shuffled by `seed` again in each pass."""
        rows = self._rows[split]
        if not rows:
            total = sum(len(part) for part in self._rows.values())
            raise InputError(
                f"{self._path}: none of its {total} rows is for split {split!r}; change "
                f"environment.options.eval_fraction ({self._options.eval_fraction}) or add rows"
            )
        epoch, place = divmod(index, len(rows))
        row = rows[int(self._order(len(rows), seed, epoch)[place])]
        return Example(
            environment=self.name,
            environment_version=self.version,
            example_id=row["id"],
            split=split,
            seed=seed + index,
            messages=row["messages"],
            answer=row["answer"],
            metadata=row["metadata"],
        )

    def demonstration(self, example: Example) -> str | None:
        """The answer that the prompt file gives, if it does."""
        return example.answer

    @property
    def extracts_here(self) -> bool:
        """False where a function of others extracts."""
        return self._options.extract is None or self._options.extract in SHIPPED

    def extract(self, completion: str) -> str | None:
        """Answer that the user's function extracts. Raises InputError, or its exception."""
        if self._options.extract is None:
            return completion.strip() or None
        return _function(self._options.extract)(completion)

    def load_scorer(self) -> None:
        """Import the reward function. Raises InputError where that does not work."""
        self._reward = _function(self._options.reward)

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """Reward components by the user's function. Raises what the function raises."""
        assert self._reward is not None, "load_scorer comes before score"
        value = self._reward(example, completion)
        named = value if isinstance(value, Mapping) else {"reward": value}
        weights = self._options.reward_weights
        return tuple(
            RewardComponent(name=str(name), value=number(part), weight=weights.get(name, 1.0))
            for name, part in named.items()
        )


def check_importable(path: str) -> None:
    """Refuse a module that is not there, without running it. Raises InputError."""
    module = path.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise InputError(f"reward function {path!r}: {error}") from error
    if spec is None:
        raise InputError(f"reward function {path!r}: no module named {module!r} on sys.path")


def _function(path: str) -> Callable[..., Any]:
    """Import the function that a path names. Raises InputError."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"reward function {path!r}: {error}") from error
    if not callable(function):
        raise InputError(f"reward function {path!r} is not callable")
    return function


def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def _rows_of(path: Path, data: bytes, eval_fraction: float) -> dict[Split, list[dict[str, Any]]]:
    """Read and check every row, by split. Raises InputError naming the line."""
    splits: dict[Split, list[dict[str, Any]]] = {"train": [], "eval": []}
    raws = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path, data)
    seen: set[str] = set()
    for place, raw in raws:
        row = _row(raw, f"{path}, {place}")
        if row["id"] in seen:
            raise InputError(f"{path}, {place}: the id {row['id']!r} is there twice")
        seen.add(row["id"])
        splits[_split_of(row["id"], eval_fraction)].append(row)
    if not seen:
        raise InputError(f"{path} has no rows: expected at least two prompts")
    return splits


def _json_rows(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    for place, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {place}", orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise InputError(f"{path}, line {place} is not JSON: {error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # pyarrow takes a third of a second to import, and few runs have Parquet prompts.
    import pyarrow as pa
    import pyarrow.dataset

    try:
        table = pyarrow.dataset.dataset(path, format="parquet").to_table()
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error
    for index, row in enumerate(table.to_pylist()):
        yield f"row {index}", {key: value for key, value in row.items() if value is not None}


def _row(raw: Any, where: str) -> dict[str, Any]:
    """Return the fields of a prompt's example. Raises InputError saying what is missing."""
    if not isinstance(raw, dict) or ("messages" in raw) == ("prompt" in raw):
        raise InputError(f"{where}: expected an object with either messages or prompt")
    raws = raw.get("messages", [{"role": "user", "content": raw.get("prompt")}])
    if not isinstance(raws, list) or not raws:
        raise InputError(f"{where}: expected messages as a list that is not empty")
    messages = tuple(_message(item, where) for item in raws)
    answer = raw.get("answer")
    metadata = {k: v for k, v in raw.items() if k not in ("messages", "prompt", "answer", "id")}
    text = orjson.dumps([[message.role, message.content] for message in messages])
    return {
        "id": str(raw.get("id", hashlib.sha256(text).hexdigest()[:16])),
        "messages": messages,
        "answer": None if answer is None else str(answer),
        "metadata": plain_json(metadata, where),
    }


def _message(item: Any, where: str) -> Message:
    role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (0, 0)
    if role not in _ROLES or not isinstance(content, str):
        raise InputError(
            f"{where}: expected a message with a role ({', '.join(_ROLES)}) and content, found "
            f"{item!r:.80}"
        )
    return Message(role=role, content=content)


def _split_of(identity: str, eval_fraction: float) -> Split:
    part = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") / 2**64
    return "eval" if part < eval_fraction else "train"
