"""Packages that libraries import only where they are installed, kept out of a process."""

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Withheld(importlib.abc.Loader):
    """Finder and loader of packages that cannot be imported, though they seem to be installed."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.names else None

    def exec_module(self, module: ModuleType) -> None:
        raise ModuleNotFoundError(f"No module named {module.__name__!r}", name=module.__name__)


_withheld = _Withheld()


def withhold(package: str) -> None:
    """Let imports of a package fail, for libraries that import it only if it is installed.

    A package that is loaded stays. For a process without code of users, which may import it. None
    in `sys.modules` would not do: Arrow takes it for the package.
    """
    _withheld.names.add(package)
    if _withheld not in sys.meta_path:
        sys.meta_path.insert(0, _withheld)
