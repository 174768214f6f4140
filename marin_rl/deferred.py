"""Packages that a library imports at its top, and that runs never use: imported once they are.

Levanter can read training sets through `datasets`, which brings pandas along, and can tell wandb of
a run: 64 and 19 MB of every process that loads a model here, and no run of ours asks Levanter to.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Mapping
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


class _Postponed(type):
    """Type of the proxies of classes; calls and attributes go to the class itself."""

    _proxy: ModuleType  # module that holds the proxy

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        return cls._imported()(*args, **settings)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._imported(), name)

    def _imported(cls) -> Any:
        if sys.modules.get(cls.__module__) is cls._proxy:
            del sys.modules[cls.__module__]
        return getattr(importlib.import_module(cls.__module__), cls.__name__)


def import_postponing(module: str, classes: Mapping[str, str]) -> None:
    """Import `module`, but not yet the modules in `classes`, from each of which it takes one class.

    It gets proxies, which import the class at its first use; others that import these modules
    get them as ever. Nothing happens where `module` is loaded already.
    """
    if module in sys.modules:
        return
    absent = {name: item for name, item in classes.items() if name not in sys.modules}
    for name, item in absent.items():
        postpone(name, item)
    try:
        importlib.import_module(module)
    finally:
        for name in absent:
            del sys.modules[name]


def postpone(module: str, item: str) -> None:
    """Let imports of one class or function of a module be postponed to the first use of it.

    Until then the module has nothing else. Nothing happens where it is loaded already.
    """
    if module not in sys.modules:
        sys.modules[module] = proxy = ModuleType(module)
        vars(proxy)[item] = _Postponed(item, (), {"__module__": module, "_proxy": proxy})


class _Withheld(importlib.abc.Loader):
    """Finder and loader of packages that cannot be imported, though they seem to be installed."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec whose module cannot be loaded; None for other names than `names`."""
        return ModuleSpec(name, self) if name in self.names else None

    def exec_module(self, module: ModuleType) -> None:
        """Raise ImportError, as Python does for a package that is not installed."""
        raise ModuleNotFoundError(f"No module named {module.__name__!r}", name=module.__name__)


_withheld = _Withheld()


def withhold(package: str) -> None:
    """Let imports of a package fail, for libraries that import it only where it is installed.

    A package that is loaded stays. For a process that is this project's alone: code of a user may
    import the package.
    """
    _withheld.names.add(package)
    if _withheld not in sys.meta_path:
        sys.meta_path.insert(0, _withheld)
