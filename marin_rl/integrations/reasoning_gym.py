"""Any dataset of reasoning-gym by name, and mixtures of them with weights.

The item at index i of a dataset with seed s is made from s + i, which is why seeds of training and
evaluation must lie apart. Its scorers parse, evaluate and search on any text a model writes, and
some of them hang or catch everything: they run in a worker process.
"""

import difflib
import importlib
import random
import warnings
from functools import lru_cache
from typing import Any

from pydantic import Field, model_validator

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.base import plain_json
from marin_rl.environments.base_environment import BaseEnvironment
from marin_rl.environments.registry import parse_options, register
from marin_rl.errors import ConfigError
from marin_rl.finite import number
from marin_rl.types import Example, Message, RewardComponent, Split

# Datasets that prepare all their items when they are made, or refuse to have many.
_SIZES = {"acre": 2_000, "gsm_symbolic": 100_000, "list_functions": 100_000, "word_ladder": 10_000}
_ENDLESS = 2**31 - 1

# Datasets that seed NumPy's old generator, which takes 32 bits: a seed and an index below 2**31.
_SHORT_SEEDED = ("pool_matrix",)
_SHORT_PERIOD = 2**31

# A dataset is made per base seed; a process meets those of training and evaluation.
_DATASETS_KEPT = 8


@lru_cache(maxsize=1)
def _library() -> Any:
    # takes seconds to import
    with warnings.catch_warnings():
        # one of its dependencies compiles with SyntaxWarnings, which are no business of our users
        warnings.simplefilter("ignore", SyntaxWarning)
        importlib.import_module("reasoning_gym.composite")
        return importlib.import_module("reasoning_gym")


class MixtureItem(Section):
    """Dataset of a mixture."""

    dataset: str = Field(description="name of a reasoning-gym dataset")
    weight: float = Field(default=1.0, gt=0, le=1e6, description="relative share of the examples")
    config: dict[str, Any] = Field(default={}, description="parameters of the dataset")


class Demonstration(Section):
    """Way in which the answer is written in supervised examples."""

    text: str = Field(
        default="{answer}", description="{answer}, {question} and the item's metadata by name"
    )
    weight: float = Field(
        default=1.0, gt=0, le=1e6, description="relative share of the demonstrations"
    )


class ReasoningGymOptions(Section):
    """Options of `reasoning_gym`: either `dataset` with its `config`, or a `mixture`."""

    dataset: str | None = Field(default=None, description="name of a reasoning-gym dataset")
    config: dict[str, Any] = Field(default={}, description="parameters of the dataset")
    mixture: tuple[MixtureItem, ...] = Field(default=(), description="datasets with weights")
    system_prompt: str | None = Field(
        default=None, description="system message before every question"
    )
    prompt: str = Field(
        default="{question}", description="user message; {question} and the item's metadata by name"
    )
    demonstrations: tuple[Demonstration, ...] = Field(
        default=(Demonstration(),),
        min_length=1,
        description="ways to write the answer in a warm start",
    )
    answer_tag: str | None = Field(
        default=None,
        pattern="^[A-Za-z_]+$",
        description="score only what stands in the last <tag>…</tag>; null: all",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "ReasoningGymOptions":
        if (self.dataset is None) == (not self.mixture):
            raise ValueError("give either dataset (with config) or mixture")
        names = [item.dataset for item in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f"a mixture names each dataset once, found {', '.join(names)}")
        return self


@register("reasoning_gym", ReasoningGymOptions)
class ReasoningGym(BaseEnvironment):
    """Rewards what the dataset's own `score_answer` says, partial credit included."""

    name = "reasoning_gym"
    workers = 1
    extracts_here = True

    def __init__(self, config: EnvironmentConfig) -> None:
        self._options = parse_options(ReasoningGymOptions, config)
        self.version = f"1+reasoning-gym.{_library().__version__}"
        only = {"dataset": self._options.dataset or "", "config": self._options.config}
        self._items = self._options.mixture or (MixtureItem(**only),)
        sizes = [_size_of(item) for item in self._items]
        self.size = min(sizes) if min(sizes) < _ENDLESS else None
        short = any(item.dataset in _SHORT_SEEDED for item in self._items)
        self.seed_period = _SHORT_PERIOD if short else None
        self._dataset = lru_cache(maxsize=_DATASETS_KEPT)(self._make)

    def example(self, seed: int, index: int, split: Split) -> Example:
        entry = self._entry(seed, index)
        metadata = plain_json(entry["metadata"], f"reasoning-gym item {seed} + {index}")
        answer, tag = entry["answer"], self._options.answer_tag
        if answer is not None:
            answer = str(answer) if tag is None else f"<{tag}>{answer}</{tag}>"
        known = {"question": entry["question"], **entry["metadata"]}
        messages = [Message(role="user", content=_filled(self._options.prompt, known, "prompt"))]
        if self._options.system_prompt is not None:
            messages.insert(0, Message(role="system", content=self._options.system_prompt))
        return self.make_example(
            messages,
            answer,
            seed=seed,
            index=index,
            split=split,
            metadata={**metadata, "index": index},
        )

    def demonstration(self, example: Example) -> str | None:
        ways = self._options.demonstrations
        if example.answer is None:
            return None
        draw = random.Random(f"demonstration {example.seed}")
        (way,) = draw.choices(ways, [way.weight for way in ways])
        known = {**example.metadata, "question": example.messages[-1].content}
        return _filled(way.text, {**known, "answer": example.answer}, "demonstrations.text")

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """The dataset's score of the answer; 0 where the tag that should hold it is missing.

        The item is made again, exactly, because scorers rely on more than JSON can carry.
        """
        index = example.metadata["index"]
        dataset = self._dataset(example.seed - index)
        entry = self._entry(example.seed - index, index)
        name = str(entry["metadata"].get("source_dataset", self._items[0].dataset))
        answer = self.extract(completion)
        value = 0.0 if answer is None else number(dataset.score_answer(answer, entry))
        return (RewardComponent(name=name, value=value),)

    def extract(self, completion: str) -> str | None:
        """Content of the last answer tag; without one, the whole completion."""
        tag = self._options.answer_tag
        if tag is None:
            return completion.strip()
        _, opened, remainder = completion.rpartition(f"<{tag}>")
        answer, closed, _ = remainder.partition(f"</{tag}>")
        return answer.strip() if opened and closed else None

    def _entry(self, seed: int, index: int) -> dict[str, Any]:
        return self._dataset(seed)[index % (self.size or _ENDLESS)]

    def _make(self, seed: int) -> Any:
        if self.seed_period is not None:
            seed %= self.seed_period
        if not self._options.mixture:
            item = self._items[0]
            return _create(item.dataset, {"size": _size_of(item), **item.config, "seed": seed})
        specs = []
        for item in self._items:
            _create(item.dataset, {"size": 1, **item.config, "seed": 0})  # errors of one name it
            config = {"size": _size_of(item), **item.config}
            spec = {"name": item.dataset, "weight": item.weight, "config": config}
            specs.append(_library().composite.DatasetSpec(**spec))
        return _create("composite", {"datasets": specs, "seed": seed, "size": _ENDLESS})


def _filled(template: str, known: dict[str, Any], option: str) -> str:
    """`template` with the names in `known` filled in. Raises ConfigError naming what it may use."""
    try:
        return template.format_map(known)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"environment.options.{option}: {error!r}; it may use {', '.join(known)}"
        ) from error


def _size_of(item: MixtureItem) -> int:
    size = item.config.get("size", _SIZES.get(item.dataset, _ENDLESS))
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{item.dataset}: expected a size of at least 1, found {size!r}")
    return size


def _create(name: str, config: dict[str, Any]) -> Any:
    """A dataset. Raises ConfigError for an unknown name or parameters that it does not take."""
    library = _library()
    known = library.factory.DATASETS
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        raise ConfigError(
            f"reasoning-gym {library.__version__} has no dataset {name!r}; it has "
            f"{len(known)}, close to that: {', '.join(close) or 'none'}"
        )
    try:
        return library.create_dataset(name, **config)
    except (TypeError, AssertionError, ValueError) as error:
        fields = known[name][1].__dataclass_fields__
        raise ConfigError(
            f"reasoning-gym dataset {name!r}: {error or type(error).__name__}; it takes "
            f"{', '.join(fields)}"
        ) from error
