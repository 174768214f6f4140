"""Where arrays live: one device, or a mesh with data, fsdp and tensor axes.

The model names its axes, so a layout is two small mappings from those names to axes of the mesh:
one for what is stored, one for what is computed. The step is the same in either case.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np
import optax
from haliax.partitioning import pspec_for_axis, set_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.models.lm_model import LmHeadModel

from marin_rl.config import MeshConfig
from marin_rl.errors import ConfigError
from marin_rl.training.model import parameter_axes

TENSOR = {"mlp": "tensor", "kv_head": "tensor", "heads": "tensor", "vocab": "tensor"}
STORED = {"embed": "fsdp", **TENSOR}
COMPUTED = {"batch": ("data", "fsdp"), **TENSOR}


Optimizer = optax.GradientTransformationExtraArgs


@dataclass(frozen=True)
class Layout:
    """How a run's arrays are placed. Without a mesh everything is on the default device."""

    mesh: Mesh | None = None

    def place_parameters(
        self, parameters: dict[str, Any], template: LmHeadModel
    ) -> dict[str, jax.Array]:
        """Parameters keyed by path, on the devices."""
        shardings = self.parameter_shardings(template)
        if shardings is None:
            return {name: jax.device_put(array) for name, array in parameters.items()}
        return {name: jax.device_put(a, shardings[name]) for name, a in parameters.items()}

    def place_state(self, state: Any, template: LmHeadModel, optimizer: Optimizer) -> Any:
        """A training state on the devices; moments lie as their parameters do."""
        if self.mesh is None:
            return jax.tree.map(jax.device_put, state)
        return self._state(state, template, optimizer, jax.device_put)

    def constrain_state(self, state: Any, template: LmHeadModel, optimizer: Optimizer) -> Any:
        """Inside the step: keep everything where `place_state` puts it."""
        if self.mesh is None:
            return state
        return self._state(state, template, optimizer, jax.lax.with_sharding_constraint)

    def _state(self, state: Any, template: LmHeadModel, optimizer: Optimizer, put: Any) -> Any:
        assert self.mesh is not None
        shardings = self.parameter_shardings(template)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        moments = optax.tree_utils.tree_map_params(
            optimizer,
            put,
            state.optimizer,
            shardings,
            transform_non_params=lambda leaf: put(leaf, everywhere),
        )
        small = {name: put(getattr(state, name), everywhere) for name in ("step", "rng", "refused")}
        parameters = jax.tree.map(put, dict(state.parameters), shardings)
        return state._replace(parameters=parameters, optimizer=moments, **small)

    def place_rows(self, arrays: Any) -> Any:
        """Arrays [M, R, T] with the rows of each microbatch spread over data and fsdp."""
        if self.mesh is None:
            return arrays
        sharding = NamedSharding(self.mesh, PartitionSpec(None, ("data", "fsdp"), None))
        return jax.tree.map(lambda array: jax.device_put(array, sharding), arrays)

    def parameter_shardings(self, template: LmHeadModel) -> dict[str, NamedSharding] | None:
        """The sharding of every parameter. Raises ConfigError where a size does not divide."""
        if self.mesh is None:
            return None
        return {
            name: NamedSharding(self.mesh, self._spec(name, axes))
            for name, axes in parameter_axes(template).items()
        }

    def _spec(self, name: str, axes: tuple[hax.Axis, ...]) -> PartitionSpec:
        assert self.mesh is not None
        for axis in axes:
            over = STORED.get(axis.name)
            if over is not None and axis.size % self.mesh.shape[over]:
                raise ConfigError(
                    f"mesh.{over} is {self.mesh.shape[over]}, but axis {axis.name} of {name} has "
                    f"{axis.size} entries: expected a divisor of it"
                )
        return pspec_for_axis(axes, STORED)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context in which the step is traced and run."""
        if self.mesh is None:
            yield
            return
        with set_mesh(self.mesh), hax.axis_mapping(COMPUTED):
            yield


SINGLE_DEVICE = Layout()


def layout_of(config: MeshConfig) -> Layout:
    """The layout that the configuration asks for on the devices there are.

    Raises ConfigError when the sizes do not multiply to a number of devices that is there.
    """
    devices = jax.devices()
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    fixed = int(np.prod([size for size in sizes.values() if size > 0]))
    if -1 in sizes.values():
        if len(devices) % fixed:
            raise ConfigError(
                f"mesh: {len(devices)} devices cannot be shared out over {sizes}: expected fixed "
                "sizes whose product divides the number of devices"
            )
        sizes = {k: len(devices) // fixed if v == -1 else v for k, v in sizes.items()}
    count = int(np.prod(list(sizes.values())))
    if count > len(devices):
        raise ConfigError(f"mesh: {sizes} needs {count} devices, found {len(devices)}")
    if count == 1:
        return SINGLE_DEVICE
    return Layout(Mesh(np.array(devices[:count]).reshape(tuple(sizes.values())), tuple(sizes)))
