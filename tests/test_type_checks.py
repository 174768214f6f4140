"""The library's types and shapes are checked while tests run, those without arrays by less work."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError
from support.run_factories import configuration, policy

from marin_rl.storage.layout import checkpoint_slot
from marin_rl.storage.runs import Run
from marin_rl.training.losses import token_weights
from marin_rl.types import Message


def test_a_function_without_arrays_has_its_arguments_and_its_result_checked(tmp_path: Path) -> None:
    with pytest.raises(BeartypeCallHintViolation, match="numbers"):
        checkpoint_slot("3")  # pyright: ignore[reportArgumentType]
    run = Run.create_or_open(configuration(str(tmp_path)))
    with pytest.raises(BeartypeCallHintViolation):
        run.store.read(3)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


def test_a_dataclass_has_its_fields_checked() -> None:
    with pytest.raises((BeartypeCallHintViolation, TypeCheckError)):
        Message(role="user", content=3)  # pyright: ignore[reportArgumentType]
    assert policy().weight_version == 0


def test_shapes_are_compared_between_arguments() -> None:
    weights = partial(token_weights, aggregation="token_mean", length_norm=1)
    mask, segments = np.ones((2, 4), np.float32), np.ones((2, 4), np.int32)
    assert jax.eval_shape(weights, mask, segments).shape == (2, 4)
    with pytest.raises(TypeCheckError):
        jax.eval_shape(weights, mask, segments[:, :3])
