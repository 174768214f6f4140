"""PEFT folders for tests: tensors by NumPy from a seed, under the names and shapes given.

No JAX here, so that PEFT's own environment can use it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def adapter_tensors(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, np.ndarray]:
    """A and B of every layer, large enough to change every token."""
    rng = np.random.default_rng(seed)
    return {
        name: (0.5 * rng.standard_normal(shapes[name]) / np.sqrt(shapes[name][1])).astype(
            np.float32
        )
        for name in sorted(shapes)
    }


def write_folder(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], seed: int
) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(adapter_tensors(shapes, seed), str(folder / "adapter_model.safetensors"))
