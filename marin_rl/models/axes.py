"""Axes of the active mesh, and functions that each of its devices runs on its own part of arrays.

XLA spreads a program over the axes by itself; a kernel, a product by group and a look-up in a table
that is spread it would rather compute from arrays that it gathers first.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

ROWS, TENSOR = ("data", "fsdp"), "tensor"
# Devices have pieces of the same rows: see `training.context`.
CONTEXT = "context"


def free_axes() -> dict[str, int]:
    """Sizes of the axes that XLA spreads this part of the program over by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.axis_names if name in mesh.auto_axes}


def dividing(names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The free axes among `names` that share out a dimension of `size`; none if they do not."""
    sizes = free_axes()
    free = tuple(name for name in names if sizes.get(name, 1) > 1)
    return () if size % math.prod(sizes[name] for name in free) else free


def on_each_device(run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`run` of each device's part of its arguments, over all free axes; `run` itself without."""
    names = set(free_axes())
    if not names:
        return run
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(run, **specs, axis_names=names, check_vma=False)


def table_rows(table_VE: Float[Array, "V E"], index_BT: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Rows of a table whose columns are spread over fsdp and context, and whose rows over tensor.

    Each device reads its part of the rows that all of fsdp and context ask for, and hands them out.
    The table is gathered neither here nor for its gradient, nor are states of other devices'
    tokens.
    """
    (V, E), (B, T) = table_VE.shape, index_BT.shape
    rows, positions = dividing(ROWS, B), dividing((CONTEXT,), T)
    by_width, by_entry = dividing(("fsdp", CONTEXT), E), dividing((TENSOR,), V)
    if not free_axes() or not set(by_width) <= {*rows, *positions}:
        return jnp.take(table_VE, index_BT, axis=0)
    # Dimensions of the index by the axes that also spread columns, the fastest of them first.
    exchanged = [(at, axis) for axis, at in ((CONTEXT, 1), ("fsdp", 0)) if axis in by_width]

    def own(table: Array, index: Array) -> Array:
        for at, axis in exchanged:
            index = jax.lax.all_gather(index, axis, axis=at, tiled=True)
        if by_entry:
            index = index - jax.lax.axis_index(by_entry) * len(table)
            # An index before the first would count from the end.
            index = jnp.where(index < 0, len(table), index)
        found = table.at[index].get(mode="fill", fill_value=0)
        if by_entry:
            found = jax.lax.psum(found, by_entry)  # one has it, the others have 0
        for at, axis in exchanged:
            found = jax.lax.all_to_all(found, axis, at, 2, tiled=True)
        return found

    in_specs = PartitionSpec(by_entry, by_width), PartitionSpec(rows, positions)
    return on_each_device(own, in_specs, PartitionSpec(rows, positions))(table_VE, index_BT)
