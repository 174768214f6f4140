"""Code of the user, named in a configuration as `FILE.py:name` or `module:name`.

A file is identified by its content: `pin` reads it and adds its SHA-256 to the name, and from then
on the digest decides. `load` runs the source with that digest as a module under a private name of
its own, never through `sys.path`, so no name of the user's folder meets one of ours. A source comes
from the file (`pin`), or from a copy (`offer`): in a run's folder, or sent to a worker process. A
copy that the user did not allow is never run. Which keys name code is said in config/files.py.
"""

import ast
import difflib
import importlib
import importlib.abc
import importlib.util
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.metadata import (
    PackageNotFoundError,
    distribution,
    entry_points,
    packages_distributions,
    version,
)
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from marin_rl.errors import ConfigError, InputError
from marin_rl.plain_files import read_regular

FILE_BYTES_MAX = 1 << 20
NAMES_SHOWN_MAX = 24
# For pydantic: a file or a dotted module, a name in it, and a file's digest.
SPEC_PATTERN = r"^([^:#\n]+\.py|[\w.]+):[A-Za-z_]\w*(#[0-9a-f]{64})?$"
ENTRY_POINTS = "marin_rl.environments"  # group of environments that packages register
PRIVATE = "marin_rl_user_code_"  # beginning of the names of modules made from files

_SPEC = re.compile(SPEC_PATTERN)


@dataclass(frozen=True, slots=True)
class CodeSpec:
    """A name of code, parsed: a file or a dotted module, a name in it, and a file's digest."""

    module: str
    name: str
    sha256: str = ""

    @property
    def is_file(self) -> bool:
        return self.module.endswith(".py")

    @property
    def typed(self) -> str:
        return f"{self.module}:{self.name}"

    def __str__(self) -> str:
        return f"{self.typed}#{self.sha256}" if self.sha256 else self.typed


@dataclass(slots=True)
class _Source:
    """Bytes of a file, read on first use; `origin` is its path or URL, for messages."""

    read: Callable[[], bytes]
    origin: str
    allowed: bool


_sources: dict[str, _Source] = {}
_lock = threading.RLock()


def parse_spec(text: object) -> CodeSpec | None:
    """Parse FILE.py:name or module:name; None for anything else."""
    if not isinstance(text, str) or _SPEC.fullmatch(text) is None:
        return None
    typed, _, digest = text.partition("#")
    module, _, name = typed.rpartition(":")
    return CodeSpec(module, name, digest)


def files_in(tree: object) -> dict[str, CodeSpec]:
    """The pinned files that are named anywhere in nested values, by digest."""
    if isinstance(tree, Mapping):
        parts: Iterable[object] = tree.values()
    elif isinstance(tree, list | tuple):
        parts = tree
    else:
        spec = parse_spec(tree)
        return {spec.sha256: spec} if spec is not None and spec.sha256 else {}
    return {digest: spec for part in parts for digest, spec in files_in(part).items()}


def pin(text: str, folder: Path, key: str) -> str:
    """Add the digest of its file to a name of code; other texts are returned as they are.

    The file is sought in `folder` or below. A name with a digest must match the file, unless the
    source of that digest is known. Raises ConfigError with `key` for a file that is not there or
    outside of the folder, a syntax error, another digest, and a name that the file does not define.
    """
    spec = parse_spec(text)
    if spec is None or not spec.is_file or spec.sha256 in _sources:
        return text
    parts = PurePosixPath(spec.module)
    if parts.is_absolute() or ".." in parts.parts:
        raise ConfigError(
            f"{key}: expected a file in the folder of the configuration or below, found "
            f"{spec.typed!r}; copy it there, or install it and write module:{spec.name}"
        )
    path = folder / spec.module
    if not path.is_file():
        files = sorted(other.name for other in path.parent.glob("*.py"))
        # A test is no reward, though its name is close to that of the file that it tests.
        others = [name for name in files if not name.startswith("test_")]
        shown = ", ".join(others[:NAMES_SHOWN_MAX]) or "no Python file"
        close = difflib.get_close_matches(path.name, others, n=1)
        hint = f"; did you mean {close[0]}:{spec.name}?" if close else ""
        raise ConfigError(
            f"{key}: no file {spec.module} in {folder.resolve()}, found {shown} in its place{hint}"
        )
    try:
        data = read_regular(path, FILE_BYTES_MAX)
        tree = ast.parse(data, str(path))
    except (OSError, InputError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {error}") from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}: {_syntax(error, str(path))}") from None
    _check_defines(spec, tree, f"{key}: {path}")
    digest = sha256(data).hexdigest()
    if spec.sha256 not in ("", digest):
        raise ConfigError(
            f"{key}: {path} was changed: expected SHA-256 {spec.sha256}, found {digest}"
        )
    offer(digest, lambda: data, str(path.absolute()), allowed=True)
    return str(replace(spec, sha256=digest))


def _check_defines(spec: CodeSpec, tree: ast.Module, file: str) -> None:
    """Refuse a file without the name, before anything of it runs."""
    names = set(_bound(tree))
    if names & {spec.name, "*", "__getattr__"}:  # a star or __getattr__ may give any name
        return
    defined = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    close = difflib.get_close_matches(spec.name, defined, n=1)
    hint = f"; did you mean {spec.module}:{close[0]}?" if close else ""
    shown = ", ".join(defined[:NAMES_SHOWN_MAX]) or "no function or class"
    raise ConfigError(f"{file} defines no {spec.name!r}; it defines {shown}{hint}")


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that the statements of a module bind, also below `if` and `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.alias):
            yield child.asname or child.name.partition(".")[0]
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _bound(child)


def _syntax(error: Exception, origin: str) -> str:
    line = getattr(error, "lineno", None)
    text = (getattr(error, "text", None) or "").strip()
    where = f"{origin}, line {line}" if line else origin
    return f"{where}: {getattr(error, 'msg', error)}{f': {text}' if text else ''}"


def offer(digest: str, read: Callable[[], bytes], origin: str, *, allowed: bool) -> None:
    """Make a source known by its digest; `read` is called, and checked, when it is needed.

    Without `allowed` it is not run until `allow` names it. A source that is known stays.
    """
    with _lock:
        known = _sources.setdefault(digest, _Source(read, origin, allowed))
        known.allowed = known.allowed or allowed


def allow(text: str) -> None:
    """Allow the source of a pinned name to be run: the user consented to it."""
    spec = parse_spec(text)
    if spec is not None and spec.sha256 in _sources:
        _sources[spec.sha256].allowed = True


def source_of(digest: str) -> bytes:
    """The bytes with a digest. Raises InputError where they are not known, or are others."""
    known = _sources.get(digest)
    if known is None:
        raise InputError(
            f"code with SHA-256 {digest} is not here: name its file in a configuration (FILE.py:"
            "name), or open the run that has a copy"
        )
    data = known.read()
    if sha256(data).hexdigest() != digest:
        raise InputError(f"{known.origin}: expected SHA-256 {digest}, found another; run fsck")
    return data


def packed_sources(tree: object) -> dict[str, dict[str, str]]:
    """The sources that nested values name, as JSON for a process that scores. Raises InputError."""
    # Latin-1 carries any bytes as text: a file may declare an encoding of its own.
    return {
        digest: {"source": source_of(digest).decode("latin-1"), "origin": _sources[digest].origin}
        for digest in files_in(tree)
    }


def offer_packed(packed: Mapping[str, Mapping[str, str]]) -> None:
    for digest, item in packed.items():
        source = item["source"].encode("latin-1")
        offer(digest, partial(bytes, source), item["origin"], allowed=True)


def load(text: str, role: str) -> Any:
    """The function or class that a name of code stands for; `role` is for messages.

    Raises InputError for another form, a module that is not there or fails, a name that it lacks, a
    value that cannot be called, and code that was not read or not allowed.
    """
    spec = parse_spec(text)
    if spec is None:
        raise InputError(f"{role} {text!r}: expected FILE.py:name or module:name")
    what = f"{role} {spec.typed!r}"
    module = _module_of(spec, what) if spec.is_file else _installed(spec, what)
    try:
        value = getattr(module, spec.name)
    except AttributeError as error:
        raise InputError(f"{what}: {error}") from error
    if not callable(value):
        raise InputError(
            f"{what} is not callable: expected a function or class, found {value!r:.80}"
        )
    return value


def check_importable(text: str, role: str) -> None:
    """Refuse a module that is not installed, without running it. Raises InputError."""
    spec = parse_spec(text)
    if spec is None or spec.is_file:  # files are checked when they are pinned
        return
    try:
        installed = importlib.util.find_spec(spec.module)
    except (ImportError, ValueError) as error:
        raise InputError(f"{role} {text!r}: {error}") from error
    if installed is None:
        raise InputError(f"{role} {text!r}: {_not_installed(spec)}")


def _not_installed(spec: CodeSpec) -> str:
    return (
        f"no module named {spec.module!r} is installed; a file of your own is named with its "
        f"suffix, {spec.module.replace('.', '/')}.py:{spec.name}"
    )


def _installed(spec: CodeSpec, what: str) -> ModuleType:
    try:
        return importlib.import_module(spec.module)
    except ImportError as error:
        absent = error.name in (spec.module, spec.module.partition(".")[0])
        raise InputError(f"{what}: {_not_installed(spec) if absent else error}") from error


def _module_of(spec: CodeSpec, what: str) -> ModuleType:
    """Return the module made from a pinned file, run once per process. Raises InputError."""
    if not spec.sha256:
        raise InputError(f"{what}: its file was not read with a configuration; use load_config")
    name = f"{PRIVATE}{spec.sha256}"
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        source = source_of(spec.sha256)
        known = _sources[spec.sha256]
        if not known.allowed:
            raise InputError(
                f"{what}: {known.origin} is code of a run that is not yours; add --trust to run it"
            )
        loader = _Loader(source, known.origin)
        module_spec = importlib.util.spec_from_file_location(name, known.origin, loader=loader)
        assert module_spec is not None, "a loader was given"
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module  # dataclasses and type hints look the module up by its name
        try:
            loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise InputError(f"{what}: {_failure(error, known.origin)}") from error
        return module


class _Loader(importlib.abc.ExecutionLoader):
    """Runs the bytes that were read, whatever the file has by now; writes no bytecode."""

    def __init__(self, source: bytes, origin: str) -> None:
        self._source, self._origin = source, origin

    def get_filename(self, fullname: str) -> str:
        return self._origin

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source)

    def is_package(self, fullname: str) -> bool:
        return False


def _failure(error: BaseException, origin: str) -> str:
    """An error of a file that is run, with the line in it."""
    if isinstance(error, SyntaxError):
        return _syntax(error, origin)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == origin]
    where = f"{origin}, line {lines[-1]}" if lines else origin
    text = f"{where}: {type(error).__name__}: {error}"
    if not isinstance(error, ImportError):
        return text
    neighbour = f"{(error.name or '').partition('.')[0]}.py"
    if "relative import" in str(error) or Path(origin).with_name(neighbour).is_file():
        text += (
            "; a file is loaded by itself and cannot import its neighbours: put both in one file, "
            "or install them as a package and write module:name"
        )
    return text


def registered(name: str) -> list[CodeSpec]:
    """Code that a package registers as an environment of this name; empty if none does."""
    points = entry_points(group=ENTRY_POINTS, name=name)
    return [spec for point in points if (spec := parse_spec(point.value)) is not None]


def record_of(spec: CodeSpec) -> dict[str, str]:
    """Identity of code for run.json: `spec`, `sha256` of its file; of a package also its version.

    An installed module is looked up, not run.
    """
    if spec.is_file:
        return {"spec": spec.typed, "sha256": spec.sha256}
    record = {"spec": spec.typed}
    try:
        found = importlib.util.find_spec(spec.module)
    except (ImportError, ValueError):
        found = None
    if found is not None and found.origin is not None and Path(found.origin).is_file():
        record["sha256"] = sha256(Path(found.origin).read_bytes()).hexdigest()
    package = spec.module.partition(".")[0]
    try:  # most have the name of their package; reading the packages of all takes a second
        names = [distribution(package).metadata["Name"]]
    except PackageNotFoundError:
        names = packages_distributions().get(package, [])
    for name in names[:1]:
        record |= {"distribution": name, "version": version(name)}
    return record
