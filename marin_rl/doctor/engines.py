"""Checks that take JAX, and all stages in the order of the doctor."""

import math
from contextlib import suppress

import jax

from marin_rl.config import Config
from marin_rl.devices import start_devices
from marin_rl.doctor import data, policy, start, system
from marin_rl.doctor.stages import (
    DOCTOR,
    OF_PAIRS,
    PREFERENCE,
    REWARD_MODEL,
    ROUNDS,
    Stage,
    run_stages,
)
from marin_rl.errors import ConfigError, ObjectMissing
from marin_rl.inference.batch_invariance import recorded_proofs
from marin_rl.machine import computes_on_host, machine_facts
from marin_rl.processes import joined
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.adapters import Modules
from marin_rl.training.custom_loss import check_loss
from marin_rl.training.policy_source import recorded_modules
from marin_rl.training.tracing import trace_preference, trace_programs, trace_reward_model


def check_all(config: Config, flow: str) -> None:
    """Run the stages of `flow`, except the stages that `before_engines` has just run."""
    run_stages(config, flow, ENGINES if start.has_passed(config, flow) else STAGES)


def loss(config: Config) -> str:
    """Check that a loss of the user's own has a finite value and gradient on a small batch."""
    if config.objective.loss is None:
        return f"surrogate {config.objective.surrogate}"
    return check_loss(config.objective)


def accelerator(config: Config) -> str:
    """Start JAX where a GPU may be; check that it is used, and that the run fits its memory."""
    if computes_on_host():
        return "none: computes on the CPU"
    first = start_devices(config.policy.compute_dtype)[0]
    return f"{first.device_kind}; {system.memory(config)}"


def devices(config: Config) -> str:
    """Check that JAX has devices, and that the mesh fits them."""
    visible, axes = jax.devices(), config.mesh.model_dump()
    sizes = axes.values()
    product = math.prod(max(axis, 1) for axis in sizes)
    short = jax.process_count() > 1 and -1 not in sizes and product < len(visible)
    if len(visible) % product or short or (-1 not in sizes and product > len(visible)):
        raise ConfigError(
            f"the mesh {' '.join(f'{axis}={size}' for axis, size in axes.items())} does not fit "
            f"{len(visible)} devices of {jax.process_count()} process(es): make their product "
            f"{'equal' if jax.process_count() > 1 else 'divide'} the device count"
        )
    return f"{len(visible)} x {visible[0].device_kind}"


def mesh(config: Config) -> str:
    """Check that a mesh of several devices fits the machine; JAX is started only for that."""
    sizes = config.mesh.model_dump().values()
    if max(sizes) <= 1 and (-1 in sizes or joined() is None):
        return "fits any number of devices"
    return devices(config)


def machine(_: Config) -> str:
    """Report the facts that bits depend on, and the proofs of engines on this machine."""
    jax.devices()  # facts are those of a process that computes
    facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    outcomes = [outcome for _, outcome in recorded_proofs()]
    if not outcomes:
        return f"{facts}; no engine has proven its programs here yet: the first one to start does"
    alike = sum(outcome.slots and outcome.prompts for outcome in outcomes)
    shared = sum(outcome.shared for outcome in outcomes)
    return (
        f"{facts}; results independent of the batch in {alike} of {len(outcomes)} engine programs "
        f"checked here, {shared} of which share a prompt's cache"
    )


def programs(config: Config) -> str:
    """Check that every program of the run can be built, by tracing them with shapes only."""
    recorded: Modules | None = None
    if config.policy.lora is not None and config.policy.lora.init_from is not None:
        with suppress(ObjectMissing):  # the folder that the adapter began from may be gone
            run = Run.open(config.root, config.run_id, config.storage_options)
            recorded = recorded_modules(run)
    count = trace_programs(config, tokenizer_for(config.policy), recorded)
    return f"{count} traced by shapes"


def reward_model_programs(config: Config) -> str:
    return f"{trace_reward_model(config, tokenizer_for(config.policy))} traced by shapes"


def preference_programs(config: Config) -> str:
    return f"{trace_preference(config, tokenizer_for(config.policy))} traced by shapes"


ENGINES = (
    Stage("accelerator", accelerator),
    Stage("loss", loss, ROUNDS),
    Stage("mesh", mesh, ROUNDS - {DOCTOR} | OF_PAIRS),
    Stage("devices", devices, frozenset({DOCTOR})),
    Stage("programs", programs, ROUNDS),
    Stage("programs of the reward model", reward_model_programs, frozenset({REWARD_MODEL})),
    Stage("programs of pairs", preference_programs, frozenset({PREFERENCE})),
    Stage("machine", machine, frozenset({DOCTOR})),
    Stage("proxies", system.proxy_variables, frozenset({DOCTOR})),
    Stage("Prefect API", system.orchestrator, frozenset({DOCTOR})),
)
STAGES = (*start.FILES, *ENGINES)
# Checks that every process of a run makes, on its host.
OF_EACH = (data.storage, policy.source, accelerator)
