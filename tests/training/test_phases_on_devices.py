"""Warm starts, pairs and teachers over two devices: what one device learns, to rounding."""

from collections.abc import Callable
from pathlib import Path

import jax  # noqa: F401 - of skipif
import pytest
from training.test_preference import SETTINGS as OF_PAIRS
from training.test_preference import answers
from training.trained_runs import begin, play

from marin_rl.config import Config
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.pairs import write_pairs
from marin_rl.training.pair_phase import PreferenceTraining
from marin_rl.training.sft import WarmStart

SIZES = "hidden_size: 32, layers: 2, heads: 4, kv_heads: 2, intermediate_size: 64, vocab_size: 104"
MEASURED = ("loss", "grad_norm", "distillation/divergence", "sft/loss", "preference/loss",
            "preference/held_out_loss", "preference/held_out_margin")  # fmt: skip


def learned(debug: Callable[..., Config], folder: Path, tokenizer, *axis: str) -> list[float]:
    """Metrics of the last segment of a warm start and of pairs, and of a second distilled round."""
    own = f"root={folder}", f"policy.model={{{SIZES}}}", *axis
    warm = Run.create_or_open(debug("sft.steps=4", "sft.steps_per_checkpoint=4", *own))
    refs = [WarmStart(warm, tokenizer).run_segment(0)]
    write_pairs(folder / "pairs.jsonl", answers())
    pairs = f"preference.pairs={folder / 'pairs.jsonl'}", "run_id=pairs"
    run = Run.create_or_open(debug(*OF_PAIRS[1:], *pairs, *own))
    training = PreferenceTraining(run, tokenizer)
    refs.append(training.run_segment(0, training.prepare()))
    taught, trainer, first = begin(debug("run_id=taught", "distillation.loss={}", *own), tokenizer)
    totals = manifest_of(taught.store, play(taught, trainer, first, range(2))).totals
    found = [each for of in (*(ref.summary for ref in refs), totals) for each in of.items()]
    return [float(value) for name, value in found if name in MEASURED]


@pytest.mark.slow
@pytest.mark.skipif("jax.device_count() < 2", reason="needs two devices, real or virtual")
def test_phases_learn_over_two_devices_what_they_learn_on_one(debug, tokenizer, tmp_path):
    expected = learned(debug, tmp_path / "one", tokenizer)
    assert len(expected) > len(MEASURED)
    for axis in ("data", "fsdp", "tensor", "context"):
        found = learned(debug, tmp_path / axis, tokenizer, f"mesh.{axis}=2")
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5), axis
