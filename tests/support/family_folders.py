"""Folders of real models' configurations, shrunk: weights from a seed, by the names of tensors."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "families.json"


def golden() -> dict[str, Any]:
    """For each model its config.json, shapes of tensors, and what transformers computes."""
    return json.loads(GOLDEN.read_text("utf-8"))


def tensor_of(name: str, shape: tuple[int, ...], *, offset: bool) -> np.ndarray:
    """A tensor's values; `offset`: norms are stored as their difference from 1."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    noise = rng.standard_normal(shape, np.float32)
    if len(shape) >= 2:
        return noise * np.float32(0.15)
    if name.endswith("bias") or ("norm" not in name and ".ln_" not in name):
        return noise * np.float32(0.1)
    return np.float32(not offset) + np.float32(0.3) * noise


def tensors_of(config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    gemma = config["model_type"].startswith("gemma")
    return {name: tensor_of(name, tuple(shape), offset=gemma) for name, shape in shapes.items()}


def write_folder(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> None:
    """Write config.json and model.safetensors; the tokenizer is the caller's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors_of(config, shapes), str(folder / "model.safetensors"))


def probe_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random weights of a sum over a tensor's gradient."""
    return np.random.default_rng(zlib.crc32(name.encode()) + 1).standard_normal(shape, np.float32)


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 100, (2, 48)).astype(np.int32)


# Positions whose logits are kept: the first, some past every window, the last.
KEPT = (0, 11, 12, 13, 30, 47)
