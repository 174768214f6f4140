"""Relative paths of files that a run reads: one origin, the folder of the YAML file.

A relative path is placed when a configuration is read: it becomes `FOLDER/.//PATH`, an absolute
path that every process opens as it is. Behind the mark it is as its user wrote it, and that alone
is content: a run stays the same wherever its files lie. Leaves out files of code (code.py), and
storage roots, checkpoints below them and log folders, which begin in the current folder.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.config.code import FoldersOf, environments_in

MARK = "/.//"

_KEYS = (
    "policy.hf_path",
    "policy.tokenizer",
    "policy.lora.init_from",
    "reward_model.pairs",
)
_PROGRAMS = ("python", "interpreter")  # without a slash they are sought on PATH
_OPTIONS = ("path", "repositories", *_PROGRAMS)
# Environments whose options of these names are paths; in those of others they may be anything.
_READERS = ("chat", "code", "judge", "math", "nemo_gym", "openenv", "python", "repository")
_WORDS = ("characters",)  # the tokenizer that is no folder


def as_written(value: Any) -> Any:
    """Nested values with every placed path as its user wrote it."""
    if isinstance(value, Mapping):
        return {key: as_written(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_written(each) for each in value]
    placed = isinstance(value, str) and value.startswith("/")
    return value.partition(MARK)[2] or value if placed else value


def place_files(
    tree: Mapping[str, Any],
    folders: FoldersOf = lambda key: [Path()],
    *,
    known: Mapping[str, str] | None = None,
    tell: Callable[[str, str], None] = lambda key, line: None,
) -> dict[str, Any]:
    """Return a copy of a plain tree with relative paths placed in the first folder that has them.

    A placed path stays where it is as long as it is there. `known` has places by what is written.
    `tell` takes a key and a line for each path that is not in the first folder, or in several.
    """

    def placed(text: str, key: str, sure: bool) -> str:  # noqa: FBT001
        written = str(as_written(text))
        if known and written in known and _exists(known[written]):
            return known[written]
        if written.startswith("/") or "://" in written or not written:
            return text
        places = [f"{folder.resolve()}{MARK}{written}" for folder in folders(key)]
        there = [place for place in places if _exists(place)]
        if MARK in text and (_exists(text) or not there):
            return text
        if there and not _same([places[0], *there]):
            tell(key, _choice(there[0], places))
        return there[0] if there else places[0] if sure else text

    return _changed(tree, placed)


def places_in(tree: Mapping[str, Any]) -> dict[str, str]:
    """Placed paths of a plain tree by what is written."""
    found: dict[str, str] = {}

    def look(text: str, key: str, sure: bool) -> str:  # noqa: FBT001
        if MARK in text:
            found[str(as_written(text))] = text
        return text

    _changed(tree, look)
    return found


def places_named(tree: Mapping[str, Any]) -> dict[str, str]:
    """Texts of a plain tree that name a file, program, checkpoint or address, by dotted key.

    At any other key a text is an address if it has `://`, and a path if it is absolute.
    """
    found: dict[str, str] = {}

    def look(text: str, key: str, sure: bool) -> str:  # noqa: FBT001
        found[key] = text
        return text

    _changed(tree, look)
    for key, text in _texts(tree):
        named = key.rpartition(".")[2] in ("checkpoint", *_PROGRAMS)
        if named or "://" in text or text.startswith(("/", "~")):
            found[key] = text
    return found


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key.removeprefix("."), value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(each, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _texts(each, f"{key}.{place}")


def _choice(chosen: str, places: Sequence[str]) -> str:
    first, *others = (str(Path(place)) for place in places)
    if chosen == places[0]:
        return f"{first} is read, next to the YAML file, and not {others[-1]}"
    return (
        f"{Path(chosen)} is read, because there is no {first}: a relative path begins next to the "
        "YAML file that names it, and in the current folder where there is none"
    )


def _exists(place: str) -> bool:
    path = Path(place)
    return any(path.parent.glob(path.name)) if "*" in path.name else path.exists()


def _same(places: Sequence[str]) -> bool:
    return len({Path(place).resolve() for place in places}) == 1


def _section(tree: Any, key: str) -> dict[str, Any]:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


Change = Callable[[str, str, bool], str]  # from a text, its dotted key, and if it must be a path


def _changed(tree: Mapping[str, Any], change: Change) -> dict[str, Any]:
    result = json.loads(json.dumps(tree))
    for key in _KEYS:
        section, _, name = key.rpartition(".")
        node = _section(result, section)
        text = node.get(name)
        if isinstance(text, str) and text not in _WORDS:
            node[name] = change(text, key, True)
    inference = _section(result, "inference")
    if isinstance(inference.get("endpoints"), list):
        inference["endpoints"] = [
            f"file:{change(entry.removeprefix('file:'), 'inference.endpoints', True)}"
            if isinstance(entry, str) and entry.startswith("file:")
            else entry
            for entry in inference["endpoints"]
        ]
    for key, environment in environments_in(result):
        options = _section(environment, "options")
        for name in _OPTIONS:
            text = options.get(name)
            if isinstance(text, str) and (name not in _PROGRAMS or "/" in text):
                sure = environment.get("name") in _READERS
                options[name] = change(text, f"{key}.options.{name}", sure)
    return result
