"""The keys of the tree by their dotted names: which there are, which are free, which differ.

Leaves out reading and setting them (loading.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from marin_rl.config.section import Section, is_plan, is_runtime_only, section_of
from marin_rl.config.sections import RunSections

# Keys and values (`key=value`) of earlier versions that decided what a run trains on, and what to
# use instead: a run that recorded one can be read, and is not gone on with.
WITHDRAWN_CONTENT = {
    "asynchrony.select=best": "set group_filter (score and min), and over_sampling.select index "
    "or first_done",
    "asynchrony.curriculum=weights": "give the entries of environment a weight, or set curriculum "
    "solve_rate",
    "asynchrony.curriculum_weights": "give the entries of environment a weight, or set curriculum "
    "solve_rate",
}
# All of them.
WITHDRAWN = {
    **{
        f"inference.{name}": "servers read checkpoints from the root, which is faster: remove it"
        for name in ("flight", "flight_certificate", "flight_key", "flight_ca")
    },
    **{
        f"inference.server.{name}": "a reverse proxy bounds heads of requests and slow clients, "
        "see docs/serving.md: remove it"
        for name in ("header_bytes_max", "header_timeout_s", "body_timeout_s")
    },
    "flow.runner=root": "use work_pool or ray, and have servers of other machines join the run's "
    "fleet (inference.endpoints: registered, marin-rl serve RUN --register)",
    **WITHDRAWN_CONTENT,
}

# Keys that have another place now: runs that recorded one are gone on with.
RENAMED = {
    f"asynchrony.{name}": f"set asynchrony.{instead}"
    for name, instead in {
        "over_staleness": "sampler windowed_wait in place of wait, or windowed in place of drop",
        "recompute_kv_cache": "in_flight_updates keep_kv_cache in place of false, or true",
        "partial_rollout": "partial_tokens 1024 in place of true, or null",
        "max_sample_batches": "dynamic_sampling to the number of batches",
        "over_sampling_factor": "over_sampling.factor",
        "select": "over_sampling.select",
        "group_filter_min": "group_filter.min, and group_filter.score to the name of the filter",
        "curriculum_window_rounds": "curriculum to the number of rounds",
        "max_inflight_groups": "limits.max_inflight_groups",
        "claim_s": "limits.claim_s",
        "commit_every_s": "limits.commit_every_s",
        "shared_device": "limits.shared_device",
    }.items()
}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ, each as `key: old -> new`, sorted."""
    lines: list[str] = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {json.dumps(a)} -> {json.dumps(b)}")
    return lines


def known_keys() -> list[str]:
    return [key for key, _ in _fields_of(RunSections)]


def free_keys() -> list[str]:
    """Dotted names of the keys that may differ when a run is continued."""
    return [key for key, info in _fields_of(RunSections) if is_runtime_only(info)]


def outward_keys() -> list[str]:
    """Dotted names of the free keys that no run.json decides, but only their user."""
    fields = _fields_of(RunSections)
    return [key for key, info in fields if is_runtime_only(info) and not is_plan(info)]


def _fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield prefix + name, info
        if (inner := section_of(info.annotation)) is not None:
            yield from _fields_of(inner, f"{prefix}{name}.")


def value_at(node: Section, key: str) -> Any:
    """Value of a dotted key; None below a section that is null."""
    value: Any = node
    for name in key.split("."):
        if isinstance(value, tuple):
            value = value[int(name)] if int(name) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            value = None if value is None else getattr(value, name)
    return value


def withdrawn_in(tree: Mapping[str, Any]) -> list[str]:
    """Withdrawn keys and values (`key=value`) that a recorded configuration has."""
    names = list[str]()
    for name in WITHDRAWN:
        key, _, withdrawn = name.partition("=")
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and withdrawn in ("", value):
            names.append(name)
    return names


def without(tree: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a nested mapping without the dotted `keys`."""
    heads: dict[str, list[str]] = {}
    for key in keys:
        head, _, subkey = key.partition(".")
        heads.setdefault(head, []).append(subkey)
    return {
        name: without(value, [subkey for subkey in heads.get(name, ()) if subkey])
        if isinstance(value, Mapping)
        else value
        for name, value in tree.items()
        if "" not in heads.get(name, ())
    }
