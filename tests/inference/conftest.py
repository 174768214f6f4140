"""The tiny model and the engine that tests of this folder share."""

from collections.abc import Iterator

import pytest
from inference.engines import engine_of
from support.engine_adapters import unload_all
from support.models import tiny_model

from marin_rl.inference.engine import Engine
from marin_rl.models.module import LanguageModel


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def engine(model: LanguageModel) -> Iterator[Engine]:
    engine = engine_of(model)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def roomy_engine(model: LanguageModel) -> Iterator[Engine]:
    """An engine with room for three adapters of rank 8."""
    engine = engine_of(model, adapters_max=3, adapter_rank_max=8)
    yield engine
    engine.close()


@pytest.fixture
def adapter_engine(roomy_engine: Engine) -> Iterator[Engine]:
    """The same engine for every test of a module, at first without an adapter."""
    yield roomy_engine
    unload_all(roomy_engine)
