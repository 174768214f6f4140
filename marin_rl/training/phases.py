"""Phases: what trains a run, each a data source, a loss, and the checkpoints that it commits.

All phases take their steps in one loop over a `DeviceBackend` (`Phase._steps`), from the state of
one committed checkpoint to the next: reinforcement learning by rounds (loop.py), the warm start
(sft.py), a reward model and a policy that learns from pairs (pair_phase.py) by segments of steps.
The batches of a segment depend only on the run's seed and the step, so a killed and resumed run
ends in the same bits as any other.
"""

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedTokenizerBase

from marin_rl.compilation import nbytes, prepare_for_training
from marin_rl.config import PairTrainingConfig, SFTConfig, fingerprint_fields
from marin_rl.machine import FREED_BYTES_MIN, give_back_freed_memory, heap_bytes
from marin_rl.progress import ProgressEvent, Stage, publish
from marin_rl.storage.layout import KeyForm
from marin_rl.storage.run_progress import optimizer_round
from marin_rl.storage.runs import Run, committed
from marin_rl.storage.written_behind import promised, settle
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.backend import DeviceBackend, Forward, Loss
from marin_rl.training.compiled_step import Program, check_finite
from marin_rl.training.policy_source import PolicySource
from marin_rl.training.state import CheckpointSlot, restore_state
from marin_rl.training.step_types import Parameters, StepRows, TrainState
from marin_rl.types import SlotRef

PREPARED_MAX = 4  # steps whose batches are made ahead
STEPS_PER_EVENT = 10

Batch = TypeVar("Batch")


class Phase:
    """A phase of one run. It keeps the program, and the state of its last checkpoint in memory.

    `state` is that of `checkpoint`; both are None before any, and while the state is trained on.
    """

    stage: ClassVar[Stage]

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase, program: Program) -> None:
        prepare_for_training(nbytes(program.like.parameters))
        self._run, self._tokenizer, self._program = run, tokenizer, program
        self._names = TokenizerIdentity.of(tokenizer)
        self._source = PolicySource(run, tokenizer, program)
        self.state: TrainState | None = None
        self.checkpoint: SlotRef | None = None

    def _restored(self, checkpoint: SlotRef) -> TrainState:
        """Return the state of a checkpoint, from memory when it is that already.

        Raises CorruptObject, ObjectMissing, or InputError for another tokenizer's checkpoint.
        """
        if self.state is None or self.checkpoint != checkpoint:
            self.state = self.checkpoint = None  # two states may not fit into memory
            like = self._program.placed_like
            self.state = restore_state(self._run, checkpoint, like, self._names)
            self.checkpoint = checkpoint
            give_back_freed_memory()
        assert self.state is not None
        return self.state

    def _taken_state(self, checkpoint: SlotRef) -> TrainState:
        """Return the state of a checkpoint to train from: its optimizer's part will be donated."""
        # Forgotten as it is handed out: after the first update its arrays are deleted.
        state = self._restored(checkpoint)
        url = self._run.store.url_of(checkpoint.slot)
        manifest = promised(url, checkpoint)  # of one that is written still
        if manifest is not None and optimizer_round(manifest) is None:
            settle(url)
        self.state = self.checkpoint = None
        return state

    def _steps(
        self, backend: DeviceBackend, loss: Loss, batches: Iterable[tuple[Batch, StepRows]]
    ) -> Iterator[tuple[Batch, Forward, dict[str, float]]]:
        """Take a step on each of the rows; its batch, forward pass and metrics.

        Raises NonFiniteUpdate when too many updates in a row were not finite.
        """
        limit = self._run.config.training.nonfinite_updates_max
        settled = heap_bytes()
        for batch, rows in batches:
            # Both are queued before either is awaited: the device does not wait for metrics to be
            # read.
            forward, update = backend.forward_backward(rows, loss), backend.optim_step()
            before, after = forward.result(), update.result()
            metrics = {**before.metrics, **after.metrics}
            check_finite(metrics, after.refused, limit)
            yield batch, before, metrics
            # Arrays that XLA's threads dropped, a set of parameters and more, are freed by the
            # next collection, which a loop that makes few objects may not come to for long; large
            # ones also where collections since have kept them.
            freed = nbytes(self._program.template)
            gc.collect(1 if freed >= FREED_BYTES_MIN else 0)
            give_back_freed_memory(freed, settled)

    def _slot(
        self, name: str, content: Mapping[str, Any], parents: Sequence[SlotRef]
    ) -> CheckpointSlot:
        return CheckpointSlot(
            run=self._run,
            slot=name,
            tokenizer=self._names,
            content=content,
            parents=parents,
            adapter=self._source.adapter,
            facts=self._program.layout.facts,
        )

    def _publish(
        self, done: int, total: int, metrics: Mapping[str, float], round: int | None = None
    ) -> None:
        publish(
            ProgressEvent(
                run_id=self._run.run_id,
                stage=self.stage,
                round=round,
                done=done,
                total=total,
                metrics=metrics,
            )
        )


class SegmentedPhase(Phase, ABC):
    """A phase of a fixed number of steps, every `steps_per_checkpoint` of which are committed.

    Its settings are the section of the configuration that `stage` names. `slot_of` names the slot
    of the checkpoint after so many steps.
    """

    slot_of: ClassVar[KeyForm]
    program_version: ClassVar[int]  # counts up when the same data would train other parameters
    measured: ClassVar[Sequence[str]]  # metrics that are reported as stage/NAME

    def __init__(
        self,
        run: Run,
        tokenizer: PreTrainedTokenizerBase,
        program: Program,
        loss: Loss,
        settings: SFTConfig | PairTrainingConfig,
    ) -> None:
        super().__init__(run, tokenizer, program)
        self._loss, self._settings = loss, settings

    @abstractmethod
    def _rows(self, step: int) -> StepRows:
        """The rows of a step; a function of the run's seed and the step."""

    @abstractmethod
    def _summary(
        self, backend: DeviceBackend, history: Sequence[Mapping[str, float]]
    ) -> tuple[Mapping[str, float], Mapping[str, Any]]:
        """Totals of a segment for its manifest, and other fields of it."""

    def _content(self) -> dict[str, Any]:
        """Settings that decide the checkpoints, besides their parents."""
        config, training = self._run.config, self._run.config.training
        chosen = () if training.optimizer is None else (training.optimizer,)
        return {
            "program": self.program_version,
            "policy": fingerprint_fields(config.policy),
            self.stage: fingerprint_fields(self._settings),
            "moments": [training.beta1, training.beta2, training.epsilon, *chosen],
            "seed": config.seed,
        }

    def _first_parents(self) -> tuple[SlotRef, ...]:
        """The slots that the first segment begins from."""
        return self._source.commit_base()

    def _first_parameters(self) -> Parameters:
        """The trained parameters before the first step."""
        return self._source.parameters_before_training()

    def _named(self, metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
        """Metrics of a step by their public names; without numbers that are not finite."""
        names = {name: f"{self.stage}/{prefix}{name}" for name in self.measured}
        names |= {name: name for name in ("grad_norm", "lr")}
        return {
            names[name]: value
            for name, value in metrics.items()
            if name in names and math.isfinite(value)
        }

    def _segment(self, step_from: int, *parents: SlotRef) -> tuple[SlotRef, Mapping[str, float]]:
        """Train from `step_from` to the segment's end, and commit; the commit and its totals.

        `parents` are further ones than the checkpoint before. Totals are empty for a commit that
        was there already. Raises NonFiniteUpdate, CommitConflict.
        """
        steps, every = self._settings.steps, self._settings.steps_per_checkpoint
        assert 0 <= step_from < steps, (step_from, steps)
        assert step_from % every == 0, (step_from, every)
        step_to = min(step_from + every, steps)
        if step_from:
            ref = committed(self._run, self.slot_of(step_from))
            assert ref is not None, f"step {step_from} is committed before what follows it"
            before = (ref,)
        else:
            before = self._first_parents()
        slot = self._slot(self.slot_of(step_to), self._content(), (*before, *parents))
        if existing := slot.find():
            return existing, {}
        frozen = self._source.frozen
        if step_from:
            state = self._taken_state(before[0])
        else:
            state = self._program.first_state(self._first_parameters(), self._run.config.seed)
        backend = DeviceBackend(self._program, state, frozen)
        del state  # the backend's: its optimizer's part is donated
        history = list[Mapping[str, float]]()
        batches = made_ahead(self._rows, step_from, step_to)
        for step, _, metrics in self._steps(backend, self._loss, batches):
            history.append(self._named(metrics))
            if (step + 1) % STEPS_PER_EVENT == 0 or step + 1 == step_to:
                self._publish(step + 1, steps, history[-1])
        totals, extra = self._summary(backend, history)
        ref = backend.save(slot, totals, extra).result()
        # Another attempt that was first may have other moments to the bit: its state is read then.
        if not ref.reused:
            self.state, self.checkpoint = backend.close(), ref
        return ref, totals


def made_ahead(make: Callable[[int], Batch], start: int, end: int) -> Iterator[tuple[int, Batch]]:
    """The batches of steps start … end - 1, made ahead in a thread while the device computes."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        first = range(start, min(start + PREPARED_MAX, end))
        ahead = [pool.submit(make, step) for step in first]
        for step in range(start, end):
            batch = ahead.pop(0).result()
            # A few steps ahead: tokenizing overlaps with training, and memory holds few batches.
            if step + PREPARED_MAX < end:
                ahead.append(pool.submit(make, step + PREPARED_MAX))
            yield step, batch
