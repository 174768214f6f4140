"""Placement of the engine's arrays: on one device, or on the mesh of the model's arrays.

Owns reading that mesh off the arrays themselves, and the names by which the decoder says how what
it computes is spread: slots over data and fsdp, key/value heads, the MLP and the vocabulary over
tensor, the rules that training follows. Leaves out what is computed (`decoder`, `weights`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

Tree = TypeVar("Tree")

# Axes of the mesh, as `constrain` takes them for each axis of an array.
SLOTS = ("data", "fsdp")
TENSOR = ("tensor",)
UNDIVIDED = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement on a device or a mesh; `weights` are the shardings of the weights."""

    weights: Any
    mesh: Mesh | None = None

    def place(self, arrays: Tree, *axes: tuple[str, ...]) -> Tree:
        """Place arrays with their leading dimensions spread over `axes`, the others undivided."""
        mesh = self.mesh
        if mesh is None:
            return jax.device_put(arrays, self.weights)
        sharding = lambda leaf: NamedSharding(mesh, _spec(dict(mesh.shape), leaf.shape, axes))
        return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf)), arrays)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context in which programs are traced and called."""
        if self.mesh is None:
            yield
            return
        with jax.set_mesh(self.mesh):
            yield


def placement_of(weights: Any) -> Placement:
    """The mesh that all arrays share, if it has several devices; else the first device."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, weights)
    leaves = jax.tree.leaves(shardings)
    meshes = {leaf.mesh for leaf in leaves if isinstance(leaf, NamedSharding)}
    # one array elsewhere, and the programs of a mesh could not take them together
    if len(meshes) == 1 and all(isinstance(leaf, NamedSharding) for leaf in leaves):
        (mesh,) = meshes
        if isinstance(mesh, Mesh) and mesh.size > 1:
            return Placement(shardings, mesh)
    return Placement(SingleDeviceSharding(jax.local_devices()[0]))


def constrain(array: Array, *axes: tuple[str, ...]) -> Array:
    """Constrain, inside a program, how leading dimensions are spread; no change on one device."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    if not sizes:
        return array
    return jax.lax.with_sharding_constraint(array, _spec(sizes, array.shape, axes))


def _spec(
    sizes: dict[str, int], shape: tuple[int, ...], axes: tuple[tuple[str, ...], ...]
) -> PartitionSpec:
    """A dimension that its axes of the mesh do not divide stays whole.

    Written as XLA writes the shardings of its results, so that a cache that was made and one that
    came out of a program are the same argument to the next.
    """
    spread = []
    for size, names in zip(shape, axes, strict=False):
        present = tuple(name for name in names if sizes.get(name, 1) > 1)
        undivided = not present or size % int(np.prod([sizes[name] for name in present]))
        spread.append(None if undivided else present[0] if len(present) == 1 else present)
    while spread and spread[-1] is None:
        spread.pop()
    return PartitionSpec(*spread)
