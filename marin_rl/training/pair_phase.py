"""Phases that learn from preference pairs, which are committed first; see phases.py for segments.

What a segment of a reward model measured is in its manifest, and so is the scale of the rewards,
for normalisation. A policy that learns from pairs without sampling, by DPO and its relatives, has
the policy before its first update as reference. Its log-probabilities are computed once, when the
pairs are committed, and are columns of theirs; so no step runs a second model, and a changed start
cannot meet the scores of another. They come from the trainer's own forward pass over the rows of
the step that a pair is first taken in, so the first update begins at a difference of exactly 0. The
losses are in bradley_terry.py and pair_losses.py.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import (
    PairTokenizer,
    longest,
    pair_batch,
    pair_row_tokens,
    pairs_of_step,
    preference_batch,
    with_reference,
)
from marin_rl.config import Config, PreferenceConfig, RewardModelConfig
from marin_rl.metrics import over_steps
from marin_rl.processes import by_first
from marin_rl.rollouts.rewards import given_pairs
from marin_rl.storage.commits import find_commit, fingerprint, parent_of
from marin_rl.storage.runs import (
    LATEST_OF_PAIRS,
    Run,
    committed,
    pairs_slot,
    preference_slot,
    reward_model_slot,
)
from marin_rl.storage.tables.pairs import commit_pairs, committed_pairs
from marin_rl.tokenizers import trained_ends
from marin_rl.training.adapters import HEAD, Modules
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.bradley_terry import (
    RewardProgram,
    SequenceScorer,
    padded_length,
    pair_arrays,
    pair_totals,
)
from marin_rl.training.compiled_step import (
    CompiledStep,
    Program,
    compiled_step_of,
    supervised_settings,
    to_fixed_shape,
)
from marin_rl.training.critic import TRUNK, ScalarHead, ScalarModel
from marin_rl.training.logprobs import packing_of
from marin_rl.training.model import named_parameters, with_parameters
from marin_rl.training.optimizer import AdamW, sft_adamw
from marin_rl.training.pair_losses import Pairs, preference_metrics
from marin_rl.training.phases import SegmentedPhase
from marin_rl.training.policy_source import recorded_modules
from marin_rl.training.state import sft_result
from marin_rl.training.step_types import Parameters, StepRows, StepSettings, TrainableParams
from marin_rl.types import PairSection, PreferencePair, SlotRef

# In the fingerprint of committed pairs: the version of their table when it was first written.
PAIRS_VERSION = 1
MEASURED_PAIRS_MAX = 1024  # held-out pairs that are measured at a segment's end


class PairPhase(SegmentedPhase):
    """A phase of steps over the committed pairs of a run."""

    stage: ClassVar[PairSection]  # pyright: ignore[reportIncompatibleVariableOverride]
    _settings: Any  # of the section

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError where the run does not configure this phase."""
        config, settings = run.config, run.config.pair_training(self.stage)
        modules = None
        if config.policy.lora is not None:
            # By the last checkpoint: an adapter's folder may be gone, or changed, since the run
            # began.
            modules = recorded_modules(run, LATEST_OF_PAIRS[self.stage](run))
        adamw = sft_adamw(settings, config.training)
        program, loss = self._program_of(config, tokenizer, adamw, modules)
        super().__init__(run, tokenizer, program, loss, settings)

    @staticmethod
    @abstractmethod
    def _program_of(
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        adamw: AdamW,
        modules: Modules | None,
    ) -> tuple[Program, Loss]:
        """The programs of the phase, and its loss."""

    def prepare(self) -> SlotRef:
        """Commit the run's pairs, tokens and split included, or return them if they are there.

        The user's file is not needed any more once they are. Raises InputError naming row or pair
        and field, CommitConflict where the file is another than the one the run began with.
        """
        run, settings = self._run, self._settings

        def kept() -> SlotRef | None:
            # A file that is there must be the one that was committed; a folder may have grown.
            return None if Path(settings.pairs).is_file() else committed(run, pairs_slot())

        if (existing := by_first(kept)) is not None:
            return existing
        file = given_pairs(settings, self.stage)
        further, parents = self._pairs_content()
        decides = {
            "file": file.sha256,
            "held_out_fraction": settings.held_out_fraction,
            "context_length": run.config.policy.context_length,
            **asdict(self._names),
            **further,
        }
        above = [parent_of(ref) for ref in parents]
        decided = fingerprint("pairs", decides, above, PAIRS_VERSION)
        find = partial(find_commit, run.store, pairs_slot(), decided)
        if (existing := by_first(find)) is not None:
            return existing
        tokenizer = PairTokenizer(
            tokenizer=self._tokenizer,
            section=self.stage,
            vocab_size=self._program.base_template.spec.vocabulary,
            context_length=run.config.policy.context_length,
            ends=trained_ends(run.config.policy, self._tokenizer),
            **asdict(self._names),
        )
        pairs = self._prepared(tokenizer.tokenized(file.pairs, settings.held_out_fraction))
        extra = {"file": settings.pairs, "file_sha256": file.sha256, **asdict(self._names)}
        commit = partial(commit_pairs, run, pairs, decided=decided, extra=extra, parents=above)
        ref = by_first(commit)
        assert ref is not None, "it is committed"
        return ref

    def _pairs_content(self) -> tuple[Mapping[str, Any], Sequence[SlotRef]]:
        """Further content of the committed pairs: settings, and slots they are made from."""
        return {}, ()

    def _prepared(self, pairs: Sequence[PreferencePair]) -> Sequence[PreferencePair]:
        """Pairs with tokens as they are committed."""
        return pairs

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
    def _pairs(self) -> Sequence[PreferencePair]:
        ref = committed(self._run, pairs_slot())
        assert ref is not None, "pairs are committed before they are trained on"
        return committed_pairs(self._run, ref)

    @cached_property
    def _training_pairs(self) -> Sequence[PreferencePair]:
        return [pair for pair in self._pairs if pair.split != "eval"]

    def _taken(self, pairs: Sequence[PreferencePair], step: int) -> list[PreferencePair]:
        """Those of the training pairs that a step takes."""
        per_step, seed = self._settings.pairs_per_step, self._run.config.seed
        places = pairs_of_step(len(pairs), per_step, seed, step).tolist()
        return [pairs[place] for place in places]

    def _first_parents(self) -> tuple[SlotRef, ...]:
        warm = (sft_result(self._run),) if self._run.config.policy.init == "sft" else ()
        return (*super()._first_parents(), *warm)


def held_out(pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """The first held-out pairs, as many as are measured."""
    return [pair for pair in pairs if pair.split == "eval"][:MEASURED_PAIRS_MAX]


STD_MIN = 1e-6


class RewardModelTraining(PairPhase):
    """Trains the reward model of one run, segment by segment."""

    stage = "reward_model"
    slot_of = reward_model_slot
    program_version = 1
    measured = ("loss", "accuracy", "margin")
    _settings: RewardModelConfig

    @staticmethod
    def _program_of(
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        adamw: AdamW,
        modules: Modules | None,
    ) -> tuple[Program, Loss]:
        # Pairs have one loss: what `StepSettings` says besides the dtype is a policy's.
        loss = Loss(settings=supervised_settings(config))
        return RewardProgram(config, tokenizer, adamw, modules), loss

    @cached_property
    def _scorer(self) -> SequenceScorer:
        return SequenceScorer(self._program.template, self._run.config.policy)

    def _rows(self, step: int) -> StepRows:
        settings, chosen = self._settings, self._taken(self._training_pairs, step)
        length = padded_length(longest(chosen), self._run.config.policy.context_length)
        batch = pair_batch(chosen, settings.margin, length)
        shape = settings.pairs_at_once, settings.pairs_per_step
        return pair_arrays(batch, *shape, self._program.layout)

    def _first_parameters(self) -> Parameters:
        # The head returns 0 for everything.
        trained, trunk = super()._first_parameters(), self._program.base_template
        if not self._program.modules:
            return named_parameters(ScalarModel.of(with_parameters(trunk, trained)))
        arrays = {f"{TRUNK}{name}": array for name, array in trained.items()}
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
        layout = self._program.layout
        parameters = layout.replica(backend.get_weights().result())
        with layout.local.active():
            rewards = self._scorer.score(parameters, [ids[inside] for ids, inside in rows])
        totals = over_steps(history)
        if apart:
            measured = pair_totals(rewards[0::2], rewards[1::2], batch.margins)
            totals |= self._named(measured, "held_out_")
        # A model that gives one reward to all would make its users divide by 0.
        std = max(float(rewards.std()), STD_MIN)
        return totals, {"reward_mean": float(rewards.mean()), "reward_std": std}


def preference_step(config: Config) -> StepSettings:
    settings = config.pair_training("preference")
    assert isinstance(settings, PreferenceConfig), "it is the class of that section"
    return StepSettings(
        objective=None,
        preference=settings.loss,
        # A pair's answers are about half of its row, or less.
        packing=packing_of("shared_prompt")._replace(chunks=2),
        compute_dtype=config.policy.compute_dtype,
        load_balance_coefficient=config.training.load_balance_coefficient or 0.0,
    )


class PreferenceTraining(PairPhase):
    """Trains the policy of one run on preference pairs, segment by segment."""

    stage = "preference"
    slot_of = preference_slot
    program_version = 1
    measured = (
        "loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob",
        "rejected_logprob", "chosen_nll", "kl",
    )  # fmt: skip
    _settings: PreferenceConfig
    _program: CompiledStep

    @staticmethod
    def _program_of(
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        adamw: AdamW,
        modules: Modules | None,
    ) -> tuple[Program, Loss]:
        loss = Loss(settings=preference_step(config))
        return compiled_step_of(config, tokenizer, adamw, loss.settings, modules), loss

    def _pairs_content(self) -> tuple[Mapping[str, Any], Sequence[SlotRef]]:
        if not self._settings.loss.has_reference:
            return {}, ()
        settings, content = self._settings, self._content()
        del content[self.stage]
        # The rows that a pair is scored in follow from the steps, and its last bits from the rows.
        content["steps"] = [settings.steps, settings.pairs_per_step, settings.pairs_at_once]
        return content, self._first_parents()

    def _prepared(self, pairs: Sequence[PreferencePair]) -> Sequence[PreferencePair]:
        """Pairs with log-probabilities by the reference, of those that are used."""
        for pair in pairs:  # refused before anything is computed
            pair_row_tokens(pair)
        if not self._settings.loss.has_reference:
            return pairs
        program, layout = self._program, self._program.layout
        reference = layout.place_parameters(self._first_parameters(), program.template)
        scored = dict[str, PreferencePair]()
        # The pairs of each step until all are taken once, then those that are held out.
        training = [pair for pair in pairs if pair.split != "eval"]
        settings, per_step = self._settings, self._settings.pairs_per_step
        steps = range(min(settings.steps, -(-len(training) // per_step)))
        used = (self._taken(training, step) for step in steps)
        for some in chain(used, _parts(held_out(pairs), per_step)):
            rows = self._rows_of(some)
            logprobs = self._scores(reference, rows)
            for pair, logprobs_T in zip(some, logprobs, strict=True):
                scored.setdefault(pair.id, with_reference(pair, logprobs_T))
            self._publish(len(scored), len(pairs), {})
        return [scored.get(pair.id, pair) for pair in pairs]

    def _rows_of(self, pairs: Sequence[PreferencePair]) -> StepRows:
        settings = self._settings
        batch = preference_batch(pairs, padded_length(max(map(pair_row_tokens, pairs))))
        shape = settings.pairs_at_once, settings.pairs_per_step
        return to_fixed_shape(batch, *shape, self._program.layout)

    def _scores(self, parameters: Parameters, rows: StepRows) -> Float32[np.ndarray, "R T"]:
        """Log-probabilities of the answers' tokens, a row for each pair."""
        program, frozen = self._program, self._source.frozen
        logprobs = program.rows(program.score, TrainableParams(parameters), frozen, rows)
        return logprobs[rows.arrays.mask.any(axis=-1)]

    def _rows(self, step: int) -> StepRows:
        return self._rows_of(self._taken(self._training_pairs, step))

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
