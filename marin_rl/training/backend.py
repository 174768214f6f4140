"""The training backend: gradients, updates and weights of one policy, for loops of any kind.

A loop queues operations and gets a `Future` for each; they run one after the other, in the order in
which they were queued, while the loop goes on. The loop of all phases (phases.py) is written on
`DeviceBackend`, and so can a user's be.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.compilation import device_array
from marin_rl.config import Config
from marin_rl.errors import InputError
from marin_rl.machine import memory_errors
from marin_rl.storage.checkpoints import ExtraParts
from marin_rl.training.adapters import first_adapter
from marin_rl.training.compiled_step import Program, compiled_step_of, policy_settings
from marin_rl.training.logprobs import ALONE
from marin_rl.training.optimizer import policy_adamw
from marin_rl.training.state import CheckpointSlot, first_parameters
from marin_rl.training.step import Gradients, beside_teacher, combine, trainable_of
from marin_rl.training.step_metrics import TokenMeasures
from marin_rl.training.step_types import (
    Parameters,
    Reference,
    StepRows,
    StepSettings,
    TrainState,
)
from marin_rl.types import SlotRef

T = TypeVar("T")


class Future(Generic[T]):
    """The result of a queued operation: `await` it, or call `result()`."""

    def __init__(self, pending: "futures.Future[Any]", fetch: Callable[[Any], T]) -> None:
        self._pending, self._fetch = pending, fetch

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the operation and return its result. Raises what the operation raised.

        Raises TimeoutError after `timeout_s` seconds.
        """
        return self._fetch(self._pending.result(timeout_s))

    def __await__(self) -> Any:
        return asyncio.to_thread(self.result).__await__()


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of a batch: see `StepSettings`. `reference` is what its KL is to, where it has one.

    `teacher` are the parameters that its divergence is to. While a critic is `warming` up, the
    policy is scored and has no gradient.
    """

    settings: StepSettings
    reference: Reference | None = None
    teacher: Parameters | None = None
    warming: bool = False


@dataclass(frozen=True, slots=True)
class Forward:
    """Metrics of a batch before the update, and measures of each token; None when supervised."""

    metrics: dict[str, float]
    measures: TokenMeasures | None


@dataclass(frozen=True, slots=True)
class Updated:
    """Metrics of an update; `refused` counts those in a row that were refused as not finite."""

    metrics: dict[str, float]
    refused: int


class DeviceBackend:
    """Operations of a training loop on the devices of this process; each returns its future.

    `state` is taken over: its optimizer's part is donated to the first update. `frozen` are the
    policy's parameters that the state does not have and no update changes.
    """

    def __init__(
        self, program: Program, state: TrainState, frozen: Parameters | None = None
    ) -> None:
        self._program, self._state, self._frozen = program, state, frozen or {}
        self._gradients: Gradients = ()
        self._loss: Any = None  # of the gradients that wait
        # One thread: operations run in the order that they were called in.
        self._queue = futures.ThreadPoolExecutor(1, "training")

    @classmethod
    def of(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> "DeviceBackend":
        """Return a backend for a configuration's policy, at its first weights.

        Those are the weights of its model folder, or random ones by its seed; with `policy.lora`
        they are frozen, and the adapter is what is trained and saved. Raises InputError.
        """
        adamw, settings = policy_adamw(config.training), policy_settings(config)
        program = compiled_step_of(config, tokenizer, adamw, settings)
        parameters, frozen = first_parameters(config, tokenizer), dict[str, Any]()
        if program.modules:
            frozen = program.place_frozen(parameters)
            parameters = first_adapter(config, program.modules, program.base_template)
        return cls(program, program.first_state(parameters, config.seed), frozen)

    def close(self) -> TrainState:
        """End the queue once it is empty, and return the state."""
        # Only the queue's thread writes the state: after this no one does.
        self._queue.shutdown()
        return self._state

    def forward_backward(self, batch: StepRows, loss: Loss) -> Future[Forward]:
        """Add the gradients of a batch to those that the next update applies.

        A loss is compiled when it is first used. Raises InputError for rows of several sequences
        whose loss counts on one a row.
        """

        def fetch(outcome: Any) -> Forward:
            metrics, measures = jax.device_get(outcome)
            return Forward(_floats(metrics), measures)

        return self._queued(fetch, self._forward_backward, batch, loss)

    def optim_step(self) -> Future[Updated]:
        """Update the parameters by the gradients so far, and begin with none.

        Raises InputError without gradients.
        """

        def fetch(outcome: Any) -> Updated:
            metrics, refused = jax.device_get(outcome)
            return Updated(_floats(metrics), int(refused))

        return self._queued(fetch, self._optim_step)

    def get_weights(self) -> Future[Parameters]:
        """Parameters by path after all updates so far, as references: they are never written to."""
        return self._queued(_same, lambda: combine(self._state.parameters, self._frozen))

    def load_weights(self, weights: Mapping[str, Any]) -> Future[None]:
        """Replace trainable parameters by copies; the optimizer's moments stay.

        Raises InputError for other names or shapes than the trainable ones.
        """
        return self._queued(_same, self._load_weights, weights)

    def save(
        self,
        checkpoint: CheckpointSlot,
        totals: Mapping[str, float],
        extra: Mapping[str, Any] | None = None,
        extra_parts: ExtraParts | None = None,
    ) -> Future[SlotRef]:
        """Commit the training state as a checkpoint: see `CheckpointSlot.commit`."""
        return self._queued(
            _same, lambda: checkpoint.commit(self._state, totals, extra, extra_parts)
        )

    def _queued(
        self, fetch: Callable[[Any], T], run: Callable[..., Any], *arguments: Any
    ) -> Future[T]:
        # Fetched by who waits, so that the next operation is dispatched meanwhile: memory may end
        # in either.
        def explained(work: Callable[..., Any], *given: Any) -> Any:
            with memory_errors("the training step", self._program.memory_keys):
                return work(*given)

        return Future(self._queue.submit(explained, run, *arguments), partial(explained, fetch))

    def _forward_backward(self, batch: StepRows, loss: Loss) -> Any:
        program = self._program
        sequences = int(np.max(batch.arrays.segment_ids, initial=0))
        # A GPU's attention sees all of a row where the settings say that it is one sequence.
        if sequences > 1 and loss.settings.packing == ALONE:
            raise InputError(
                f"expected one sequence a row, found rows of {sequences}: give the loss settings "
                "whose packing is that of the rows (training.logprobs.packing_of)"
            )
        passes = program.forward_backward(loss.settings)
        trainable, frozen = trainable_of(self._state, self._frozen, warming=loss.warming)
        frozen = beside_teacher(frozen, loss.teacher)
        with program.layout.active():
            placed = program.layout.place_rows(batch.arrays)
            gradients, metrics, measures = passes(
                trainable, frozen, loss.reference, placed, batch.used
            )
            if self._gradients:
                pairs = zip(self._gradients, gradients, strict=True)
                # Several batches before a step: their gradients add up, as those of microbatches
                # do.
                gradients = [jax.tree.map(jnp.add, *pair) for pair in pairs]
                self._loss = self._loss + metrics["loss"]
            else:
                self._loss = metrics["loss"]
        # Stored last: where a pass fails, gradients that waited are as they were.
        self._gradients = gradients
        return metrics, measures

    def _optim_step(self) -> Any:
        if not self._gradients:
            raise InputError(
                "expected forward_backward before optim_step, found no gradients: queue a batch"
            )
        # Taken: a second step without a batch between is refused, not repeated.
        gradients, self._gradients = self._gradients, ()
        with self._program.layout.active():
            self._state, metrics = self._program.update(self._state, gradients, self._loss)
        return metrics, self._state.refused

    def _load_weights(self, weights: Mapping[str, Any]) -> None:
        expected = {name: array.shape for name, array in self._state.parameters.items()}
        shapes = {name: tuple(jnp.shape(array)) for name, array in weights.items()}
        if shapes != expected:
            names = sorted(
                name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name)
            )
            raise InputError(
                f"weights do not fit the policy: {names[0]} expected {expected.get(names[0])}, "
                f"found {shapes.get(names[0])}; load those of a model of its architecture"
            )
        # Masters are float32, whatever a model folder has; an adapter's may be configured.
        dtypes = {name: array.dtype for name, array in self._state.parameters.items()}
        copies = {name: device_array(array, dtypes[name]) for name, array in weights.items()}
        layout, template = self._program.layout, self._program.template
        self._state = self._state._replace(parameters=layout.place_parameters(copies, template))


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _same(outcome: Any) -> Any:
    return outcome
