"""Cache of compiled programs: its place, its switch, and the time of compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training.batches import compilations

from marin_rl.compilation import (
    CACHE_VARIABLE,
    compiled_apart,
    device_array,
    enable_compilation_cache,
    set_matmul_precision,
)
from marin_rl.config import TrainingConfig
from marin_rl.machine import machine_key
from marin_rl.training.optimizer import first_moments, make_optimizer, policy_adamw

# Past the once-per-process guard, and past what the session has set.
enable = enable_compilation_cache.__wrapped__


@pytest.fixture(autouse=True)
def _restored():
    names = "jax_compilation_cache_dir", "jax_default_matmul_precision"
    before = {name: jax.config.values[name] for name in names}
    yield
    for name in names:
        jax.config.update(name, before[name])


def test_the_folder_is_chosen_by_our_variable_then_by_that_of_jax(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    monkeypatch.delenv(CACHE_VARIABLE)
    assert enable() == tmp_path / "jax" / machine_key()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "ours"))
    ours = tmp_path / "ours" / machine_key()
    assert enable() == ours
    assert ours.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(ours)


def test_an_empty_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "")
    before = jax.config.jax_compilation_cache_dir
    assert enable() is None
    assert jax.config.jax_compilation_cache_dir == before


def test_compiling_apart_compiles_no_shape_twice_and_still_donates(caplog):
    def doubled(given, donated):
        return 2 * given + donated

    call = compiled_apart(jax.jit(doubled, donate_argnums=1), "a product")
    with jax.log_compiles():
        for length in (3, 3, 5):
            donated = jnp.ones(length)
            assert call(np.ones(length, np.float32), donated).tolist() == [3.0] * length
            assert donated.is_deleted()
    finished = [text for text in caplog.messages if "XLA compilation of jit(doubled)" in text]
    assert len(finished) == 2


def test_an_array_of_numpy_is_copied_to_the_device_without_a_program():
    compiled = compilations()
    given = np.arange(12345, dtype=np.float32)
    array = device_array(given)
    given[:] = 0
    np.testing.assert_array_equal(array, np.arange(12345))
    assert array.dtype == np.float32
    assert device_array(array) is array
    assert compilations() == compiled


def test_the_first_moments_of_all_shapes_are_one_program():
    parameters = {f"{n}/weight": np.ones((n, 17), np.float32) for n in range(1, 9)}
    optimizer = make_optimizer(policy_adamw(TrainingConfig()), dict.fromkeys(parameters, True))
    compiled = compilations()
    moments = first_moments(optimizer, parameters)
    assert compilations() == compiled + 1
    expected = optimizer.init(parameters)
    assert jax.tree.structure(moments) == jax.tree.structure(expected)
    for found, zeros in zip(jax.tree.leaves(moments), jax.tree.leaves(expected), strict=True):
        assert found.dtype == zeros.dtype
        np.testing.assert_array_equal(found, zeros)


def _product() -> str:
    """The product of two matrices of float32 as a program is given it."""
    rows = jnp.ones((2, 2), jnp.float32)
    return jax.jit(jnp.matmul).lower(rows, rows).as_text()


def test_a_gpu_multiplies_float32_in_float32(monkeypatch):
    """By JAX's default it is TF32: a run of `configs/game.yaml` on a GPU ended at its canary."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    set_matmul_precision("bfloat16")
    assert "HIGHEST" not in _product()
    set_matmul_precision("float32")
    assert "HIGHEST" in _product()


def test_the_precision_that_a_user_chose_is_kept(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.config.update("jax_default_matmul_precision", "tensorfloat32")
    set_matmul_precision(jnp.float32)
    assert jax.config.jax_default_matmul_precision == "tensorfloat32"


def test_on_a_cpu_programs_are_the_same_as_before():
    before = _product()
    set_matmul_precision("float32")
    assert _product() == before
