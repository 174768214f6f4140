"""The training of a reward model: a phase whose examples are preference pairs, committed first.

What a segment measured is in its manifest, and so is the scale of the rewards, for normalisation.
See phases.py for segments, and preference.py for the loss.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import PairTokenizer, longest, pair_batch, pairs_of_step
from marin_rl.config import RewardModelConfig, fingerprint_fields
from marin_rl.errors import ConfigError
from marin_rl.metrics import over_steps
from marin_rl.storage.commits import find_commit, fingerprint
from marin_rl.storage.runs import (
    Run,
    committed,
    latest_reward_model,
    pairs_slot,
    reward_model_slot,
)
from marin_rl.storage.tables.pairs import commit_pairs, committed_pairs, read_pairs
from marin_rl.tokenizers import trained_ends
from marin_rl.training.adapters import HEAD
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.compiled_step import supervised_settings
from marin_rl.training.critic import TRUNK, ScalarHead, ScalarModel
from marin_rl.training.model import named_parameters, with_parameters
from marin_rl.training.optimizer import sft_adamw
from marin_rl.training.phases import SegmentedPhase, optimizer_content
from marin_rl.training.policy_source import (
    adapter_before_training,
    policy_parameters,
    recorded_modules,
)
from marin_rl.training.preference import (
    PreferenceProgram,
    SequenceScorer,
    padded_length,
    pair_arrays,
    preference_totals,
)
from marin_rl.training.state import sft_result
from marin_rl.training.step_types import Parameters, StepRows
from marin_rl.types import PreferencePair, SlotRef
from schemas.tables import PAIRS_VERSION

# Counts up when the same pairs would train other parameters.
PROGRAM_VERSION = 1
MEASURED_PAIRS_MAX = 1024  # held-out pairs that are measured at a segment's end
STD_MIN = 1e-6


class RewardModelTraining(SegmentedPhase):
    """Trains the reward model of one run, segment by segment."""

    stage = "reward_model"
    _settings: RewardModelConfig

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError where the run configures no reward model."""
        config, settings = run.config, settings_of(run)
        recorded = None
        if config.policy.lora is not None:
            # By the last checkpoint: an adapter's folder may be gone, or changed, since the run
            # began.
            recorded = recorded_modules(run, latest_reward_model(run))
        adamw = sft_adamw(settings, config.training)
        program = PreferenceProgram(config, tokenizer, adamw, recorded)
        # Pairs have one loss: what `StepSettings` says besides the dtype is a policy's.
        loss = Loss(settings=supervised_settings(config))
        super().__init__(run, tokenizer, program, loss, settings)
        self._scorer = SequenceScorer(program.template, config.policy)

    def prepare(self) -> SlotRef:
        """Commit the run's pairs, tokens and split included, or return them if they are there.

        The user's file is not needed any more once they are. Raises InputError naming row or pair
        and field, CommitConflict where the file is another than the one the run began with.
        """
        run, settings = self._run, self._settings
        existing = committed(run, pairs_slot())
        # Only where the file is gone: where it is there, it must be the one that was committed.
        if existing is not None and not Path(settings.pairs).exists():
            return existing
        file = read_pairs(settings.pairs)
        decides = {
            "file": file.sha256,
            "held_out_fraction": settings.held_out_fraction,
            "context_length": run.config.policy.context_length,
            **asdict(self._names),
        }
        decided = fingerprint("pairs", decides, (), PAIRS_VERSION)
        if (existing := find_commit(run.store, pairs_slot(), decided)) is not None:
            return existing
        tokenizer = PairTokenizer(
            tokenizer=self._tokenizer,
            vocab_size=self._program.base_template.spec.vocabulary,
            context_length=run.config.policy.context_length,
            ends=trained_ends(run.config.policy, self._tokenizer),
            **asdict(self._names),
        )
        pairs = tokenizer.tokenized(file.pairs, settings.held_out_fraction)
        extra = {"file": settings.pairs, "file_sha256": file.sha256, **asdict(self._names)}
        return commit_pairs(run, pairs, decided=decided, extra=extra)

    def run_segment(self, step_from: int, pairs: SlotRef) -> SlotRef:
        """Train from `step_from` to the segment's end on the committed `pairs`, and commit.

        Returns the commit that exists already. The summary holds the means of the segment's steps
        and the metrics of the held-out pairs at its end. Raises NonFiniteUpdate, CommitConflict.
        """
        ref, totals = self._segment(step_from, pairs)
        if totals:
            step_to = min(step_from + self._settings.steps_per_checkpoint, self._settings.steps)
            self._publish(step_to, self._settings.steps, totals)
        return ref

    @cached_property
    def _pairs(self) -> list[PreferencePair]:
        ref = committed(self._run, pairs_slot())
        assert ref is not None, "pairs are committed before they are trained on"
        return committed_pairs(self._run, ref)

    @cached_property
    def _training_pairs(self) -> list[PreferencePair]:
        return [pair for pair in self._pairs if pair.split != "eval"]

    def _rows(self, step: int) -> StepRows:
        settings, config, pairs = self._settings, self._run.config, self._training_pairs
        taken = pairs_of_step(len(pairs), settings.pairs_per_step, config.seed, step)
        chosen = [pairs[index] for index in taken]
        length = padded_length(longest(chosen), config.policy.context_length)
        batch = pair_batch(chosen, settings.margin, length)
        shape = settings.microbatch_pairs, settings.pairs_per_step
        return pair_arrays(batch, *shape, self._program.layout)

    def _slot_of(self, step: int) -> str:
        return reward_model_slot(step)

    def _content(self) -> Mapping[str, Any]:
        config = self._run.config
        return {
            "program": PROGRAM_VERSION,
            "policy": fingerprint_fields(config.policy),
            "reward_model": fingerprint_fields(self._settings),
            "moments": optimizer_content(config),
            "seed": config.seed,
        }

    def _first_parents(self) -> tuple[SlotRef, ...]:
        warm = (sft_result(self._run),) if self._run.config.policy.init == "sft" else ()
        return (*self._base.commit(), *warm)

    def _first_parameters(self) -> Parameters:
        """The trunk of a policy, or an adapter of it, and a head that returns 0 for everything."""
        run, program = self._run, self._program
        trunk = program.base_template
        if not program.modules:
            policy = policy_parameters(run, self._names, self._tokenizer, trunk)
            return named_parameters(ScalarModel.of(with_parameters(trunk, policy)))
        adapter = adapter_before_training(run, self._names, program.modules, trunk)
        arrays = {f"{TRUNK}{name}": array for name, array in adapter.items()}
        head = named_parameters(ScalarHead.init(trunk.spec.width))
        return arrays | {f"{HEAD}{name}": array for name, array in head.items()}

    def _named(self, metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
        own = {name: f"reward_model/{prefix}{name}" for name in ("loss", "accuracy", "margin")}
        names = own | {name: name for name in ("grad_norm", "lr")}
        return {
            names[name]: value
            for name, value in metrics.items()
            if name in names and math.isfinite(value)
        }

    def _summary(
        self, backend: DeviceBackend, history: Sequence[Mapping[str, float]]
    ) -> tuple[Mapping[str, float], Mapping[str, Any]]:
        """Means of the steps, metrics of the held-out pairs, and the scale of the rewards.

        The scale is measured on the held-out pairs, without any on training pairs.
        """
        held_out = [pair for pair in self._pairs if pair.split == "eval"]
        pairs = (held_out or self._training_pairs)[:MEASURED_PAIRS_MAX]
        batch = pair_batch(pairs, self._settings.margin, longest(pairs))
        rows = zip(batch.token_ids, batch.inside, strict=True)
        parameters = backend.get_weights().result()
        with self._program.layout.active():
            rewards = self._scorer.score(parameters, [ids[inside] for ids, inside in rows])
        totals = over_steps(history)
        if held_out:
            measured = preference_totals(rewards[0::2], rewards[1::2], batch.margins)
            totals |= self._named(measured, "held_out_")
        # A model that gives one reward to all would make its users divide by 0.
        std = max(float(rewards.std()), STD_MIN)
        return totals, {"reward_mean": float(rewards.mean()), "reward_std": std}


def settings_of(run: Run) -> RewardModelConfig:
    """The section `reward_model` of a run. Raises ConfigError without one."""
    settings = run.config.reward_model
    if settings is None:
        raise ConfigError(
            f"run {run.run_id!r} has no section reward_model: add one that names the file of pairs "
            "(reward_model.pairs)"
        )
    return settings
