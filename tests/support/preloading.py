"""Imports before forks, and ends of these: what servers that fork processes for tests share.

A fork finds all that its server has imported, and ends without taking it apart, which takes a
second.
"""

import atexit
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterable
from typing import NoReturn

# What commands of marin-rl import while they run: a run for its tables, its curve, its adapters,
# its client's requests.
COMMANDS = (
    "graphviz",
    "httpcore2",
    "jaxlib.mlir.dialects.mhlo",
    "marin_rl.serving.weights.adapters",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "openai.resources",
    "pandas",
    "flows.evaluate",
    "flows.rl_loop",
    "flows.session",
    "flows.sft",
    "marin_rl.batching.build",
    "marin_rl.batching.sequences",
    "marin_rl.cli",
    "marin_rl.compilation",
    "marin_rl.environments.echo",
    "marin_rl.inference.engine",
    "marin_rl.planning",
    "marin_rl.runtime",
    "marin_rl.serving.server",
    "marin_rl.serving.weights.canary",
    "marin_rl.training.loop",
    "marin_rl.training.sft",
    "marin_rl.weight_sync",
)


def import_for_forks(names: Iterable[str]) -> None:
    """Import modules, in memory that forks share."""
    gc.disable()  # collections take a quarter of the time of the imports, and find none
    for name in names:
        importlib.import_module(name)
    freeze()
    gc.enable()


def freeze() -> None:
    """Leave what there is out of collections, which would have each fork write to, and copy, it."""
    gc.collect()
    gc.freeze()


def close_down() -> None:
    """Wait for threads, run what is registered for the end, and write out what is printed."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def end_process(code: int) -> NoReturn:
    """End as Python does, but without taking apart what is imported."""
    close_down()
    os._exit(code)


def code_of(end: SystemExit) -> int:
    """The exit code of a process that ends by it; a text is printed, as Python does."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
