"""The debug configuration, smaller still, under a root of its own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from marin_rl.compilation import enable_compilation_cache
from marin_rl.config import Config, load_config
from marin_rl.tokenizers import character_tokenizer

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    """Trainers of one configuration compile once per session, in every process."""
    enable_compilation_cache()


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly(compiled_quickly: None) -> None:
    """All tests of this folder."""


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer()


@pytest.fixture(scope="session")
def debug_under() -> Callable[..., Config]:
    """configs/debug.yaml under a root, with overrides; smaller still."""

    def load(root: Path, *overrides: str) -> Config:
        smaller = ("policy.model.hidden_size=16", "policy.model.intermediate_size=24")
        return load_config(DEBUG, [f"root={root}", *smaller, *overrides])

    return load


@pytest.fixture
def debug(debug_under: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """That configuration under a root of the test's own."""
    return partial(debug_under, tmp_path / "runs")
