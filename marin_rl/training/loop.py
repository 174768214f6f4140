"""The training stage: from checkpoint r and a round's batches to checkpoint r + 1, committed.

A Trainer keeps the compiled step and the state of the checkpoint it made or read last, so that the
next round starts from memory; the committed checkpoint decides in any case. It also makes
checkpoint 0 of a run.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float32
from levanter.models.lm_model import LmHeadModel
from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config, fingerprint_fields
from marin_rl.machine import give_back_freed_memory
from marin_rl.metrics import over_steps
from marin_rl.progress import ProgressEvent, publish
from marin_rl.storage.checkpoints import (
    Beside,
    checkpoint_fingerprint,
    commit_checkpoint,
)
from marin_rl.storage.commits import find_commit, new_attempt
from marin_rl.storage.runs import Run, as_continued, checkpoint_slot, committed
from marin_rl.storage.tables.batches import read_batches
from marin_rl.storage.tables.scores import ScoredStep, ScoresWriter
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.compiled_step import (
    check_finite,
    compiled_step_of,
    rows_compiled_for,
    score_norm_rows,
    score_rows,
    take_step,
    to_fixed_shape,
    value_rows,
)
from marin_rl.training.model import with_parameters
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.precompute import RowExtras, RowPrecompute
from marin_rl.training.reference_policy import groups_of, kl_coefficient, reference_round
from marin_rl.training.round_stats import RoundAccount, scored_step
from marin_rl.training.scoring import packing_of
from marin_rl.training.state import (
    Identity,
    first_parameters,
    fresh_state,
    other_run,
    restore_parameters,
    restore_state,
    sft_result,
    tree_of,
)
from marin_rl.training.step import Parameters, Reference, StepSettings, TrainState, as_array
from marin_rl.types import SlotRef, TrainingBatch

# Counts up when the same batches would train other parameters, or leave other scores.
PROGRAM_VERSION = 4


Batches = Callable[[], Iterable[TrainingBatch]]  # the steps of a round, read again at each call


class Trainer:
    """Trains one run. `state` is that of the committed `checkpoint`, or None before the first."""

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        config = run.config
        self._run, self._tokenizer = run, tokenizer
        self._names = TokenizerIdentity.of(tokenizer)
        self._program = compiled_step_of(
            config,
            tokenizer,
            policy_adamw(config.training),
            StepSettings(
                objective=config.objective,
                temperature=config.sampling.temperature or 1.0,
                length_norm=config.sampling.max_tokens,
                packing=packing_of(config.batching.packing),
                compute_dtype=config.policy.compute_dtype,
                critic=config.training.critic,
            ),
        )
        self._state: TrainState | None = None
        self._held_to: tuple[int, Parameters] | None = None
        self.checkpoint: SlotRef | None = None
        self.identity: Identity | None = None

    @property
    def model(self) -> LmHeadModel:
        """The model of the loaded checkpoint: the trainer's own arrays, never written to."""
        assert self._state is not None, "no checkpoint is loaded"
        return with_parameters(self._program.template, self._state.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the loaded parameters."""
        assert self._state is not None, "no checkpoint is loaded"
        return sum(array.nbytes for array in self._state.parameters.values())

    def load(self, checkpoint: SlotRef) -> None:
        """Make `checkpoint` the current one; from memory when it is that already.

        Raises CorruptObject, ObjectMissing, or InputError for another tokenizer's checkpoint.
        """
        if self._state is not None and self.checkpoint == checkpoint:
            return
        self._forget()
        program = self._program
        state = restore_state(self._run, checkpoint, program.like, self._names)
        self._remember(program.place(state), checkpoint)
        del state
        give_back_freed_memory()

    def init_policy(self) -> SlotRef:
        """Commit checkpoint 0 as the configuration says, or return it if it is there."""
        run, slot = self._run, checkpoint_slot(0)
        source = sft_result(run) if run.config.policy.init == "sft" else None
        parents = (source,) if source else ()
        decisive = self._first_content()
        if (found := already_committed(run, slot, decisive, parents)) is not None:
            return found
        parameters = self._first_parameters(source)
        program, averaged = self._program, self._program.like.average is not None
        critic = program.critic and program.critic.first_state(parameters, program.template)
        state = fresh_state(
            parameters, program.optimizer, run.config.seed, averaged=averaged, critic=critic
        )
        ref = self._commit(self._program.place(state), slot, decisive, parents, {})
        give_back_freed_memory()  # reading a model's folder frees several times its size
        return ref

    def train_round(self, round: int, batches: SlotRef, checkpoint: SlotRef) -> SlotRef:
        """Train on a round's batches from `checkpoint`, and commit checkpoint `round` + 1.

        The summary of the result holds the round's training metrics; the scores of its tokens are
        committed with it. A round without batches commits the parameters unchanged, and no scores.
        Raises NonFiniteUpdate when too many updates in a row were not finite; nothing is committed
        then.
        """
        slot, parents = checkpoint_slot(round + 1), (checkpoint, batches)
        decisive = decisive_content(self._run.config)
        if (found := already_committed(self._run, slot, decisive, parents)) is not None:
            return found
        account, attempt = RoundAccount(self._tokenizer), new_attempt()
        with ScoresWriter(self._run, round, attempt, account.eos_token_id) as scores:
            state, totals = self._updated(round, batches, checkpoint, account, scores.write)
            beside = Beside(attempt=attempt, parts=scores.parts)
            return self._commit(state, slot, decisive, parents, totals, beside)

    def replay_round(
        self, round: int, batches: SlotRef, checkpoint: SlotRef
    ) -> tuple[TrainState, dict[str, float]]:
        """State and metrics that `train_round` would commit; nothing is written.

        Raises as `train_round` does.
        """
        account = RoundAccount(self._tokenizer)
        return self._updated(round, batches, checkpoint, account, lambda scored: None)

    def gradient(
        self, round: int, batches: Batches, checkpoint: SlotRef
    ) -> dict[str, Float32[np.ndarray, "..."]]:
        """The mean over a round's steps of their gradients at the checkpoint, before clipping.

        No step is taken, so that rounds of different numbers of steps compare; 0 without steps.
        Raises as `load` does.
        """
        self.load(checkpoint)
        assert self._state is not None
        program, state = self._program, self._state
        reference, read = self._reference(round, checkpoint), list(batches())
        changes, _ = self._before_updates(round, lambda: read, state, reference, min(len(read), 1))
        if self._run.config.objective.kl_placement == "reward":
            reference = None
        total = {
            name: np.zeros(array.shape, np.float32) for name, array in state.parameters.items()
        }
        for step, batch in enumerate(read):
            arrays, used = self._arrays(batch)
            arrays = changes[step](arrays) if changes else arrays
            with program.layout.active():
                placed = program.layout.place_rows(arrays)
                found = program.gradient(state, reference, placed, as_array(used))
            for name, array in found.items():
                total[name] += np.asarray(array, np.float32) / len(read)
        return total

    def _updated(
        self,
        round: int,
        batches: SlotRef,
        checkpoint: SlotRef,
        account: RoundAccount,
        keep: Callable[[ScoredStep], None],
    ) -> tuple[TrainState, dict[str, float]]:
        """State and metrics after a round's updates; `keep` is given the scores of every step."""
        self.load(checkpoint)
        assert self._state is not None
        state, reference = self._state, self._reference(round, checkpoint)
        self._forget()  # the optimizer state is donated from here on
        steps, epochs = int(batches.summary.get("steps", 0)), self._run.config.training.epochs
        rows: list[Mapping[str, float]] = []
        read = partial(read_batches, self._run, batches)
        changes, told = self._before_updates(round, read, state, reference, steps * epochs)
        if self._run.config.objective.kl_placement == "reward":
            reference = None  # it has had its say, in the advantages
        step = self._program.step_of(round)
        for batch, change in self._steps(batches, changes):
            arrays, used = self._arrays(batch)
            arrays = change(arrays)
            state, metrics, measured = take_step(
                self._program, state, reference, arrays, used, step
            )
            metrics |= told
            check_finite(state, metrics, self._run.config.training.nonfinite_updates_max)
            rows.append(metrics)
            if len(rows) <= steps:  # the first pass
                keep(scored_step(batch, arrays, measured, change))
                account.add(batch, self._program.template)
            self._publish(round, len(rows), steps * epochs, metrics)
        return state, over_steps(rows) | account.totals(epochs, self._program.layout.devices)

    def _steps(
        self, batches: SlotRef, changes: Sequence[RowExtras]
    ) -> Iterator[tuple[TrainingBatch, RowExtras]]:
        """The batch of each optimizer step, epoch after epoch, and what else is known of it."""
        for _ in range(self._run.config.training.epochs):
            for step, batch in enumerate(read_batches(self._run, batches)):
                yield batch, changes[step] if changes else RowExtras()

    def _before_updates(
        self,
        round: int,
        batches: Batches,
        state: TrainState,
        reference: Reference | None,
        total: int,
    ) -> tuple[list[RowExtras], Mapping[str, float]]:
        """Extra arrays of a round's rows before the first of `total` updates, and their metrics."""
        objective = self._run.config.objective
        by_token = objective.estimator.by_token
        weighing = by_token and self._program.critic is None
        correcting = (total > 1 or weighing) and objective.importance_correction != "none"
        penalising = reference is not None and objective.kl_placement == "reward"
        if not total or not (correcting or penalising or by_token):
            return [], {}
        precompute = RowPrecompute(objective, partial(score_rows, self._program))
        read = list(batches())
        cut = [self._arrays(batch) for batch in read]
        if correcting:
            precompute.correct(state.parameters, cut)
        if reference is not None and penalising:
            groups = {} if self._program.critic else groups_of(self._run, round)
            precompute.penalise(reference, groups, read, cut)
        if self._program.critic is not None:
            values = partial(value_rows, self._program, state)
            precompute.estimate(self._program.critic.config, values, read, cut)
        if weighing:
            norms = partial(score_norm_rows, self._program)
            groups = groups_of(self._run, round)
            precompute.weigh(state.parameters, norms, groups, read, cut)
        return precompute.changes, precompute.metrics

    def _publish(self, round: int, done: int, total: int, metrics: Mapping[str, float]) -> None:
        publish(
            ProgressEvent(
                run_id=self._run.run_id,
                stage="train",
                round=round,
                done=done,
                total=max(total, done),
                metrics=metrics,
            )
        )

    def _arrays(self, batch: TrainingBatch) -> tuple[Any, int]:
        config = self._run.config
        rollouts = config.rollouts.groups_per_round * config.rollouts.group_size
        rows_max = min(config.batching.sequences_per_step or rollouts, rollouts)
        microbatch = config.training.microbatch_sequences
        if config.batching.packing != "none":
            rows_max = rows_compiled_for(max(len(batch.token_ids), microbatch), rows_max)
        return to_fixed_shape(batch, microbatch, rows_max, self._program.layout)

    def _reference(self, round: int, checkpoint: SlotRef) -> Reference | None:
        """Reference policy of a round, read once; None where no KL is configured."""
        objective, state = self._run.config.objective, self._state
        assert state is not None
        if objective.kl_coefficient == 0:
            return None
        coefficient = np.float32(kl_coefficient(self._run, checkpoint))
        if state.average is not None:
            return Reference(state.average, coefficient)
        number = reference_round(objective, round)
        if self._held_to is None or self._held_to[0] != number:
            found = committed(self._run, checkpoint_slot(number))
            assert found is not None, "the checkpoints before a round are committed"
            program = self._program
            parameters = restore_parameters(self._run, found, program.like, self._names)
            placed = program.layout.place_parameters(parameters, program.template)
            self._held_to = number, placed
        return Reference(self._held_to[1], coefficient)

    def _first_content(self) -> dict[str, Any]:
        config = self._run.config
        critic = config.training.critic
        return {
            "program": PROGRAM_VERSION,
            "policy": fingerprint_fields(config.policy),
            "seed": config.seed,
            **({} if critic is None else {"critic": critic.trunk}),
        }

    def _first_parameters(self, sft: SlotRef | None) -> Parameters:
        config, like = self._run.config, self._program.like
        if sft is not None:
            return restore_parameters(self._run, sft, like, self._names)
        if config.policy.init == "checkpoint":
            return restore_parameters(*other_run(config), like, self._names)
        return first_parameters(config, self._tokenizer)

    def _commit(
        self,
        state: TrainState,
        slot: str,
        decisive: Mapping[str, Any],
        parents: Sequence[SlotRef],
        metrics: Mapping[str, float],
        beside: Beside | None = None,
    ) -> SlotRef:
        identity = Identity.of(state, self._names)
        ref = commit_checkpoint(
            self._run,
            slot,
            tree_of(state),
            content=decisive,
            parents=parents,
            totals={name: value for name, value in metrics.items() if math.isfinite(value)},
            extra={**identity.as_dict(), **as_continued(self._run)},
            beside=beside,
        )
        if ref.reused:  # another attempt was first: what it committed is the truth
            self.load(ref)
        else:
            self._state, self.checkpoint, self.identity = state, ref, identity
        return ref

    def _remember(self, state: TrainState, checkpoint: SlotRef) -> None:
        self._state, self.checkpoint = state, checkpoint
        self.identity = Identity.of(state, self._names)

    def _forget(self) -> None:
        self._state = self.checkpoint = self.identity = None


def init_policy(run: Run, tokenizer: PreTrainedTokenizerBase) -> SlotRef:
    """Commit checkpoint 0 of a run, or return it if it is there."""
    return Trainer(run, tokenizer).init_policy()


def decisive_content(config: Config) -> dict[str, Any]:
    """The configuration that decides what a round's batches train, besides those batches."""
    return {
        "program": PROGRAM_VERSION,
        "policy": fingerprint_fields(config.policy),
        "objective": fingerprint_fields(config.objective),
        "training": fingerprint_fields(config.training),
        "temperature": config.sampling.temperature,
        "max_tokens": config.sampling.max_tokens,
    }


def already_committed(
    run: Run, slot: str, decisive: Mapping[str, Any], parents: Sequence[SlotRef]
) -> SlotRef | None:
    """The slot if it is committed. Raises CommitConflict if it holds something else."""
    return find_commit(run.store, slot, checkpoint_fingerprint(decisive, parents))
