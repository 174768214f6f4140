"""Stages of the checks before a start: one small object each, and who goes through them.

A flow goes through its stages in order and stops at the first that fails; `marin-rl doctor` goes
through all of them, also after a failure. Conditions on keys alone are checked by the configuration
itself (`config`).
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from marin_rl.config import Config
from marin_rl.errors import MarinRLError
from marin_rl.progress import phase

T = TypeVar("T")

DOCTOR = "doctor"
EVALUATE = "evaluate"
RL, SFT, REWARD_MODEL, PREFERENCE = "rl-loop", "sft", "reward-model", "preference"
OF_PAIRS = frozenset({REWARD_MODEL, PREFERENCE})
ROUNDS = frozenset({RL, SFT, EVALUATE, DOCTOR})
EVERYBODY = ROUNDS | OF_PAIRS


@dataclass(frozen=True, slots=True)
class Stage:
    """One check of a configuration, which returns a line of text or raises an error of our tree.

    `used_by` are flows by their names, and the doctor.
    """

    name: str
    check: Callable[[Config], str]
    used_by: frozenset[str] = EVERYBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of one check; `detail` is its result, or the error with its remedy."""

    name: str
    passed: bool
    detail: str


def run_stages(config: Config, user: str, stages: Sequence[Stage]) -> None:
    """Raise the error of the first stage of `user` that fails, before any work is done."""
    for stage in stages:
        if user in stage.used_by:
            with phase(f"checking {stage.name}"):
                stage.check(config)


def examine(config: Config, stages: Sequence[Stage]) -> Iterator[Finding]:
    """Run every stage of the doctor, also after failures; one cause is explained once."""
    explained: dict[str, str] = {}
    for stage in stages:
        if DOCTOR not in stage.used_by:
            continue
        try:
            with phase(f"checking {stage.name}"):
                detail = stage.check(config)
            yield Finding(name=stage.name, passed=True, detail=detail)
        except MarinRLError as error:
            detail = f"{type(error).__name__}: {error}"
            first = explained.setdefault(detail, stage.name)
            shown = detail if first == stage.name else f"the same error as {first}"
            yield Finding(name=stage.name, passed=False, detail=shown)


def await_apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await a coroutine on an event loop in another thread: a calling flow may be running one."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(make())).result()
