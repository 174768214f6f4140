"""Trust: what a command takes from a run's folder, and what from its user alone.

A run.json says what a run is. Whatever reaches beyond the folder is its user's: free keys such as
endpoints, variables with keys and trackers, the code that is imported, the folders that are read.
They come from a run that this user started here, a configuration file, `--set`, or `--trust`.
"""

import importlib.util
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marin_rl.config import (
    Config,
    EnvironmentConfig,
    fingerprint_fields,
    load_config,
    outward_keys,
    override,
    parse_config,
)
from marin_rl.environments.base import code_of
from marin_rl.errors import ConfigError
from marin_rl.storage.own_runs import remembered
from marin_rl.storage.run_records import RUN_KEY, read_record
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import CHARACTERS

EVERYTHING = ""  # the beginning of all keys
LINE_MAX = 300  # characters of a line of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """Choices of the user of a command: a configuration file, overrides, or all that a run says."""

    file: Path | None = None
    overrides: tuple[str, ...] = ()
    trust: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """Dotted names of the keys that the overrides set."""
        return frozenset(item.partition("=")[0].strip() for item in self.overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Something outside of a run that its content names by a key: code to import, or a place."""

    key: str
    value: str
    shown: str


def settings_of(run: Run, consent: Consent, uses: Sequence[str] = (EVERYTHING,)) -> Config:
    """The configuration of a command on `run`: the run's content, and the user's free keys.

    `uses` are the dotted beginnings of the keys that the command goes by. Raises ConfigError that
    lists the free keys among them that run.json sets and the user does not.
    """
    own = remembered(run)
    if own is not None:
        tree = override(fingerprint_fields(run.config), own)
    else:
        tree = run.config.model_dump(mode="json")
    if own is None and consent.trust:
        tree = override(tree, _left_out(run, (EVERYTHING,)))
    if consent.file is not None:
        tree = override(tree, _outward_of(load_config(consent.file)))
    elif own is None and not consent.trust:
        _refuse_left_out(run, _left_out(run, uses), consent)
    tree |= {"root": run.config.root, "storage_options": dict(run.config.storage_options)}
    return parse_config(override(tree, consent.overrides), f"run {run.run_id!r}")


def check_named(
    run: Run, config: Config, consent: Consent, sections: Sequence[str] = (EVERYTHING,)
) -> None:
    """Refuse what the run of somebody else names outside of its folder, unless the user did too.

    `config` is what the command goes by, and `sections` the beginnings of the keys it looks at.
    Raises ConfigError that lists modules to import and places to read.
    """
    if consent.trust or remembered(run) is not None:
        return
    own = {(item.key, item.value) for item in _of_file(consent)}
    foreign = [
        item
        for item in named_in(config)
        if item.key.startswith(tuple(sections))
        and (item.key, item.value) not in own
        and item.key not in consent.keys
    ]
    if foreign:
        raise ConfigError(
            f"run {run.run_id!r} was not started by you on this machine ({run.folder.url}), and "
            "its run.json names code or places outside of its folder:\n  "
            + "\n  ".join(f"{item.key}: {item.shown}"[:LINE_MAX] for item in foreign)
            + "\nTo use them, add --trust, or give a configuration file of your own that names them"
        )


def named_in(config: Config) -> list[Named]:
    """The code that a configuration's environments import, and the places that it reads."""
    environments: dict[str, EnvironmentConfig | None] = {
        "environment": config.environment,
        "sft.environment": config.sft.environment,
        **{f"evaluation.sets.{name}": e for name, e in (config.evaluation.sets or {}).items()},
    }
    named = [
        item
        for prefix, environment in environments.items()
        if environment is not None
        for item in _of_environment(prefix, environment)
    ]
    policy = config.policy
    places = {
        "policy.hf_path": policy.hf_path,
        "policy.checkpoint": policy.checkpoint,
        "policy.tokenizer": None if policy.tokenizer == CHARACTERS else policy.tokenizer,
        "reward_model.pairs": config.reward_model and config.reward_model.pairs,
    }
    return named + [_place(key, value) for key, value in places.items() if value]


def _of_environment(prefix: str, config: EnvironmentConfig) -> list[Named]:
    named = [
        Named(key=f"{prefix}.{key}", value=value, shown=f"imports {value}, {origin_of(value)}")
        for key, value in code_of(config).items()
    ]
    if config.name == "chat" and "path" in config.options:
        named.append(_place(f"{prefix}.options.path", str(config.options["path"])))
    if config.reward_model is not None:
        named.append(_place(f"{prefix}.reward_model.checkpoint", config.reward_model.checkpoint))
    return named


def _place(key: str, value: str) -> Named:
    return Named(key=key, value=value, shown=f"reads {value}")


def origin_of(function: str) -> str:
    """Origin of `module:name`, as a phrase. Imports nothing."""
    top = function.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return "which is not on the Python path"
    return f"from {spec.origin or ', '.join(spec.submodule_search_locations or ())}"


def _of_file(consent: Consent) -> list[Named]:
    return [] if consent.file is None else named_in(load_config(consent.file))


def _left_out(run: Run, uses: Sequence[str]) -> list[str]:
    """Free keys as run.json has them, `dotted.key=JSON`, that `Run.open` left at their default."""
    stored, default = (read_record(run.folder) or {}).get("config"), _defaults()
    values = {key: _at(stored, key) for key in _outward() if key.startswith(tuple(uses))}
    return [
        f"{key}={json.dumps(value)}"
        for key, value in values.items()
        if value is not _ABSENT and value != _at(default, key)
    ]


def _outward_of(config: Config) -> list[str]:
    tree = config.model_dump(mode="json")
    values = {key: _at(tree, key) for key in _outward()}
    # a key of a section that is null has no value
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not _ABSENT]


def _outward() -> list[str]:
    """Outward keys but for those that say where the run lies."""
    return [key for key in outward_keys() if key not in ("root", "storage_options")]


def _refuse_left_out(run: Run, items: Sequence[str], consent: Consent) -> None:
    left = [item for item in items if item.partition("=")[0] not in consent.keys]
    if not left:
        return
    key = left[0].partition("=")[0]
    example = f"{key}={json.dumps(_at(_defaults(), key))}"
    raise ConfigError(
        f"run {run.run_id!r} was not started by you on this machine, and these settings of "
        f"{run.folder.url_of(RUN_KEY)} are not taken from there:\n  "
        + "\n  ".join(item[:LINE_MAX] for item in left)
        + f"\nName each as you want it, like --set {shlex.quote(example)}, or give a configuration "
        "file of your own; --trust takes them as they are"
    )


def _defaults() -> dict[str, Any]:
    return Config().model_dump(mode="json")


_ABSENT = object()


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return _ABSENT
        tree = tree[name]
    return tree
