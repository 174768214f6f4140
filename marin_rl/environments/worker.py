"""The work of a process that scores: an environment's rewards and answers, one completion each.

`scoring` asks for it through `marin_rl.isolated`, which ends the process and whatever it started.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment, ScoresGroups, answer_in
from marin_rl.environments.registry import construct
from marin_rl.environments.scoring import score_here
from marin_rl.errors import Abstained, InputError, MarinRLError, RewardFault
from marin_rl.types import Example, message_of
from marin_rl.user_code import PRIVATE, offer_packed


def begin(settings: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bytes]:
    """Construct the environment of `settings`; return the function that scores and extracts.

    Its `ready` says whether groups are scored in one call, and whether that reads token ids.
    Raises InputError where it cannot be imported.
    """
    environment = constructed(settings, "score")
    by_group = isinstance(environment, ScoresGroups) and environment.scores_groups
    wants_ids = isinstance(environment, ScoresGroups) and environment.wants_completion_ids
    answer = partial(_answer, environment)
    answer.ready = [by_group, wants_ids]  # pyright: ignore[reportAttributeAccessIssue]
    return answer


def constructed(
    settings: Mapping[str, Any], purpose: str, *, examples: bool = False
) -> Environment:
    """The environment of `settings`, with what scoring needs and, if asked for, its examples.

    Raises InputError, which names the purpose, where it cannot be imported.
    """
    try:
        offer_packed(settings["code"])
        if not settings["module"].startswith(PRIVATE):  # it may register environments
            importlib.import_module(settings["module"])
        environment = construct(EnvironmentConfig.model_validate(settings["environment"]))
        if examples:
            environment.load_examples()
        environment.load_scorer()
    except (MarinRLError, ImportError) as error:
        message = f"the environment cannot {purpose}: {type(error).__name__}: {error}"
        raise InputError(message) from error
    return environment


def _answer(environment: Environment, request: Mapping[str, Any]) -> bytes:
    """Score completions for an example, or extract an answer."""
    if "extract" in request:
        return orjson.dumps(_extracted(environment, request["extract"]))
    return orjson.dumps(_scored(environment, request["example"], request["score"]))


def _scored(
    environment: Environment, values: Mapping[str, Any], call: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    messages = tuple(map(message_of, values["messages"]))
    example = Example(**{**values, "messages": messages})
    dialogues = [tuple(map(message_of, messages)) for messages in call.get("dialogues", ())]
    scores = score_here(environment, example, call["completions"], call["ids"], dialogues)
    return [
        {"fault": str(score), "abstained": isinstance(score, Abstained)}
        if isinstance(score, RewardFault)
        else {"components": score}
        for score in scores
    ]


def _extracted(environment: Environment, completion: str) -> dict[str, Any]:
    try:
        answer = answer_in(environment, completion)
    except InputError as error:
        return {"unfit": str(error)}
    return {"answer": None if answer is None else str(answer)}
