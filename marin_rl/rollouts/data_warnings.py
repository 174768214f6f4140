"""Facts about a run's data that its user may not expect, known before anything starts.

Owns the sentences that `run`, its plan and `doctor` print. Nothing here is an error: what cannot
work is refused where the data is read (`environments`).
"""

import sys
from collections.abc import Iterator

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.config import Config, EnvironmentConfig
from marin_rl.environments.chat import RowEnvironment
from marin_rl.environments.registry import entry_alone, loaded_environment
from marin_rl.errors import ConfigError, InputError
from marin_rl.tokenizers import any_of, control_tokens, end_token_ids, tokenizer_for

# They make examples without an end, from libraries that take seconds to import.
GENERATORS = ("echo", "reasoning_gym")
ROWS_TOGETHER = 64  # rendered by one message to a worker

# Rows that were found too long, by policy, environment and room: measuring takes some seconds.
_measured: dict[tuple[str, str, int], tuple[int, ...]] = {}


def data_warnings(config: Config, *, scored: bool = True) -> list[str]:
    """Return what environments say of their data, and small held-out sets.

    Without `scored`, for a flow that learns from demonstrations alone, nothing on rewards and
    evaluations. Reads the prompts, once per process. Raises ConfigError, InputError as
    `loaded_environment`.
    """
    warnings = [*_left_out(config)]
    for chosen, rewarded in _environments(config):
        notices = loaded_environment(chosen).notices(scored=scored and rewarded)
        warnings += [notice for notice in notices if notice not in warnings]
    spelt = _control_tokens(config) if scored else ()
    return [*warnings, *spelt, *(_small_sets(config) if scored else ())]


def _control_tokens(config: Config) -> Iterator[str]:
    """Yield a sentence for each file of prompts whose texts spell control tokens."""
    files = [each for each, rewarded in _environments(config) if rewarded]
    if not any(isinstance(loaded_environment(each), RowEnvironment) for each in files):
        return
    try:
        tokenizer = tokenizer_for(config.policy)
    except InputError:
        return  # the check of the tokenizer says so
    control = any_of(control_tokens(tokenizer, end_token_ids(tokenizer)))
    for chosen in files:
        environment = loaded_environment(chosen)
        if not isinstance(environment, RowEnvironment):
            continue
        rows = environment.first_of_each_split(chosen)
        spelt = [
            (place, match[0])
            for place, example in rows
            if (match := control.search("\n".join(each.content for each in example.messages)))
        ]
        if spelt:
            yield (
                f"{spelt[0][0]}: the prompt has {spelt[0][1]!r}, which is a control token of the "
                f"policy's tokenizer and is read as one, as in {len(spelt)} of {len(rows)} rows; "
                "remove it from the text if it is not meant"
            )


def has_more_examples(config: Config) -> bool:
    """Return True if a set that is evaluated has more examples than an evaluation takes."""
    sets = config.evaluation.sets or training_environments(config)
    return any(
        chosen.name in GENERATORS
        or (size := loaded_environment(chosen).eval_size) is None
        or size > config.evaluation.examples
        for chosen in sets.values()
    )


def training_environments(config: Config) -> dict[str, EnvironmentConfig]:
    """Training environments by key, each with its complete settings."""
    outer = config.environment
    if outer.mixture is None:
        return {"environment": outer}
    return {f"environment.{n}": entry_alone(outer, e) for n, e in enumerate(outer.mixture)}


def all_environments(config: Config) -> dict[str, EnvironmentConfig]:
    """Environments of training, evaluation and the warm start of a run, by key."""
    sets = (config.evaluation.sets or {}).items()
    chosen = training_environments(config) | {f"evaluation.sets.{name}": one for name, one in sets}
    if config.policy.init == "sft" and config.sft.environment is not None:
        chosen["sft.environment"] = config.sft.environment
    return chosen


def _environments(config: Config) -> Iterator[tuple[EnvironmentConfig, bool]]:
    """Yield environments with prompts, and whether completions of them are scored."""
    for key, chosen in all_environments(config).items():
        if chosen.name not in GENERATORS:
            yield chosen, key != "sft.environment"


def _small_sets(config: Config) -> Iterator[str]:
    """Yield a sentence for each evaluation set with fewer examples than are asked for."""
    wanted = config.evaluation.examples
    sets = config.evaluation.sets or training_environments(config)
    for name, chosen in sorted(sets.items()):
        environment = None if chosen.name in GENERATORS else loaded_environment(chosen)
        if environment is None or environment.eval_size is None or environment.eval_size >= wanted:
            continue
        key = f"evaluation.sets.{name}" if config.evaluation.sets else name
        held_out = environment.eval_size
        every = f"every evaluation has {held_out} example{'' if held_out == 1 else 's'}"
        if environment.size is None:  # it makes its examples: there are no rows to hold out
            there = f"has {held_out} different ones, so {every}"
        else:
            there = (
                f"holds out {held_out} of its {held_out + environment.size} rows, so {every}; "
                f"raise {key}.options.eval_fraction or add rows"
            )
        yield f"evaluation.examples is {wanted}, but {key} {there}"


def _left_out(config: Config) -> Iterator[str]:
    """Yield a sentence for each file of which rows are left out."""
    for key, chosen in training_environments(config).items():
        rows = chosen.long_prompts
        rows = rows_left_out(config, key) if rows == "drop" else rows
        if rows and not isinstance(rows, str):
            yield (
                f"{key}.long_prompts: {len(rows)} rows are left out, whose prompts leave no room "
                f"for sampling.max_tokens in policy.context_length; the first is row {rows[0]}, "
                "counted from 0"
            )


def rows_left_out(config: Config, key: str) -> tuple[int, ...]:
    """Numbers of the rows whose prompts leave no room for a completion, in an environment's file.

    `key` is one of `training_environments`. Measures all rows, once per process. Raises ConfigError
    for an environment without such rows, InputError.
    """
    chosen = training_environments(config)[key]
    room = config.policy.context_length - config.sampling.max_tokens
    measured = config.policy.model_dump_json(), chosen.model_dump_json(), room
    if measured not in _measured:
        if not isinstance(environment := loaded_environment(chosen), RowEnvironment):
            raise ConfigError(
                f"{key}.long_prompts: drop leaves out rows of files, which {environment.name} does "
                "not read: expected chat, code, judge or math, or leave the key out"
            )
        tokenizer = tokenizer_for(config.policy)
        template, options = ChatTemplate.of(tokenizer), chosen.chat_template_options or {}
        rows, long = environment.numbered(chosen, sys.maxsize), list[int]()
        for start in range(0, len(rows), ROWS_TOGETHER):
            some = rows[start : start + ROWS_TOGETHER]
            conversations = [
                Conversation(
                    messages=[{"role": m.role, "content": m.content} for m in example.messages],
                    opening=True,
                    options=options,
                )
                for _, example in some
            ]
            renderings = template.render_all(conversations)
            long += [
                row
                for (row, _), rendering in zip(some, renderings, strict=True)
                if len(tokenizer.encode(rendering.text, add_special_tokens=False)) > room
            ]
        _measured[measured] = tuple(long)
    return _measured[measured]
