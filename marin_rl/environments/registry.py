"""Registry of environments by name, and environments made once per process.

A name stands for one that comes with this package, one of another package, registered by its entry
point in the group "marin_rl.environments", or a class in a file of the user (`custom`). Leaves out
the protocol (`base`), and what a run must not do with its environments (`checks`).
"""

import ast
import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from marin_rl.config import EnvironmentConfig, code_in, environments_in
from marin_rl.environments.base import SHIPPED, Environment
from marin_rl.errors import ConfigError
from marin_rl.types import Split
from marin_rl.user_code import ENTRY_POINTS, parse_spec

USER_CLASS = "FILE.py:Class"  # stands for all classes that are named as code

# Methods of environments of several turns, as verifiers names them.
TURNS = frozenset({"env_response", "is_completed", "setup_state", "call_tool"})

_BUILT_IN = {
    USER_CLASS: "marin_rl.environments.custom",
    "chat": "marin_rl.environments.chat",
    "code": "marin_rl.environments.code_problems",
    "echo": "marin_rl.environments.echo",
    "game": "marin_rl.environments.game",
    "gymnasium": "marin_rl.environments.external.gymnasium",
    "judge": "marin_rl.environments.judge",
    "math": "marin_rl.environments.math_problems",
    "nemo_gym": "marin_rl.environments.external.nemo_gym",
    "openenv": "marin_rl.environments.external.openenv",
    "python": "marin_rl.environments.python_tool",
    "reasoning_gym": "marin_rl.environments.reasoning_gym",
    "repository": "marin_rl.environments.repository",
    "textarena": "marin_rl.environments.external.textarena",
    "verifiers": "marin_rl.environments.external.verifiers",
    "verifiers_v1": "marin_rl.environments.external.verifiers_v1",
}

# Played by an interpreter that has the package.
_PACKAGES = {
    "gymnasium": "gymnasium",
    "textarena": "textarena",
    "verifiers": "verifiers",
    "verifiers_v1": "verifiers",
}
_SERVERS = ("nemo_gym", "openenv", "verifiers_v1")  # played by a server

# Environments with several turns, and those whose model may call tools. None of them is imported to
# be listed; a test compares their classes.
SEVERAL_TURNS = frozenset(
    {"game", "gymnasium", "nemo_gym", "openenv", "python", "repository", "textarena", "verifiers"}
    | {"verifiers_v1"}
)
WITH_TOOLS = frozenset({"nemo_gym", "openenv", "python", "repository", "verifiers", "verifiers_v1"})

OptionsT = TypeVar("OptionsT", bound=BaseModel)

Factory = Callable[[EnvironmentConfig], Environment]
FactoryT = TypeVar("FactoryT", bound=Factory)

_registered: dict[str, Factory] = {}


def register(name: str) -> Callable[[FactoryT], FactoryT]:
    """Decorate a class (or function) that makes an environment out of its configuration."""

    def decorate(factory: FactoryT) -> FactoryT:
        _registered[name] = factory
        return factory

    return decorate


def known_environments() -> list[str]:
    """Names that a configuration may use, sorted."""
    return sorted({*_BUILT_IN, *_registered, *(point.name for point in _points())})


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
    """Environments that a configuration may name, sorted; none of them is imported."""
    own = [
        EnvironmentEntry(name, _first_line(_BUILT_IN[name]), *_abilities(name), _needs(name))
        for name in _BUILT_IN
    ]
    others = [
        EnvironmentEntry(point.name, f"registered as {point.value}", "", "", "")
        for point in _points()
    ]
    return sorted([*own, *others], key=lambda entry: entry.name)


def _first_line(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0].partition(": `environment.name")[0]


def _abilities(name: str) -> tuple[str, str]:
    """Turns and tools of an environment that comes with this package."""
    if name == USER_CLASS:
        return "", ""
    turns = "several" if name in SEVERAL_TURNS else "one"
    return turns, "yes" if name in WITH_TOOLS else "no"


def _needs(name: str) -> str:
    needs = ["a server"] if name in _SERVERS else []
    if (package := _PACKAGES.get(name)) is not None:
        there = find_spec(package) is not None
        state = "installed" if there else "not installed here; see options.python"
        needs.append(f"{package}: {state}")
    return ", ".join(needs)


def construct(config: EnvironmentConfig) -> Environment:
    """The environment with nothing loaded.

    Raises ConfigError for an unknown name or wrong options, InputError for unfit files.
    """
    if config.mixture is not None:
        mixture = importlib.import_module("marin_rl.environments.mixture")
        return mixture.Mixture(config)
    name = USER_CLASS if parse_spec(config.name) is not None else config.name
    if name not in _registered and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in _registered:
        for point in _points():
            if point.name == name:
                _registered[name] = point.load()
    if name not in _registered:
        known = known_environments()
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"environment.name: expected one of {', '.join(known)}, found {name!r}{hint}"
        )
    environment = _registered[name](config)
    if never_called := sorted(TURNS & set(dir(environment))):
        raise ConfigError(
            f"environment {config.name.partition('#')[0]!r} has {', '.join(never_called)}, never "
            "called here: for several turns define `episode`, for tools a class whose public "
            "methods are the tools (docs/your-environment.md), and remove these"
        )
    return environment


def foreign_code(tree: Mapping[str, Any]) -> dict[str, str]:
    """Code of others that a configuration, as a plain tree, imports, by the key that names it.

    Leaves out environments and functions of this package, and environments that this process has
    registered.
    """
    named = {key: str(spec) for key, spec in code_in(tree) if str(spec) not in SHIPPED}
    for key, environment in environments_in(dict(tree)):
        name = environment.get("name")
        if name not in _BUILT_IN and name not in _registered:
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
            f"environment.options.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()
        ]
        raise ConfigError(
            f"environment {config.name.partition('#')[0]!r} takes {options}:\n  "
            + "\n  ".join(lines)
        ) from None


def _points() -> Any:
    return entry_points(group=ENTRY_POINTS)
