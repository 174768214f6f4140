"""Texts of a configuration that name code of the user, or another file.

A file of code gets its digest (`user_code.pin`). A relative path is placed when a configuration is
read: it becomes `FOLDER/.//PATH`, an absolute path that every process opens as it is. Behind the
mark it is as its user wrote it, and that alone is content: a run stays the same wherever its files
lie. Leaves out storage roots, checkpoints below them and log folders, which begin in the current
folder.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marin_rl.user_code import CodeSpec, parse_spec, pin

MARK = "/.//"
# Options of environments that name code; another one does if its value is FILE.py:name.
CODE_OPTIONS = ("reward", "extract", "train")

_CODE_KEYS = ("objective.loss", "asynchrony.group_filter", "asynchrony.group_filter.score")
_PATH_KEYS = (
    "policy.hf_path", "policy.tokenizer", "policy.lora.init_from", "reward_model.pairs",
    "preference.pairs", "distillation.folder",
)  # fmt: skip
_PROGRAMS = ("python", "interpreter")  # without a slash they are sought on PATH
_PATH_OPTIONS = (
    "path", "shots_path", "repositories", "folder", "check_folder", "sessions", *_PROGRAMS,
)  # fmt: skip
# Environments whose options of these names are paths; in those of others they may be anything.
_READERS = (
    "agent", "chat", "code", "judge", "math", "nemo_gym", "openenv", "python", "repository",
    "suite",
)  # fmt: skip
_WORDS = ("characters",)  # the tokenizer that is no folder

FoldersOf = Callable[[str], Sequence[Path]]  # in which the files of a dotted key are sought


class _Text(NamedTuple):
    """A text in a plain tree: its dotted key, and `name` in its container.

    What is named begins after `prefix`. It is `sure` to be a path, or may be another word.
    """

    key: str
    container: Any
    name: Any
    prefix: str = ""
    sure: bool = True

    @property
    def value(self) -> str:
        return self.container[self.name].removeprefix(self.prefix)

    def write(self, value: str) -> None:
        self.container[self.name] = self.prefix + value


def pin_code(tree: Mapping[str, Any], folders: Path | FoldersOf) -> dict[str, Any]:
    """A copy of a plain tree in which every file of code has its digest; see `user_code.pin`.

    The first folder that has the file counts. Raises ConfigError naming the key and the last one.
    """
    result = _copied(tree)
    for text in _code_texts(result):
        spec = parse_spec(text.value)
        sought = [folders] if isinstance(folders, Path) else folders(text.key)
        there = (folder for folder in sought if spec and (folder / spec.module).is_file())
        text.write(pin(text.value, next(there, sought[-1]), text.key))
    return result


def code_in(tree: Mapping[str, Any]) -> list[tuple[str, CodeSpec]]:
    """Names of code in a plain tree with their dotted keys."""
    named: list[tuple[str, CodeSpec]] = []
    for text in _code_texts(_copied(tree)):
        option = text.key.partition(".options.")[2].partition(".")[0]  # "" of other keys
        spec = parse_spec(text.value)
        if spec is not None and (spec.is_file or option in ("", *CODE_OPTIONS)):
            named.append((text.key, spec))
    return named


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

    def placed(text: _Text) -> str:
        written = str(as_written(text.value))
        if known and written in known and _exists(known[written]):
            return known[written]
        if written.startswith("/") or "://" in written or not written:
            return text.value
        places = [f"{folder.resolve()}{MARK}{written}" for folder in folders(text.key)]
        there = [place for place in places if _exists(place)]
        if MARK in text.value and (_exists(text.value) or not there):
            return text.value
        if there and len({Path(place).resolve() for place in (places[0], *there)}) > 1:
            first, *_, last = (str(Path(place)) for place in places)
            line = (
                f"{Path(there[0])} is read, because there is no {first}: a relative path begins "
                "next to the YAML file that names it, and in the current folder where there is none"
            )
            if there[0] == places[0]:
                line = f"{first} is read, next to the YAML file, and not {last}"
            tell(text.key, line)
        return there[0] if there else places[0] if text.sure else text.value

    result = _copied(tree)
    for text in _path_texts(result):
        text.write(placed(text))
    return result


def places_in(tree: Mapping[str, Any]) -> dict[str, str]:
    """Placed paths of a plain tree by what is written."""
    return {str(as_written(path)): path for path in paths_in(tree).values() if MARK in path}


def paths_in(tree: Mapping[str, Any]) -> dict[str, str]:
    """Paths of a plain tree by their dotted keys."""
    return {text.key: text.value for text in _path_texts(_copied(tree))}


def places_named(tree: Mapping[str, Any]) -> dict[str, str]:
    """Texts of a plain tree that name a file, program, checkpoint or address, by dotted key.

    At any other key a text is an address if it has `://`, and a path if it is absolute.
    """
    copied, named = _copied(tree), paths_in(tree)
    for text in (text for name in copied for text in _texts_below(copied, name, name)):
        known = text.key.rpartition(".")[2] in ("checkpoint", *_PROGRAMS)
        if known or "://" in text.value or text.value.startswith(("/", "~")):
            named[text.key] = text.value
    return named


def environments_in(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sections of environments by their keys; the tree may be one that is not valid."""
    nodes = {"environment": tree.get("environment")}
    nodes["sft.environment"] = section_at(tree, "sft").get("environment")
    sets = section_at(tree, "evaluation.sets")
    for key, node in (nodes | {f"evaluation.sets.{n}": each for n, each in sets.items()}).items():
        if isinstance(node, dict):
            yield key, node
            entries = node.get("mixture")
            for place, entry in enumerate(entries if isinstance(entries, list) else ()):
                if isinstance(entry, dict):
                    yield f"{key}.mixture.{place}", entry


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(tree))


def section_at(tree: Any, key: str) -> dict[str, Any]:
    """The mapping at a dotted key of a plain tree; empty where there is none."""
    for name in filter(None, key.split(".")):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def _at(tree: dict[str, Any], keys: Sequence[str]) -> Iterator[_Text]:
    for key in keys:
        section, _, name = key.rpartition(".")
        node = section_at(tree, section)
        if isinstance(node.get(name), str):
            yield _Text(key, node, name)


def _texts_below(container: Any, name: Any, key: str) -> Iterator[_Text]:
    """Yield every text at a place of a container, at any depth."""
    value = container[name]
    if isinstance(value, str):
        yield _Text(key, container, name)
    elif isinstance(value, dict | list):
        for each in value if isinstance(value, dict) else range(len(value)):
            yield from _texts_below(value, each, f"{key}.{each}")


def _code_texts(tree: dict[str, Any]) -> Iterator[_Text]:
    for key, environment in environments_in(tree):
        for name in ("name", "options"):
            if name in environment:
                yield from _texts_below(environment, name, f"{key}.{name}")
    yield from _at(tree, _CODE_KEYS)


def _path_texts(tree: dict[str, Any]) -> Iterator[_Text]:
    yield from (text for text in _at(tree, _PATH_KEYS) if text.value not in _WORDS)
    endpoints = section_at(tree, "inference").get("endpoints")
    for place, entry in enumerate(endpoints if isinstance(endpoints, list) else ()):
        if isinstance(entry, str) and entry.startswith("file:"):
            yield _Text("inference.endpoints", endpoints, place, prefix="file:")
    for key, environment in environments_in(tree):
        options, sure = section_at(environment, "options"), environment.get("name") in _READERS
        for name in _PATH_OPTIONS:
            text = options.get(name)
            if isinstance(text, str) and (name not in _PROGRAMS or "/" in text):
                yield _Text(f"{key}.options.{name}", options, name, sure=sure)


def _exists(place: str) -> bool:
    path = Path(place)
    return any(path.parent.glob(path.name)) if "*" in path.name else path.exists()
