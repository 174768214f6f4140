"""Reinforcement learning: from checkpoint r and a round's batches to checkpoint r + 1, committed.

This phase is one of rounds (see phases.py). What its loss needs of the policy before the first
update is computed first (precompute.py). A Trainer also makes checkpoint 0 of a run.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.reuse import reused_by
from marin_rl.compilation import gathered
from marin_rl.config import Config, fingerprint_fields
from marin_rl.errors import CorruptObject, InputError
from marin_rl.lora.adapter import Adapter
from marin_rl.machine import changed_facts, computes_on_host, give_back_freed_memory
from marin_rl.metrics import over_steps
from marin_rl.models.module import LanguageModel
from marin_rl.processes import leads
from marin_rl.progress import phase
from marin_rl.rollouts.teaching import STAMP, another_teacher, taught_prompts
from marin_rl.storage.checkpoints import ExtraParts
from marin_rl.storage.commits import manifest_of, new_attempt
from marin_rl.storage.run_progress import as_continued, optimizer_round
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, committed
from marin_rl.storage.tables.batches import read_batches
from marin_rl.storage.tables.scores import ScoredStep, ScoresWriter
from marin_rl.training.adapters import changes_nothing
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.compiled_step import (
    CompiledStep,
    compiled_step_of,
    policy_settings,
    rows_compiled_for,
    to_fixed_shape,
)
from marin_rl.training.mesh import Layout
from marin_rl.training.model import named_parameters, with_parameters
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.phases import Phase
from marin_rl.training.policy_source import recorded_modules
from marin_rl.training.precompute import RowExtras, RowPrecompute
from marin_rl.training.reference_policy import groups_of, kl_coefficient, reference_round
from marin_rl.training.round_stats import RoundAccount, scored_step
from marin_rl.training.state import (
    CheckpointSlot,
    Identity,
    identity_of,
    restore_parameters,
    sft_result,
    tree_of,
)
from marin_rl.training.step import beside_teacher, combine, trainable_of
from marin_rl.training.step_types import (
    Parameters,
    Reference,
    StepArrays,
    StepRows,
    TrainableParams,
    TrainState,
)
from marin_rl.training.teacher import LocalTeacher, local_teacher, teacher_spec
from marin_rl.trust import Consent, check_named, code_of_updates
from marin_rl.types import SlotRef, TrainingBatch
from schemas.manifests import Manifest

# Counts up when the same batches would train other parameters, or leave other scores.
PROGRAM_VERSION = 4
Batches = Callable[[], Iterable[TrainingBatch]]  # the steps of a round, read again at each call


class Trainer(Phase):
    """Trains one run. `identity` belongs to the checkpoint loaded last; None before the first."""

    stage = "train"
    _program: CompiledStep

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        config = run.config
        self._settings = policy_settings(config)
        if config.distillation is not None and config.distillation.loss is not None:
            theirs = teacher_spec(run, tokenizer)
            distilled = {"distillation": config.distillation, "teacher": theirs}
            self._settings = replace(self._settings, **distilled)
        modules = recorded_modules(run) if config.policy.lora else None
        adamw = policy_adamw(config.training)
        program = compiled_step_of(config, tokenizer, adamw, self._settings, modules)
        super().__init__(run, tokenizer, program)
        self._reference_policy: tuple[int, Parameters] | None = None
        self.identity: Identity | None = None

    def models(self, *, apart: bool = False) -> tuple[LanguageModel, LanguageModel, Adapter | None]:
        """The model of the loaded checkpoint as it is trained, and as it is served.

        Served is an adapter merged into its base, or `apart` the base and the adapter. Both are the
        trainer's own arrays, never written to, or copies of them on the devices of this process
        where several processes train: all of these call this then.
        """
        program = self._program
        trained = program.layout.replica(self._loaded.parameters)
        frozen = program.layout.replica(self._source.frozen)
        model = with_parameters(program.template, combine(trained, frozen))
        if apart:
            return model, *program.base_and_adapter(frozen, trained)
        return model, program.served_model(frozen, trained), None

    @property
    def _loaded(self) -> TrainState:
        assert self.state is not None, "no checkpoint is loaded"
        return self.state

    @cached_property
    def _teacher(self) -> LocalTeacher | None:
        """The teacher that a step runs beside the policy; None where it runs none."""
        if self._settings.divergence is None:
            return None
        return local_teacher(self._run, self._tokenizer)

    @cached_property
    def _teacher_parameters(self) -> Parameters | None:
        if (teacher := self._teacher) is None:
            return None
        parameters = named_parameters(teacher.model)
        return self._program.layout.place_parameters(parameters, teacher.model)

    @property
    def layout(self) -> Layout:
        return self._program.layout

    def load(self, checkpoint: SlotRef) -> None:
        """Make `checkpoint` the current one; from memory when it is that already.

        One without the optimizer's state is trained again from the last that has it. Raises
        CorruptObject, ObjectMissing, InputError for another tokenizer's checkpoint or for one that
        is not the same when trained again, and as `train_round` does.
        """
        if self.checkpoint == checkpoint:
            return
        manifest = manifest_of(self._run.store, checkpoint)
        if optimizer_round(manifest) is None:
            self._restored(checkpoint)
        else:
            state = self._trained_again(manifest)
            self.state, self.checkpoint = state, checkpoint
        # Of the manifest, which vouches for the files: to hash all parameters again takes long.
        self.identity = identity_of(self._run, checkpoint)

    def _trained_again(self, checkpoint: Manifest) -> TrainState:
        """The whole state of a checkpoint that has the parameters only."""
        round = (checkpoint_slot.first(checkpoint.slot) or 0) - 1
        # Rounds before a fork are trained as the run that played them says.
        player = self._run.at_round(round)
        if player is not self._run:
            check_named(player, player.config, Consent(), code_of_updates(player.config))
        trainer = self if player is self._run else Trainer(player, self._tokenizer)
        before, batches = trained_from(player, checkpoint, round)
        # First of all the state before it, which may take rounds of its own.
        trainer.load(before)
        with phase(f"training round {round} again, for the optimizer's state after it"):
            state, _ = trainer.replay_round(round, batches, before)
        again = self.identity_of(state).as_dict()
        digests = [name for name in again if name.endswith("_digest")]
        if any(again[name] != checkpoint.extra.get(name) for name in digests):
            raise InputError(_not_the_same(self._run, self.layout, round, checkpoint, again))
        return state

    def identity_of(self, state: TrainState) -> Identity:
        return Identity.of(state, self._names, self._source.adapter)

    def init_policy(self) -> SlotRef:
        """Commit the configured checkpoint 0, or return the existing one."""
        run, program = self._run, self._program
        warm = (sft_result(run),) if run.config.policy.init == "sft" else ()
        # The base of an adapter first: it is a parent, and names the warm start that made it.
        base = self._source.commit_base()
        critic = run.config.training.critic
        content = {
            "program": PROGRAM_VERSION,
            "policy": fingerprint_fields(run.config.policy),
            "seed": run.config.seed,
            **({} if critic is None else {"critic": critic.trunk}),
        }
        slot = self._slot(checkpoint_slot(0), content, (*base, *warm))
        if (existing := slot.find()) is not None:
            return existing
        parameters = self._source.parameters_before_training()
        state = program.first_state(parameters, run.config.seed)
        del parameters  # their memory is the state's
        ref = self._commit(DeviceBackend(program, state), slot, {})
        give_back_freed_memory()  # reading a model's folder frees several times its size
        return ref

    def train_round(self, round: int, batches: SlotRef, checkpoint: SlotRef) -> SlotRef:
        """Train on a round's batches from `checkpoint`, and commit checkpoint `round` + 1.

        The summary of the result holds the round's training metrics; the scores of its tokens are
        committed with it. A round without batches commits the parameters unchanged, and no scores.
        Raises NonFiniteUpdate when too many updates in a row were not finite; nothing is committed
        then.
        """
        # Before anything is loaded: a round that is trained already costs one read of its slot.
        content = decisive_content(self._run.config)
        recorded: dict[str, Any] = {}
        if self._teacher is not None:
            self._check_teacher(round, checkpoint)
            recorded = {STAMP: self._teacher.identity}
            content["teacher_digest"] = self._teacher.identity
        slot = self._slot(checkpoint_slot(round + 1), content, (checkpoint, batches))
        if (existing := slot.find()) is not None:
            return existing
        slot = replace(
            slot,
            optimizer_round=self._optimizer_round(round + 1, checkpoint),
            # Other processes that take stages can only wait for what is committed.
            behind=self._run.config.flow.runner == "local",
        )
        # One attempt names scores and checkpoint: both are parts of one slot, committed by one
        # manifest.
        account, attempt = RoundAccount(self._tokenizer), new_attempt()
        with ScoresWriter(self._run, round, attempt, account.eos_token_id) as scores:
            keep = scores.write if leads() else _unwritten
            backend, totals = self._updated(round, batches, checkpoint, account, keep)
            extra_parts = ExtraParts(attempt=attempt, parts=scores.parts)
            return self._commit(backend, slot, totals, extra_parts, recorded)

    def _check_teacher(self, round: int, checkpoint: SlotRef) -> None:
        """Raise InputError for another teacher than that of the round before."""
        if round == 0 or self._run.at_round(round - 1) is not self._run:
            return  # a fork may have another
        before = manifest_of(self._run.store, checkpoint).extra.get(STAMP)
        if self._teacher is not None and before != self._teacher.identity:
            raise another_teacher(self._teacher, round - 1, [str(before)])

    def _optimizer_round(self, number: int, before: SlotRef) -> int | None:
        """The last checkpoint with the optimizer's state; None where `number` is to have it."""
        config = self._run.config
        shapes = jax.tree.leaves(tree_of(self._program.like))
        state_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in shapes)
        every = config.checkpoints.optimizer_every(state_bytes, on_host=computes_on_host())
        earlier = optimizer_round(manifest_of(self._run.store, before))
        last = number - 1 if earlier is None else earlier
        # The last of a run is whole: it is what others go on from.
        return None if number - last >= every or number == config.rounds else last

    def replay_round(
        self, round: int, batches: SlotRef, checkpoint: SlotRef
    ) -> tuple[TrainState, dict[str, float]]:
        """State and metrics that `train_round` would commit; nothing is written.

        Raises as `train_round` does.
        """
        account = RoundAccount(self._tokenizer)
        backend, totals = self._updated(round, batches, checkpoint, account, _unwritten)
        return backend.close(), totals

    def gradient(
        self, round: int, batches: Batches, checkpoint: SlotRef
    ) -> dict[str, Float32[np.ndarray, "..."]]:
        """The mean over a round's steps of their gradients at the checkpoint, before clipping.

        No step is taken, so that rounds of different numbers of steps compare; 0 without steps.
        Raises as `load` does.
        """
        self.load(checkpoint)
        program, state = self._program, self._loaded
        passes = program.forward_backward(self._settings)
        reference, read = self._reference(round, checkpoint), list(batches())
        # One update at most: each gradient is taken at the checkpoint, where old logprobs are the
        # current ones.
        extras, _ = self._before_updates(round, lambda: read, state, reference, min(len(read), 1))
        if self._run.config.objective.kl_placement == "reward":
            reference = None  # it is applied in the advantages
        total = {
            name: np.zeros(array.shape, np.float32) for name, array in state.parameters.items()
        }
        for step, batch in enumerate(read):
            rows = self._rows(batch)
            rows = extras[step](rows) if extras else rows
            with program.layout.active():
                placed = program.layout.place_rows(rows.arrays)
                trainable, frozen = trainable_of(state, self._source.frozen)
                frozen = beside_teacher(frozen, self._teacher_parameters)
                parts, _, _ = passes(trainable, frozen, reference, placed, rows.used)
            for gradients in parts:
                assert gradients.policy is not None, "the policy is trained"
                for name, array in gathered(gradients.policy).items():
                    # On the host, step by step: the sum of a round needs no second set of gradients
                    # on the device.
                    total[name] += np.asarray(array, np.float32) / len(read)
        return total

    def _updated(
        self,
        round: int,
        batches: SlotRef,
        checkpoint: SlotRef,
        account: RoundAccount,
        keep: Callable[[ScoredStep], None],
    ) -> tuple[DeviceBackend, dict[str, float]]:
        """A backend after a round's updates, and metrics; `keep` is given the scores of a step."""
        self.load(checkpoint)
        config, program = self._run.config, self._program
        steps, epochs = int(batches.summary.get("steps", 0)), config.training.epochs
        reference = self._reference(round, checkpoint)
        read = partial(read_batches, self._run, batches)
        extras, known = self._before_updates(round, read, self._loaded, reference, steps * epochs)
        if config.objective.kl_placement == "reward":
            reference = None  # it is applied in the advantages
        loss = Loss(
            settings=self._settings,
            reference=reference,
            teacher=self._teacher_parameters,
            warming=program.warms_up(round),
        )
        # Taken: the first update donates the optimizer's arrays, so after a failure the checkpoint
        # has to be read again.
        backend = DeviceBackend(program, self._taken_state(checkpoint), self._source.frozen)
        history: list[Mapping[str, float]] = []
        rows = self._epochs(batches, extras)
        for (batch, extra, arrays), before, measured in self._steps(backend, loss, rows):
            history.append({**measured, **known})
            # Scores are of the policy before the round; rows of a second epoch have been trained
            # on.
            if len(history) <= steps:  # the first pass
                keep(scored_step(batch, arrays, before.measures, extra))
                account.add(batch, program.template)
            total = max(steps * epochs, len(history))
            self._publish(len(history), total, history[-1], round)
        return backend, over_steps(history) | account.totals(epochs, program.layout.devices)

    def _epochs(
        self, batches: SlotRef, extras: Sequence[RowExtras]
    ) -> Iterator[tuple[tuple[TrainingBatch, RowExtras, StepArrays], StepRows]]:
        """Rows of each optimizer step, epoch after epoch, with their batch and what is known."""
        for _ in range(self._run.config.training.epochs):
            for step, batch in enumerate(read_batches(self._run, batches)):
                extra = extras[step] if extras else RowExtras()
                rows = extra(self._rows(batch))
                yield (batch, extra, rows.arrays), rows

    def _before_updates(
        self,
        round: int,
        batches: Batches,
        state: TrainState,
        reference: Reference | None,
        total: int,
    ) -> tuple[list[RowExtras], Mapping[str, float]]:
        """Extra arrays of a round's rows before the first of `total` updates, and their metrics."""
        objective, program = self._run.config.objective, self._program
        distillation = self._run.config.rollout_teacher
        by_token = objective.estimator.by_token
        weighing = by_token and program.critic is None
        # In a single update the old logprobs are the current ones, which the step computes anyway.
        correcting = (total > 1 or weighing) and objective.importance_correction != "none"
        penalising = reference is not None and objective.kl_placement == "reward"
        with_context = self._settings.distillation and self._settings.distillation.context
        needed = correcting or penalising or by_token or distillation or with_context
        if not total or not needed:
            return [], {}
        read = list(batches())
        # The whole round at once: whitening and penalties are over all of its tokens.
        precompute = RowPrecompute(objective, read, [self._rows(batch) for batch in read])
        trainable, frozen = trainable_of(state, self._source.frozen)
        if correcting:
            precompute.correct(partial(program.rows, program.score, trainable, frozen))
        if reference is not None and penalising:
            groups = {} if program.critic else groups_of(self._run, round)
            of_reference = TrainableParams(reference.parameters)
            score = partial(program.rows, program.score, of_reference, frozen)
            precompute.penalise(score, float(reference.coefficient), groups)
        if program.critic is not None:
            values = partial(program.rows, program.values, trainable, frozen)
            precompute.estimate(program.critic.config, values)
        if weighing:
            norms = partial(program.rows, program.score_norms, trainable, frozen)
            precompute.weigh(norms, groups_of(self._run, round))
        if distillation is not None:
            precompute.distil(distillation.coefficient)
        if with_context:
            rounds = (round, *reused_by(self._run, round))
            precompute.place_context(taught_prompts(self._run, rounds))
        return precompute.extras, precompute.metrics

    def _rows(self, batch: TrainingBatch) -> StepRows:
        config = self._run.config
        rollouts = config.rollouts.groups_per_round * config.rollouts.group_size
        rows_max = min(config.batching.sequences_per_step or rollouts, rollouts)
        microbatch = batch.microbatch_rows or config.training.microbatch_sequences
        # Packed rows are fewer than rollouts, by a number that changes from round to round.
        if config.batching.layout != "none":
            rows_max = rows_compiled_for(max(len(batch.token_ids), microbatch), rows_max)
        return to_fixed_shape(batch, microbatch, rows_max, self._program.layout)

    def _reference(self, round: int, checkpoint: SlotRef) -> Reference | None:
        """Reference policy of a round, read once; None where no KL is configured."""
        objective, average = self._run.config.objective, self._loaded.average
        if objective.kl_coefficient == 0:
            return None
        coefficient = np.float32(kl_coefficient(self._run, checkpoint))
        # The average is part of the state, and was updated by the round before.
        if average is not None:
            return Reference(average, coefficient)
        number = reference_round(objective, round)
        if self._reference_policy is None or self._reference_policy[0] != number:
            ref = committed(self._run, checkpoint_slot(number))
            assert ref is not None, "the checkpoints before a round are committed"
            program = self._program
            parameters = restore_parameters(self._run, ref, program.placed_like, self._names)
            # An adapter that changes nothing yet, as all do whose B is zero: the base by itself is
            # the reference, and costs the adapter's part of a pass less.
            if program.modules and changes_nothing(parameters):
                parameters = {}
            self._reference_policy = number, parameters
        return Reference(self._reference_policy[1], coefficient)

    def _commit(
        self,
        backend: DeviceBackend,
        slot: CheckpointSlot,
        totals: Mapping[str, float],
        extra_parts: ExtraParts | None = None,
        recorded: Mapping[str, Any] = MappingProxyType({}),
    ) -> SlotRef:
        extra = {**as_continued(self._run), **recorded}
        ref = backend.save(slot, totals, extra, extra_parts).result()
        if ref.reused:  # another attempt was first: what it committed is the truth
            self.load(ref)
        else:
            # First: where this fails, no state is kept under the identity of another.
            identity = identity_of(self._run, ref)
            self.state, self.checkpoint = backend.close(), ref
            self.identity = identity
        return ref


def _unwritten(_: ScoredStep) -> None:
    """Drop the scores of a step, as replays and processes other than 0 do."""


def _not_the_same(
    run: Run, layout: Layout, round: int, checkpoint: Manifest, again: Mapping[str, Any]
) -> str:
    """Text of an error: a round that was trained again is not what was committed of it."""
    changed = changed_facts(checkpoint.extra.get("machine", {}), layout.facts).items()
    facts = "; ".join(f"{name}: {then}, now {now}" for name, (then, now) in changed)
    pair = [str(each["parameters_digest"])[:12] for each in (again, checkpoint.extra)]
    return (
        f"{run.store.url_of(checkpoint.slot)} holds no optimizer state, and training round {round} "
        f"again gives parameters with digest {pair[0]}, expected {pair[1]} "
        f"({facts or 'no recorded fact of the machine differs'}): continue on a machine like the "
        f"recorded one, or fork the run from round {optimizer_round(checkpoint)}, whose checkpoint "
        "holds one. checkpoints.optimizer_every_rounds: 1 writes it every round"
    )


def trained_from(run: Run, recorded: Manifest, round: int) -> tuple[SlotRef, SlotRef]:
    """The checkpoint and the batches of a round, as `recorded`, what they made, names them.

    Raises CorruptObject where others are committed there now.
    """
    named = {parent.slot: parent.sha256 for parent in recorded.parents}
    parents: list[SlotRef] = []
    for slot in (checkpoint_slot(round), batches_slot(round)):
        ref = committed(run, slot)
        # A slot that was made again would be compared with an update that never saw it.
        if ref is None or ref.sha256 != named.get(slot):
            raise CorruptObject(
                f"{run.store.url_of(recorded.slot)} was made from {slot} with SHA-256 "
                f"{named.get(slot)}, found {ref.sha256 if ref else 'nothing'} there: run fsck"
            )
        parents.append(ref)
    return parents[0], parents[1]


def decisive_content(config: Config) -> dict[str, Any]:
    """The configuration that decides what a round's batches train, besides those batches."""
    teacher = config.distillation
    divergence = None if teacher is None else teacher.loss
    context = None if teacher is None else fingerprint_fields(teacher).get("context")
    return {
        "program": PROGRAM_VERSION,
        "policy": fingerprint_fields(config.policy),
        "objective": fingerprint_fields(config.objective),
        "training": fingerprint_fields(config.training),
        # The only settings of sampling that a loss depends on.
        "temperature": config.sampling.temperature,
        "max_tokens": config.sampling.max_tokens,
        # Only where it applies: fingerprints of earlier runs stay what they were.
        **({} if teacher is None else {"teacher": teacher.coefficient}),
        **({} if divergence is None else {"divergence": fingerprint_fields(divergence)}),
        **({"context": context} if divergence is not None and context else {}),
    }
