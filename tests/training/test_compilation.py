"""Where compiled programs are kept, and how that is switched off."""

import jax
import pytest

from marin_rl.compilation import CACHE_VARIABLE, enable_compilation_cache

# Past the once-per-process guard, and past what the session has set.
enable = enable_compilation_cache.__wrapped__


@pytest.fixture(autouse=True)
def _restored():
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_folder_is_chosen_by_our_variable_then_by_that_of_jax(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    monkeypatch.delenv(CACHE_VARIABLE)
    assert enable() == tmp_path / "jax"
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "ours"))
    assert enable() == tmp_path / "ours"
    assert (tmp_path / "ours").is_dir()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "ours")


def test_an_empty_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "")
    before = jax.config.jax_compilation_cache_dir
    assert enable() is None
    assert jax.config.jax_compilation_cache_dir == before
