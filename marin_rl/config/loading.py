"""Loading of configurations from YAML, recipes and `dotted.key=value`, with validation.

The only code that reads files here; what is valid is said by the sections themselves.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from marin_rl.config.keys import known_keys
from marin_rl.config.run import Config
from marin_rl.errors import ConfigError

RECIPE = "recipe"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides, validate.

    A key `recipe` names another YAML file, relative to this one, that lies beneath it: the file's
    own keys win. A recipe given as an override lies above the file and beneath other overrides.
    Raises ConfigError naming the file and every wrong key, with the nearest known one.
    """
    file = Path(path)
    own = _read_yaml(file)
    recipes = [item for item in overrides if item.partition("=")[0].strip() == RECIPE]
    others = [item for item in overrides if item not in recipes]
    beneath = own.pop(RECIPE, None)
    above = override({}, recipes).get(RECIPE)
    layers = [_recipe(file, beneath), own, _recipe(file, above)]
    return parse_config(override(_overlaid(layers), others), source=str(file))


def _recipe(file: Path, name: object) -> dict[str, Any]:
    if name is None:
        return {}
    if not isinstance(name, str):
        raise ConfigError(f"{file}: recipe is {name!r}; expected the path of a YAML file")
    return _read_yaml(file.parent / name)


def _overlaid(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Nested mappings, later ones over earlier ones."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = _overlaid([result[key], value]) if both else value
    return result


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {file}: expected a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected keys and values, found {type(tree).__name__}")
    return tree


def parse_config(tree: Mapping[str, Any], source: str = "configuration") -> Config:
    """Validate a plain tree. Raises ConfigError with one line per problem."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_describe(item) for item in error.errors()]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None


def override(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `tree` with each `a.b.c=value` set; values are read as YAML."""
    result: dict[str, Any] = json.loads(json.dumps(tree))
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {item!r}: expected dotted.key=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {item!r}: the value is not valid YAML") from error
        *parents, leaf = key.strip().split(".")
        node = result
        for name in parents:
            child = node.get(name)
            if child is None:
                child = node[name] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"--set {item!r}: {name!r} is a value, not a section")
            node = child
        node[leaf] = value
    return result


def _describe(item: ErrorDetails) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(whole configuration)"
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key{_nearest(key)}"
    shown = "" if isinstance(item["input"], dict | BaseModel) else f", found {item['input']!r}"
    return f"{key}: {item['msg']}{shown}"


def _nearest(key: str) -> str:
    known = known_keys()
    parent, _, leaf = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent]
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {f'{parent}.' if parent else ''}{close[0]}?"
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known: {', '.join(siblings)}" if siblings else ""
