"""Trust: which settings a command takes from a run's folder, and which only from its user.

One rule: the record of another user's run never names code to import, a place to read or an
address. Its user does, by a configuration file, `--set`, or `--trust`, which accepts what the
record names. A run that this user started here is trusted as it was started: a small file in the
user's state folder remembers the digest of its run.json and the free keys of that time.
"""

import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from marin_rl.config import (
    WITHDRAWN,
    Config,
    code_in,
    content_fields,
    environments_in,
    load_config,
    outward_keys,
    override,
    parse_config,
    pin_files,
    places_named,
    section_at,
)
from marin_rl.environments.registry import foreign_code
from marin_rl.errors import ConfigError
from marin_rl.plain_files import whole_or_absent
from marin_rl.storage.run_records import RUN_KEY, read_record
from marin_rl.storage.runs import Run
from marin_rl.user_code import allow, parse_spec, pin

_log = logging.getLogger(__name__)

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
        return frozenset(item.partition("=")[0].strip() for item in self.overrides)


def settings_of(run: Run, consent: Consent, uses: Sequence[str] = (EVERYTHING,)) -> Config:
    """The configuration of a command on `run`: the run's content, and the user's free keys.

    `uses` are the dotted beginnings of the keys that the command goes by. Raises ConfigError that
    lists the free keys among them that run.json sets and the user does not.
    """
    own = remembered(run)
    tree = content_fields(run.config) if own is not None else run.config.model_dump(mode="json")
    usual, theirs = _outward_in(tree), dict[str, Any]()
    if own is None:
        stored = _outward_in((read_record(run.folder) or {}).get("config"))
        theirs = {k: v for k, v in stored.items() if k not in usual or v != usual[k]}
    tree = override(tree, own if own is not None else _items(theirs) if consent.trust else ())
    if consent.file is not None:
        chosen = load_config(consent.file).model_dump(mode="json")
        tree = override(tree, _items(_outward_in(chosen)))
    elif not consent.trust:
        used = (key for key in theirs if key.startswith(tuple(uses)))
        if left := {key: theirs[key] for key in used if key not in consent.keys}:
            raise ConfigError(_not_taken(run, left, usual))
    tree |= {"root": run.config.root, "storage_options": dict(run.config.storage_options)}
    changed = pin_files(override(tree, consent.overrides))
    return parse_config(changed, f"run {run.run_id!r}")


def trusted_config(
    run: Run,
    consent: Consent,
    uses: Sequence[str] = (EVERYTHING,),
    sections: Sequence[str] = (EVERYTHING,),
) -> Config:
    config = settings_of(run, consent, uses)
    check_named(run, config, consent, sections)
    return config


def _outward_in(tree: Any) -> dict[str, Any]:
    """Values of the keys that only the user decides; keys of null sections are left out."""
    values: dict[str, Any] = {}
    for key in outward_keys():
        section, _, name = key.rpartition(".")
        node = section_at(tree, section)
        if name in node and key not in ("root", "storage_options"):
            values[key] = node[name]
    return values


def _items(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _not_taken(run: Run, left: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    key = next(iter(left))
    example = f"{key}={json.dumps(usual.get(key))}"
    return (
        f"run {run.run_id!r} was not started by you on this machine, and these settings of "
        f"{run.folder.url_of(RUN_KEY)} are not taken from there:\n  "
        + "\n  ".join(item[:LINE_MAX] for item in _items(left))
        + f"\nName each as you want it, like --set {shlex.quote(example)}, or give a configuration "
        "file of your own; --trust takes them as they are"
    )


def check_named(
    run: Run, config: Config, consent: Consent, sections: Sequence[str] = (EVERYTHING,)
) -> None:
    """Refuse what the run of somebody else names outside of its folder, unless the user did too.

    `config` is what the command goes by, and `sections` the beginnings of the keys it looks at.
    Copies of code in them may be run from then on.
    Raises ConfigError that lists modules to import and places to read.
    """
    named = {k: v for k, v in named_in(config).items() if k.startswith(tuple(sections))}
    if not consent.trust and remembered(run) is None:
        in_file = {} if consent.file is None else named_in(load_config(consent.file))
        foreign = [
            f"{key}: {_use_of(key, value)}"[:LINE_MAX]
            for key, value in named.items()
            if in_file.get(key) != value
            and not any(f"{key}.".startswith(f"{chosen}.") for chosen in consent.keys)
        ]
        if foreign:
            raise ConfigError(
                f"run {run.run_id!r} was not started by you on this machine ({run.folder.url}), "
                "and its run.json names code or places outside of its folder:\n  "
                + "\n  ".join(foreign)
                + "\nTo use them, add --trust, or give a configuration file of your own that names "
                "them"
            )
    for value in named.values():
        allow(value)


def code_of_updates(config: Config) -> tuple[str, ...]:
    """Sections whose code the updates of a round run.

    The environment says which tools its prompts offer, where a teacher beside the policy reads them
    after a context.
    """
    teacher = config.distillation
    rendered = teacher is not None and teacher.loss is not None and teacher.context
    return ("objective", "environment") if rendered else ("objective",)


def named_in(config: Config) -> dict[str, str]:
    """Texts of a run's content that name code, places and addresses, by their dotted keys."""
    tree = content_fields(config)
    unsafe = {
        f"{key}.options.sandbox": "rlimits_only"
        for key, environment in environments_in(tree)
        if environment.get("options", {}).get("sandbox") == "rlimits_only"
    }
    return foreign_code(tree) | places_named(tree) | unsafe


def _use_of(key: str, value: str) -> str:
    """Say what would be done with a text of `named_in`. Imports nothing."""
    if key.endswith(".options.sandbox"):
        return "runs programs that a model writes without a sandbox"
    if (spec := parse_spec(value)) is None:
        return f"sends to {value}" if value.startswith("http") else f"reads {value}"
    if spec.is_file:
        return f"imports {value}, a copy in the run's folder"
    try:
        installed = find_spec(spec.module.partition(".")[0])
    except (ImportError, ValueError):
        installed = None
    if installed is None:
        return f"imports {value}, which is not on the Python path"
    places = installed.submodule_search_locations or ()
    return f"imports {value}, from {installed.origin or ', '.join(places)}"


def pin_function(run: Run, typed: str, option: str, *, trust: bool) -> str:
    """Pin code that the user typed: to its file in the current folder, else to the run's copy.

    Raises ConfigError with `option` if there is neither, and for a copy in the run of somebody else
    without `trust`.
    """
    spec = parse_spec(typed)
    copy = None
    if spec is not None and spec.is_file and not Path(spec.module).is_file():
        named = code_in(run.config.model_dump(mode="json"))
        copy = next((own for _, own in named if own.sha256 and own.module == spec.module), None)
    if spec is None or copy is None:
        return pin(typed, Path(), option)
    if not trust and remembered(run) is None:
        raise ConfigError(
            f"{option}: there is no file {spec.module} here, and the copy of it belongs to run "
            f"{run.run_id!r}, which was not started by you on this machine ({run.folder.url}); add "
            "--trust to run that copy"
        )
    pinned = str(replace(spec, sha256=copy.sha256))
    allow(pinned)
    return pinned


class _OwnRun(BaseModel):
    """Record of a run of this user; `free` are its free keys as `dotted.key=JSON`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str = "marin-rl/own-run"
    version: int = 1
    run_id: str
    url: str
    free: tuple[str, ...]


def state_folder() -> Path:
    """The folder of these files: `marin-rl/runs` below XDG_STATE_HOME or ~/.local/state."""
    chosen = os.environ.get("XDG_STATE_HOME")
    base = Path(chosen) if chosen else Path(os.path.expanduser("~"), ".local", "state")  # noqa: PTH111 - never raises
    return base / "marin-rl" / "runs"


def remember(run: Run) -> None:
    """Remember `run`, with the free keys it has now, as this user's own. Raises OSError."""
    own = _OwnRun(run_id=run.run_id, url=run.folder.url, free=run.reference.free)
    path = _path_of(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_absent(path) as partial:
        partial.write_text(own.model_dump_json() + "\n", encoding="utf-8")


def try_to_remember(run: Run) -> None:
    """Remember `run`, or say in the log why that does not work and what to do."""
    try:
        remember(run)
    except OSError as error:
        _log.warning(
            "this run cannot be remembered as yours (%s), so other commands may ask for --trust; "
            "set XDG_STATE_HOME to a folder that you may write",
            error,
        )


def remembered(run: Run) -> tuple[str, ...] | None:
    """Return the free keys that `run` was last run with; None where it is not this user's own."""
    try:
        own = _OwnRun.model_validate_json(_path_of(run).read_bytes())
    # A record that cannot be read is that of another user, or of a later version: then --trust
    # decides.
    except (OSError, ValidationError):
        return None
    # A key was withdrawn, or a key with a value.
    return tuple(
        item
        for item in own.free
        if not {item.partition("=")[0], item.replace('"', "")} & WITHDRAWN.keys()
    )


def _path_of(run: Run) -> Path:
    # By content and not by place: a copied run is still the user's own, an edited one is not.
    digest = sha256(run.folder.read(RUN_KEY)).hexdigest()
    return state_folder() / f"{digest}.json"
