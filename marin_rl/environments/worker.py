"""The process that scores: reads groups from standard input, writes a line per completion.

Started by `scoring`. Standard output belongs to that conversation, so what a reward function prints
goes to standard error. It ends when its parent does: an idle one sees its input close, and one that
hangs is ended by a timer of the C runtime, which needs no interpreter lock.
"""

import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment, answer_in, construct
from marin_rl.environments.scoring import score_here
from marin_rl.errors import InputError, MarinRLError, RewardFault
from marin_rl.types import Example, Message

Answer = Callable[[str], dict[str, Any]]

# The parent kills at the time limit; this is for when there is no parent any more.
GRACE_S = 2.0


def main() -> None:
    """Serve one parent until it closes our standard input."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    questions = sys.stdin.buffer
    environment = _begin(orjson.loads(questions.readline()), answers)
    if environment is not None:
        _serve(environment, questions, answers)


def _begin(hello: dict[str, Any], answers: BinaryIO) -> Environment | None:
    try:
        importlib.import_module(hello["module"])
        environment = construct(EnvironmentConfig.model_validate(hello["environment"]))
        environment.load_scorer()
    except (MarinRLError, ImportError) as error:
        _tell(answers, {"unfit": f"{type(error).__name__}: {error}"})
        return None
    _tell(answers, {"ready": True})
    return environment


def _serve(environment: Environment, questions: BinaryIO, answers: BinaryIO) -> None:
    with Path(os.devnull).open("w") as nowhere:
        while line := questions.readline():
            group = orjson.loads(line)
            answer = (
                _scoring(environment, group) if "example" in group else _extracting(environment)
            )
            for completion in group["completions"]:
                faulthandler.dump_traceback_later(
                    group["timeout_s"] + GRACE_S, exit=True, file=nowhere
                )
                found = answer(completion)
                faulthandler.cancel_dump_traceback_later()
                _tell(answers, found)


def _scoring(environment: Environment, group: dict[str, Any]) -> Answer:
    """The answer to a completion of a group that is to be scored."""
    example = _example(group["example"])

    def answer(completion: str) -> dict[str, Any]:
        score = score_here(environment, example, completion)
        return {"fault": str(score)} if isinstance(score, RewardFault) else {"components": score}

    return answer


def _extracting(environment: Environment) -> Answer:
    """The answer to a completion whose answer is to be extracted."""

    def answer(completion: str) -> dict[str, Any]:
        try:
            found = answer_in(environment, completion)
        except InputError as error:
            return {"unfit": str(error)}
        return {"answer": None if found is None else str(found)}

    return answer


def _tell(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(orjson.dumps(message) + b"\n")


def _example(plain: dict[str, Any]) -> Example:
    messages = tuple(Message(**message) for message in plain.pop("messages"))
    return Example(messages=messages, **plain)
