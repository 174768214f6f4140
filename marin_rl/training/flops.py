"""Model FLOPs of training, and peak FLOP/s of devices: the two sides of `perf/mfu`.

Peaks are the makers' figures for dense bfloat16 matrix products, for any precision a run computes
in. A device that is not in the table has no peak, and a run on it no `perf/mfu`; a CPU never has.
"""

import jax
import numpy as np
from jaxtyping import Int
from levanter.models.lm_model import LmHeadModel

from marin_rl.training.model import parameter_shapes

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
    model: LmHeadModel, lengths_S: Int[np.ndarray, " S"], starts_S: Int[np.ndarray, " S"]
) -> float:
    """FLOPs of one forward and backward pass over sequences of these lengths, in tokens.

    6 N n + 6 L H Q n^2 for a sequence of n tokens (PaLM, arXiv:2204.02311, appendix B, with the
    attention halved because it is causal): N weights that are multiplied with, the input embedding
    aside unless it is the head too; L layers of H heads of size Q. One that goes on at position s
    of a shared prompt attends to that, too: (s + n)^2 - s^2 in place of n^2. What is computed
    again, the reference policy and padding count nothing.
    """
    config = model.config
    lengths, starts = lengths_S.astype(np.float64), starts_S.astype(np.float64)
    # Twice the pairs of query and key that causal attention has.
    pairs = np.square(starts + lengths) - np.square(starts)
    attention = config.num_layers * config.num_heads * config.actual_head_size
    products = 6.0 * _multiplied(model) * lengths.sum()  # 2 FLOPs forward and 4 backward
    return float(products + 6.0 * attention * pairs.sum())


def _multiplied(model: LmHeadModel) -> float:
    shapes = parameter_shapes(model)
    tied = bool(model.config.tie_word_embeddings)
    # Looking up an embedding multiplies nothing; a tied one is the head's matrix as well.
    counted = (s for name, s in shapes.items() if tied or not name.startswith(EMBEDDING))
    return float(sum(np.prod(shape, dtype=np.float64) for shape in counted))
