"""marin-rl: reinforcement learning for language models as durable, file-based stages.

The library behind the stages. It never imports Prefect; the flows do. Scripts and notebooks begin
here: `from marin_rl import LLM, Config, run, scan_rollouts`. Each name is imported when it is
first used, so that `import marin_rl` stays quick; `__init__.pyi` tells type checkers what they are.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

# pyright: reportUnsupportedDunderAll=false
__all__ = [
    "LLM", "Completion", "Config", "Engine", "Learned", "Round", "TrainingRun", "__version__",
    "learn", "run", "scan_batches", "scan_dispositions", "scan_evals", "scan_metrics",
    "scan_rollouts", "scan_scores", "sql",
]  # fmt: skip

_HOMES = {
    "marin_rl.api.sampling": ("LLM", "Completion", "Engine"),
    "marin_rl.api.training": ("Learned", "Round", "TrainingRun", "learn", "run"),
    "marin_rl.config": ("Config",),
}


class _InstalledPackages:
    """Finds this distribution's other top-level packages where this one lies, whatever sys.path is.

    A folder of a user may hold a `tasks.py` or `schemas.py`, and it is first on sys.path of a
    script or a notebook in it. Installed for every process that imports marin_rl, which all of ours
    do first.
    """

    names = ("flows", "schemas", "tasks")
    folder = str(Path(__file__).parent.parent)

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of one of `names`; None for all other modules."""
        return PathFinder.find_spec(name, [cls.folder], target) if name in cls.names else None


def _refuse_other_packages() -> None:
    """Raise ImportError where a name of ours is already taken by a module of somebody else."""
    for name in _InstalledPackages.names:
        origin = getattr(sys.modules.get(name), "__file__", None)
        if origin and Path(origin).parent.parent != Path(_InstalledPackages.folder):
            raise ImportError(
                f"the module {name!r} was imported from {origin}, and marin-rl has a package of "
                f"that name: import marin_rl before it, or rename {Path(origin).name}"
            )


# Levanter imports GitPython, which raises ImportError where there is no git.
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
_refuse_other_packages()
sys.meta_path.insert(0, _InstalledPackages)

from marin_rl.machine import (  # noqa: E402 - the finder comes first
    ensure_no_alarms,
    ensure_threads,
    spare_loopback,
)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # importlib.metadata takes longer to import than the command line
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("marin-rl")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0.0.0"
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "marin_rl.analysis")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Before anything can start JAX: afterwards its thread pool has its size, and its log a level.
ensure_threads()
ensure_no_alarms()
spare_loopback()
