"""Parts of a round's checkpoint besides arrays: scores of tokens, end tokens, model FLOPs.

Model FLOPs and the peak FLOP/s of devices are the two sides of `perf/mfu`. Peaks are the makers'
figures for dense bfloat16 matrix products, for any precision a run computes in. A device that is
not in the table has no peak, and a run on it no `perf/mfu`; a CPU never has.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from marin_rl.models.module import LanguageModel
from marin_rl.storage.tables.scores import ScoredStep
from marin_rl.training.model import parameter_shapes
from marin_rl.training.precompute import RowExtras
from marin_rl.training.step_metrics import TokenMeasures
from marin_rl.training.step_types import StepArrays, trained_mask
from marin_rl.types import TrainingBatch, segment_lengths, segment_starts

# Totals of a checkpoint's manifest that are no metrics: `perf/mfu` is made of them.
MODEL_FLOPS, PEAK_FLOPS = "model_flops", "peak_flops_per_second"

# FLOP/s of one JAX device by its `device_kind`, or by the first words of it.
PEAK_FLOPS_PER_SECOND = {
    "NVIDIA A100": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "TPU v4": 275e12,
    "TPU v4 lite": 138e12,
    "TPU v5": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}

PART_OF_A_DEVICE = " MIG "  # not in the table: a slice has only a share of its device's peak

EMBEDDING = "embeddings/"


def scored_step(
    batch: TrainingBatch,
    arrays: StepArrays,
    measured: TokenMeasures | None,
    extra: RowExtras,
) -> ScoredStep:
    """Scores of a step's tokens: measured by the step, and from its batch and arrays.

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

    def add(self, batch: TrainingBatch, model: LanguageModel) -> None:
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


def peak_flops(kind: str) -> float | None:
    """Peak FLOP/s of a device whose `device_kind` is `kind`; None where it is not in the table.

    The longest name counts that `kind` is, or begins with as whole words: an L40 is no L4.
    """
    if PART_OF_A_DEVICE in kind:
        return None
    words = kind.replace("-", " ") + " "
    known = [name for name in PEAK_FLOPS_PER_SECOND if words.startswith(name + " ")]
    return PEAK_FLOPS_PER_SECOND[max(known, key=len)] if known else None


def peak_of_devices(count: int) -> float | None:
    """FLOP/s of the first `count` devices of this process together; None where not known."""
    peaks = [peak_flops(device.device_kind) for device in jax.devices()[:count]]
    # One unknown device leaves the utilisation of all unknown: a partial sum would overstate it.
    return None if None in peaks else float(sum(peak for peak in peaks if peak is not None))


def training_flops(
    model: LanguageModel, lengths_S: Int[np.ndarray, " S"], starts_S: Int[np.ndarray, " S"]
) -> float:
    """FLOPs of one forward and backward pass over sequences of these lengths, in tokens.

    6 N n + 6 L H Q n^2 for a sequence of n tokens (PaLM, arXiv:2204.02311, appendix B, with the
    attention halved because it is causal): N weights that are multiplied with, the input embedding
    aside unless it is the head too; L layers of H heads of size Q. One that continues a shared
    prompt at position s attends to the prompt, too: (s + n)^2 - s^2 in place of n^2. What is
    computed again, the reference policy and padding count nothing.
    """
    spec = model.spec
    lengths, starts = lengths_S.astype(np.float64), starts_S.astype(np.float64)
    # Twice the pairs of query and key that causal attention has.
    pairs = np.square(starts + lengths) - np.square(starts)
    attention = spec.layers * spec.heads * spec.head_size
    # Looking up an embedding multiplies nothing; a tied one is the head's matrix as well.
    counted = (
        shape
        for name, shape in parameter_shapes(model).items()
        if spec.tied or not name.startswith(EMBEDDING)
    )
    weights = float(sum(np.prod(shape, dtype=np.float64) for shape in counted))
    products = 6.0 * weights * lengths.sum()  # 2 FLOPs forward and 4 backward
    return float(products + 6.0 * attention * pairs.sum())
