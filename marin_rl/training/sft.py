"""The supervised warm start: segments of optimizer steps on (prompt, answer) pairs, each committed.

The examples of a step are a function of the run's seed and the step alone, and a segment starts
from the checkpoint of the one before, so a run that was killed ends in the same bits as one that
was not. Tokens are prepared in a thread while the device computes.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.sequences import ChatTokenizer, chats_tokens
from marin_rl.config import Config, fingerprint_fields
from marin_rl.environments.base import Environment, make_environment
from marin_rl.errors import InputError
from marin_rl.progress import ProgressEvent, publish
from marin_rl.storage.checkpoints import commit_checkpoint
from marin_rl.storage.runs import Run, committed, sft_slot
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.compiled_step import compiled_step_of
from marin_rl.training.loop import (
    PROGRAM_VERSION,
    already_committed,
    check_finite,
    take_step,
    to_fixed_shape,
)
from marin_rl.training.optimizer import sft_adamw
from marin_rl.training.state import (
    Identity,
    first_parameters,
    fresh_state,
    other_run,
    restore_parameters,
    restore_state,
    tree_of,
)
from marin_rl.training.step import StepSettings, TrainState
from marin_rl.types import Message, SlotRef, TrainingBatch

LENGTH_STEP = 8  # sequences are padded to a multiple of this, so few lengths are ever compiled
PREPARED_MAX = 4  # steps whose tokens are made ahead
STEPS_PER_EVENT = 10

Batch = TypeVar("Batch")


class WarmStart:
    """Plays the warm start of one run, segment by segment."""

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        config = run.config
        self._run, self._tokenizer = run, tokenizer
        self._names = TokenizerIdentity.of(tokenizer)
        self._environment = make_environment(config.sft.environment or config.environment)
        self._environment.load_examples()
        self._program = compiled_step_of(
            config,
            tokenizer,
            sft_adamw(config.sft, config.training),
            StepSettings(objective=None, compute_dtype=config.policy.compute_dtype),
        )
        self._state: TrainState | None = None
        self._at: SlotRef | None = None

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
        parents = (self._before(step_from),) if step_from else ()
        decisive = self._content()
        if found := already_committed(run, sft_slot(step_to), decisive, parents):
            return found
        state, metrics = self._begin(parents), dict[str, float]()
        self._state = self._at = None  # the optimizer state is donated from here on
        for step, batch in made_ahead(self._batch, step_from, step_to):
            layout = self._program.layout
            rows = to_fixed_shape(batch, sft.microbatch_sequences, sft.sequences_per_step, layout)
            state, metrics, _ = take_step(self._program, state, None, *rows)
            check_finite(state, metrics, run.config.training.nonfinite_updates_max)
            if (step + 1) % STEPS_PER_EVENT == 0 or step + 1 == step_to:
                self._publish(step + 1, metrics)
        ref = commit_checkpoint(
            run,
            sft_slot(step_to),
            tree_of(state),
            content=decisive,
            parents=parents,
            totals=_summary(metrics),
            extra=Identity.of(state, self._names).as_dict(),
        )
        if not ref.reused:
            self._state, self._at = state, ref
        return ref

    def _before(self, step: int) -> SlotRef:
        ref = committed(self._run, sft_slot(step))
        assert ref is not None, f"{sft_slot(step)} is committed before the segment after it"
        return ref

    def _begin(self, parents: tuple[SlotRef, ...]) -> TrainState:
        config, program = self._run.config, self._program
        if parents and self._state is not None and self._at == parents[0]:
            return self._state
        if parents:
            state = restore_state(self._run, parents[0], program.like, self._names)
            return program.place(state)
        if config.policy.init == "checkpoint":
            parameters = restore_parameters(*other_run(config), program.like, self._names)
        else:
            parameters = first_parameters(config, self._tokenizer)
        return program.place(fresh_state(parameters, program.optimizer, config.seed))

    def _content(self) -> dict[str, object]:
        config = self._run.config
        return {
            "program": PROGRAM_VERSION,
            "policy": fingerprint_fields(config.policy),
            "sft": fingerprint_fields(config.sft),
            "environment": fingerprint_fields(config.sft.environment or config.environment),
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
            if step + PREPARED_MAX < end:
                ahead.append(pool.submit(make, step + PREPARED_MAX))
            yield step, batch


def supervised_batch(
    config: Config, environment: Environment, tokenizer: PreTrainedTokenizerBase, step: int
) -> TrainingBatch:
    """The examples of one step, tokenized by the chat template and padded to one length.

    Row i of step s is example number s * sequences_per_step + i of the environment. Raises
    InputError for an example without an answer, or longer than the context.
    """
    chosen = config.sft.environment or config.environment
    rows = config.sft.sequences_per_step
    chats = list[tuple[Sequence[Message], str]]()
    for number in range(step * rows, (step + 1) * rows):
        example = environment.example(chosen.train_seed, number, "train")
        answer = environment.demonstration(example)
        if answer is None:
            raise InputError(
                f"example {example.example_id} of {example.environment} has no answer: a warm "
                "start needs (prompt, answer) pairs; choose another sft.environment"
            )
        chats.append((example.messages, answer))
    found = chats_tokens(cast(ChatTokenizer, tokenizer), chats)
    longest = max(len(ids) for ids, _ in found)
    if longest > config.policy.context_length:
        raise InputError(
            f"an example of step {step} has {longest} tokens, but policy.context_length is "
            f"{config.policy.context_length}: raise it, or choose shorter examples"
        )
    return _padded(found, -(-longest // LENGTH_STEP) * LENGTH_STEP)


def _padded(found: list[tuple[np.ndarray, np.ndarray]], length: int) -> TrainingBatch:
    lengths = np.array([len(ids) for ids, _ in found])
    inside_BT = np.arange(length) < lengths[:, None]
    token_ids, loss_mask = (np.zeros(inside_BT.shape, np.int32) for _ in range(2))
    token_ids[inside_BT] = np.concatenate([ids for ids, _ in found])
    loss_mask[inside_BT] = np.concatenate([mask for _, mask in found])
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
