"""The keys that name code of the user: environments, rewards, extractors, the loss, a filter.

Leaves out what such a name stands for, and its loading (user_code.py).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.user_code import CodeSpec, parse_spec, pin

# Options of environments that name code; another one does if its value is FILE.py:name.
CODE_OPTIONS = ("reward", "extract")

Change = Callable[[str, str], str]  # from a text and its dotted key
FoldersOf = Callable[[str], Sequence[Path]]  # in which the files of a dotted key are sought


def pin_code(tree: Mapping[str, Any], folders: Path | FoldersOf) -> dict[str, Any]:
    """A copy of a plain tree in which every file of code has its digest; see `user_code.pin`.

    A file is that of the first folder that has one. Raises ConfigError naming the key and the last.
    """

    def pinned(text: str, key: str) -> str:
        spec, sought = parse_spec(text), [folders] if isinstance(folders, Path) else folders(key)
        there = (folder for folder in sought if spec and (folder / spec.module).is_file())
        return pin(text, next(there, sought[-1]), key)

    return _changed(tree, pinned)


def code_in(tree: Mapping[str, Any]) -> list[tuple[str, CodeSpec]]:
    """Names of code in a plain tree with their dotted keys."""
    named: list[tuple[str, CodeSpec]] = []

    def look(text: str, key: str) -> str:
        spec = parse_spec(text)
        option = key.partition(".options.")[2].partition(".")[0]  # "" of keys that are no option
        if spec is not None and (spec.is_file or option in ("", *CODE_OPTIONS)):
            named.append((key, spec))
        return text

    _changed(tree, look)
    return named


def _changed(tree: Mapping[str, Any], change: Change) -> dict[str, Any]:
    result = json.loads(json.dumps(tree))
    for key, node in environments_in(result):
        for name, prefix in (("name", key), ("options", key)):
            if name in node:
                node[name] = _deep(node[name], f"{prefix}.{name}", change)
    nodes: dict[str, Any] = {name: result.get(name) for name in ("objective", "asynchrony")}
    if isinstance(nodes["asynchrony"], dict):
        nodes["asynchrony.group_filter"] = nodes["asynchrony"].get("group_filter")
    for section, name in (
        ("objective", "loss"), ("asynchrony", "group_filter"), ("asynchrony.group_filter", "score"),
    ):  # fmt: skip
        node = nodes.get(section)
        if isinstance(node, dict) and isinstance(node.get(name), str):
            node[name] = change(node[name], f"{section}.{name}")
    return result


def environments_in(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sections of environments by their keys; the tree may be one that is not valid."""
    evaluation, sft = tree.get("evaluation"), tree.get("sft")
    sets = evaluation.get("sets") if isinstance(evaluation, dict) else None
    nodes = {
        "environment": tree.get("environment"),
        "sft.environment": sft.get("environment") if isinstance(sft, dict) else None,
    }
    if isinstance(sets, dict):
        nodes |= {f"evaluation.sets.{name}": node for name, node in sets.items()}
    for key, node in nodes.items():
        if isinstance(node, dict):
            yield key, node
            entries = node.get("mixture")
            for place, entry in enumerate(entries if isinstance(entries, list) else ()):
                if isinstance(entry, dict):
                    yield f"{key}.mixture.{place}", entry


def _deep(value: Any, key: str, change: Change) -> Any:
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, dict):
        return {name: _deep(each, f"{key}.{name}", change) for name, each in value.items()}
    if isinstance(value, list):
        return [_deep(each, f"{key}.{index}", change) for index, each in enumerate(value)]
    return value
