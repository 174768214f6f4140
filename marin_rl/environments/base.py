"""Environments: their base class, and the checks of rewards that all of them share.

An environment makes examples out of (seed, index, split) alone and scores completions; it keeps no
state between calls. One of another package is registered by its entry point in the group
"marin_rl.environments"; a class in a file of the user is named as code (`custom`). Time limits
on scoring are in `scoring`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import orjson

from marin_rl.environments.episode import Episode, FinishedRollout, OneShot, PolicyAddress, Tool
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.finite import BOUNDS, fit_rewards, number, reward_number, shown
from marin_rl.types import Demonstration, Example, Message, RewardComponent, Split, assistant

# Functions of this package that a configuration may name: no foreign code is imported for them.
_ANSWERS = ("exact_match", "number_match", "last_number")
SHIPPED = frozenset(f"marin_rl.environments.answers:{name}" for name in _ANSWERS)

GroupScore = tuple[RewardComponent, ...] | RewardFault
Dialogues = Sequence[Sequence[Message]]

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class Environment(ABC):
    """Problems and their scoring: define `example` and `score`, and change the rest.

    Attributes may be set on the class, in `__init__` or in `load_examples`. `version` changes
    whenever examples or scores may. `size` and `eval_size` are the numbers of different examples,
    None where there is no end of them; an index beyond starts over. Seeds that differ by a
    multiple of `seed_period` may make one example; None: no two do. `rows_digest` is the digest of
    its files, known after `load_examples`.

    `workers` is the number of processes that score and play episodes; 0 does that in the main
    process, without time limits. `replayable` is False where the steps of an episode have
    effects outside of their process, or answers that differ. With `own_prompts` the members of
    a group may start with different prompts, and begin other conversations later;
    `replays_calls` says that their episodes may be compared, by what they ask, all the same. With
    `asks_policy` the policy plays others in its episodes, too: the example that an episode is
    made of has `episode.POLICY` in its metadata, the `endpoints` (base URLs that end in /v1),
    the id of the `model`, and the `sampling`.
    `extracts_here` says that `extract` is code of this package, which needs no worker.

    With `plain_prompts` the text of an example's only message is the prompt, without the chat
    template. `stop` are strings that end a completion too, `new_tokens_max` bounds its tokens, and
    with `choices` it is the one of them that is likeliest as the first token, of the 20 likeliest.
    `record` says which published file of examples was read, and how.
    """

    name: str = ""
    version: str = "1"
    size: int | None = None
    eval_size: int | None = None
    seed_period: int | None = None
    rows_digest: str | None = None
    workers: int = 1
    replayable: bool = True
    own_prompts: bool = False
    replays_calls: bool = False
    asks_policy: bool = False
    extracts_here: bool = False
    wants_completion_ids: bool = False
    plain_prompts: bool = False
    stop: tuple[str, ...] = ()
    new_tokens_max: int | None = None
    choices: tuple[str, ...] = ()
    record: Mapping[str, str] = MappingProxyType({})
    reward_name: str = ""  # for errors, where it is not the environment's

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__dict__.get("name") or cls.__name__

    @classmethod
    def defines(cls, member: str) -> bool:
        return getattr(cls, member) is not getattr(Environment, member)

    def load_examples(self) -> None:  # noqa: B027 - a default, and not to be defined by all
        """Load what examples need, once, in the process that samples. Raises InputError."""

    def load_scorer(self) -> None:  # noqa: B027 - as above
        """Load what scoring needs, once, in each process that scores. Raises InputError."""

    @abstractmethod
    def example(self, seed: int, index: int, split: Split) -> Example:
        """The example at `index` of a split: a pure function of its arguments."""

    def place(self, seed: int, index: int, split: Split) -> str | None:
        """File and row of an example, for errors."""
        return None

    def demonstration(self, example: Example) -> str | None:
        """Answer for a supervised warm start: by default the example's."""
        return example.answer

    def demonstrated(self, example: Example) -> Demonstration | None:
        """The conversation that a warm start learns: by default it ends in that answer's text."""
        text = self.demonstration(example)
        if text is None:
            return None
        name = f"example {example.example_id} of {self.name}"
        return Demonstration(messages=example.messages, answer=assistant(text), name=name)

    def check_demonstrations(self, seed: int, count: int) -> None:
        """Raise InputError where one of the first `count` training examples has none.

        By default the first one speaks for all.
        """
        if count and self.demonstration(example := self.example(seed, 0, "train")) is None:
            raise InputError(no_demonstration(self, example))

    def notices(self, *, scored: bool = True) -> Sequence[str]:
        """Sentences on its data that a user may not expect, known after `load_examples`.

        Those on rewards are left out where nothing is `scored`: of demonstrations.
        """
        return ()

    @abstractmethod
    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """Named components of the reward of one completion. May raise any exception."""

    def score_of_limit(self, completion: str, limit: str) -> tuple[RewardComponent, ...] | None:
        """Score of a completion whose check exceeded `limit`; None makes it a fault."""
        return None

    @property
    def scores_groups(self) -> bool:
        """True where the completions of an example are scored in one call, by `score_group`.

        Known after `load_scorer`.
        """
        return self.defines("score_group")

    def score_group(
        self,
        example: Example,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        dialogues: Dialogues,
    ) -> Sequence[GroupScore]:
        """Components or a fault for each member of a group, compared with one another.

        `dialogues` have all that followed the prompt, the model's turns and what the environment
        answered, and `completions` the last turn of each; `completion_ids` are its token ids where
        the class says `wants_completion_ids`. May raise any exception.
        """
        return [self.score(example, completion) for completion in completions]

    def extract(self, completion: str) -> str | None:
        """The answer that a completion gives, as votes are counted; None without one."""
        return completion.strip() or None

    def episode(self, example: Example) -> Episode:
        """A new episode: by default of one step, the completion, which is scored."""
        return OneShot(example)

    @property
    def has_episodes(self) -> bool:
        """True for episodes of several turns."""
        return self.defines("episode")

    def tools_offered(self) -> Sequence[Tool]:
        """Tools that every episode offers.

        They are checked against the policy's chat template before a run starts; tools that an
        episode returns from `start` alone are checked there.
        """
        return ()

    async def rollouts(
        self, example: Example, policy: PolicyAddress
    ) -> Sequence[FinishedRollout | RewardFault]:
        """A rollout or a fault for each entry of `policy.sampling`, in order.

        For environments that sample from the policy by themselves. May raise anything;
        EndpointUnavailable says that its own server cannot be reached.
        """
        raise AssertionError(f"{self.name} does not sample by itself: see returns_rollouts")

    @property
    def returns_rollouts(self) -> bool:
        """True if the environment samples from the policy itself (`rollouts`)."""
        return self.defines("rollouts")

    def make_example(
        self,
        prompt: str | Sequence[Message],
        answer: str | None = None,
        *,
        seed: int,
        index: int,
        split: Split,
        metadata: Mapping[str, Any] = _NO_METADATA,
    ) -> Example:
        """An example of this environment; a `prompt` of text is one message of the user."""
        text = isinstance(prompt, str)
        return Example(
            environment=self.name,
            environment_version=self.version,
            example_id=f"{split}-{seed}-{index}",
            split=split,
            seed=seed + index,
            messages=(Message(role="user", content=prompt),) if text else tuple(prompt),
            answer=answer,
            metadata=dict(metadata),
        )


class RewardedElsewhere(Environment):
    """Base of environments whose episodes another library or server plays and rewards."""

    def demonstration(self, example: Example) -> str | None:
        """None: there are no turns to imitate."""
        return None

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """0: an episode that was ended before it was rewarded."""
        return (RewardComponent(name=self.name, value=0.0),)


def completed(environment: Any) -> Environment:
    """Give an environment that is no subclass of `Environment` the defaults of its optional parts.

    Raises ConfigError where its class cannot have another base, such as one with `__slots__`.
    """
    kind = type(environment)
    if not isinstance(environment, Environment):
        own = {"__module__": kind.__module__}
        own |= {"name": kind.name} if hasattr(kind, "name") else {}
        try:
            environment.__class__ = type(kind.__name__, (kind, Environment), own)
        except TypeError as error:
            raise ConfigError(
                f"the environment {kind.__module__}.{kind.__qualname__} cannot get the defaults of "
                f"what it does not define ({error}): expected a subclass of BaseEnvironment, or a "
                "class without __slots__"
            ) from error
    return environment


def no_demonstration(environment: Environment, example: Example) -> str:
    """Return the message for an example that a warm start cannot learn from."""
    return (
        f"example {example.example_id} of {environment.name} has no demonstration (its answer is "
        "null): a warm start needs (prompt, answer) pairs; choose another sft.environment"
    )


def answer_in(environment: Environment, completion: str) -> str | None:
    """The answer that an environment extracts; by default the whole text, stripped.

    None, which is no vote, where extracting fails.
    """
    try:
        return environment.extract(completion)
    except InputError:
        raise
    except Exception:  # noqa: BLE001 - what a function makes of a model's words must not end a run
        return None


def plain_json(metadata: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """`metadata` as plain JSON values: what is not JSON becomes a string, NaN becomes null.

    Raises InputError where a key cannot be one in JSON.
    """
    option = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS
    try:
        return orjson.loads(orjson.dumps(dict(metadata), default=str, option=option))
    except (TypeError, ValueError) as error:
        raise InputError(f"{source}: its metadata cannot be written as JSON: {error}") from error


def checked_components(value: object) -> tuple[RewardComponent, ...]:
    """Check that `value` is a reward. Raises ValueError saying what it is instead."""
    if not isinstance(value, tuple) or not value:
        raise ValueError(f"expected reward components, found {value!r:.80}")
    for component in value:
        if not isinstance(component, RewardComponent):
            raise ValueError(f"expected a reward component, found {component!r:.80}")
    components = tuple(map(_checked, value))
    reward_number(reward_of(components), "weighted sum of the reward components")
    return components


def _checked(component: RewardComponent) -> RewardComponent:
    """Return a component with numbers that can be trained on. Raises ValueError naming it."""
    written = component.value, component.weight
    found = "found {} = {} with weight {}".format(component.name, *map(shown, written))
    try:
        value, weight = map(number, written)
    except ValueError:
        raise ValueError(f"expected numbers, {found}") from None
    if not (math.isfinite(value) and math.isfinite(weight)):
        raise ValueError(f"expected finite numbers, {found}")
    if not fit_rewards(value) or not fit_rewards(weight):
        raise ValueError(f"expected numbers {BOUNDS}; {found}")
    plain = all(isinstance(each, int | float) for each in written)
    return component if plain else replace(component, value=value, weight=weight)


def reward_of(components: tuple[RewardComponent, ...]) -> float:
    return float(sum(component.weight * component.value for component in components))
