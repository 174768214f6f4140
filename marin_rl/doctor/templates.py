"""Checks of the chat template: its options, the end of an answer, dialogues, rows to learn from.

A run keeps what it began with, so these are checks of runs that are still to begin.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from marin_rl.config import Config, EnvironmentConfig, PolicyConfig
from marin_rl.errors import BridgeFault, InputError
from marin_rl.types import Message

if TYPE_CHECKING:
    from marin_rl.environments.chat import Chat
    from marin_rl.storage.tables.pairs import PairFile

AS_BEGUN = "as the run began"
ROWS_TOGETHER = 64
GENERATED_CHECKED_MAX = 256  # examples of an environment without an end of them


def chat_template(config: Config) -> str:
    """Check the options of the chat template, that an answer has an end, and that dialogues go on.

    Raises InputError.
    """
    from marin_rl.chat_templates import check_options
    from marin_rl.rollouts.policy_tokenizer import light_tokenizer

    policy = _policy_to_begin(config)
    if policy is None:
        return AS_BEGUN
    tokenizer = light_tokenizer(policy)
    for key, chosen in _environments(config):
        options = chosen.chat_template_options or {}
        if "date" in options:
            raise InputError(f"{key}.chat_template_options.date: the day is that of the whole run")
        if options:
            check_options(tokenizer, options, f"{key}.chat_template_options")
    for key, chosen in _environments(config, trained=True):
        _check_dialogues(policy, chosen, key)
    named = ", ".join(policy.end_tokens or ("the tokenizer's end token",))
    return f"an answer ends with {named}"


def warm_start(config: Config) -> str:
    """Check the demonstrations of a run that begins with a warm start, as `learned_rows` does."""
    if config.policy.init != "sft":
        return "none configured"
    return learned_rows(config)


def learned_rows(config: Config) -> str:
    """Check that what a warm start learns from a row is what the row says.

    Raises InputError that names the row.
    """
    policy = _policy_to_begin(config)
    if policy is None:
        return AS_BEGUN
    # The flow checks again what the command line has checked, in one process.
    return f"{_compared(config.model_copy(update={'policy': policy}).model_dump_json())} rows"


def learned_pairs(config: Config, file: "PairFile") -> None:
    """Check that pairs without tokens are learned as they are written, and that all fit.

    Raises InputError.
    """
    from marin_rl.batching.row_checks import check_lengths, rendered_lengths
    from marin_rl.rollouts.policy_tokenizer import end_ids_in, light_tokenizer

    policy = _policy_to_begin(config)
    if policy is None:
        return
    tokenizer = light_tokenizer(policy)
    rows = [
        ((pair.messages, getattr(pair, field)), f"{place}, field {field}")
        for pair, place in zip(file.pairs, file.places, strict=True)
        if pair.chosen_token_ids is None
        for field in ("chosen", "rejected")
    ]
    lengths = [
        (f"{place}, field {field}_token_ids", len(ids))
        for pair, place in zip(file.pairs, file.places, strict=True)
        for field, ids in (("chosen", pair.chosen_token_ids), ("rejected", pair.rejected_token_ids))
        if ids is not None
    ]
    for start in range(0, len(rows), ROWS_TOGETHER):
        chats, names = zip(*rows[start : start + ROWS_TOGETHER], strict=True)
        counts = rendered_lengths(tokenizer, chats, names, end_ids_in(tokenizer))
        lengths += zip(names, counts, strict=True)
    check_lengths(lengths, policy.context_length)


def _policy_to_begin(config: Config) -> PolicyConfig | None:
    """The policy as a new run records it; None where the run has begun. Raises InputError."""
    from marin_rl.rollouts.recorded_defaults import policy_as_begun
    from marin_rl.storage.runs import recorded_config

    return None if recorded_config(config) else policy_as_begun(config.policy)


def _environments(
    config: Config, *, trained: bool = False
) -> Iterator[tuple[str, EnvironmentConfig]]:
    """Yield the run's environments by their keys; those of training alone if `trained`."""
    from marin_rl.rollouts.data_warnings import training_environments

    yield from training_environments(config).items()
    if not trained and config.sft.environment is not None:
        yield "sft.environment", config.sft.environment
    if not trained:
        sets = config.evaluation.sets or {}
        yield from ((f"evaluation.sets.{name}", chosen) for name, chosen in sets.items())


def _check_dialogues(policy: PolicyConfig, chosen: EnvironmentConfig, key: str) -> None:
    """Refuse a template that cannot carry the turns of an environment's episodes."""
    from marin_rl.environments.episode import OffersTools
    from marin_rl.environments.registry import loaded_environment
    from marin_rl.rollouts.bridge import TemplateBridge
    from marin_rl.rollouts.recorded_defaults import has_dialogues

    if chosen.on_broken_prefix == "segments" or not has_dialogues(chosen):
        return
    environment = loaded_environment(chosen)
    tools = environment.tools_offered() if isinstance(environment, OffersTools) else ()
    try:
        TemplateBridge(policy, chosen.chat_template_options).check(tools)
    except BridgeFault as error:
        raise InputError(
            f"{key} has episodes of several turns, which the policy's chat template cannot carry: "
            f"{error}. Use a template that can, set {key}.on_broken_prefix to segments, or "
            f"{key}.turns_max to 1"
        ) from None


@lru_cache(maxsize=1)
def _compared(settings: str) -> int:
    """Number of different demonstrations of a configuration, as JSON, all of which were compared.

    Raises InputError that names the row.
    """
    from marin_rl.batching.row_checks import check_lengths, rendered_lengths
    from marin_rl.rollouts.policy_tokenizer import end_ids_in, light_tokenizer

    config = Config.model_validate_json(settings)
    tokenizer, rows = light_tokenizer(config.policy), _demonstrations(config)
    lengths: list[tuple[str, int]] = []
    while some := list(islice(rows, ROWS_TOGETHER)):
        chats, names, options = zip(*some, strict=True)
        counts = rendered_lengths(tokenizer, chats, names, end_ids_in(tokenizer), options)
        lengths += zip(names, counts, strict=True)
    check_lengths(lengths, config.policy.context_length)
    return len(lengths)


def _row_number(rows: "Chat", seed: int, index: int) -> int:
    return rows.row_number(seed, index, "train")


def _demonstrations(
    config: Config,
) -> Iterator[tuple[tuple[Sequence[Message], str], str, Mapping[str, Any]]]:
    """Yield each different demonstration of a warm start, its name, and its template's options."""
    from marin_rl.environments.base import NamesRows
    from marin_rl.environments.chat import Chat
    from marin_rl.environments.mixture import order_in, parts_of
    from marin_rl.environments.registry import loaded_environment

    chosen = config.sft.environment or config.environment
    examples = config.sft.steps * config.sft.sequences_per_step
    order = None if chosen.mixture is None else order_in(chosen.mixture)
    for place, part in enumerate(parts_of(loaded_environment(chosen, "train"), chosen)):
        own, seed = part.environment, part.config.train_seed
        count = examples if order is None else order.count(place, examples)
        different = GENERATED_CHECKED_MAX if own.size is None else own.size
        indices = list(range(min(count, different)))
        if isinstance(own, Chat):  # in the order of the file, whose first wrong row is named
            indices = sorted(indices, key=partial(_row_number, own, seed))
        for index in indices:
            example = own.example(seed, index, "train")
            name = f"example {example.example_id} of {own.name}"
            if isinstance(own, NamesRows):
                name = own.place(seed, index, "train")
            answer = own.demonstration(example)
            if answer is not None:  # those without one are refused by `demonstrations`
                options = part.config.chat_template_options or {}
                yield (example.messages, answer), name, options
