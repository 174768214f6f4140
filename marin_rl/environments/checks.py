"""Checks of a run's environments before any work, against all the examples that it may use.

Training, evaluation and warm start take their examples from separate ranges of seeds: ranges that
overlap are refused, and so are warm starts without demonstrations. Leaves out how an
environment is made (`registry`).
"""

import itertools

from marin_rl.config import Config, EnvironmentConfig
from marin_rl.environments.base import Environment
from marin_rl.environments.registry import construct, loaded_environment, order_in, parts_of
from marin_rl.errors import ConfigError

# Seeds of examples are signed integers of 64 bits on disk.
SEED_END = 2**63


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


def environment_of(config: Config) -> Environment:
    """The environment of a run, checked against all the examples that the run may use."""
    used = config.rounds * config.examples_reserved
    held_out = config.evaluation.examples
    warm = config.sft.steps * config.sft.sequences_per_step if config.policy.init == "sft" else 0
    other = config.sft.environment
    if other is None:
        used = max(used, warm)
    elif warm:
        for key, own in entries_of(config.environment).items():
            if own.name == other.name:
                check_seeds_apart(
                    other,
                    own,
                    train_examples=warm,
                    eval_examples=held_out,
                    section="sft.environment",
                    held_out_section=key,
                )
    if config.environment.mixture is None:
        environment = make_environment(
            config.environment, train_examples=used, eval_examples=held_out
        )
    else:
        check_entries_apart(
            config.environment,
            train_examples=used,
            eval_examples=held_out,
            weighs=config.ahead.curriculum is not None,
        )
        environment = loaded_environment(config.environment)
    if warm:
        check_demonstrations(config)
    _check_goes_on(environment, config)
    return environment


def _check_goes_on(environment: Environment, config: Config) -> None:
    """Raise ConfigError for environments whose rollouts no other policy can go on with.

    With partial_tokens, episodes are begun again and given the recorded turns, so their steps must
    have no effects outside, and answer as before.
    """
    for part in parts_of(environment, config.environment):
        own = part.environment
        samples, asks = own.returns_rollouts, own.asks_policy
        fault = ""
        if samples:
            fault = "which samples by itself"
        elif asks:
            fault = "whose episodes ask the policy themselves, and later weights answer otherwise"
        elif not own.replayable:
            effects = "its steps have effects outside of their process"
            fault = f"which says `replayable = False`: {effects}"
        if fault and config.piece_tokens is not None:
            raise ConfigError(
                f"asynchrony.partial_tokens with environment {own.name}, {fault}: a "
                "later process or policy cannot go on with an unfinished rollout; expected "
                "environments whose episodes can be begun again and given the recorded turns, or "
                "partial_tokens null (rollouts.commit_groups keeps the members of dialogues that "
                "have ended)"
            )
        if (asks or samples) and config.in_flight_updates:
            raise ConfigError(
                f"asynchrony.in_flight_updates with environment {own.name}, which "
                "asks the policy by itself: the version that it was given is gone once new weights "
                "are served; expected other environments, or in_flight_updates false"
            )


def entries_of(config: EnvironmentConfig) -> dict[str, EnvironmentConfig]:
    """The environments of a run by their keys: the only one, or those of the list."""
    if config.mixture is None:
        return {"environment": config}
    return {f"environment.{place}": entry for place, entry in enumerate(config.mixture)}


def check_entries_apart(
    config: EnvironmentConfig, *, train_examples: int, eval_examples: int, weighs: bool = False
) -> None:
    """Refuse environments of a list whose examples would meet; each may have all with `weighs`.

    Training and held-out examples of one name lie apart; so do the training examples of two that
    also have the same options, and would otherwise train on the same problems. Raises ConfigError.
    """
    assert config.mixture is not None, "a list of environments"
    order = order_in(config.mixture)
    entries = list(entries_of(config).items())
    used = [
        train_examples if weighs else order.count(place, train_examples)
        for place in range(len(entries))
    ]
    for (key, entry), n in zip(entries, used, strict=True):
        for other_key, other in entries:
            if other.name == entry.name:
                check_seeds_apart(
                    entry,
                    other,
                    train_examples=max(n, 1),
                    eval_examples=eval_examples,
                    section=key,
                    held_out_section=other_key,
                )
    for ((key, one), n_one), ((other_key, other), n_other) in itertools.combinations(
        zip(entries, used, strict=True), 2
    ):
        if (one.name, one.options) != (other.name, other.options):
            continue
        period = construct(one).seed_period or SEED_END
        distance = other.train_seed - one.train_seed
        if distance % period < n_one or -distance % period < n_other:
            raise ConfigError(
                f"{key}.train_seed {one.train_seed} with {n_one} training examples and "
                f"{other_key}.train_seed {other.train_seed} with {n_other} share examples, for "
                f"both are {one.name.partition('#')[0]!r} with the same options; move the seeds "
                "apart"
            )


def check_demonstrations(config: Config) -> None:
    """Raise InputError for a warm start with an example that has no demonstration."""
    chosen = config.sft.environment or config.environment
    environment = loaded_environment(chosen, "train")
    examples = config.sft.steps * config.sft.sequences_per_step
    order = None if chosen.mixture is None else order_in(chosen.mixture)
    for place, part in enumerate(parts_of(environment, chosen)):
        own, seed = part.environment, part.config.train_seed
        count = examples if order is None else order.count(place, examples)
        own.check_demonstrations(seed, count)


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
    lie apart on a circle of that length. Raises ConfigError with both ranges, and as `construct`.
    """
    first, start = train.train_seed, held_out.eval_seed
    last, end = first + train_examples - 1, start + eval_examples - 1
    ranges = (
        f"{section}.train_seed {first} reaches {last} with {train_examples} training examples, "
        f"{held_out_section}.eval_seed {start} reaches {end} with {eval_examples} held-out ones"
    )
    if max(last, end) >= SEED_END:
        raise ConfigError(f"{ranges}: expected seeds below 2**63; choose smaller ones")
    # None where all seeds of an environment differ
    periods = {construct(train).seed_period, construct(held_out).seed_period} - {None}
    for period in periods or {SEED_END}:
        assert period is not None
        if (start - first) % period < train_examples or (first - start) % period < eval_examples:
            folded = "" if period == SEED_END else f" (its library folds seeds to below {period})"
            raise ConfigError(
                f"{ranges}: the two ranges share examples{folded}; move the seeds further apart "
                "(by default 1000000000)"
            )
