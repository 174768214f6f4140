"""Settings and rows that a run keeps from its first start.

A new run records its choice for each key marked `AS_BEGUN` that its configuration leaves null.
Each of them changes what is sampled or learned, so earlier runs continue without such a choice.
Rows are recorded by digest next to run.json and compared at every start: with a changed file a run
would go on with other examples in another order. Leaves out code of the user, which the
configuration names by digest (`config.files`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from marin_rl.config import Config, EnvironmentConfig, PolicyConfig, with_choices
from marin_rl.environments.registry import loaded_environment
from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.machine import computes_on_host
from marin_rl.planning import pairs_at_once
from marin_rl.rollouts.data_warnings import (
    GENERATORS,
    all_environments,
    rows_left_out,
    training_environments,
)
from marin_rl.storage.commits import commit_object, new_attempt, record_errors
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import ObjectStore, open_store
from marin_rl.tokenizers import end_tokens_of, template_options_of
from marin_rl.types import PairSection
from schemas.manifests import open_record, sealed_json
from schemas.records import RowsRecord

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
