"""The environment protocol, the registry by name, and the checks that all environments share.

An environment makes examples out of (seed, index, split) alone and scores completions; it keeps no
state between calls. One of another package is registered by its entry point in the group
"marin_rl.environments". Time limits on scoring are in `scoring`.
"""

import difflib
import importlib
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar, runtime_checkable

import orjson
from pydantic import ValidationError

from marin_rl.config import Config, EnvironmentConfig, Section
from marin_rl.errors import ConfigError, InputError
from marin_rl.types import Example, RewardComponent, Split

ENTRY_POINTS = "marin_rl.environments"
# Seeds of examples are signed integers of 64 bits on disk.
SEED_END = 2**63

# Functions that a configuration may name without another's code being imported.
_ANSWERS = ("exact_match", "number_match", "last_number")
SHIPPED = frozenset(f"marin_rl.environments.answers:{name}" for name in _ANSWERS)

_BUILT_IN = {
    "chat": "marin_rl.environments.chat",
    "echo": "marin_rl.environments.echo",
    "reasoning_gym": "marin_rl.environments.reasoning_gym",
}


@runtime_checkable
class Environment(Protocol):
    """Problems and their scoring.

    `size` is the number of different examples of a split, None where there is no end of them;
    an index beyond it starts over. `workers` is the number of processes that score, each with a
    time limit that interrupts; 0 is for scoring that cannot hang and happens where it is called.
    """

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    @property
    def version(self) -> str:
        """Changes whenever examples or scores may."""
        ...

    @property
    def size(self) -> int | None:
        """Number of different examples for training, if there is an end of them."""
        ...

    @property
    def workers(self) -> int:
        """Processes that score."""
        ...

    def load_examples(self) -> None:
        """Load what examples need, in the process that samples, once. Raises InputError."""
        ...

    def example(self, seed: int, index: int, split: Split) -> Example:
        """The example at `index` of a split: a pure function of its arguments."""
        ...

    def demonstration(self, example: Example) -> str | None:
        """Answer for a supervised warm start; None where the example has none."""
        ...

    def load_scorer(self) -> None:
        """Load what scoring needs, in the process that scores, once. Raises InputError."""
        ...

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """Named components of the reward of one completion. May raise any exception."""
        ...


@runtime_checkable
class Extracts(Protocol):
    """Optional part of an environment: the answer that a completion gives."""

    def extract(self, completion: str) -> str | None:
        """The answer in a completion, as votes are counted; None where there is none."""
        ...


@runtime_checkable
class ExtractsHere(Protocol):
    """Optional part of an environment: its `extract` is code of this package, and cannot hang."""

    @property
    def extracts_here(self) -> bool:
        """True where answers may be extracted outside of the process that scores."""
        ...


@runtime_checkable
class FixedSet(Protocol):
    """Optional part of an environment: the number of different evaluation examples."""

    @property
    def eval_size(self) -> int:
        """Number of different examples of the split `eval`."""
        ...


@runtime_checkable
class FoldsSeeds(Protocol):
    """An environment of a library whose seeds have fewer than 63 bits."""

    @property
    def seed_period(self) -> int | None:
        """Seeds that differ by a multiple of it may make one example; None: no two do."""
        ...


def extracts_here(environment: Environment) -> bool:
    """Return True where answers are extracted by code that needs no process of its own."""
    if environment.workers == 0 or not isinstance(environment, Extracts):
        return True
    return isinstance(environment, ExtractsHere) and environment.extracts_here


def answer_in(environment: Environment, completion: str) -> str | None:
    """The answer that an environment extracts; by default the whole text, stripped.

    None, which is no vote, where extracting fails.
    """
    if not isinstance(environment, Extracts):
        return completion.strip() or None
    try:
        return environment.extract(completion)
    except InputError:
        raise
    except Exception:  # noqa: BLE001 - what a function makes of a model's words must not end a run
        return None


OptionsT = TypeVar("OptionsT", bound=Section)

Factory = Callable[[EnvironmentConfig], Environment]
FactoryT = TypeVar("FactoryT", bound=Factory)

_registered: dict[str, Factory] = {}


def register(name: str) -> Callable[[FactoryT], FactoryT]:
    """Decorate a class (or function) that makes an environment out of its configuration."""

    def decorate(factory: FactoryT) -> FactoryT:
        _registered[name] = factory
        return factory

    return decorate


def known_environments() -> list[str]:
    """Names that a configuration may use, sorted."""
    return sorted({*_BUILT_IN, *_registered, *(point.name for point in _points())})


def construct(config: EnvironmentConfig) -> Environment:
    """The environment with nothing loaded.

    Raises ConfigError for an unknown name or wrong options, InputError for unfit files.
    """
    name = config.name
    if name not in _registered and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in _registered:
        for point in _points():
            if point.name == name:
                _registered[name] = point.load()
    if name not in _registered:
        known = known_environments()
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"environment.name: expected one of {', '.join(known)}, found {name!r}{hint}"
        )
    return _registered[name](config)


def code_of(config: EnvironmentConfig) -> dict[str, str]:
    """Code of others that an environment imports: `module:name` by the key that names it.

    Empty for environments and functions that come with this package, and for environments that
    this process has registered.
    """
    name = config.name
    if name not in _BUILT_IN and name not in _registered:
        values = [point.value for point in _points() if point.name == name]
        return {"name": values[-1]} if values else {}
    if name != "chat":
        return {}
    chosen = {f"options.{key}": config.options.get(key) for key in ("reward", "extract")}
    return {
        key: str(value)
        for key, value in chosen.items()
        if value is not None and value not in SHIPPED
    }


def make_environment(
    config: EnvironmentConfig, *, train_examples: int = 1, eval_examples: int = 1
) -> Environment:
    """The environment that a run uses, proven to have examples.

    `train_examples` and `eval_examples` are how many the run may take of each split. Raises
    ConfigError for an unknown name, wrong options, or seeds from which training and evaluation
    would meet; InputError where there are no examples.
    """
    check_seeds_apart(config, config, train_examples=train_examples, eval_examples=eval_examples)
    return loaded_environment(config, "train", "eval")


def loaded_environment(config: EnvironmentConfig, *splits: Split) -> Environment:
    """An environment, made once per process and configuration, with an example of each split.

    Raises ConfigError for an unknown name or wrong options, InputError where one has no examples.
    """
    environment = _loaded(config.model_dump_json())
    for split in splits:
        seed = config.train_seed if split == "train" else config.eval_seed
        environment.example(seed, 0, split)
    return environment


@lru_cache(maxsize=16)
def _loaded(config_json: str) -> Environment:
    """Some prepare for seconds, or read large files."""
    environment = construct(EnvironmentConfig.model_validate_json(config_json))
    environment.load_examples()
    return environment


def environment_of(config: Config) -> Environment:
    """The environment of a run, checked against all the examples that the run may use."""
    used = config.rounds * config.rollouts.groups_per_round
    held_out = config.evaluation.examples
    warm = config.sft.steps * config.sft.sequences_per_step if config.policy.init == "sft" else 0
    other = config.sft.environment
    if other is None:
        used = max(used, warm)
    elif other.name == config.environment.name and warm:
        check_seeds_apart(
            other,
            config.environment,
            train_examples=warm,
            eval_examples=held_out,
            section="sft.environment",
        )
    return make_environment(config.environment, train_examples=used, eval_examples=held_out)


def check_seeds_apart(
    train: EnvironmentConfig,
    held_out: EnvironmentConfig,
    *,
    train_examples: int,
    eval_examples: int,
    section: str = "environment",
    held_out_section: str = "environment",
) -> None:
    """Refuse seeds whose examples would meet: example i of seed s is made from s + i.

    Where a library folds seeds, s and s + `seed_period` make one example, so the two ranges must
    lie apart on a circle of that length. Raises ConfigError with both ranges.
    """
    first, start = train.train_seed, held_out.eval_seed
    last, end = first + train_examples - 1, start + eval_examples - 1
    ranges = (
        f"{section}.train_seed {first} reaches {last} with {train_examples} training examples, "
        f"{held_out_section}.eval_seed {start} reaches {end} with {eval_examples} held-out ones"
    )
    if max(last, end) >= SEED_END:
        raise ConfigError(f"{ranges}: expected seeds below 2**63; choose smaller ones")
    periods = {period_of(train), period_of(held_out)} - {None}
    for period in periods or {SEED_END}:
        assert period is not None
        if (start - first) % period < train_examples or (first - start) % period < eval_examples:
            folded = "" if period == SEED_END else f" (its library folds seeds to below {period})"
            raise ConfigError(
                f"{ranges}: the two ranges share examples{folded}; move the seeds further apart "
                "(by default 1000000000)"
            )


def period_of(config: EnvironmentConfig) -> int | None:
    """The period of an environment's seeds, None where all of them differ.

    Raises ConfigError for an unknown name or wrong options.
    """
    environment = construct(config)
    return environment.seed_period if isinstance(environment, FoldsSeeds) else None


def parse_options(kind: type[OptionsT], config: EnvironmentConfig) -> OptionsT:
    """The options of an environment, validated. Raises ConfigError with a line per problem."""
    try:
        return kind.model_validate(config.options)
    except ValidationError as error:
        known = ", ".join(kind.model_fields)
        lines = [
            f"environment.options.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()
        ]
        raise ConfigError(
            f"environment {config.name!r} takes the options {known}:\n  " + "\n  ".join(lines)
        ) from None


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
        if not (_is_finite(component.value) and _is_finite(component.weight)):
            raise ValueError(
                f"expected finite numbers, found {component.name} = {component.value!r:.80} with "
                f"weight {component.weight!r:.80}"
            )
    if not math.isfinite(reward_of(value)):
        raise ValueError("the weighted sum of the reward components is not finite")
    return value


def reward_of(components: tuple[RewardComponent, ...]) -> float:
    """Sum of `weight * value`."""
    return float(sum(component.weight * component.value for component in components))


def number(value: Any) -> float:
    """`value` as a float, if it is a real number (or bool); a string is not. Raises ValueError."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise ValueError(f"expected a number, found {value!r:.80}")
    return float(value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def _points() -> Any:
    return entry_points(group=ENTRY_POINTS)
