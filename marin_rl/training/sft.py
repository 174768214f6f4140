"""The supervised warm start: a phase whose examples are (prompt, answer) pairs of an environment.

The loss is the mean negative log-likelihood of the answers' tokens, weighted where rows say so. See
phases.py for segments.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.packing import Packing, one_per_row, pack
from marin_rl.batching.plan import rows_for
from marin_rl.batching.sequences import demonstrated
from marin_rl.config import Config, fingerprint_fields
from marin_rl.environments.base import Environment, no_demonstration
from marin_rl.environments.registry import demonstrated_by, loaded_environment, part_for
from marin_rl.errors import InputError
from marin_rl.machine import computes_on_host
from marin_rl.storage.runs import Run, sft_slot
from marin_rl.tokenizers import trained_ends
from marin_rl.training.adapters import first_adapter, warm_start_config
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.compiled_step import (
    compiled_step_of,
    rows_compiled_for,
    supervised_settings,
    to_fixed_shape,
)
from marin_rl.training.loop import PROGRAM_VERSION
from marin_rl.training.optimizer import sft_adamw
from marin_rl.training.phases import SegmentedPhase
from marin_rl.training.step_types import Parameters, StepRows
from marin_rl.types import Demonstration, SlotRef, TrainingBatch

LENGTH_STEP = 8  # sequences are padded to a multiple of this, so few lengths are ever compiled
# Tokens of a CPU's forward and backward pass over packed rows: enough to keep its cores busy, and
# no more, because a step's last pass may be filled in part.
PASS_TOKENS = 1024


class WarmStart(SegmentedPhase):
    """Trains the warm start of one run, segment by segment."""

    stage = "sft"
    slot_of = sft_slot
    program_version = PROGRAM_VERSION
    measured = ("loss",)

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        config = warm_start_config(run.config)
        # a file that has only demonstrations may hold out no row
        self._environment = loaded_environment(
            config.sft.environment or config.environment, "train"
        )
        settings = supervised_settings(config, packed=config.batching.packs_examples)
        loss = Loss(settings=settings)
        adamw = sft_adamw(config.sft, config.training)
        program = compiled_step_of(config, tokenizer, adamw, loss.settings)
        super().__init__(run, tokenizer, program, loss, config.sft)

    def run_segment(self, step_from: int) -> SlotRef:
        """Train from `step_from` to the segment's end, and commit; return an existing commit.

        The summary holds the segment's last `sft/loss`, `grad_norm` and `lr`. Raises InputError for
        examples without an answer or longer than the context, NonFiniteUpdate, CommitConflict.
        """
        return self._segment(step_from)[0]

    def _rows(self, step: int) -> StepRows:
        sft = self._run.config.sft
        batch = supervised_batch(self._run.config, self._environment, self._tokenizer, step)
        rows, rows_max = sft.microbatch_sequences, sft.sequences_per_step
        if batch.microbatch_rows is not None:
            rows = batch.microbatch_rows
            rows_max = rows_compiled_for(len(batch.token_ids), rows_max)
        return to_fixed_shape(batch, rows, rows_max, self._program.layout)

    def _content(self) -> dict[str, Any]:
        config = self._run.config
        environment = config.sft.environment or config.environment
        return super()._content() | {"environment": fingerprint_fields(environment)}

    def _first_parameters(self) -> Parameters:
        program = self._program
        if program.modules:
            return first_adapter(self._run.config, program.modules, program.base_template)
        return self._source.policy_parameters(warm_start=False)

    def _summary(
        self, backend: DeviceBackend, history: Sequence[Mapping[str, float]]
    ) -> tuple[Mapping[str, float], Mapping[str, Any]]:
        return history[-1], {}


def supervised_batch(
    config: Config, environment: Environment, tokenizer: PreTrainedTokenizerBase, step: int
) -> TrainingBatch:
    """The examples of one step, tokenized by the chat template, in rows of one length.

    Without packing, row i of step s is example number s * sequences_per_step + i of the
    environment, where no example is cut into several. Raises InputError for an example without an
    answer, longer than the context, or that the chat template does not render.
    """
    chosen = config.sft.environment or config.environment
    count = config.sft.sequences_per_step
    shown = list[Demonstration]()
    # By number and not from an iterator: a segment that is continued needs none of the earlier
    # ones.
    for number in range(step * count, (step + 1) * count):
        example = environment.example(chosen.train_seed, number, "train")
        learned = demonstrated_by(part_for(environment, chosen, example), example)
        if learned is None:
            raise InputError(no_demonstration(environment, example))
        shown.append(learned)
    ends = trained_ends(config.policy, tokenizer)
    rendered = demonstrated(tokenizer, shown, ends, config.sft.train_on)
    tokens_K = np.array([len(chat.ids) for chat in rendered])
    if (longest := int(tokens_K.max())) > config.policy.context_length:
        raise InputError(
            f"an example of step {step} has {longest} tokens, but policy.context_length is "
            f"{config.policy.context_length}: raise it, or choose shorter examples"
        )
    places, length, microbatch_rows = _places(config, tokens_K)
    shape = places.rows, length
    token_ids, loss_mask, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(4))
    weights = np.zeros(shape, np.float32)
    for chat, row, start, segment in zip(
        rendered, places.row_K, places.start_K, places.segment_K, strict=True
    ):
        inside = row, slice(start, start + len(chat.ids))
        token_ids[inside], loss_mask[inside], segment_ids[inside] = chat.ids, chat.mask, segment
        positions[inside] = np.arange(len(chat.ids))
        weights[inside] = chat.weights
    nothing = np.zeros(shape, np.float32)
    return TrainingBatch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        segment_ids=segment_ids,
        positions=positions,
        policy_logprobs=nothing,
        advantages=nothing,
        returns=nothing,
        microbatch_rows=microbatch_rows,
        # None where they say nothing: steps of such rows keep their program, and its bits.
        loss_weights=None if np.array_equal(weights, loss_mask) else weights,
    )


def _places(config: Config, tokens_K: Int64[np.ndarray, " K"]) -> tuple[Packing, int, int | None]:
    """Places of a step's sequences in rows, the length of these, and rows of a microbatch.

    Without packing, the latter are as configured: None.
    """
    longest, zero_K = int(tokens_K.max()), np.zeros_like(tokens_K)
    if not config.batching.packs_examples:
        # Of the step's longest row, rounded up: one length for all would compute mostly padding.
        return one_per_row(zero_K), -(-longest // LENGTH_STEP) * LENGTH_STEP, None
    # A doubling: each length is a program to compile, and what a row has left holds others.
    padded = 1 << (longest - 1).bit_length()
    microbatch = min(config.sft.microbatch_sequences, config.sft.sequences_per_step)
    length, rows = rows_for(padded, microbatch)
    if computes_on_host():
        rows = min(rows, max(PASS_TOKENS // length, 1))
    packing = pack(zero_K, tokens_K, zero_K, zero_K, row_tokens=length, share=False)
    return packing, length, rows
