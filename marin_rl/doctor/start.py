"""Checks of a run by its files, before Prefect and JAX are imported.

Also whether a run is locked, finished, or of another content. The stages that need JAX
follow at the start of a flow (`engines`).
"""

from functools import partial

from marin_rl.config import Config
from marin_rl.doctor import data, policy, system
from marin_rl.doctor.stages import (
    DOCTOR,
    EVALUATE,
    OF_PAIRS,
    PREFERENCE,
    REWARD_MODEL,
    RL,
    ROUNDS,
    SFT,
    Stage,
    run_stages,
)
from marin_rl.storage import runs
from marin_rl.storage.layout import evals_slot
from marin_rl.storage.run_progress import ends_early, is_closed
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import open_store
from marin_rl.storage.stores.locks import refuse_locked
from marin_rl.types import PairSection, SlotRef

FILES = (
    Stage("storage root", data.storage),
    Stage("model folder", policy.source, frozenset({RL, SFT}) | OF_PAIRS),
    Stage("model", policy.model),
    Stage("adapter", policy.adapter),
    Stage("environment", data.environment, ROUNDS),
    Stage("rows", data.rows, frozenset({RL, SFT})),
    Stage("data", data.warnings, frozenset({DOCTOR})),
    Stage("tokenizer", policy.tokenizer),
    Stage("chat template", policy.chat_template),
    Stage("demonstrations", data.warm_start, ROUNDS - {SFT}),
    Stage("demonstrations of the warm start", data.demonstrations, frozenset({SFT})),
    Stage("pairs", partial(data.pairs, section="reward_model"), frozenset({REWARD_MODEL})),
    Stage("pairs", partial(data.pairs, section="preference"), frozenset({PREFERENCE})),
    Stage("prompts", policy.prompts, ROUNDS),
    Stage("tools", policy.tools, ROUNDS - {SFT}),
    Stage("canary", policy.canary, ROUNDS - {SFT}),
    Stage("reward model", policy.reward_model, ROUNDS),
    Stage("teacher", policy.teacher, frozenset({RL, DOCTOR})),
    Stage("memory", system.memory, ROUNDS),
    Stage("reward", data.reward, frozenset({DOCTOR})),
    Stage("reward on an example", data.own_reward, frozenset({RL, EVALUATE})),
    Stage("groups", data.group_filter, ROUNDS),
    Stage("endpoints", system.endpoints, ROUNDS),
)

# The flow and the configuration that went through FILES last, until the flow starts with it.
_passed: list[tuple[str, str]] = []


def before_engines(config: Config, flow: str) -> SlotRef | None:
    """Check what needs nothing but files; return the last checkpoint of a finished flow.

    Raises ConfigError if the run exists with another content, RunLocked if another process works on
    it, and the errors of the stages.
    """
    runs.refuse_other_content(config)
    result = finished(config, flow)
    if result is None:
        check_files(config, flow)
    return result


def check_files(config: Config, flow: str) -> None:
    """Run the stages of `flow` that need nothing but files. Raises the first error."""
    _passed.clear()
    run_stages(config, flow, FILES)
    _passed.append((flow, config.model_dump_json()))


def has_passed(config: Config, flow: str) -> bool:
    """Return True once for a configuration that this process has just passed through FILES."""
    passed = [*_passed]
    _passed.clear()
    return passed == [(flow, config.model_dump_json())]


def rounds_trained(config: Config) -> int | None:
    """Return the number of rounds that are trained; None if there is no such run."""
    run = _begun(config)
    return None if run is None else _trained(run)


def _begun(config: Config) -> Run | None:
    store = open_store(config.root, config.storage_options).at(config.run_id)
    if RUN_KEY not in store.children():
        return None
    return Run.open(config.root, config.run_id, config.storage_options)


def _trained(run: Run) -> int:
    latest = runs.latest_checkpoint(run)
    return latest.number if latest else 0


def finished(config: Config, flow: str) -> SlotRef | None:
    """Return the checkpoint that `flow` ended with; None while it has work to do.

    Writes nothing. Raises RunLocked if another process on this machine works on the run.
    """
    if (run := _begun(config)) is None:
        return None
    if (path := run.folder.local_path(runs.LOCK_KEY)) is not None:
        refuse_locked(path)
    if flow == RL:
        trained = _trained(run)
        if trained < config.rounds and not ends_early(run, config, trained):
            return None
        if runs.committed(run, evals_slot(trained)) is None:
            return None
        return runs.committed_checkpoint(run, trained) if is_closed(run, trained - 1) else None
    if flow == SFT:
        latest, steps = runs.latest_sft(run), config.sft.steps
    else:
        section: PairSection = "preference" if flow == PREFERENCE else "reward_model"
        settings, latest = getattr(config, section), runs.LATEST_OF_PAIRS[section](run)
        steps = settings.steps if settings else 0
    return latest if latest and latest.number >= steps else None
