"""The supervised warm start: segments of optimizer steps on (prompt, answer) pairs, each committed.

The examples of a step are a function of the run's seed and the step alone, and a segment starts
from the checkpoint of the one before, so a run that was killed ends in the same bits as one that
was not. Tokens are prepared in a thread while the device computes.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import padded
from marin_rl.batching.sequences import named_chats
from marin_rl.config import Config, fingerprint_fields
from marin_rl.environments.base import Environment
from marin_rl.environments.checks import no_demonstration
from marin_rl.environments.mixture import part_for
from marin_rl.environments.registry import loaded_environment
from marin_rl.errors import InputError
from marin_rl.progress import ProgressEvent, publish
from marin_rl.storage.runs import Run, committed, sft_slot
from marin_rl.tokenizers import TokenizerIdentity, trained_ends
from marin_rl.training.adapters import first_adapter, warm_start_config
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.compiled_step import (
    check_finite,
    compiled_step_of,
    supervised_settings,
    to_fixed_shape,
)
from marin_rl.training.frozen import FrozenBase
from marin_rl.training.loop import PROGRAM_VERSION
from marin_rl.training.optimizer import sft_adamw
from marin_rl.training.policy_source import policy_parameters
from marin_rl.training.state import CheckpointSlot, CommittedState
from marin_rl.training.step_types import TrainState
from marin_rl.types import Message, SlotRef, TrainingBatch

LENGTH_STEP = 8  # sequences are padded to a multiple of this, so few lengths are ever compiled
PREPARED_MAX = 4  # steps whose tokens are made ahead
STEPS_PER_EVENT = 10

Batch = TypeVar("Batch")


class WarmStart:
    """Trains the warm start of one run, segment by segment."""

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        config = warm_start_config(run.config)
        self._run, self._tokenizer = run, tokenizer
        self._names = TokenizerIdentity.of(tokenizer)
        # a file of demonstrations alone may hold out no row
        self._environment = loaded_environment(
            config.sft.environment or config.environment, "train"
        )
        self._loss = Loss(settings=supervised_settings(config))
        program = compiled_step_of(
            config, tokenizer, sft_adamw(config.sft, config.training), self._loss.settings
        )
        self._program = program
        self._base = FrozenBase(run, tokenizer, program)
        self._committed = CommittedState(run, self._names, program.like, program.place)

    def run_segment(self, step_from: int) -> SlotRef:
        """Train from `step_from` to the segment's end and commit the checkpoint there.

        Returns what is committed already. The summary holds the segment's last `sft/loss`,
        `grad_norm` and `lr`. Raises InputError for examples without an answer or longer than the
        context, NonFiniteUpdate, CommitConflict.
        """
        sft, run = self._run.config.sft, self._run
        assert 0 <= step_from < sft.steps, (step_from, sft.steps)
        assert step_from % sft.steps_per_checkpoint == 0, (step_from, sft.steps_per_checkpoint)
        step_to = min(step_from + sft.steps_per_checkpoint, sft.steps)
        slot = self._slot(step_from, step_to)
        if existing := slot.find():
            return existing
        state, metrics = self._begin(step_from, slot), dict[str, float]()
        backend = DeviceBackend(self._program, state, self._base.parameters)
        del state  # the backend's: its optimizer's part is donated
        for step, batch in made_ahead(self._batch, step_from, step_to):
            layout = self._program.layout
            rows = to_fixed_shape(batch, sft.microbatch_sequences, sft.sequences_per_step, layout)
            forward, update = backend.forward_backward(rows, self._loss), backend.optim_step()
            metrics = forward.result().metrics | update.result().metrics
            refused_max = run.config.training.nonfinite_updates_max
            check_finite(metrics, update.result().refused, refused_max)
            if (step + 1) % STEPS_PER_EVENT == 0 or step + 1 == step_to:
                self._publish(step + 1, metrics)
        ref = backend.save(slot, _summary(metrics)).result()
        # Another attempt that was first may have other moments to the bit: its state is read then.
        if not ref.reused:
            self._committed.keep(backend.close(), ref)
        return ref

    def _slot(self, step_from: int, step_to: int) -> CheckpointSlot:
        before = committed(self._run, sft_slot(step_from)) if step_from else None
        assert before or not step_from, f"{sft_slot(step_from)} is committed before what follows it"
        parents = (before,) if before else self._base.commit()
        return CheckpointSlot(
            run=self._run,
            slot=sft_slot(step_to),
            tokenizer=self._names,
            content=self._content(),
            parents=parents,
            adapter=self._base.adapter,
        )

    def _begin(self, step_from: int, slot: CheckpointSlot) -> TrainState:
        """The state that a segment starts from: its parent's, or the first."""
        if step_from:
            return self._committed.take(slot.parents[0])
        program, run = self._program, self._run
        if program.modules:
            parameters = first_adapter(run.config, program.modules, program.base_template)
        else:
            parameters = policy_parameters(
                run, self._names, self._tokenizer, program.base_template, warm_start=False
            )
        return program.first_state(parameters, run.config.seed)

    def _content(self) -> dict[str, object]:
        config = self._run.config
        return {
            "program": PROGRAM_VERSION,
            "policy": fingerprint_fields(config.policy),
            "sft": fingerprint_fields(config.sft),
            "environment": fingerprint_fields(config.sft.environment or config.environment),
            # Of `training`, what the optimizer of the warm start uses; changing the rest keeps it.
            "moments": [config.training.beta1, config.training.beta2, config.training.epsilon],
            "seed": config.seed,
        }

    def _batch(self, step: int) -> TrainingBatch:
        return supervised_batch(self._run.config, self._environment, self._tokenizer, step)

    def _publish(self, step: int, metrics: dict[str, float]) -> None:
        publish(
            ProgressEvent(
                run_id=self._run.run_id,
                stage="sft",
                done=step,
                total=self._run.config.sft.steps,
                metrics=_summary(metrics),
            )
        )


def made_ahead(make: Callable[[int], Batch], start: int, end: int) -> Iterator[tuple[int, Batch]]:
    """The batches of steps start … end - 1, made ahead in a thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        first = range(start, min(start + PREPARED_MAX, end))
        ahead = [pool.submit(make, step) for step in first]
        for step in range(start, end):
            batch = ahead.pop(0).result()
            # A few steps ahead: tokenizing overlaps with training, and memory holds few batches.
            if step + PREPARED_MAX < end:
                ahead.append(pool.submit(make, step + PREPARED_MAX))
            yield step, batch


def supervised_batch(
    config: Config, environment: Environment, tokenizer: PreTrainedTokenizerBase, step: int
) -> TrainingBatch:
    """The examples of one step, tokenized by the chat template and padded to one length.

    Row i of step s is example number s * sequences_per_step + i of the environment. Raises
    InputError for an example without an answer, longer than the context, or that the chat template
    does not render.
    """
    chosen = config.sft.environment or config.environment
    rows = config.sft.sequences_per_step
    chats = list[tuple[Sequence[Message], str]]()
    names, options = list[str](), list[dict[str, Any]]()
    # By number and not from an iterator: a segment that is continued needs none of the earlier
    # ones.
    for number in range(step * rows, (step + 1) * rows):
        example = environment.example(chosen.train_seed, number, "train")
        answer = environment.demonstration(example)
        if answer is None:
            raise InputError(no_demonstration(environment, example))
        chats.append((example.messages, answer))
        names.append(f"example {example.example_id} of {environment.name}")
        options.append(part_for(environment, chosen, example).config.chat_template_options or {})
    ends = trained_ends(config.policy, tokenizer)
    rendered = named_chats(tokenizer, chats, names, ends, options)
    sequences = [(chat.ids, chat.mask) for chat in rendered]
    longest = max(len(ids) for ids, _ in sequences)
    if longest > config.policy.context_length:
        raise InputError(
            f"an example of step {step} has {longest} tokens, but policy.context_length is "
            f"{config.policy.context_length}: raise it, or choose shorter examples"
        )
    # Of the step's longest row, rounded up: one length for all steps would compute mostly padding.
    return _padded(sequences, -(-longest // LENGTH_STEP) * LENGTH_STEP)


def _padded(sequences: list[tuple[np.ndarray, np.ndarray]], length: int) -> TrainingBatch:
    token_ids, inside_BT = padded([ids for ids, _ in sequences], len(sequences), length)
    loss_mask, _ = padded([mask for _, mask in sequences], len(sequences), length)
    nothing = np.zeros(inside_BT.shape, np.float32)
    return TrainingBatch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        segment_ids=inside_BT.astype(np.int32),
        positions=np.where(inside_BT, np.arange(length), 0).astype(np.int32),
        policy_logprobs=nothing,
        advantages=nothing,
        returns=nothing,
    )


def _summary(metrics: dict[str, float]) -> dict[str, float]:
    names = {"loss": "sft/loss", "grad_norm": "grad_norm", "lr": "lr"}
    return {names[name]: metrics[name] for name in names if np.isfinite(metrics[name])}
