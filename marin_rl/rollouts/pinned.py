"""Settings and rows that a run keeps from its first start, and warnings about its data before it.

A new run records its choice for each key marked `AS_BEGUN` that its configuration leaves null.
Each of them changes what is sampled or learned, so earlier runs continue without such a choice.
Rows are recorded by digest next to run.json and compared at every start: with a changed file a run
would go on with other examples in another order. Leaves out code of the user, which the
configuration names by digest (`config.files`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.config import Config, EnvironmentConfig, PolicyConfig, with_choices
from marin_rl.environments.chat import RowEnvironment
from marin_rl.environments.registry import entry_alone, loaded_environment
from marin_rl.errors import ConfigError, InputError, ObjectMissing
from marin_rl.machine import computes_on_host
from marin_rl.planning import pairs_at_once
from marin_rl.storage.commits import commit_object, new_attempt, record_errors
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore, open_store
from marin_rl.tokenizers import (
    any_of,
    control_tokens,
    end_token_ids,
    end_tokens_of,
    template_options_of,
    tokenizer_for,
)
from marin_rl.types import PairSection
from schemas.manifests import open_record, sealed_json
from schemas.records import RowsRecord

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


FORMAT, VERSION = "marin-rl/rows", 1

# From here on continued dialogues are measurably faster (bench/episodes.py). Prompts run in pieces
# of as many positions as there are slots, and few at a time are slower than a whole prompt.
CONTEXT_MIN = 512
SLOTS_MIN = 64


def as_begun(config: Config) -> Config:
    """Return the configuration that a new run records. Raises as `CHOICES`, `rows_left_out` do."""

    def choice(key: str) -> Any:
        if key in CHOICES:
            return CHOICES[key](config)
        place, _, name = key.rpartition(".")
        training = place.replace(".mixture", "")  # as `training_environments` names them
        if name != "long_prompts" or training not in training_environments(config):
            raise ConfigError(f"{key}: expected refuse or null: only `environment` leaves rows out")
        return rows_left_out(config, training)

    return with_choices(config, choice)


def policy_as_begun(policy: PolicyConfig) -> PolicyConfig:
    """Return the policy that a new run records. Raises as `POLICY_CHOICES` do."""
    return with_choices(policy, lambda key: POLICY_CHOICES[key](policy))


def prefix_cache_of(config: Config) -> bool | None:
    """True for a run of an embedded engine with long dialogues, else None: no choice.

    Reads the environment, once per process. Raises ConfigError, InputError as `loaded_environment`.
    """
    inference = config.inference
    if inference.endpoints:
        return None
    if inference.engine.slots < SLOTS_MIN or config.policy.context_length < CONTEXT_MIN:
        return None
    dialogues = any(map(has_dialogues, training_environments(config).values()))
    return True if dialogues else None


def has_dialogues(chosen: EnvironmentConfig) -> bool:
    several = chosen.name not in GENERATORS and chosen.turns_max != 1
    return several and loaded_environment(chosen).has_episodes


def serve_merged_of(config: Config) -> bool | None:
    """False where servers follow a run with an adapter; None where they do not: no choice.

    They have the base once, and load a few megabytes for each version. True where weights change in
    flight: requests end on the adapter that they began with, but go on with merged weights.
    """
    policy = config.policy
    if policy.lora is None or policy.quantize_base is not None or not config.inference.pulled:
        return None
    return config.in_flight_updates


def row_layout_of(config: Config) -> str | None:
    """The layout `auto` for a run on one CPU device that says no length of rows; else None.

    Not on accelerators, where it has not been measured, nor on several devices, which could not
    share a microbatch of few long rows.
    """
    alone = config.mesh.data == config.mesh.fsdp == 1
    chooses = computes_on_host() and alone and config.batching.row_tokens is None
    return "auto" if chooses and not config.batching.length_buckets else None


def pairs_at_once_of(stage: PairSection) -> Callable[[Config], int | None]:
    """The choice of the plan, or none for KTO, whose loss is of all answers of a microbatch."""

    def choice(config: Config) -> int | None:
        labelled = config.pair_training(stage).labelled
        return None if labelled else pairs_at_once(config, stage)

    return choice


POLICY_CHOICES: Mapping[str, Callable[[PolicyConfig], Any]] = {
    "end_tokens": end_tokens_of,
    "chat_template_options": template_options_of,
}
CHOICES: Mapping[str, Callable[[Config], Any]] = {
    "policy.end_tokens": lambda config: end_tokens_of(config.policy),
    "policy.chat_template_options": lambda config: template_options_of(config.policy),
    "inference.engine.prefix_cache": prefix_cache_of,
    "inference.serve_merged": serve_merged_of,
    "batching.packing": row_layout_of,
    "reward_model.microbatch_pairs": pairs_at_once_of("reward_model"),
    "preference.microbatch_pairs": pairs_at_once_of("preference"),
}


def refuse_other_rows(config: Config) -> None:
    _unrecorded_rows(config, open_store(config.root, config.storage_options).at(config.run_id))


def record_rows(run: Run) -> None:
    """Record the digests of rows that the run reads for the first time. Raises ConfigError."""
    for name, path, digest in _unrecorded_rows(run.config, run.folder):
        attempt = new_attempt()
        own = {"attempt": attempt, "path": path, "rows_digest": digest}
        commit_object(
            run.folder,
            name,
            sealed_json({"format": FORMAT, "version": VERSION, **own}),
            attempt=attempt,
            fingerprint=digest,
            identify=partial(_identified, source=run.folder.url_of(name)),
        )


def _unrecorded_rows(config: Config, store: ObjectStore) -> list[tuple[str, str, str]]:
    """Record's name, path and digest of rows without one. Raises ConfigError for changed rows."""
    new, changed = list[tuple[str, str, str]](), list[str]()
    for key, chosen in all_environments(config).items():
        environment = None if chosen.name in GENERATORS else loaded_environment(chosen)
        if environment is None or (digest := environment.rows_digest) is None:
            continue
        name, path = f"data/{key}.json", str(chosen.options.get("path") or environment.name)
        try:
            data = store.read(name)
        except ObjectMissing:
            new.append((name, path, digest))
            continue
        _, recorded = _identified(data, source=store.url_of(name))
        if recorded != digest:
            changed.append(f"{key}: {path} had the digest {recorded}, and has {digest}")
    if changed:
        raise ConfigError(
            f"run {config.run_id!r} was started with other rows ({store.url_of('data')}):\n  "
            + "\n  ".join(changed)
            + "\nFor a run with the changed file choose another --run-id, or fork this one. To go "
            "on with this one, put the file back as it was: added rows change the order of all."
        )
    return new


def _identified(data: bytes, source: str) -> tuple[str, str]:
    with record_errors(source):
        record = open_record(data, RowsRecord, format=FORMAT, version=VERSION)
    return str(record["attempt"]), str(record["rows_digest"])
