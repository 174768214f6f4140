"""Checks of types and shapes at run time, which cost a call as little as they can.

jaxtyping binds the arguments of every call, opens a scope for the names of dimensions, and has the
arguments checked before the call and once more with the result. A function whose signature has no
array has no dimensions to compare: beartype alone says the same of it, in a tenth of the time. What
a signature with arrays says of a call depends on types, shapes and dtypes, but for items of lists:
calls that are alike in those are checked once.
"""

import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import jax
import jaxtyping
import numpy as np
from beartype.roar import BeartypeException
from jaxtyping import _import_hook as import_hook

with_shapes = jaxtyping.jaxtyped
TUPLE_MAX = 8  # items of a tuple that are looked at
ARRAYS = (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)
# Code of functions inside functions. Each call of the outer one makes another, whose checks take a
# millisecond to make: the first is checked.
_inner_seen = set[types.CodeType]()


def install() -> None:
    """Have jaxtyping's import hook decorate with `checked`, and compile in one thread at a time.

    Call it before what is checked is imported.
    """
    jaxtyping.jaxtyped = checked  # pyright: ignore[reportAttributeAccessIssue]
    loader = import_hook._JaxtypingLoader
    loader.source_to_code = one_at_a_time(loader.source_to_code)


@contextmanager
def shapes_unchecked() -> Iterator[None]:
    """Check no shapes inside the block: a third of the time of a run that calls for minutes what
    other tests call with checks.
    """
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that one thread calls while others wait.

    CPython 3.11 counts the depth of syntax trees once for all threads: where two convert such trees
    at once, one ends with "SystemError: AST constructor recursion depth mismatch".
    """
    alone = threading.Lock()

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with alone:
            return function(*arguments, **named)

    return call


def checked(thing: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """Return a function, descriptor or dataclass with its types checked, and shapes if it has any.

    Called as jaxtyping's hook calls `jaxtyped`: without a thing it is a decorator.
    """
    if thing is None:
        return functools.partial(checked, typechecker=typechecker)
    again = functools.partial(checked, typechecker=typechecker)
    if isinstance(thing, classmethod | staticmethod):
        return type(thing)(again(thing.__func__))
    if isinstance(thing, property):
        return property(*(each and again(each) for each in (thing.fget, thing.fset, thing.fdel)))
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
            thing.__init__ = again(thing.__init__)
        return thing
    return thing if stays_unchecked(thing) else checked_function(thing, typechecker)


def stays_unchecked(function: Any) -> bool:
    """Return True for a function whose checks would cost more than its calls."""
    if "<locals>" not in function.__qualname__ or not inspect.isfunction(function):
        return False
    seen = function.__code__ in _inner_seen
    _inner_seen.add(function.__code__)
    return seen


def checked_function(thing: Any, typechecker: Callable[[Any], Any]) -> Any:
    """Return a function with its types checked, and shapes if its signature has any."""
    if not has_plain_signature(thing):
        return checked_by_kind(thing, typechecker)
    try:
        return typechecker(thing)
    except BeartypeException:  # it resolves less in a function's own annotations than in a copy's
        return checked_by_kind(thing, typechecker)


def checked_by_kind(thing: Any, typechecker: Callable[[Any], Any]) -> Any:
    """Return a function whose calls are checked with shapes, once for each kind of call."""
    check = with_shapes(thing, typechecker=typechecker)
    if not inspect.isfunction(thing) or not returns_at_once(thing):
        return check
    passed: dict[Any, set[Any]] = {}

    @functools.wraps(thing)
    def call(*arguments: Any, **named: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:  # what is not checked has not passed
            return thing(*arguments, **named)
        kind = tuple(map(kind_of, arguments)), tuple((n, kind_of(v)) for n, v in named.items())
        results = passed.get(kind)
        if results is None:
            result = check(*arguments, **named)
            passed[kind] = {kind_of(result)}
            return result
        result = thing(*arguments, **named)
        if (kind_of_result := kind_of(result)) not in results:
            given = functools.wraps(thing)(lambda *_, **__: result)
            with_shapes(given, typechecker=typechecker)(*arguments, **named)
            results.add(kind_of_result)
        return result

    return call


def kind_of(value: Any) -> Any:
    """Return what the check of a value depends on: its type, shape and dtype; of a tuple, each."""
    if isinstance(value, tuple) and len(value) <= TUPLE_MAX:
        return type(value), *map(kind_of, value)
    # of arrays alone: the shape of a query, such as DuckDB's, runs it
    return (type(value), value.shape, value.dtype) if isinstance(value, ARRAYS) else type(value)


def returns_at_once(function: Any) -> bool:
    """Return True for a function that is no generator and no coroutine."""
    other = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return not any(is_so(function) for is_so in other)


def has_plain_signature(function: Any) -> bool:
    """Return True for a function, not a generator, that is annotated without arrays."""
    if not inspect.isfunction(function) or inspect.isgeneratorfunction(function):
        return False
    return not any(may_have_shape(each) for each in function.__annotations__.values())


def may_have_shape(annotation: Any) -> bool:
    """Return True for an annotation with an array in it, or with a name not resolved yet."""
    if isinstance(annotation, str | TypeVar) or type(annotation).__name__ == "ForwardRef":
        return True
    if isinstance(annotation, list | tuple):  # the arguments of a Callable
        return any(may_have_shape(each) for each in annotation)
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return issubclass(annotation, jaxtyping.AbstractArray) or "jaxtyping" in (
            annotation.__module__,
            type(annotation).__module__.partition(".")[0],
        )
    return any(may_have_shape(each) for each in get_args(annotation))
