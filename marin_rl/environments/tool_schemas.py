"""Tools out of methods: their JSON schemas by type hints and docstrings, and checked calls.

The schemas equal the output of transformers' `get_json_schema`, without its key `return`, which
servers refuse; importing transformers takes seconds, and torch with it. Types that it does not
know (models, enumerations, dataclasses) are described by pydantic. Leaves out which methods are
tools, and what becomes of a result (`tool_class`).
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from marin_rl.environments.episode import function_tool
from marin_rl.errors import ConfigError

_SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean"}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# Google's style: a section heading fills a line, an argument is "name (type): words".
_SECTION = re.compile(
    r"^\s*(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?):\s*$"
)
_ARGUMENT = re.compile(r"^(\s*)\**(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(\[.*?\])\)\s*$")


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Parameters that can be given by name, with annotations that are types. Raises ValueError."""
    try:
        listed = inspect.signature(function, eval_str=True).parameters.values()
    except (NameError, TypeError) as error:  # an annotation that names nothing, mostly
        raise ValueError(str(error)) from error
    return [item for item in listed if item.kind not in VARIADIC]


class ToolMethod:
    """A tool with its JSON `schema`. ConfigError without a docstring or parameter types."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, text = name, inspect.getdoc(function)
        if not text:
            raise ConfigError(
                f"tool {name}: expected a docstring, which tells the model what the tool does"
            )
        try:
            parameters = parameters_of(function)[1:]  # without self
        except ValueError as error:
            raise ConfigError(f"tool {name}: its signature: {error}") from error
        description, words = _parsed(text)
        properties, definitions = dict[str, Any](), dict[str, Any]()
        for item in parameters:
            where = f"tool {name}: parameter {item.name}"
            if item.annotation is item.empty:
                raise ConfigError(f"{where}: expected a type, as in `{item.name}: str`")
            schema = _schema_of(item.annotation, where, definitions)
            properties[item.name] = _described(schema, words.get(item.name))
        self._types = {item.name: TypeAdapter(item.annotation) for item in parameters}
        self._required = [item.name for item in parameters if item.default is item.empty]
        arguments: dict[str, Any] = {"type": "object", "properties": properties}
        if self._required:
            arguments["required"] = self._required
        if definitions:
            arguments["$defs"] = definitions
        self.schema = function_tool(name, description, arguments)

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call as the method's types. Raises ValueError."""
        known = ", ".join(self._types) or "no arguments"
        if unknown := sorted(arguments.keys() - self._types.keys()):
            raise ValueError(f"{self.name} takes {known}, found {', '.join(unknown)}")
        if missing := [name for name in self._required if name not in arguments]:
            raise ValueError(f"{self.name} takes {known}: {', '.join(missing)} is missing")
        typed = dict[str, Any]()
        for name, value in arguments.items():
            try:
                typed[name] = self._types[name].validate_python(value)
            except ValidationError as error:
                said = error.errors(include_url=False, include_context=False)[0]["msg"]
                raise ValueError(f"{self.name}: {name}: {said}, found {value!r:.80}") from None
        return typed


def _parsed(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's description, and the words about each argument."""
    description, arguments = list[str](), dict[str, str]()
    section, indent, name = "", 0, ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section, name = heading[1], ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            entry = _ARGUMENT.match(line)
            if entry and (not name or len(entry[1]) <= indent):
                indent, name = len(entry[1]), entry[2]
                arguments[name] = entry[3].strip()
            elif name and line.strip():
                arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return "\n".join(description).strip(), arguments


def _described(schema: dict[str, Any], words: str | None) -> dict[str, Any]:
    """Return a parameter's schema with its description, whose choices become an enumeration."""
    if words is None:
        return schema
    if choices := _CHOICES.search(words):
        schema = {**schema, "enum": json.loads(choices[1])}
        words = words[: choices.start()].strip()
    return {**schema, "description": words}


def _schema_of(hint: Any, where: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; referenced schemas are added to `definitions`."""

    def inner(part: Any) -> dict[str, Any]:
        return _schema_of(part, where, definitions)

    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is Any:
        return {}
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union([inner(part) for part in parts if part is not type(None)], hint)
    if hint is list or origin is list:
        return {"type": "array", **({"items": inner(parts[0])} if parts else {})}
    if hint is dict or origin is dict:
        values = {"additionalProperties": inner(parts[1])} if parts else {}
        return {"type": "object", **values}
    if origin is Literal:
        kinds = sorted({_SIMPLE.get(type(value), "null") for value in parts})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(parts)}
    return _by_pydantic(hint, where, definitions)


def _union(schemas: list[dict[str, Any]], hint: Any) -> dict[str, Any]:
    if len(schemas) == 1:
        (schema,) = schemas
    elif all(schema.keys() == {"type"} for schema in schemas):
        schema = {"type": sorted(schema["type"] for schema in schemas)}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in get_args(hint) else {})


def _by_pydantic(hint: Any, where: str, definitions: dict[str, Any]) -> dict[str, Any]:
    try:
        schema = TypeAdapter(hint).json_schema(ref_template="#/$defs/{model}")
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as error:
        raise ConfigError(
            f"{where}: expected a type that JSON can spell, found {hint!r:.80}"
        ) from error
    definitions |= schema.pop("$defs", {})
    return schema
