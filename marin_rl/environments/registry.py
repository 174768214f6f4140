"""Registry of environments by name, and environments made once per process.

A name stands for an environment of this package, of one of its integrations (a file of that name),
of another package, registered by its entry point in the group "marin_rl.environments", or for a
class in a file of the user (`custom`). Also owns several environments in one run: whose turn it is
at each index, and the names of their examples. Leaves out the protocol (`base`), and what a run
must not do with its environments (`checks`).
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from marin_rl.config import (
    EnvironmentConfig,
    MixtureEntry,
    SamplingConfig,
    Section,
    code_in,
    environments_in,
    whole_weights,
)
from marin_rl.environments.base import SHIPPED, Environment, completed
from marin_rl.errors import ConfigError
from marin_rl.types import Demonstration, Example, RewardComponent, Split
from marin_rl.user_code import ENTRY_POINTS, parse_spec

USER_CLASS = "FILE.py:Class"  # stands for all classes that are named as code

# Methods of environments of several turns, as verifiers names them.
TURNS = frozenset({"env_response", "is_completed", "setup_state", "call_tool"})

INTEGRATIONS = "marin_rl.integrations"
_OWN = {
    USER_CLASS: "marin_rl.environments.custom",
    "chat": "marin_rl.environments.chat",
    "code": "marin_rl.environments.code_problems",
    "echo": "marin_rl.environments.echo",
    "game": "marin_rl.environments.game",
    "judge": "marin_rl.environments.judge",
    "math": "marin_rl.environments.math_problems",
    "python": "marin_rl.environments.python_tool",
    "repository": "marin_rl.environments.repository",
    "suite": "marin_rl.environments.suites",
}

OptionsT = TypeVar("OptionsT", bound=BaseModel)

Factory = Callable[[EnvironmentConfig], Environment]
FactoryT = TypeVar("FactoryT", bound=Factory)


@dataclass(frozen=True, slots=True)
class _Registered:
    """An environment's factory, its options, and what is said of it."""

    factory: Factory
    options: type[Section] | None
    tools: bool
    package: str | None
    server: bool


_registered: dict[str, _Registered] = {}


def register(
    name: str,
    options: type[Section] | None = None,
    *,
    tools: bool = False,
    package: str | None = None,
    server: bool = False,
) -> Callable[[FactoryT], FactoryT]:
    """Decorate a class (or function) that makes an environment out of its configuration.

    `tools` says that the model may call some that the class does not know, `package` what the
    interpreter that plays must have, and `server` that a server plays.
    """

    def decorate(factory: FactoryT) -> FactoryT:
        _registered[name] = _Registered(factory, options, tools, package, server)
        return factory

    return decorate


@cache
def built_in() -> dict[str, str]:
    """Module of each environment that comes with this package, by name; none is imported."""
    modules = dict(_OWN)
    for file in sorted(files(INTEGRATIONS).iterdir(), key=lambda file: file.name):
        name = file.name.removesuffix(".py")
        if name != file.name and "\n@register(" in file.read_text(encoding="utf-8"):
            modules[name] = f"{INTEGRATIONS}.{name}"
    return modules


def known_environments() -> list[str]:
    return sorted({*built_in(), *_registered, *(point.name for point in _points())})


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """Name of an environment, what it plays, and what it needs in addition to this package.

    `turns` is "one" or "several"; `tools` says that the model may call some. Both are "" where the
    environment's own code decides.
    """

    name: str
    plays: str
    turns: str
    tools: str
    needs: str


def described_environments() -> list[EnvironmentEntry]:
    """Environments that a configuration may name, sorted; those of other packages not imported."""
    own = [_described(name) for name in built_in()]
    others = [
        EnvironmentEntry(point.name, f"registered as {point.value}", "", "", "")
        for point in _points()
    ]
    return sorted([*own, *others], key=lambda entry: entry.name)


def _described(name: str) -> EnvironmentEntry:
    importlib.import_module(built_in()[name])
    made = _registered[name]
    text = sys.modules[made.factory.__module__].__doc__ or ""
    plays = text.partition("\n")[0].partition(": `environment.name")[0]
    if name == USER_CLASS:
        return EnvironmentEntry(name, plays, "", "", "")
    own: Any = made.factory
    several = own.defines("episode") or own.defines("rollouts")
    tools = made.tools or own.defines("tools_offered")
    needs = ["a server"] if made.server else []
    if made.package is not None:
        there = find_spec(made.package) is not None
        state = "installed" if there else "not installed here; see options.python"
        needs.append(f"{made.package}: {state}")
    return EnvironmentEntry(
        name, plays, "several" if several else "one", "yes" if tools else "no", ", ".join(needs)
    )


def options_by_environment() -> dict[str, type[Section]]:
    """Options of each environment that comes with this package, by name, sorted."""
    for module in built_in().values():
        importlib.import_module(module)
    made = ((name, _registered[name].options) for name in sorted(built_in()))
    return {name: options for name, options in made if options is not None}


def construct(config: EnvironmentConfig) -> Environment:
    """The environment with nothing loaded. Raises ConfigError, InputError for unfit files."""
    if config.mixture is not None:
        return Mixture(config)
    name = USER_CLASS if parse_spec(config.name) is not None else config.name
    environment = _factory(name)(config)
    if never_called := sorted(TURNS & set(dir(environment))):
        raise ConfigError(
            f"environment {config.name.partition('#')[0]!r} has {', '.join(never_called)}, never "
            "called here: for several turns define `episode`, for tools a class whose public "
            "methods are the tools (docs/your-environment.md), and remove these"
        )
    return completed(environment)


def _factory(name: str) -> Factory:
    """Return the factory of an environment, imported here. Raises ConfigError for no name."""
    if name not in _registered and (module := built_in().get(name)) is not None:
        importlib.import_module(module)
    if name not in _registered:
        for point in _points():
            if point.name == name:
                register(name)(point.load())
    if name not in _registered:
        known = known_environments()
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"environment.name: expected one of {', '.join(known)}, found {name!r}{hint}"
        )
    return _registered[name].factory


def foreign_code(tree: Mapping[str, Any]) -> dict[str, str]:
    """Code of others that a configuration, as a plain tree, imports, by the key that names it.

    Leaves out environments and functions of this package, and environments that this process has
    registered.
    """
    named = {key: str(spec) for key, spec in code_in(tree) if str(spec) not in SHIPPED}
    for key, environment in environments_in(dict(tree)):
        name = environment.get("name")
        if name not in built_in() and name not in _registered:
            named |= {f"{key}.name": point.value for point in _points() if point.name == name}
    return named


def loaded_environment(config: EnvironmentConfig, *splits: Split) -> Environment:
    """An environment, made once per process and configuration, with an example of each split.

    Raises ConfigError for an unknown name or wrong options, InputError where one has no examples.
    """
    environment = _loaded(config.model_dump_json())
    for split in splits:
        seed = config.train_seed if split == "train" else config.eval_seed
        environment.example(seed, 0, split)
    return environment


@lru_cache(maxsize=16)
def _loaded(config_json: str) -> Environment:
    """Some prepare for seconds, or read large files."""
    environment = construct(EnvironmentConfig.model_validate_json(config_json))
    environment.load_examples()
    return environment


def parse_options(kind: type[OptionsT], config: EnvironmentConfig) -> OptionsT:
    """The options of an environment, validated. Raises ConfigError with a line per problem."""
    try:
        return kind.model_validate(config.options)
    except ValidationError as error:
        known = ", ".join(kind.model_fields)
        options = f"the options {known}" if known else "no options"
        lines = [
            f"{'.'.join(('environment.options', *map(str, item['loc'])))}: "
            + item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise ConfigError(
            f"environment {config.name.partition('#')[0]!r} takes {options}:\n  "
            + "\n  ".join(lines)
        ) from None


def _points() -> Iterable[EntryPoint]:
    return entry_points(group=ENTRY_POINTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of environments, which repeats after a cycle of W groups.

    `places[i]` is the environment of group i, `before[i]` how many groups it had before that one.
    After any number n of groups, an environment of weight w has had n w / W of them, rounded up or
    down: a round of a multiple of W groups has them in exact proportion.
    """

    weights: tuple[int, ...]
    places: tuple[int, ...]
    before: tuple[int, ...]

    def at(self, index: int) -> tuple[int, int]:
        """Environment of the group at `index`, and the place of that group among its own."""
        cycles, rest = divmod(index, len(self.places))
        place = self.places[rest]
        return place, cycles * self.weights[place] + self.before[rest]

    def count(self, place: int, n: int) -> int:
        cycles, rest = divmod(n, len(self.places))
        return cycles * self.weights[place] + self.places[:rest].count(place)


@lru_cache(maxsize=64)
def order_of(weights: tuple[int, ...]) -> Order:
    """The order of environments with these weights, whole numbers.

    Earliest deadline first: group j of an environment of weight w lies in [floor(j W / w),
    ceil((j + 1) W / w)), and of those whose window is open the one that closes first is next. This
    keeps every count within one of its share (Baruah et al. 1996, Algorithmica 15, Pfair
    schedules). Equal deadlines go to the first of the list.
    """
    cycle, counts = sum(weights), [0] * len(weights)
    places, before = list[int](), list[int]()
    for index in range(cycle):
        open_now = [k for k, w in enumerate(weights) if counts[k] * cycle // w <= index]
        place = min(open_now, key=lambda k: -(-(counts[k] + 1) * cycle // weights[k]))
        places.append(place)
        before.append(counts[place])
        counts[place] += 1
    assert tuple(counts) == weights, "a cycle has every environment as often as its weight says"
    return Order(weights=weights, places=tuple(places), before=tuple(before))


def order_in(entries: Sequence[MixtureEntry]) -> Order:
    return order_of(whole_weights([entry.weight for entry in entries]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPart:
    """An environment of a run with its own settings; the label is "" where it is the only one."""

    label: str
    config: EnvironmentConfig
    environment: Environment


class Mixture(Environment):
    """Several environments as one: examples in turn, each under its environment's label."""

    name = "mixture"
    workers = 0  # it scores nothing itself

    def __init__(self, config: EnvironmentConfig) -> None:
        assert config.mixture is not None, "construct makes a mixture of a list alone"
        self._seed = config.train_seed, config.eval_seed
        self._order = order_in(config.mixture)
        alone = [(entry.shown_label, entry_alone(config, entry)) for entry in config.mixture]
        self._take([EnvironmentPart(label=a, config=c, environment=construct(c)) for a, c in alone])

    def _take(self, parts: Sequence[EnvironmentPart]) -> None:
        self.parts = tuple(parts)
        self.parts_by_label = {part.label: part for part in parts}
        self.version = "; ".join(f"{part.label} {part.environment.version}" for part in parts)

    def load_examples(self) -> None:
        loaded = (loaded_environment(part.config, "train", "eval") for part in self.parts)
        pairs = zip(self.parts, loaded, strict=True)
        self._take([replace(part, environment=environment) for part, environment in pairs])

    def example(self, seed: int, index: int, split: Split) -> Example:
        place, own = self._order.at(index)
        return self.own_example(self.parts[place].label, seed, own, split)

    def own_example(self, label: str, seed: int, index: int, split: Split) -> Example:
        part = self.parts_by_label[label]
        first = part.config.train_seed if split == "train" else part.config.eval_seed
        outer = self._seed[0] if split == "train" else self._seed[1]
        return labelled(part.environment.example(first + seed - outer, index, split), label)

    def demonstration(self, example: Example) -> str | None:
        return self.parts_by_label[example.environment].environment.demonstration(example)

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        raise AssertionError(f"{example.environment} scores its examples itself: see parts_of")


def labelled(example: Example, label: str) -> Example:
    return replace(example, environment=label, example_id=f"{label}/{example.example_id}")


def parts_of(environment: Environment, config: EnvironmentConfig) -> tuple[EnvironmentPart, ...]:
    if isinstance(environment, Mixture):
        return environment.parts
    return (EnvironmentPart(label="", config=config, environment=environment),)


def part_for(
    environment: Environment, config: EnvironmentConfig, example: Example
) -> EnvironmentPart:
    if isinstance(environment, Mixture):
        return environment.parts_by_label[example.environment]
    return EnvironmentPart(label="", config=config, environment=environment)


def demonstrated_by(part: EnvironmentPart, example: Example) -> Demonstration | None:
    """The conversation that a warm start learns of an example, by its environment's settings."""
    learned = part.environment.demonstrated(example)
    if learned is None:
        return None
    segments = part.config.on_broken_prefix == "segments"
    options = {**(part.config.chat_template_options or {}), **learned.options}
    return replace(learned, options=options, segments=segments)


def entry_alone(outer: EnvironmentConfig, entry: MixtureEntry) -> EnvironmentConfig:
    """The settings of an environment of a list, as if it were the only one.

    What holds for all of them together comes from `outer`.
    """
    own = {name: getattr(entry, name) for name in EnvironmentConfig.model_fields}
    common = ("pass_environment", "reward_memory_bytes_max")
    return EnvironmentConfig(**own | {name: getattr(outer, name) for name in common})


def sampling_for(sampling: SamplingConfig, config: EnvironmentConfig, label: str) -> SamplingConfig:
    """The sampling of the environment with this label: the run's, with its own limits."""
    for entry in config.mixture or ():
        if entry.shown_label == label and entry.sampling is not None:
            return sampling.model_copy(update=entry.sampling.model_dump())
    return sampling
