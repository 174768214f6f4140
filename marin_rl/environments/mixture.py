"""Several environments in one run: whose turn it is at each index, and their examples.

Owns the order of environments and the names of their examples. Leaves out sampling and scoring,
which are each environment's own (`parts_of`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from marin_rl.config import EnvironmentConfig, MixtureEntry, SamplingConfig, whole_weights
from marin_rl.environments.base import Environment
from marin_rl.environments.registry import construct, loaded_environment
from marin_rl.types import Example, RewardComponent, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of environments, which repeats after a cycle of W groups.

    `places[i]` is the environment of group i, `before[i]` how many groups it had before that one.
    After any number n of groups, an environment of weight w has had n w / W of them, rounded up or
    down: a round of a multiple of W groups has them in exact proportion.
    """

    weights: tuple[int, ...]
    places: tuple[int, ...]
    before: tuple[int, ...]

    def at(self, index: int) -> tuple[int, int]:
        """Environment of the group at `index`, and the place of that group among its own."""
        cycles, rest = divmod(index, len(self.places))
        place = self.places[rest]
        return place, cycles * self.weights[place] + self.before[rest]

    def count(self, place: int, n: int) -> int:
        cycles, rest = divmod(n, len(self.places))
        return cycles * self.weights[place] + self.places[:rest].count(place)


@lru_cache(maxsize=64)
def order_of(weights: tuple[int, ...]) -> Order:
    """The order of environments with these weights, whole numbers.

    Earliest deadline first: group j of an environment of weight w lies in [floor(j W / w),
    ceil((j + 1) W / w)), and of those whose window is open the one that closes first is next. This
    keeps every count within one of its share (Baruah et al. 1996, Algorithmica 15, Pfair
    schedules). Equal deadlines go to the first of the list.
    """
    cycle, counts = sum(weights), [0] * len(weights)
    places, before = list[int](), list[int]()
    for index in range(cycle):
        open_now = [k for k, w in enumerate(weights) if counts[k] * cycle // w <= index]
        place = min(open_now, key=lambda k: -(-(counts[k] + 1) * cycle // weights[k]))
        places.append(place)
        before.append(counts[place])
        counts[place] += 1
    assert tuple(counts) == weights, "a cycle has every environment as often as its weight says"
    return Order(weights=weights, places=tuple(places), before=tuple(before))


def order_in(entries: Sequence[MixtureEntry]) -> Order:
    return order_of(whole_weights([entry.weight for entry in entries]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An environment of a run with its own settings; the label is "" where it is the only one."""

    label: str
    config: EnvironmentConfig
    environment: Environment


class Mixture(Environment):
    """Several environments as one: examples in turn, each under its environment's label."""

    name = "mixture"
    workers = 0  # it scores nothing itself

    def __init__(self, config: EnvironmentConfig) -> None:
        assert config.mixture is not None, "construct makes a mixture of a list alone"
        self._seed = config.train_seed, config.eval_seed
        self._order = order_in(config.mixture)
        alone = [(entry.shown_label, entry_alone(config, entry)) for entry in config.mixture]
        self._take([Part(label=a, config=c, environment=construct(c)) for a, c in alone])

    def _take(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.version = "; ".join(f"{part.label} {part.environment.version}" for part in parts)

    def load_examples(self) -> None:
        self._take(
            [
                replace(part, environment=loaded_environment(part.config, "train", "eval"))
                for part in self.parts
            ]
        )

    def example(self, seed: int, index: int, split: Split) -> Example:
        place, own = self._order.at(index)
        return self._example_of(self.parts[place], seed, own, split)

    def own_example(self, label: str, seed: int, index: int, split: Split) -> Example:
        part = next(part for part in self.parts if part.label == label)
        return self._example_of(part, seed, index, split)

    def _example_of(self, part: "Part", seed: int, own: int, split: Split) -> Example:
        first = part.config.train_seed if split == "train" else part.config.eval_seed
        outer = self._seed[0] if split == "train" else self._seed[1]
        example = part.environment.example(first + seed - outer, own, split)
        return labelled(example, part.label)

    def part_of(self, example: Example) -> Part:
        return next(part for part in self.parts if part.label == example.environment)

    def demonstration(self, example: Example) -> str | None:
        return self.part_of(example).environment.demonstration(example)

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        raise AssertionError(f"{example.environment} scores its examples itself: see parts_of")


def labelled(example: Example, label: str) -> Example:
    return replace(example, environment=label, example_id=f"{label}/{example.example_id}")


def parts_of(environment: Environment, config: EnvironmentConfig) -> tuple[Part, ...]:
    if isinstance(environment, Mixture):
        return environment.parts
    return (Part(label="", config=config, environment=environment),)


def part_for(environment: Environment, config: EnvironmentConfig, example: Example) -> Part:
    if isinstance(environment, Mixture):
        return environment.part_of(example)
    return Part(label="", config=config, environment=environment)


def entry_alone(outer: EnvironmentConfig, entry: MixtureEntry) -> EnvironmentConfig:
    """The settings of an environment of a list, as if it were the only one.

    What holds for all of them together comes from `outer`.
    """
    own = {name: getattr(entry, name) for name in EnvironmentConfig.model_fields}
    common = ("pass_environment", "reward_memory_bytes_max")
    return EnvironmentConfig(**own | {name: getattr(outer, name) for name in common})


def sampling_for(sampling: SamplingConfig, config: EnvironmentConfig, label: str) -> SamplingConfig:
    """The sampling of the environment with this label: the run's, with its own limits."""
    for entry in config.mixture or ():
        if entry.shown_label == label and entry.sampling is not None:
            return sampling.model_copy(update=entry.sampling.model_dump())
    return sampling
