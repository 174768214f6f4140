"""The training stage: from checkpoint r and a round's batches to checkpoint r + 1, committed.

A Trainer keeps the compiled step and the state of the checkpoint it made or read last, so that the
next round starts from memory; whatever it is asked to start from, the commit decides. It also makes
checkpoint 0 of a run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from levanter.models.lm_model import LmHeadModel
from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config, content
from marin_rl.errors import NonFiniteUpdate
from marin_rl.progress import ProgressEvent, publish
from marin_rl.storage.batches import read_batches
from marin_rl.storage.checkpoints import (
    checkpoint_fingerprint,
    commit_checkpoint,
)
from marin_rl.storage.commits import committed_as
from marin_rl.storage.runs import Run, checkpoint_slot, committed
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.mesh import Layout, layout_of
from marin_rl.training.model import (
    matrix_mask,
    with_gradient_checkpointing,
    with_parameters,
)
from marin_rl.training.optimizer import (
    AdamW,
    learning_rate_schedule,
    make_optimizer,
    policy_adamw,
)
from marin_rl.training.state import (
    Identity,
    first_parameters,
    fresh_state,
    other_run,
    restore_parameters,
    restore_state,
    sft_result,
    state_like,
    template_of,
    tree_of,
)
from marin_rl.training.step import (
    Parameters,
    Step,
    StepSettings,
    TrainState,
    as_array,
    make_step,
    step_arrays,
)
from marin_rl.types import SlotRef, TrainingBatch

PROGRAM_VERSION = 1  # counts up when the same batches would train other parameters

# How a metric of several optimizer steps becomes one of the round; the others are means. What
# compares trainer and sampler means something only before the first update of the round.
LAST = ("lr", "updates/steps")
FIRST = ("sampling/", "mismatch_kl")


class Program:
    """The compiled step of one run and one optimizer, and what a state looks like to it."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        adamw: AdamW,
        settings: StepSettings,
    ) -> None:
        self.layout: Layout = layout_of(config.mesh)
        self.template = template_of(config.policy, tokenizer)
        if config.training.gradient_checkpointing:
            self.template = with_gradient_checkpointing(self.template)
        self.optimizer = make_optimizer(adamw, matrix_mask(self.template))
        self.like = state_like(self.template, self.optimizer)
        self.step: Step = make_step(
            self.template, self.optimizer, learning_rate_schedule(adamw), settings, self.layout
        )

    def place(self, state: TrainState) -> TrainState:
        """The state on the devices, sharded as the step wants it."""
        return self.layout.place_state(state, self.template, self.optimizer)


class Trainer:
    """Trains one run. `state` is that of the committed `checkpoint`, or None before the first."""

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        config = run.config
        self._run, self._tokenizer = run, tokenizer
        self._names = TokenizerIdentity.of(tokenizer)
        self._program = Program(
            config,
            tokenizer,
            policy_adamw(config.training),
            StepSettings(
                objective=config.objective,
                temperature=config.sampling.temperature or 1.0,
                length_norm=config.sampling.max_tokens,
                compute_dtype=config.policy.compute_dtype,
            ),
        )
        self._state: TrainState | None = None
        self._reference: Parameters | None = None
        self.checkpoint: SlotRef | None = None
        self.identity: Identity | None = None

    @property
    def model(self) -> LmHeadModel:
        """The model of the loaded checkpoint: the trainer's own arrays, never written to."""
        assert self._state is not None, "no checkpoint is loaded"
        return with_parameters(self._program.template, self._state.parameters)

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

    def init_policy(self) -> SlotRef:
        """Commit checkpoint 0 as the configuration says, or return it if it is there."""
        run, slot = self._run, checkpoint_slot(0)
        source = sft_result(run) if run.config.policy.init == "sft" else None
        parents = (source,) if source else ()
        decisive = self._first_content()
        if (found := already_committed(run, slot, decisive, parents)) is not None:
            return found
        parameters = self._first_parameters(source)
        state = fresh_state(parameters, self._program.optimizer, run.config.seed)
        return self._commit(self._program.place(state), slot, decisive, parents, {})

    def train_round(self, round: int, batches: SlotRef, checkpoint: SlotRef) -> SlotRef:
        """Train on a round's batches from `checkpoint`, and commit checkpoint `round` + 1.

        The summary of the result holds the round's training metrics. A round without batches
        commits the parameters unchanged. Raises NonFiniteUpdate when too many updates in a row were
        not finite; nothing is committed then.
        """
        slot, parents = checkpoint_slot(round + 1), (checkpoint, batches)
        decisive = decisive_content(self._run.config)
        if (found := already_committed(self._run, slot, decisive, parents)) is not None:
            return found
        self.load(checkpoint)
        assert self._state is not None
        state, reference = self._state, self._reference_parameters()
        self._forget()  # the optimizer state is donated from here on
        total = int(batches.summary.get("steps", 0)) * self._run.config.training.epochs
        rows: list[Mapping[str, float]] = []
        for batch in self._batches(batches):
            arrays, used = self._arrays(batch)
            state, metrics = take_step(self._program, state, reference, arrays, used)
            check_finite(state, metrics, self._run.config.training.nonfinite_updates_max)
            rows.append(metrics)
            self._publish(round, len(rows), total, metrics)
        return self._commit(state, slot, decisive, parents, round_metrics(rows))

    def _batches(self, batches: SlotRef) -> Iterator[TrainingBatch]:
        for _ in range(self._run.config.training.epochs):
            yield from read_batches(self._run, batches)

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
        return fitted(batch, config.training.microbatch_sequences, rows_max)

    def _reference_parameters(self) -> Parameters | None:
        """Those of checkpoint 0, read once; None where no KL is asked for."""
        if self._run.config.objective.kl_coefficient == 0:
            return None
        if self._reference is None:
            first = committed(self._run, checkpoint_slot(0))
            assert first is not None, "checkpoint 0 is committed before any round is trained"
            parameters = restore_parameters(self._run, first, self._program.like, self._names)
            self._reference = self._program.layout.place_parameters(
                parameters, self._program.template
            )
        return self._reference

    def _first_content(self) -> dict[str, Any]:
        config = self._run.config
        return {"program": PROGRAM_VERSION, "policy": content(config.policy), "seed": config.seed}

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
    ) -> SlotRef:
        identity = Identity.of(state, self._names)
        ref = commit_checkpoint(
            self._run,
            slot,
            tree_of(state),
            content=decisive,
            parents=parents,
            totals={name: value for name, value in metrics.items() if math.isfinite(value)},
            extra=identity.as_dict(),
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
        "policy": content(config.policy),
        "objective": content(config.objective),
        "training": content(config.training),
        "temperature": config.sampling.temperature,
        "max_tokens": config.sampling.max_tokens,
    }


def fitted(batch: TrainingBatch, microbatch: int, rows_max: int) -> tuple[Any, int]:
    """A batch in the fixed shape that steps of up to `rows_max` rows are compiled for."""
    rows = min(microbatch, rows_max)
    return step_arrays(batch, rows, -(-rows_max // rows))


def take_step(
    program: Program, state: TrainState, reference: Parameters | None, arrays: Any, used: int
) -> tuple[TrainState, dict[str, float]]:
    """One optimizer step, and its metrics fetched from the device at once."""
    with program.layout.active():
        placed = program.layout.place_rows(arrays)
        state, metrics, _ = program.step(state, reference, placed, as_array(used))
    return state, {name: float(value) for name, value in jax.device_get(metrics).items()}


def check_finite(state: TrainState, metrics: Mapping[str, float], limit: int) -> None:
    """Raise NonFiniteUpdate once `limit` updates in a row were refused."""
    if metrics["updates/skipped"] and int(state.refused) >= limit:
        raise NonFiniteUpdate(
            f"{int(state.refused)} updates in a row were not finite (loss {metrics['loss']}, "
            f"gradient norm {metrics['grad_norm']}) and were refused; expected fewer than {limit} "
            "(training.nonfinite_updates_max). Lower training.learning_rate, or look at the "
            "round's rewards and log-probabilities"
        )


def round_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a round from those of its optimizer steps; none for no steps."""
    names = sorted({name for step in steps for name in step})
    return {name: _reduced(name, [step[name] for step in steps if name in step]) for name in names}


def _reduced(name: str, values: Sequence[float]) -> float:
    if name in LAST:
        return values[-1]
    if name.startswith(FIRST):
        return values[0]
    return float(np.sum(values)) if name == "updates/skipped" else float(np.mean(values))


def already_committed(
    run: Run, slot: str, decisive: Mapping[str, Any], parents: Sequence[SlotRef]
) -> SlotRef | None:
    """The slot if it is committed. Raises CommitConflict if it holds something else."""
    return committed_as(run.store, slot, checkpoint_fingerprint(decisive, parents))
