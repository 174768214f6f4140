"""Base class of environments: what most of them have in common, with defaults.

Leaves out the protocol that all environments follow, whether they derive from it or not (`base`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from marin_rl.environments.base import Dialogues, GroupScore
from marin_rl.types import Example, Message, RewardComponent, Split

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class BaseEnvironment(ABC):
    """Base of environments of one's own: define `example` and `score`, and change the rest.

    Attributes may be set on the class, in `__init__` or in `load_examples`. `workers` is the number
    of processes that score and play episodes; 0 does that in the main process, without time limits.
    `replayable` is False where the steps of an episode have effects outside of their process.
    """

    name: str = ""
    version: str = "1"
    size: int | None = None
    workers: int = 1
    replayable: bool = True
    wants_completion_ids: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__dict__.get("name") or cls.__name__

    def load_examples(self) -> None:  # noqa: B027 - a default, and not to be defined by all
        """Load what examples need, once, in the process that samples. By default nothing."""

    def load_scorer(self) -> None:  # noqa: B027 - as above
        """Load what scoring needs, once, in each process that scores. By default nothing."""

    @abstractmethod
    def example(self, seed: int, index: int, split: Split) -> Example:
        """The example at `index` of a split: a pure function of its arguments."""

    def demonstration(self, example: Example) -> str | None:
        """Answer for a supervised warm start: by default the example's."""
        return example.answer

    @abstractmethod
    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """Named components of the reward of one completion."""

    @property
    def scores_groups(self) -> bool:
        """True where the class defines `score_group`."""
        return type(self).score_group is not BaseEnvironment.score_group

    def score_group(
        self,
        example: Example,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        dialogues: Dialogues,
    ) -> Sequence[GroupScore]:
        """Components for each member of a group, compared with one another, in one call.

        By default members are scored by themselves, by `score`. `dialogues` have what followed the
        prompt, and `completions` the last turn of each; `completion_ids` are its token ids where
        the class says `wants_completion_ids`.
        """
        return [self.score(example, completion) for completion in completions]

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


class RewardedElsewhere(BaseEnvironment):
    """Base of environments whose episodes another library or server plays and rewards."""

    def demonstration(self, example: Example) -> str | None:
        """None: there are no turns to imitate."""
        return None

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """0: an episode that was ended before it was rewarded."""
        return (RewardComponent(name=self.name, value=0.0),)
