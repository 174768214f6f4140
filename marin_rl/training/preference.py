"""A policy that learns from preference pairs, without sampling: DPO and its relatives.

The reference is the policy before its first update. Its log-probabilities are computed once, when
the pairs are committed, and are columns of theirs; so no step runs a second model, and a changed
start cannot meet the scores of another. They come from the trainer's own forward pass over the rows
of the step that a pair is first taken in, so the first update begins at a difference of exactly 0.
See pair_phase.py for the pairs, and pair_losses.py for the losses.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import pair_row_tokens, preference_batch, with_reference
from marin_rl.config import Config, PreferenceConfig, fingerprint_fields
from marin_rl.metrics import over_steps
from marin_rl.storage.runs import Run, preference_slot
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.bradley_terry import padded_length
from marin_rl.training.compiled_step import CompiledStep, compiled_step_of, to_fixed_shape
from marin_rl.training.logprobs import packing_of
from marin_rl.training.optimizer import sft_adamw
from marin_rl.training.pair_losses import Pairs, preference_metrics
from marin_rl.training.pair_phase import PairPhase, held_out, modules_as_begun
from marin_rl.training.phases import optimizer_content
from marin_rl.training.policy_source import adapter_before_training, policy_parameters
from marin_rl.training.step_types import Parameters, StepRows, StepSettings, TrainableParams
from marin_rl.types import PreferencePair, SlotRef

PACKING = packing_of("shared_prompt")


def preference_step(config: Config) -> StepSettings:
    """The settings of a step on pairs."""
    settings = config.pair_training("preference")
    assert isinstance(settings, PreferenceConfig), "it is the class of that section"
    return StepSettings(
        objective=None,
        preference=settings.loss,
        packing=PACKING,
        compute_dtype=config.policy.compute_dtype,
        load_balance_coefficient=config.training.load_balance_coefficient or 0.0,
    )


class PreferenceTraining(PairPhase):
    """Trains the policy of one run on preference pairs, segment by segment."""

    stage = section = "preference"
    program_version = 1  # counts up when the same pairs would train other parameters
    measured = (
        "loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob",
        "rejected_logprob", "chosen_nll",
    )  # fmt: skip
    _settings: PreferenceConfig
    _program: CompiledStep

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError where the run configures no learning from pairs."""
        config, settings = run.config, run.config.pair_training(self.section)
        recorded = modules_as_begun(run, self.section)
        loss = Loss(settings=preference_step(config))
        adamw = sft_adamw(settings, config.training)
        program = compiled_step_of(config, tokenizer, adamw, loss.settings, recorded)
        super().__init__(run, tokenizer, program, loss, settings)

    def _pairs_content(self) -> tuple[Mapping[str, Any], Sequence[SlotRef]]:
        if not self._settings.loss.has_reference:
            return {}, ()
        config, settings = self._run.config, self._settings
        # The rows that a pair is scored in follow from the steps, and its last bits from the rows.
        return {
            "program": self.program_version,
            "policy": fingerprint_fields(config.policy),
            "steps": [settings.steps, settings.pairs_per_step, settings.microbatch_pairs],
            "moments": optimizer_content(config),
            "seed": config.seed,
        }, self._first_parents()

    def _prepared(self, pairs: Sequence[PreferencePair]) -> Sequence[PreferencePair]:
        """Pairs with log-probabilities by the reference, of those that are used."""
        for pair in pairs:  # refused before anything is computed
            pair_row_tokens(pair)
        if not self._settings.loss.has_reference:
            return pairs
        program, layout = self._program, self._program.layout
        reference = layout.place_parameters(self._first_parameters(), program.template)
        scored = dict[str, PreferencePair]()
        for some in self._first_uses(pairs):
            rows = self._rows_of(some)
            logprobs = self._scores(reference, rows)
            for pair, logprobs_T in zip(some, logprobs, strict=True):
                scored.setdefault(pair.id, with_reference(pair, logprobs_T))
            self._publish(len(scored), len(pairs), {})
        return [scored.get(pair.id, pair) for pair in pairs]

    def _first_uses(self, pairs: Sequence[PreferencePair]) -> Iterator[Sequence[PreferencePair]]:
        """The pairs of each step until all are taken once, then those that are held out."""
        training = [pair for pair in pairs if pair.split != "eval"]
        per_step = self._settings.pairs_per_step
        for step in range(min(self._settings.steps, -(-len(training) // per_step))):
            yield [training[place] for place in self._taken(len(training), step)]
        yield from _parts(held_out(pairs), per_step)

    def _rows_of(self, pairs: Sequence[PreferencePair]) -> StepRows:
        settings = self._settings
        batch = preference_batch(pairs, padded_length(max(map(pair_row_tokens, pairs))))
        shape = settings.microbatch_pairs, settings.pairs_per_step
        return to_fixed_shape(batch, *shape, self._program.layout)

    def _scores(self, parameters: Parameters, rows: StepRows) -> Float32[np.ndarray, "R T"]:
        """Log-probabilities of the answers' tokens, a row for each pair."""
        program, frozen = self._program, self._base.parameters
        logprobs = program.rows(program.score, TrainableParams(parameters), frozen, rows)
        used = rows.arrays.mask.any(axis=-1)
        return logprobs[used]

    def _rows(self, step: int) -> StepRows:
        return self._rows_of(self._step_pairs(step))

    def _slot_of(self, step: int) -> str:
        return preference_slot(step)

    def _first_parameters(self) -> Parameters:
        run, program = self._run, self._program
        template = program.base_template
        if not program.modules:
            return policy_parameters(run, self._names, self._tokenizer, template)
        return adapter_before_training(run, self._names, program.modules, template)

    def _summary(
        self, backend: DeviceBackend, history: Sequence[Mapping[str, float]]
    ) -> tuple[Mapping[str, float], Mapping[str, Any]]:
        """Means of the steps, and metrics of the held-out pairs."""
        totals = over_steps(history)
        apart = held_out(self._pairs)
        if apart:
            weights = backend.get_weights().result()
            own = {name: weights[name] for name in self._program.like.parameters}
            parts = _parts(apart, self._settings.pairs_per_step)
            measured = [self._answers(own, some) for some in parts]
            pairs: Pairs = jax.tree.map(lambda *each: jnp.concatenate(each), *measured)
            metrics = preference_metrics(self._settings.loss, pairs)
            floats = {name: float(value) for name, value in metrics.items()}
            totals |= self._named(floats, "held_out_")
        return totals, {}

    def _answers(self, parameters: Parameters, pairs: Sequence[PreferencePair]) -> Pairs:
        rows = self._rows_of(pairs)
        used = rows.arrays.mask.any(axis=-1)
        arrays = jax.tree.map(lambda each: jnp.asarray(each[used]), rows.arrays)
        return Pairs.of(jnp.asarray(self._scores(parameters, rows)), arrays)


def _parts(pairs: Sequence[PreferencePair], size: int) -> Iterator[Sequence[PreferencePair]]:
    return (pairs[start : start + size] for start in range(0, len(pairs), size))
