"""Packages that a library imports at its top, and that runs never use: imported once they are.

Levanter can read training sets through `datasets`, which brings pandas along, and can tell wandb of
a run: 64 and 19 MB of every process that loads a model here, and no run of ours asks Levanter to.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Deferred(ModuleType):
    """Proxy of a package, which imports the package at its first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _ASKED_OF_PACKAGES:  # by who looks at every module
            raise AttributeError(name)
        with _lock:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
                try:
                    package = importlib.import_module(self.__name__)
                except BaseException:
                    sys.modules[self.__name__] = self
                    raise
                vars(self).update(vars(package))
        return getattr(sys.modules[self.__name__], name)


_lock = threading.RLock()
_ASKED_OF_PACKAGES = ("__path__", "__all__", "__version__")


def defer(*packages: str) -> None:
    """Let imports of top-level packages from now on be deferred; not of those that are loaded."""
    for package in packages:
        spec = None if package in sys.modules else importlib.util.find_spec(package)
        if spec is not None:
            proxy = Deferred(package)
            proxy.__spec__, proxy.__file__ = spec, spec.origin
            sys.modules[package] = proxy


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
