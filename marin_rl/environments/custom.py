"""Environments of the user's own, named by file or module.

`environment.name: envs.py:Counting` names a class. It may be a subclass of `BaseEnvironment`, which
has defaults, any class with the members of `base.Environment`, or a class of tools (`tool_class`).
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, create_model

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.base import Environment, completed
from marin_rl.environments.registry import USER_CLASS, parse_options, register
from marin_rl.environments.tool_class import (
    ToolClass,
    ToolOptions,
    ToolsOverExamples,
    ToolsOverRows,
    is_tool_class,
)
from marin_rl.environments.tool_schemas import parameters_of
from marin_rl.errors import ConfigError, InputError
from marin_rl.user_code import load

WORKERS_MAX = 64
ATTRIBUTES = ("name", "version", "size", "workers")
METHODS = ("load_examples", "example", "demonstration", "load_scorer", "score")
MEMBERS = (*ATTRIBUTES, *METHODS)  # of a class that is no subclass of `Environment`


@register(USER_CLASS)
def from_class(config: EnvironmentConfig) -> Environment:
    """The environment that `name` names as FILE.py:Class or module:Class.

    Raises ConfigError for a class that is no environment and for wrong options, InputError for code
    that cannot be loaded or fails.
    """
    kind = load(config.name, "environment")
    shown = config.name.partition("#")[0]
    if not isinstance(kind, type):
        raise ConfigError(f"environment.name: expected a class, found {shown} = {kind!r:.80}")
    if is_tool_class(kind):
        return _with_tools(kind, config)
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(_lacking(shown, missing))
    lacking = [name for name in MEMBERS if not hasattr(kind, name)]
    # attributes may be set when it is made, methods are there before
    if any(name in METHODS for name in lacking):
        raise ConfigError(_lacking(shown, lacking))
    arguments = _arguments(kind, config)
    try:
        environment = kind(**arguments)
    except Exception as error:
        raise InputError(f"environment {shown!r}: {type(error).__name__}: {error}") from error
    _check_members(environment, shown)
    return completed(environment)


def _with_tools(kind: type, config: EnvironmentConfig) -> Environment:
    """The environment of a class of tools, whose options are its arguments too. As `from_class`."""
    fields = _fields(_parameters(kind))
    if taken := sorted(fields.keys() & ToolOptions.model_fields.keys()):
        raise ConfigError(
            f"environment.name: {kind.__name__} has the parameters {', '.join(taken)}, which are "
            "names of options: rename them"
        )
    options = parse_options(create_model("Options", __base__=ToolOptions, **fields), config)
    arguments = {name: getattr(options, name) for name in fields}
    tool_class = ToolClass(kind, arguments, options, config)
    tool_class.check()
    return ToolsOverRows(config, tool_class) if options.path else ToolsOverExamples(tool_class)


def _check_members(environment: Any, shown: str) -> None:
    """Raise ConfigError naming the members that are missing, or have another type."""
    if missing := [name for name in MEMBERS if not hasattr(environment, name)]:
        raise ConfigError(_lacking(shown, missing))
    size, workers = environment.size, environment.workers
    fits = {
        "name": (isinstance(environment.name, str) and environment.name, "text"),
        "version": (isinstance(environment.version, str), "text"),
        "size": (size is None or (isinstance(size, int) and size >= 0), "a number or None"),
        "workers": (
            isinstance(workers, int) and 0 <= workers <= WORKERS_MAX,
            f"a number from 0 to {WORKERS_MAX}",
        ),
    }
    wrong = [
        f"{name} {getattr(environment, name)!r:.40} (expected {expected})"
        for name, (fit, expected) in fits.items()
        if not fit
    ]
    wrong += [
        f"{name} (expected a method)"
        for name in METHODS
        if not callable(getattr(environment, name))
    ]
    if wrong:
        raise ConfigError(f"environment.name: {shown} has {', '.join(wrong)}")


def _lacking(shown: str, missing: Sequence[str]) -> str:
    return (
        f"environment.name: {shown} is no environment, it lacks {', '.join(missing)}; a subclass "
        "of marin_rl.environments.base_environment.BaseEnvironment needs example and score alone"
    )


def _arguments(kind: type, config: EnvironmentConfig) -> Mapping[str, Any]:
    """Arguments of the class, from the options: its configuration, a pydantic model, or each."""
    parameters = _parameters(kind)
    if len(parameters) == 1:
        (only,) = parameters
        if only.annotation is EnvironmentConfig:
            return {only.name: config}
        if isinstance(only.annotation, type) and issubclass(only.annotation, BaseModel):
            return {only.name: parse_options(only.annotation, config)}
    fields = _fields(parameters)
    model = create_model("Options", __base__=Section, **fields)
    options = parse_options(model, config)
    return {name: getattr(options, name) for name in fields}


def _fields(parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
    """Fields of a pydantic model that has the parameters of a class."""
    return {
        item.name: (
            Any if item.annotation is item.empty else item.annotation,
            ... if item.default is item.empty else item.default,
        )
        for item in parameters
    }


def _parameters(kind: type) -> list[inspect.Parameter]:
    try:
        return parameters_of(kind)
    except ValueError as error:
        raise InputError(f"environment {kind.__name__!r}: its signature: {error}") from error
