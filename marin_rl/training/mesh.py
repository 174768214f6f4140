"""Layout of arrays: one device, or a mesh with data, fsdp, context and tensor axes.

The model names its axes, so a layout is two small mappings from those names to axes of the mesh:
one for what is stored, one for what is computed. The step is the same in either case.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
from haliax.partitioning import pspec_for_axis, set_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marin_rl.compilation import replicated
from marin_rl.config import MeshConfig
from marin_rl.errors import ConfigError
from marin_rl.models.axes import CONTEXT, ROWS
from marin_rl.training.critic import Critic
from marin_rl.training.model import parameter_axes
from marin_rl.training.step_types import Parameters, TrainableParams

# Axes between two matrices, such as an MLP's: each device has a part of both, and one sum over
# devices follows the second.
TENSOR = {"mlp": "tensor", "kv_head": "tensor", "heads": "tensor", "vocab": "tensor"}
# At rest every matrix is spread over fsdp and context too, by the axis that all of them have.
SHARDED = ("fsdp", CONTEXT)
# In a step fsdp spreads rows in the place of `embed`, and context their positions: a layer's
# weights are gathered for its products.
COMPUTED = {"batch": ROWS, **TENSOR}
Optimizer = optax.GradientTransformationExtraArgs


@dataclass(frozen=True)
class Layout:
    """Placement of a run's arrays. Without a mesh everything is on the default device.

    `moments_memory`: the kind of memory of optimizers' moments, on a mesh; None: the devices' own.
    """

    mesh: Mesh | None = None
    moments_memory: str | None = None

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def spans_processes(self) -> bool:
        return self.mesh is not None and self.mesh.is_multi_process

    @property
    def facts(self) -> dict[str, str]:
        """Facts that bits depend on, by name; none on one device."""
        if self.mesh is None:
            return {}
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1)
        processes = {device.process_index for device in self.mesh.devices.flat}
        return {"mesh": sizes, "processes": str(len(processes))}

    @property
    def local(self) -> "Layout":
        """The layout of what this process computes alone: its own devices, by rows.

        This very layout, unless other processes have some of its devices.
        """
        if not self.spans_processes:
            return self
        own = np.array(jax.local_devices())
        if own.size == 1:
            return SINGLE_DEVICE
        return Layout(Mesh(own.reshape(-1, 1, 1), ("data", "fsdp", "tensor")))

    def replica(self, parameters: Parameters) -> Parameters:
        """The parameters for `local`: references, or copies where processes share them.

        With several processes this is a collective: see `compilation.gathered`.
        """
        if not self.spans_processes:
            return parameters
        assert self.mesh is not None
        own, gather = self.local.mesh, replicated(self.mesh)

        def here(array: jax.Array) -> jax.Array:
            shards = [shard.data for shard in gather(array).addressable_shards]
            if own is None:
                return shards[0]
            everywhere = NamedSharding(own, PartitionSpec())
            return jax.make_array_from_single_device_arrays(array.shape, everywhere, shards)

        return {name: here(array) for name, array in parameters.items()}

    @property
    def readable(self) -> NamedSharding | None:
        """The sharding by which every process can read a program's results; None: any."""
        if not self.spans_processes or self.mesh is None:
            return None
        return NamedSharding(self.mesh, PartitionSpec())

    def place_parameters(
        self, parameters: dict[str, Any], template: eqx.Module
    ) -> dict[str, jax.Array]:
        """Parameters, or gradients, of any of the template's names on the devices."""
        return self._parameters(parameters, template, _put)

    def place_state(
        self, state: Any, template: eqx.Module, optimizer: Optimizer, critic: Critic | None = None
    ) -> Any:
        """A training state on the devices; moments are sharded as their parameters."""
        if self.mesh is None:
            return jax.tree.map(jax.device_put, state)
        return self._state(state, template, optimizer, critic, _put)

    def parameters_like(self, shapes: Mapping[str, Any], template: eqx.Module) -> dict[str, Any]:
        """Shapes of parameters with the shardings of `place_parameters`, for readers of files."""
        return self._parameters(shapes, template, _struct)

    def state_like(
        self, like: Any, template: eqx.Module, optimizer: Optimizer, critic: Critic | None = None
    ) -> Any:
        """Shapes of a training state with the shardings of `place_state`."""
        return (
            like if self.mesh is None else self._state(like, template, optimizer, critic, _struct)
        )

    def constrain_gradients(
        self, gradients: TrainableParams, template: eqx.Module, critic: Critic | None = None
    ) -> TrainableParams:
        """Keep each gradient, in the backward pass, where `place_state` puts its parameter."""
        if self.mesh is None:
            return gradients
        put = jax.lax.with_sharding_constraint
        policy, of_critic = gradients
        if policy is not None:
            policy = self._parameters(policy, template, put)
        if critic is not None and of_critic is not None:
            of_critic = self._parameters(of_critic, critic.template, put)
        return TrainableParams(policy, of_critic)

    def _parameters(self, parameters: Any, template: eqx.Module, put: Any) -> dict[str, Any]:
        shardings = self.parameter_shardings(template)
        if shardings is None:
            return {name: put(array) for name, array in parameters.items()}
        return {name: put(array, shardings[name]) for name, array in parameters.items()}

    def _state(
        self,
        state: Any,
        template: eqx.Module,
        optimizer: Optimizer,
        critic: Critic | None,
        put: Any,
    ) -> Any:
        assert self.mesh is not None
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def trained(state: Any, template: eqx.Module, optimizer: Optimizer) -> Any:
            """Parameters and moments of a policy or a critic, and the number of its updates."""
            shardings = self.parameter_shardings(template)
            assert shardings is not None
            if (memory := self.moments_memory) is not None:
                shardings = {n: each.with_memory_kind(memory) for n, each in shardings.items()}
            # By structure, not by name: optax nests moments of parameters in its own states.
            moments = optax.tree_utils.tree_map_params(
                optimizer,
                lambda leaf, sharding: leaf if _is_masked(leaf) else put(leaf, sharding),
                state.optimizer,
                {name: shardings[name] for name in state.parameters},
                transform_non_params=lambda leaf: put(leaf, everywhere),
                is_leaf=_is_masked,
            )
            return state._replace(
                parameters=self._parameters(state.parameters, template, put),
                optimizer=moments,
                step=put(state.step, everywhere),
            )

        average, of_critic = state.average, state.critic
        if average is not None:
            average = self._parameters(average, template, put)
        if critic is not None and of_critic is not None:
            of_critic = trained(of_critic, critic.template, critic.optimizer)
        return trained(state, template, optimizer)._replace(
            rng=put(state.rng, everywhere),
            refused=put(state.refused, everywhere),
            average=average,
            critic=of_critic,
        )

    def whole_rows(self, rows: int, together: int = 1) -> int:
        """The fewest rows, `rows` or more, that data and fsdp share out evenly; of `together`.

        What is more than `rows` is to be empty: it changes no loss and no gradient.
        """
        over = 1 if self.mesh is None else self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        # Both at once: rows that the devices share evenly, in whole pairs for a reward model.
        unit = math.lcm(over, together)
        return -(-rows // unit) * unit

    def whole_length(self, length: int) -> int:
        """The fewest positions, `length` or more, that devices of context cut into their pieces."""
        pieces = 1 if self.mesh is None else 2 * self.mesh.shape.get(CONTEXT, 0) or 1
        return -(-length // pieces) * pieces

    def place_rows(self, arrays: Any) -> Any:
        """Arrays [M, R, T] with the rows of each microbatch spread over data and fsdp."""
        if self.mesh is None:
            return arrays
        # Rows over fsdp too: its devices hold other weights, but work on their own rows. Those of
        # context have them whole: they are numbers of tokens, and cut inside the program.
        sharding = NamedSharding(self.mesh, PartitionSpec(None, ROWS, None))
        return jax.tree.map(lambda array: _put(array, sharding), arrays)

    def parameter_shardings(self, template: eqx.Module) -> dict[str, NamedSharding] | None:
        """The sharding of every parameter. Raises ConfigError where a size does not divide."""
        if self.mesh is None:
            return None
        return {
            name: NamedSharding(self.mesh, self._spec(name, axes))
            for name, axes in parameter_axes(template).items()
        }

    def _spec(self, name: str, axes: tuple[hax.Axis, ...]) -> PartitionSpec:
        assert self.mesh is not None
        sizes = dict(self.mesh.shape)
        stored = {"embed": SHARDED if CONTEXT in sizes else SHARDED[0], **TENSOR}
        for axis in axes:
            over: str | tuple[str, ...] = stored.get(axis.name, ())
            names = (over,) if isinstance(over, str) else over
            size = math.prod(sizes[name] for name in names)
            # Refused here, with the name, since XLA would fail in the middle of compiling the step.
            if axis.size % size:
                raise ConfigError(
                    f"{' times '.join(f'mesh.{name}' for name in names)} is {size}, but axis "
                    f"{axis.name} of {name} has {axis.size} entries: expected a divisor of it"
                )
        return pspec_for_axis(axes, stored)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context in which the step is traced and run; what is active already stays."""
        # A mesh cannot be set within a program, such as one that is traced to check it.
        if self.mesh is None or not jax.sharding.get_abstract_mesh().empty:
            yield
            return
        computed = COMPUTED
        if CONTEXT in self.mesh.shape:
            computed = {**computed, "position": CONTEXT}
        with set_mesh(self.mesh), hax.axis_mapping(computed):
            yield


SINGLE_DEVICE = Layout()


def layout_of(config: MeshConfig, optimizer: str | None = None) -> Layout:
    """The layout that the configuration asks for on the devices there are.

    Raises ConfigError when the sizes do not multiply to a number of devices that is there, or when
    the `optimizer` needs memory of the host and devices have none.
    """
    devices, memory = jax.devices(), None
    if optimizer == "adamw_offload":
        memory = "pinned_host"
        kinds = sorted(each.kind for each in devices[0].addressable_memories())
        if memory not in kinds:
            raise ConfigError(
                f"training.optimizer adamw_offload needs devices with memory {memory}, found "
                f"{', '.join(kinds)} of {devices[0].device_kind}: choose adamw or adamw_8bit"
            )
    # Without `context` where that is null: programs of such meshes are those of earlier runs.
    sizes: dict[str, int] = config.model_dump()
    sizes["tensor"] = sizes.pop("tensor")  # the last, whose devices exchange most
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
    if jax.process_count() > 1 and count < len(devices):
        raise ConfigError(
            f"mesh: {sizes} takes {count} of the {len(devices)} devices of {jax.process_count()} "
            "processes: expected all, since every process trains; set mesh.fsdp or mesh.data to -1"
        )
    # Without a mesh the step has no constraints, and compiles to the program of one device.
    if count == 1 and memory is None:
        return SINGLE_DEVICE
    mesh = Mesh(np.array(devices[:count]).reshape(tuple(sizes.values())), tuple(sizes))
    return Layout(mesh, memory)


def _put(array: Any, sharding: NamedSharding | None = None) -> jax.Array:
    """Place an array that every process has whole: each puts its own part of it, by itself."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding)  # it lies on all processes already
    # `device_put` would have all processes compare their values, which is a collective.
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _struct(shape: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _is_masked(node: Any) -> bool:
    """True for what an optimizer has in the place of a parameter that another one updates."""
    return isinstance(node, optax.MaskedNode)
