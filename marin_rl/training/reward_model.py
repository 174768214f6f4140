"""The training of a reward model: a phase whose examples are preference pairs, committed first.

What a segment measured is in its manifest, and so is the scale of the rewards, for normalisation.
See pair_phase.py for the pairs, and bradley_terry.py for the loss.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import longest, pair_batch
from marin_rl.config import RewardModelConfig
from marin_rl.metrics import over_steps
from marin_rl.storage.runs import Run, reward_model_slot
from marin_rl.training.adapters import HEAD
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.bradley_terry import (
    RewardProgram,
    SequenceScorer,
    padded_length,
    pair_arrays,
    pair_totals,
)
from marin_rl.training.compiled_step import supervised_settings
from marin_rl.training.critic import TRUNK, ScalarHead, ScalarModel
from marin_rl.training.model import named_parameters, with_parameters
from marin_rl.training.optimizer import sft_adamw
from marin_rl.training.pair_phase import (
    MEASURED_PAIRS_MAX,
    PairPhase,
    held_out,
    modules_as_begun,
)
from marin_rl.training.policy_source import adapter_before_training, policy_parameters
from marin_rl.training.step_types import Parameters, StepRows

STD_MIN = 1e-6


class RewardModelTraining(PairPhase):
    """Trains the reward model of one run, segment by segment."""

    stage = section = "reward_model"
    program_version = 1  # counts up when the same pairs would train other parameters
    measured = ("loss", "accuracy", "margin")
    _settings: RewardModelConfig

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError where the run configures no reward model."""
        config, settings = run.config, run.config.pair_training(self.section)
        recorded = modules_as_begun(run, self.section)
        adamw = sft_adamw(settings, config.training)
        program = RewardProgram(config, tokenizer, adamw, recorded)
        # Pairs have one loss: what `StepSettings` says besides the dtype is a policy's.
        loss = Loss(settings=supervised_settings(config))
        super().__init__(run, tokenizer, program, loss, settings)
        self._scorer = SequenceScorer(program.template, config.policy)

    def _rows(self, step: int) -> StepRows:
        settings, chosen = self._settings, self._step_pairs(step)
        length = padded_length(longest(chosen), self._run.config.policy.context_length)
        batch = pair_batch(chosen, settings.margin, length)
        shape = settings.microbatch_pairs, settings.pairs_per_step
        return pair_arrays(batch, *shape, self._program.layout)

    def _slot_of(self, step: int) -> str:
        return reward_model_slot(step)

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

    def _summary(
        self, backend: DeviceBackend, history: Sequence[Mapping[str, float]]
    ) -> tuple[Mapping[str, float], Mapping[str, Any]]:
        """Means of the steps, metrics of the held-out pairs, and the scale of the rewards.

        The scale is measured on the held-out pairs, without any on training pairs.
        """
        apart = held_out(self._pairs)
        pairs = apart or self._training_pairs[:MEASURED_PAIRS_MAX]
        batch = pair_batch(pairs, self._settings.margin, longest(pairs))
        rows = zip(batch.token_ids, batch.inside, strict=True)
        parameters = backend.get_weights().result()
        with self._program.layout.active():
            rewards = self._scorer.score(parameters, [ids[inside] for ids, inside in rows])
        totals = over_steps(history)
        if apart:
            measured = pair_totals(rewards[0::2], rewards[1::2], batch.margins)
            totals |= self._named(measured, "held_out_")
        # A model that gives one reward to all would make its users divide by 0.
        std = max(float(rewards.std()), STD_MIN)
        return totals, {"reward_mean": float(rewards.mean()), "reward_std": std}
