"""The library's types and shapes are checked while tests run, those without arrays by less work."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int, TypeCheckError
from support import type_checks
from support.run_factories import configuration, policy
from support.type_checks import checked_by_kind, has_plain_signature

from marin_rl.storage.layout import checkpoint_slot
from marin_rl.storage.runs import Run
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
    from marin_rl.training.losses import token_weights

    mask, segments = np.ones((2, 4), np.float32), np.ones((2, 4), np.int32)
    assert np.asarray(token_weights(mask, segments, "token_mean", 1)).shape == (2, 4)
    with pytest.raises(TypeCheckError):
        token_weights(mask, segments[:, :3], "token_mean", 1)


def test_only_signatures_without_arrays_and_open_names_are_plain() -> None:
    def plain(a: int, b: list[str] | None = None) -> dict[str, tuple[int, ...]]: ...
    def of_array(a: Float[np.ndarray, "2 rows"]) -> None: ...
    def within(a: dict[str, Int[np.ndarray, "2 rows"]] | None) -> None: ...
    def returned() -> list[Float[np.ndarray, "2 rows"]]: ...
    def named(a: "Run") -> None: ...
    def generated():
        yield 1

    assert [has_plain_signature(f) for f in (plain, of_array, within, returned, named)] == [
        True, False, False, False, False,
    ]  # fmt: skip
    assert not has_plain_signature(generated)


def test_calls_are_checked_once_for_each_shape_dtype_and_result() -> None:
    checks = list[str]()

    def counted(function: Any) -> Any:
        checked_too = beartype(function)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            checks.append(function.__name__)
            return checked_too(*arguments, **named)

        return call

    def halves(a: Float[np.ndarray, " rows"], shorter: int = 0) -> Float[np.ndarray, " rows"]:
        return a[shorter:] / 2

    checked = checked_by_kind(halves, counted)
    for _ in range(3):
        assert checked(np.ones(4)).tolist() == [0.5] * 4
    once = len(checks)
    assert checked(np.ones(3)).shape == (3,)
    assert len(checks) == 2 * once, "another shape, the same checks"
    with pytest.raises(TypeCheckError):
        checked(np.ones(4), shorter=1)
    with pytest.raises(TypeCheckError):
        checked(np.ones(4, int))
    assert checked(np.ones(4), shorter=0).shape == (4,)
    with pytest.raises(TypeCheckError, match="return"):
        checked(np.ones(4), shorter=1)  # alike but for the result


def test_a_call_that_was_not_checked_is_checked_the_next_time() -> None:
    def shorter(a: Float[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
        return a[1:]

    checked = checked_by_kind(shorter, beartype)
    with type_checks.shapes_unchecked():
        assert checked(np.ones(4)).shape == (3,)
    with pytest.raises(TypeCheckError, match="return"):
        checked(np.ones(4))
