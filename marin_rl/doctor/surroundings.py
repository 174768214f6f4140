"""Checks of what surrounds a run: devices, machine, endpoints, Prefect server."""

import json
import math
import os
import urllib.error
import urllib.request

from marin_rl.config import REGISTERED, Config, InferenceConfig
from marin_rl.doctor.event_loop import await_apart
from marin_rl.errors import ConfigError, EndpointUnavailable, StalePolicy
from marin_rl.machine import proxies, share_one_heap

HEALTH_TIMEOUT_S = 3.0
ENDPOINT_TIMEOUT_S = 10.0


def devices(config: Config) -> str:
    """Check that JAX has devices, and that the mesh fits them."""
    import jax

    visible = jax.devices()
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    product = math.prod(max(axis, 1) for axis in sizes)
    if len(visible) % product or (-1 not in sizes and product > len(visible)):
        raise ConfigError(
            f"the mesh data={sizes[0]} fsdp={sizes[1]} tensor={sizes[2]} does not fit "
            f"{len(visible)} devices: make their product divide the device count"
        )
    return f"{len(visible)} x {visible[0].device_kind}"


def mesh(config: Config) -> str:
    """Check that a mesh of several devices fits the machine; only for that JAX is started."""
    if max(config.mesh.data, config.mesh.fsdp, config.mesh.tensor) <= 1:
        return "fits any number of devices"
    share_one_heap()  # as a flow does, before JAX starts its threads
    return devices(config)


def machine(config: Config) -> str:
    """Report the facts that bits depend on, and the proofs of engines on this machine."""
    import jax

    from marin_rl.inference.batch_invariance import recorded_proofs
    from marin_rl.machine import machine_facts

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


def endpoints(config: Config) -> str:
    """Check that every endpoint answers and serves the model by name."""
    if not config.inference.endpoints:
        return "embedded server (none configured)"
    from marin_rl.inference.client.fleet_sources import EndpointSource

    wanted, entries = config.inference.model, config.inference.endpoints
    named = EndpointSource([entry for entry in entries if entry != REGISTERED]).resolve()
    for endpoint in (each.url for each in named):
        served = _models_of(config.inference, endpoint)
        if not any(name == wanted or name.startswith(f"{wanted}@") for name in served):
            raise StalePolicy(
                f"{endpoint} serves {', '.join(served) or 'nothing'}, not {wanted!r}: set "
                "inference.model to a served name, or serve this one"
            )
    later = "; servers may register later" if REGISTERED in entries else ""
    return f"{len(named)} endpoints serve {wanted}{later}"


def _models_of(inference: InferenceConfig, endpoint: str) -> list[str]:
    """List an endpoint's models."""
    from marin_rl.inference.client.policy_client import PolicyClient

    async def ask() -> list[str]:
        async with PolicyClient(
            endpoints=(endpoint,),
            model=inference.model,
            api_key=os.environ.get(inference.api_key_variable),
            timeout_s=ENDPOINT_TIMEOUT_S,
            attempts_max=1,
            in_flight_max=1,
        ) as client:
            return await client.models()

    return await_apart(ask)


def proxy_variables(_: Config) -> str:
    """Name the proxies of the environment, through which requests to other machines go."""
    names = ", ".join(proxies())
    return f"{names} set: requests to other machines go there" if names else "none set"


def orchestrator(config: Config) -> str:
    """Check that the configured Prefect API answers; without one, runs start a temporary server."""
    url = os.environ.get("PREFECT_API_URL") or ""
    if not url:
        return f"no PREFECT_API_URL: {config.run_id} would use a temporary server"
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S) as reply:
            healthy = json.loads(reply.read())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise EndpointUnavailable(
            f"no Prefect API at {url} ({error}): start it by "
            "`prefect server start`, or unset PREFECT_API_URL"
        ) from error
    return f"{url}: healthy" if healthy else f"{url}: answers, not healthy"
