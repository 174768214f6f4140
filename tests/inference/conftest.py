"""The tiny model and the engine that tests of this folder share."""

from collections.abc import Iterator

import pytest
from levanter.models.lm_model import LmHeadModel
from support.engines import engine_of
from support.models import tiny_model

from marin_rl.inference.engine import Engine


@pytest.fixture(scope="module")
def model() -> LmHeadModel:
    return tiny_model()


@pytest.fixture(scope="module")
def engine(model: LmHeadModel) -> Iterator[Engine]:
    engine = engine_of(model)
    yield engine
    engine.close()
