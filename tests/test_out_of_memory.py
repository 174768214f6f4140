"""Work that does not fit into memory: one error, as early as it is known."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.config import Config, EngineConfig, load_config, parse_config
from marin_rl.doctor.start import before_engines
from marin_rl.doctor.system import memory, tight
from marin_rl.errors import OutOfMemory
from marin_rl.inference.runner import Runner
from marin_rl.machine import is_out_of_memory, out_of_memory, room
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.compiled_step import policy_settings
from marin_rl.training.model import build_model
from marin_rl.training.step_types import StepArrays, StepRows

DEBUG = Path(__file__).parents[1] / "configs/debug.yaml"
# A server of a terabyte would have to grow tenfold before it could train this.
HUGE = {
    "model": {
        "hidden_size": 16_384, "layers": 400, "heads": 128, "kv_heads": 8,
        "intermediate_size": 53_248, "vocab_size": 128_256,
    },
    "context_length": 8192,
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def huge(root: Path, **more: object) -> Config:
    return parse_config(
        {"root": str(root), "policy": HUGE, "environment": {"name": "echo"}, **more}
    )


def test_a_run_that_can_never_fit_is_refused_before_any_work(tmp_path):
    with pytest.raises(OutOfMemory, match="does not fit into memory: it needs about") as caught:
        before_engines(huge(tmp_path), "rl-loop")
    error = str(caught.value)
    assert "training.microbatch_sequences (now 16)" in error
    assert "training.gradient_checkpointing: true" in error
    assert "policy.context_length (now 8192)" in error
    assert "policy.lora.rank" in error
    assert "mesh.fsdp" in error
    assert not [*tmp_path.iterdir()]


def test_the_keys_are_those_of_what_is_largest(tmp_path):
    slots = {"engine": {"slots": 65_536}}
    with pytest.raises(OutOfMemory, match=r"inference\.engine\.slots \(now 65536\)"):
        memory(huge(tmp_path, inference=slots))


def test_a_small_run_fits_and_is_not_warned_of():
    config = load_config(DEBUG)
    assert "at the peak" in memory(config)
    assert tight(config) is None


@pytest.mark.parametrize("levels", [("",), ("", "/a"), ("", "/a", "/a/b")])
def test_the_narrowest_control_group_counts(tmp_path: Path, levels: tuple[str, ...]) -> None:
    own = tmp_path / "own"
    own.write_text("12:cpu:/elsewhere\n0::/a/b\n")
    for depth, level in enumerate(levels):
        folder = tmp_path / f"groups{level}"
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{(9 - depth) * 10**8}\n")
        (folder / "memory.current").write_text("300000000\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 100000000\n")
    found = room(tmp_path / "groups", own)
    assert found is not None
    assert (found.total, found.place) == ((10 - len(levels)) * 10**8, "its control group")
    assert found.free == found.total - 2 * 10**8


def test_an_unlimited_group_leaves_the_machine(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    assert str(room(tmp_path, own)).endswith("(this machine)")


def test_memory_of_an_accelerator_is_not_known_before_it_starts(monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert room() is None
    assert "not started yet" in memory(load_config(DEBUG))


ASKED = {
    "RESOURCE_EXHAUSTED: Out of memory allocating 31435193848 bytes.": "31.4 GB in one piece",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.50GiB.": "2.7 GB in one piece",
    "RESOURCE_EXHAUSTED: no size": "more than there is, with",
}


@pytest.mark.parametrize("text", ASKED)
def test_words_of_xla_become_sizes(text: str) -> None:
    error = RuntimeError(text)
    assert is_out_of_memory(error)
    assert ASKED[text] in str(out_of_memory("the step", ("a", "b"), error))
    assert str(out_of_memory("the step", ("a", "b"), error)).endswith("Lower it by a; or b")


def test_other_faults_of_a_program_stay_what_they_are() -> None:
    assert not is_out_of_memory(RuntimeError("INTERNAL: the driver is gone"))
    assert not is_out_of_memory(ValueError("Out of memory"))
    assert is_out_of_memory(MemoryError())


@pytest.mark.usefixtures("compiled_quickly")
def test_a_step_that_does_not_fit_is_one_error_with_its_keys() -> None:
    config = load_config(DEBUG)
    backend = DeviceBackend.of(config, character_tokenizer())
    shape = (1, 16, 400_000)  # of each head a table of 400,000 by 400,000 scores
    whole, real = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    arrays = StepArrays(whole, np.zeros(shape, np.bool_), whole, whole, real, real)
    step = backend.forward_backward(StepRows(arrays, 1), Loss(settings=policy_settings(config)))
    with pytest.raises(OutOfMemory, match="the training step does not fit into memory") as caught:
        step.result()
    assert "training.microbatch_sequences (now 8)" in str(caught.value)
    assert caught.value.__cause__ is None
    backend.close()


def test_an_engine_that_does_not_fit_is_one_error_with_its_keys() -> None:
    model = build_model(load_config(DEBUG).policy, 128, 0)
    engine = EngineConfig(slots=4096)
    with pytest.raises(OutOfMemory, match=r"the engine does not fit .*inference\.engine\.slots"):
        Runner(model, engine, 10_000_000, jnp.dtype(jnp.float32))
