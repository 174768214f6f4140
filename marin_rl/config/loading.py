"""A whole run's configuration, and its loading from YAML, recipes and `dotted.key=value`.

The only code that reads files here, those of the folder recipes/ included; what is valid is said by
the sections themselves, and across them by `checks`.
"""

import difflib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator
from pydantic_core import ErrorDetails

from marin_rl.config.checks import CHECKS
from marin_rl.config.files import pin_code, place_files
from marin_rl.config.peers import closest, peer_hint
from marin_rl.config.sampling import SamplingConfig, as_mixture
from marin_rl.config.sections import RENAMED, WITHDRAWN, RunSections, known_keys
from marin_rl.config.yaml_files import FILE_BYTES_MAX, parse_yaml
from marin_rl.errors import ConfigError, InputError
from marin_rl.plain_files import read_regular

_log = logging.getLogger(__name__)

RECIPE = "recipe"
RECIPES = Path(__file__).parent / "recipes"
PROBLEMS_SHOWN_MAX = 20

# Errors of pydantic for a key or a mode that is no more.
WITHDRAWN_ERRORS = ("extra_forbidden", "literal_error", "int_parsing", "int_type")

# What is meant by a value that these keys do not have.
INSTEAD = {
    "objective.surrogate": "a loss of your own is objective.loss: FILE.py:function",
    "asynchrony.dynamic_sampling": "expected filter, or the batches that are sampled at most",
    "asynchrony.curriculum": "expected solve_rate, or the trained rounds that solve rates are of",
}

Overrides = Sequence[str] | Mapping[str, Any]  # `dotted.key=value`, or values by dotted key


class Config(RunSections):
    """A whole run: what is trained, on what, how, and for how many rounds."""

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> "Config":
        """Read a configuration and validate it.

        `source` is a YAML file, or a nested mapping as a YAML file holds it. Files that a mapping
        names are relative to the current folder, those of a YAML file to its own. `overrides` are
        values by dotted key, `{"training.learning_rate": 1e-4}`, or as the command line takes them,
        `["training.learning_rate=1e-4"]`. Raises ConfigError naming every wrong key, with the
        nearest known one.
        """
        changes = as_overrides(overrides)
        if not isinstance(source, Mapping):
            return load_config(source, changes)
        try:
            plain = json.loads(json.dumps(dict(source), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"configuration: expected values that JSON has: {error}") from None
        return _layered(plain, Path("mapping"), changes)

    @model_validator(mode="before")
    @classmethod
    def _defaults_follow(cls, data: Any) -> Any:
        """Give a short context a default of sampling.max_tokens that leaves room for a prompt."""
        if not isinstance(data, Mapping):
            return data
        policy, sampling = data.get("policy"), data.get("sampling", {})
        context = policy.get("context_length") if isinstance(policy, Mapping) else None
        chosen = not isinstance(sampling, Mapping) or "max_tokens" in sampling
        default = SamplingConfig.model_fields["max_tokens"].default
        if chosen or not isinstance(context, int) or not 1 < context <= default:
            return data
        return {**data, "sampling": {**sampling, "max_tokens": context // 2}}

    @model_validator(mode="after")
    def _sections_fit(self) -> "Config":
        for check in CHECKS:
            check(self)
        return self


def as_overrides(overrides: Overrides) -> list[str]:
    """Overrides as the command line takes them. Raises ConfigError for a value that is no JSON."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are {overrides!r}: expected a list or a mapping")
    if not isinstance(overrides, Mapping):
        return list(overrides)
    try:
        return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"overrides: {error}; expected numbers, texts, lists or mappings, and code by name "
            "(`rewards.py:score`)"
        ) from None


def pin_files(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain tree with digests of its files of code, and with its relative paths placed.

    Both are sought in the current folder. Raises ConfigError naming the key.
    """
    return place_files(pin_code(tree, Path()))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides, validate.

    A key `recipe` names a shipped recipe or another YAML file, relative to this one, whose keys
    this one overrides. A recipe given as an override wins over the file, and other overrides win
    over it. Files that a YAML file names are sought next to it and, unless they are code, in the
    current folder (files.py); those that an override names in the current folder first. Raises
    ConfigError naming the file and every wrong key, with the nearest known one.
    """
    file = Path(path)
    return _layered(_read_yaml(file), file, overrides)


def _layered(own: dict[str, Any], file: Path, overrides: Sequence[str]) -> Config:
    """Validate the keys `own` of `file` with its recipes and overrides."""
    recipes = [item for item in overrides if item.partition("=")[0].strip() == RECIPE]
    others = [item for item in overrides if item not in recipes]
    beneath = own.pop(RECIPE, None)
    above = override({}, recipes).get(RECIPE)
    here, beside = Path(), file.parent
    typed = override({}, others)
    layers = [_recipe(file, above), (_overlaid([own]), (beside, here)), _recipe(file, beneath)]

    def folders(key: str) -> Sequence[Path]:
        if _sets(typed, key):
            return here, beside
        return next((folders for tree, folders in layers if _sets(tree, key)), (beside, here))

    def of_code(key: str) -> Sequence[Path]:  # none of the current folder but by an override
        return folders(key) if _sets(typed, key) else folders(key)[:-1]

    def tell(key: str, line: str) -> None:
        if not _sets(typed, key):
            _log.warning("%s: %s", key, line)

    merged = override(_overlaid(tree for tree, _ in reversed(layers)), others)
    tree = place_files(pin_code(merged, of_code), folders, tell=tell)
    return parse_config(tree, source=str(file))


def _sets(tree: Any, key: str) -> bool:
    """Return True if a tree has a dotted key, or a list where an item of one is meant."""
    for name in key.split("."):
        if isinstance(tree, list):
            return True
        if not isinstance(tree, Mapping) or name not in tree:
            return False
        tree = tree[name]
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A shipped recipe: the settings of a published method, and the line that cites it."""

    name: str
    description: str
    settings: Mapping[str, Any]


def shipped_recipes() -> list[Recipe]:
    """Return the recipes that come with this package, by name."""
    return [
        Recipe(
            name=file.stem,
            description=file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# "),
            settings=_read_yaml(file),
        )
        for file in sorted(RECIPES.glob("*.yaml"))
    ]


def _recipe(file: Path, name: object) -> tuple[dict[str, Any], Sequence[Path]]:
    """Keys of the recipe that `file` names, and the folders in which its files are sought."""
    usual = (file.parent, Path())
    if name is None:
        return {}, usual
    if not isinstance(name, str):
        raise ConfigError(
            f"{file}: recipe is {name!r}; expected the name of a recipe or the path of a YAML file"
        )
    shipped = {recipe.stem: recipe for recipe in sorted(RECIPES.glob("*.yaml"))}
    if name in shipped:
        return _read_yaml(shipped[name]), usual
    if (own := file.parent / name).is_file():
        return _overlaid([_read_yaml(own)]), (own.parent, *usual)
    # Recipes used to be a folder of files: recipes/dapo.yaml
    named = Path(name).stem if Path(name).parent.name in ("", "recipes") else name
    if named in shipped:
        return _read_yaml(shipped[named]), usual
    close = difflib.get_close_matches(named, shipped, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"{file}: recipe is {name!r}; expected one of {', '.join(shipped)} (`marin-rl recipes` "
        f"shows what they set), or the path of a YAML file, but there is none at {own}{hint}"
    )


def _overlaid(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Nested mappings, later ones over earlier ones."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, own in layer.items():
            value = as_mixture(own) if key == "environment" else own
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = _overlaid([result[key], value]) if both else value
    return result


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = parse_yaml(read_regular(file, FILE_BYTES_MAX).decode()) or {}
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {file}: expected a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    except InputError as error:
        raise ConfigError(str(error)) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected keys and values, found {type(tree).__name__}")
    return tree


def parse_config(tree: Mapping[str, Any], source: str = "configuration") -> Config:
    """Validate a plain tree. Raises ConfigError with one line per problem."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = [_describe(item) for item in problems[:PROBLEMS_SHOWN_MAX]]
        if left := len(problems) - len(lines):
            lines.append(f"and {left} more")
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None


def override(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `tree` with each `a.b.c=value` set; values are read as YAML."""
    result: dict[str, Any] = json.loads(json.dumps(tree))
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {item!r}: expected dotted.key=value")
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise ConfigError(f"--set {item:.200}: the value is not valid YAML: {error}") from error
        *parents, leaf = key.strip().split(".")
        node = result
        for name in parents:
            child = node.get(name)
            if child is None:
                child = node[name] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"--set {item!r}: {name!r} is a value, not a section")
            node = child
        node[leaf] = as_mixture(value) if key.strip() == "environment" else value
    return result


def _describe(item: ErrorDetails) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "(whole configuration)"
    for name in (f"{key}={item['input']!s:.20}", key):
        if item["type"] in WITHDRAWN_ERRORS and name in WITHDRAWN | RENAMED:
            return f"{name}: was withdrawn; {(WITHDRAWN | RENAMED)[name]}"
    if item["type"] == "extra_forbidden":
        hint = peer_hint(key, item["input"])
        return f"{key}: unknown key{f'; {hint}' if hint else _nearest(key)}"
    shown = "" if isinstance(item["input"], dict | BaseModel) else f", found {item['input']!r:.200}"
    instead = f"; {INSTEAD[key]}" if key in INSTEAD else ""
    return f"{key}: {item['msg'].removeprefix('Value error, ')}{shown}{instead}"


def _nearest(key: str) -> str:
    known = known_keys()
    parent, _, leaf = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent]
    if close := closest(leaf, siblings):
        return f"; did you mean {f'{parent}.' if parent else ''}{close}?"
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known: {', '.join(siblings)}" if siblings else ""
