"""The work of a process that has an environment: scores, episodes, or finished rollouts.

Its parents are `scoring` and `episode_pool`, which ask through `marin_rl.isolated`.
Nothing is unpickled: requests and answers are JSON, and are validated by their types.
"""

import importlib
from collections.abc import Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import orjson
from pydantic import TypeAdapter

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import Environment, answer_in
from marin_rl.environments.episode import FAULTS, FinishedRollout, PolicyAddress, check_numbers
from marin_rl.environments.episode_pool import EpisodeHere
from marin_rl.environments.registry import construct
from marin_rl.environments.scoring import fault_of, score_here
from marin_rl.errors import Abstained, InputError, MarinRLError, RewardFault
from marin_rl.isolated.worker import RandomState
from marin_rl.types import Example, Turn, message_of
from marin_rl.user_code import PRIVATE, offer_packed

_EXAMPLE, _POLICY = TypeAdapter(Example), TypeAdapter(PolicyAddress)


def begin(settings: Mapping[str, Any]) -> "Scores | Episodes":
    """Construct the environment of `settings`; return what serves its `purpose`.

    Raises InputError, which names the purpose, where it cannot be imported.
    """
    purpose = settings["purpose"]
    try:
        offer_packed(settings["code"])
        if not settings["module"].startswith(PRIVATE):  # it may register environments
            importlib.import_module(settings["module"])
        environment = construct(EnvironmentConfig.model_validate(settings["environment"]))
        if purpose != "score":
            environment.load_examples()
        environment.load_scorer()
    except (MarinRLError, ImportError) as error:
        message = f"the environment cannot {purpose}: {type(error).__name__}: {error}"
        raise InputError(message) from error
    return Scores(environment) if purpose == "score" else Episodes(environment)


class Scores:
    """Scores of completions, and answers that are extracted from them, one call after another.

    `ready` says whether groups are scored in one call, and whether that reads token ids.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.ready = [environment.scores_groups, environment.wants_completion_ids]

    def __call__(self, request: Mapping[str, Any]) -> bytes:
        if "extract" not in request:
            return self._scores(request["example"], request["score"])
        try:
            answer = answer_in(self._environment, request["extract"])
        except InputError as error:
            return orjson.dumps({"unfit": str(error)})
        return orjson.dumps({"answer": None if answer is None else str(answer)})

    def _scores(self, values: Mapping[str, Any], call: Mapping[str, Any]) -> bytes:
        messages = tuple(map(message_of, values["messages"]))
        example = Example(**{**values, "messages": messages})
        dialogues = [tuple(map(message_of, messages)) for messages in call.get("dialogues", ())]
        scores = score_here(self._environment, example, call["completions"], call["ids"], dialogues)
        return orjson.dumps(
            [
                {"fault": str(score), "abstained": isinstance(score, Abstained)}
                if isinstance(score, RewardFault)
                else {"components": score}
                for score in scores
            ]
        )


class Episodes:
    """Episodes by the number that their owner gave them, and rollouts; their calls interleave.

    Each has the state of Python's and NumPy's global random numbers to itself, which begins with
    the example's seed, so that an environment that draws from them is a function of example and
    actions, whatever else its process plays.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._episodes: dict[int, EpisodeHere] = {}
        self._random: dict[int, RandomState] = {}

    def call(
        self, request: Mapping[str, Any]
    ) -> tuple[Coroutine[Any, Any, bytes], AbstractContextManager[object]]:
        number, operation, argument = (request[k] for k in ("episode", "operation", "argument"))
        state = self._random.get(number, nullcontext())
        if operation == "start":
            example = _EXAMPLE.validate_python(argument)
            state = self._random[number] = RandomState(example.seed)
            self._episodes[number] = EpisodeHere(self._environment, example)
        elif operation == "rollouts":
            state = RandomState(argument["example"]["seed"])
        return self._answer(number, operation, argument), state

    async def _answer(self, number: int, operation: str, argument: Any) -> bytes:
        try:
            return orjson.dumps({"answer": await self._done(number, operation, argument)})
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is other people's code
            kinds = {**FAULTS, "fault": BaseException}
            kind = next(name for name, each in kinds.items() if isinstance(error, each))
            return orjson.dumps({"failure": kind, "message": str(fault_of(error))})

    async def _done(self, number: int, operation: str, argument: Any) -> Any:
        match operation:
            case "start":
                return await self._episodes[number].start()
            case "step":
                return await self._episodes[number].step(_turn_of(argument))
            case "rollouts":
                example = _EXAMPLE.validate_python(argument["example"])
                policy = _POLICY.validate_python(argument["policy"])
                return list(map(_encoded, await self._environment.rollouts(example, policy)))
            case _:
                self._random.pop(number, None)
                episode = self._episodes.pop(number, None)
                return None if episode is None else await episode.close()


def _turn_of(record: dict[str, Any]) -> Turn:
    """Return a turn as its parent sent it. Raises pydantic's ValidationError."""
    logprobs = record.pop("logprobs", None)
    values = {
        field.name: _adapter(field.type).validate_python(record[field.name])
        for field in fields(Turn)
        if field.name in record
    }
    return Turn(**values, logprobs=None if logprobs is None else np.array(logprobs, np.float32))


@cache
def _adapter(kind: Any) -> Any:  # a TypeAdapter, which beartype knows no hint of
    return TypeAdapter(kind)  # takes milliseconds to make


def _encoded(rollout: object) -> orjson.Fragment | str:
    """Return the JSON of a rollout, or its fault in words, so that one costs no other."""
    if isinstance(rollout, RewardFault):
        return str(rollout)
    try:
        if not isinstance(rollout, FinishedRollout):
            raise TypeError(f"expected a FinishedRollout, found {type(rollout).__name__}")
        check_numbers(rollout)  # JSON has null in the place of NaN
        return orjson.Fragment(orjson.dumps(rollout, option=orjson.OPT_SERIALIZE_NUMPY))
    except (TypeError, ValueError) as error:
        return str(fault_of(error))
