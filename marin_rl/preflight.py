"""Checks of a run by its files, before Prefect, JAX and transformers are imported.

Owns the checks that read files alone, and whether a run is locked, finished, or of another content.
A loss of the user's own is called too, and a mesh of several devices compared with those that are
there, which takes JAX but no Prefect. The checks of `doctor` that need the other libraries come
after that, at the start of a flow.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from marin_rl.config import Config
from marin_rl.doctor.checks import Check, preflight
from marin_rl.doctor.data import demonstrations, environment, pairs, storage
from marin_rl.doctor.memory import memory
from marin_rl.doctor.policy import canary, loss, prompts, tokenizer_files, tools
from marin_rl.doctor.rewards import abstentions, trials
from marin_rl.doctor.surroundings import endpoints, mesh
from marin_rl.doctor.templates import chat_template, warm_start
from marin_rl.environments.registry import code_of
from marin_rl.errors import InputError
from marin_rl.machine import share_one_heap
from marin_rl.model_folders import check_model_folder, read_hf_config, weight_files
from marin_rl.planning import architecture_of
from marin_rl.rollouts.recorded_data import refuse_other_rows
from marin_rl.storage.layout import POLICY_SLOTS, evals_slot, metrics_key, round_of
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.runs import (
    LOCK_KEY,
    Run,
    checkpoint_named,
    committed,
    committed_checkpoint,
    latest_checkpoint,
    latest_reward_model,
    latest_sft,
    refuse_other_content,
)
from marin_rl.storage.stores.filesystem import open_store
from marin_rl.storage.stores.locks import refuse_locked
from marin_rl.types import SlotRef
from marin_rl.user_code import check_importable

_log = logging.getLogger(__name__)


def before_engines(config: Config, flow: str) -> SlotRef | None:
    """Check everything that files tell; return the last checkpoint of a flow that is finished.

    Raises ConfigError if the run exists with another content, RunLocked if another process works on
    it, and what the checks of BEFORE_ENGINES raise.
    """
    refuse_other_content(config)
    result = finished(config, flow)
    if result is None:
        preflight(config, BEFORE_ENGINES[flow])
        if environment in BEFORE_ENGINES[flow]:
            refuse_other_rows(config)
    return result


def before_evaluation(config: Config) -> None:
    """Check what an evaluation reads: the tokenizer, the environment's rows, and the reward.

    Raises what these checks raise.
    """
    preflight(config, (tokenizer_files, environment, own_reward))


def rounds_trained(config: Config) -> int | None:
    """Return the number of rounds that are trained; None where there is no such run."""
    store = open_store(config.root, config.storage_options).at(config.run_id)
    if RUN_KEY not in store.children():
        return None
    return _trained(Run.open(config.root, config.run_id, config.storage_options))


def _trained(run: Run) -> int:
    latest = latest_checkpoint(run)
    return (round_of(latest.slot.rpartition("/")[2]) or 0) if latest else 0


def finished(config: Config, flow: str) -> SlotRef | None:
    """Return the checkpoint that `flow` ended with; None while it has work to do.

    Writes nothing. Raises RunLocked if another process on this machine works on the run.
    """
    store = open_store(config.root, config.storage_options).at(config.run_id)
    if RUN_KEY not in store.children():
        return None
    if (path := store.local_path(LOCK_KEY)) is not None:
        refuse_locked(path)
    run = Run.open(config.root, config.run_id, config.storage_options)
    return _FINISHED[flow](run, config)


def _rounds_finished(run: Run, config: Config) -> SlotRef | None:
    """Return the latest checkpoint if all rounds are trained and closed, and it is evaluated."""
    trained = _trained(run)
    if trained < config.rounds or committed(run, evals_slot(trained)) is None:
        return None
    if metrics_key(trained - 1).rpartition("/")[2] not in run.store.children("metrics"):
        return None
    return committed_checkpoint(run, trained)


def _reward_model_finished(run: Run, config: Config) -> SlotRef | None:
    steps = config.reward_model.steps if config.reward_model else 0
    return _with_steps(latest_reward_model(run), steps)


def _with_steps(latest: SlotRef | None, steps: int) -> SlotRef | None:
    if latest is None or int(latest.slot.rpartition("-")[2]) < steps:
        return None
    return latest


_FINISHED: dict[str, Callable[[Run, Config], SlotRef | None]] = {
    "rl-loop": _rounds_finished,
    "sft": lambda run, config: _with_steps(latest_sft(run), config.sft.steps),
    "reward-model": _reward_model_finished,
}


def policy_source(config: Config) -> str:
    """Check that the checkpoint that the policy starts from is there, or the folder, and exact."""
    policy = config.policy
    if policy.init == "checkpoint":
        key, place = "policy.checkpoint", policy.checkpoint or ""
        run, ref = checkpoint_named(place, POLICY_SLOTS, key, config.storage_options)
        return run.store.url_of(ref.slot)
    if policy.hf_path is not None:
        check_model_folder(Path(policy.hf_path))
    if architecture_of(config) is None:
        raise InputError(
            f"no model at {policy.hf_path}: expected a local Hugging Face folder with config.json "
            "and safetensors; download it first"
        )
    if policy.hf_path is not None:
        read_hf_config(Path(policy.hf_path))
        weight_files(Path(policy.hf_path))
        from marin_rl.hf_settings import check_hf_folder  # imports transformers

        check_hf_folder(policy.hf_path)
    return policy.hf_path or policy.init


def adapter(config: Config) -> str:
    """Check that the base can have the adapter: its modules, ranks, and where it begins."""
    lora, architecture = config.policy.lora, architecture_of(config)
    if lora is None or architecture is None:
        return "none configured"
    if lora.init_from is not None and rounds_trained(config) is not None:
        return "as the run began"  # which needs the folder no more
    from marin_rl.lora import configured_modules

    modules = configured_modules(lora, architecture.linear_shapes)
    return f"{len(modules)} modules of rank {max(module.rank for module in modules.values())}"


def reward_model_slot(config: Config) -> str:
    """Check that the reward model is committed; a flow compares its tokenizer as well."""
    if config.environment.reward_model is None:
        return "none configured"
    from marin_rl.rollouts.rewards import reward_model_named

    run, ref = reward_model_named(config)
    return run.store.url_of(ref.slot)


def own_reward(config: Config) -> str:
    """Check a reward function of the user's own on one example; others are known to work."""
    if not code_of(config.environment):
        return "shipped"
    if notice := abstentions(trials(config, 1)):
        _log.warning("reward: %s", notice)
        return notice
    return "a reward for an example"


def own_loss(config: Config) -> str:
    """Check a loss of the user's own on a small batch; JAX is imported for it alone."""
    if config.objective.loss is not None:
        check_importable(config.objective.loss, "loss")
        share_one_heap()  # as a flow does, before JAX starts its threads
    return loss(config)


BEFORE_ENGINES: dict[str, tuple[Check, ...]] = {
    "rl-loop": (
        storage, policy_source, adapter, tokenizer_files, chat_template, reward_model_slot,
        environment, warm_start, prompts, tools, canary, memory, own_reward, mesh, own_loss,
        endpoints,
    ),
    "sft": (
        storage, policy_source, adapter, tokenizer_files, chat_template, environment,
        demonstrations, prompts, memory, mesh,
    ),
    "reward-model": (storage, policy_source, adapter, tokenizer_files, chat_template, pairs, mesh),
}  # fmt: skip
