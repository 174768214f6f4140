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
    """Rows of a table whose columns are spread over fsdp and whose rows are over tensor.

    Each device reads its part of the rows that all of fsdp ask for, and hands them out: the table
    is gathered neither here nor for its gradient, nor are states of other devices' tokens.
    """
    V, E = table_VE.shape
    rows, by_width = dividing(ROWS, len(index_BT)), dividing(("fsdp",), E)
    by_entry = dividing((TENSOR,), V)
    if not free_axes() or not set(by_width) <= set(rows):
        return jnp.take(table_VE, index_BT, axis=0)

    def own(table: Array, index: Array) -> Array:
        if by_width:
            index = jax.lax.all_gather(index, by_width, axis=0, tiled=True)
        if by_entry:
            index = index - jax.lax.axis_index(by_entry) * len(table)
            # An index before the first would count from the end.
            index = jnp.where(index < 0, len(table), index)
        found = table.at[index].get(mode="fill", fill_value=0)
        if by_entry:
            found = jax.lax.psum(found, by_entry)  # one has it, the others have 0
        if by_width:
            found = jax.lax.all_to_all(found, by_width, 0, 2, tiled=True)
        return found

    in_specs = PartitionSpec(by_entry, by_width), PartitionSpec(rows)
    return on_each_device(own, in_specs, PartitionSpec(rows))(table_VE, index_BT)
