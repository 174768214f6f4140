"""Trust: what a command takes from a run's folder, and what from its user alone.

A run.json says what a run is. Whatever reaches beyond the folder is its user's: free keys such as
endpoints, variables with keys and trackers, the code that is imported, the folders that are read.
They come from a run that this user started here, a configuration file, `--set`, or `--trust`.
"""

import importlib.util
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marin_rl.config import (
    Config,
    EnvironmentConfig,
    code_in,
    content_fields,
    load_config,
    outward_keys,
    override,
    parse_config,
    pin_files,
)
from marin_rl.environments.registry import code_of
from marin_rl.errors import ConfigError
from marin_rl.storage.own_runs import remembered
from marin_rl.storage.run_records import RUN_KEY, read_record
from marin_rl.storage.runs import Run
from marin_rl.tokenizer_files import CHARACTERS
from marin_rl.user_code import allow, parse_spec, pin

_READING = ("chat", "code", "judge", "math", "openenv")  # whose options name places
_ADDRESSES = {"judge": "base_url", "openenv": "url"}  # options that name a server
_PROGRAMS = ("code",)  # environments that run what a model writes

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
        tree = override(content_fields(run.config), own)
    else:
        tree = run.config.model_dump(mode="json")
    if own is None and consent.trust:
        tree = override(tree, _left_out(run, (EVERYTHING,)))
    if consent.file is not None:
        tree = override(tree, _outward_of(load_config(consent.file)))
    elif own is None and not consent.trust:
        _refuse_left_out(run, _left_out(run, uses), consent)
    tree |= {"root": run.config.root, "storage_options": dict(run.config.storage_options)}
    changed = pin_files(override(tree, consent.overrides))
    return parse_config(changed, f"run {run.run_id!r}")


def check_named(
    run: Run, config: Config, consent: Consent, sections: Sequence[str] = (EVERYTHING,)
) -> None:
    """Refuse what the run of somebody else names outside of its folder, unless the user did too.

    `config` is what the command goes by, and `sections` the beginnings of the keys it looks at.
    Copies of code in them may be run from then on.
    Raises ConfigError that lists modules to import and places to read.
    """
    named = [item for item in named_in(config) if item.key.startswith(tuple(sections))]
    if not consent.trust and remembered(run) is None:
        _refuse_foreign(run, named, consent)
    for item in named:
        allow(item.value)


def _refuse_foreign(run: Run, named: Sequence[Named], consent: Consent) -> None:
    in_file = [] if consent.file is None else named_in(load_config(consent.file))
    own = {(item.key, item.value) for item in in_file}
    foreign = [
        item
        for item in named
        if (item.key, item.value) not in own
        and not any(f"{item.key}.".startswith(f"{key}.") for key in consent.keys)
    ]
    if foreign:
        raise ConfigError(
            f"run {run.run_id!r} was not started by you on this machine ({run.folder.url}), and "
            "its run.json names code or places outside of its folder:\n  "
            + "\n  ".join(f"{item.key}: {item.shown}"[:LINE_MAX] for item in foreign)
            + "\nTo use them, add --trust, or give a configuration file of your own that names them"
        )


def pin_function(run: Run, typed: str, option: str, *, trust: bool) -> str:
    """Pin code that the user typed: to its file in the current folder, else to the run's copy.

    Raises ConfigError with `option` where there is neither, and for a copy in the run of somebody
    else without `trust`.
    """
    spec = parse_spec(typed)
    if spec is None or not spec.is_file or Path(spec.module).is_file():
        return pin(typed, Path(), option)
    named = code_in(run.config.model_dump(mode="json"))
    copy = next((own for _, own in named if own.sha256 and own.module == spec.module), None)
    if copy is None:
        return pin(typed, Path(), option)
    pinned = str(replace(spec, sha256=copy.sha256))
    if not trust and remembered(run) is None:
        raise ConfigError(
            f"{option}: there is no file {spec.module} here, and the copy of it belongs to run "
            f"{run.run_id!r}, which was not started by you on this machine ({run.folder.url}); add "
            "--trust to run that copy"
        )
    allow(pinned)
    return pinned


def named_in(config: Config) -> list[Named]:
    """The code that a configuration's environments import, and the places that it reads."""
    environments: dict[str, EnvironmentConfig | None] = {
        "environment": config.environment,
        "sft.environment": config.sft.environment,
        **{
            f"environment.mixture.{place}": entry
            for place, entry in enumerate(config.environment.mixture or ())
        },
        **{f"evaluation.sets.{name}": e for name, e in (config.evaluation.sets or {}).items()},
    }
    named = [
        item
        for prefix, environment in environments.items()
        if environment is not None
        for item in _of_environment(prefix, environment)
    ]
    if config.objective.loss is not None:
        named.append(_code("objective.loss", config.objective.loss))
    policy = config.policy
    places = {
        "policy.hf_path": policy.hf_path,
        "policy.checkpoint": policy.checkpoint,
        "policy.tokenizer": None if policy.tokenizer == CHARACTERS else policy.tokenizer,
        "reward_model.pairs": config.reward_model and config.reward_model.pairs,
    }
    return named + [_place(key, value) for key, value in places.items() if value]


def _of_environment(prefix: str, config: EnvironmentConfig) -> list[Named]:
    # the environments of a list are named one by one
    code = {} if config.mixture is not None else code_of(config)
    named = [_code(f"{prefix}.{key}", value) for key, value in code.items()]
    if config.name in _READING:
        places = [key for key in ("path", "interpreter") if config.options.get(key) is not None]
        named += [_place(f"{prefix}.options.{key}", str(config.options[key])) for key in places]
    address = _ADDRESSES.get(config.name)
    if address in config.options:
        url = str(config.options[address])
        named.append(Named(key=f"{prefix}.options.{address}", value=url, shown=f"sends to {url}"))
    if config.name in _PROGRAMS and config.options.get("sandbox") == "rlimits_only":
        named.append(
            Named(
                key=f"{prefix}.options.sandbox",
                value="rlimits_only",
                shown="runs programs that a model writes without a sandbox",
            )
        )
    if config.reward_model is not None:
        named.append(_place(f"{prefix}.reward_model.checkpoint", config.reward_model.checkpoint))
    return named


def _code(key: str, value: str) -> Named:
    return Named(key=key, value=value, shown=f"imports {value}, {origin_of(value)}")


def _place(key: str, value: str) -> Named:
    return Named(key=key, value=value, shown=f"reads {value}")


def origin_of(function: str) -> str:
    """Origin of FILE.py:name or `module:name`, as a phrase. Imports nothing."""
    spec = parse_spec(function)
    if spec is not None and spec.is_file:
        return "a copy in the run's folder"
    top = function.partition(":")[0].partition(".")[0]
    try:
        installed = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        installed = None
    if installed is None:
        return "which is not on the Python path"
    return f"from {installed.origin or ', '.join(installed.submodule_search_locations or ())}"


def _left_out(run: Run, uses: Sequence[str]) -> list[str]:
    """Free keys as run.json has them, `dotted.key=JSON`, that `Run.open` left at their default."""
    stored = (read_record(run.folder) or {}).get("config")
    opened = run.config.model_dump(mode="json")  # sections that the run has, these keys as usual
    values = {key: _at(stored, key) for key in _outward() if key.startswith(tuple(uses))}
    return [
        f"{key}={json.dumps(value)}"
        for key, value in values.items()
        if value is not _ABSENT and value != _at(opened, key)
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
    usual = _at(run.config.model_dump(mode="json"), key)
    example = f"{key}={json.dumps(usual)}"
    raise ConfigError(
        f"run {run.run_id!r} was not started by you on this machine, and these settings of "
        f"{run.folder.url_of(RUN_KEY)} are not taken from there:\n  "
        + "\n  ".join(item[:LINE_MAX] for item in left)
        + f"\nName each as you want it, like --set {shlex.quote(example)}, or give a configuration "
        "file of your own; --trust takes them as they are"
    )


_ABSENT = object()


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return _ABSENT
        tree = tree[name]
    return tree
