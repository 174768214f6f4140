"""The process that scores: reads a group per line, writes an answer per completion.

Started by `scoring` through `marin_rl.worker_process`, which ends it and whatever it started.
"""

import importlib
from collections.abc import Callable
from typing import Any

import orjson

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment, answer_in, construct
from marin_rl.environments.scoring import score_here
from marin_rl.errors import InputError, MarinRLError, RewardFault
from marin_rl.types import Example, Message
from marin_rl.worker_process import Channel

Answer = Callable[[str], dict[str, Any]]


def main(channel: Channel) -> None:
    """Serve one parent until it closes its end."""
    lines = channel.lines()
    environment = _begin(orjson.loads(next(lines)), channel)
    if environment is None:
        return
    for line in lines:
        _answer_group(environment, orjson.loads(line), channel)


def _begin(hello: dict[str, Any], channel: Channel) -> Environment | None:
    try:
        importlib.import_module(hello["module"])
        environment = construct(EnvironmentConfig.model_validate(hello["environment"]))
        environment.load_scorer()
    except (MarinRLError, ImportError) as error:
        _answer(channel, hello, {"unfit": f"{type(error).__name__}: {error}"})
        return None
    _answer(channel, hello, {"ready": True})
    return environment


def _answer_group(environment: Environment, group: dict[str, Any], channel: Channel) -> None:
    answer = _scoring(environment, group) if "example" in group else _extracting(environment)
    for index, completion in enumerate(group["completions"]):
        _answer(channel, group, {"index": index, **answer(completion)})


def _scoring(environment: Environment, group: dict[str, Any]) -> Answer:
    """Return the function that scores a completion of a group."""
    example = _example(group["example"])

    def answer(completion: str) -> dict[str, Any]:
        score = score_here(environment, example, completion)
        return {"fault": str(score)} if isinstance(score, RewardFault) else {"components": score}

    return answer


def _extracting(environment: Environment) -> Answer:
    """Return the function that extracts the answer of a completion."""

    def answer(completion: str) -> dict[str, Any]:
        try:
            extracted = answer_in(environment, completion)
        except InputError as error:
            return {"unfit": str(error)}
        return {"answer": None if extracted is None else str(extracted)}

    return answer


def _answer(channel: Channel, question: dict[str, Any], answer: dict[str, Any]) -> None:
    """Answer with the question's nonce: a line without it came from elsewhere."""
    channel.send(orjson.dumps({"nonce": question["nonce"], **answer}))


def _example(plain: dict[str, Any]) -> Example:
    messages = tuple(Message(**message) for message in plain.pop("messages"))
    return Example(messages=messages, **plain)
