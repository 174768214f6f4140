"""Records of a trained step besides its parameters: its tokens' scores, and counts of work."""

from typing import Any

from levanter.models.lm_model import LmHeadModel
from transformers import PreTrainedTokenizerBase

from marin_rl.storage.tables.scores import ScoredStep
from marin_rl.training.flops import peak_of_devices, training_flops
from marin_rl.training.precompute import RowExtras
from marin_rl.training.step import trained_mask
from marin_rl.training.step_metrics import TokenMeasures
from marin_rl.training.step_types import StepArrays
from marin_rl.types import TrainingBatch, segment_lengths, segment_starts

# Totals of a checkpoint's manifest that are no metrics: `perf/mfu` is made of them.
MODEL_FLOPS, PEAK_FLOPS = "model_flops", "peak_flops_per_second"


def scored_step(
    batch: TrainingBatch,
    arrays: StepArrays,
    measured: TokenMeasures | None,
    extra: RowExtras,
) -> ScoredStep:
    """Scores of a step's tokens: those it measured, and those that its batch and arrays have.

    `extra` has what was known before the round's first update and the step itself was not given.
    """
    assert measured is not None, "a step with an objective measures its tokens"
    shape = batch.token_ids.shape

    def rows(array_MRT: Any) -> Any:
        # Rows that filled up the last microbatch are cut off again.
        return None if array_MRT is None else array_MRT.reshape(-1, shape[1])[: shape[0]]

    return ScoredStep(
        rollout_ids=batch.rollout_ids,
        mask=trained_mask(batch),
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        clipped=rows(measured.clipped),
        floats={
            "trainer_logprobs": rows(measured.trainer_logprobs),
            "sampler_logprobs": batch.policy_logprobs,
            "reference_logprobs": rows(
                measured.reference_logprobs if extra.ref_logprobs is None else extra.ref_logprobs
            ),
            "old_logprobs": rows(measured.old_logprobs),
            "entropies": rows(measured.entropies),
            "ratios": rows(measured.ratios),
            "advantages": rows(arrays.advantages),
            "values": rows(measured.values),
            "old_values": rows(arrays.old_values),
            "returns": rows(arrays.returns),
            "squared_score_norms": rows(extra.norms),
        },
    )


class RoundAccount:
    """Counts what a round's batches hold, each once: end tokens, and FLOPs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        end = tokenizer.eos_token_id
        self.eos_token_id = end if isinstance(end, int) else None
        self._steps, self._ends, self._flops = 0, 0, 0.0

    def add(self, batch: TrainingBatch, model: LmHeadModel) -> None:
        """Count the tokens and FLOPs of one optimizer step's batch."""
        self._steps += 1
        self._ends += int((batch.token_ids[trained_mask(batch)] == self.eos_token_id).sum())
        self._flops += training_flops(model, segment_lengths(batch), segment_starts(batch))

    def totals(self, epochs: int, devices: int) -> dict[str, float]:
        """Totals for the manifest: `val/num_eos_tokens`, and both sides of `perf/mfu`."""
        if not self._steps:
            return {}
        peak = peak_of_devices(devices)
        totals = {"val/num_eos_tokens": float(self._ends), MODEL_FLOPS: self._flops * epochs}
        return totals if peak is None else totals | {PEAK_FLOPS: peak}
