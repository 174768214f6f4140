"""Checks of what surrounds a run: memory, endpoints, proxies, Prefect server."""

import json
import os
import urllib.error
import urllib.request

from marin_rl.config import REGISTERED, Config, InferenceConfig
from marin_rl.doctor.stages import await_apart
from marin_rl.errors import EndpointUnavailable, OutOfMemory, StalePolicy
from marin_rl.inference.client.fleet_sources import EndpointSource
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.machine import computes_on_host, gigabytes, proxies, room
from marin_rl.planning import keys_that_lower, plan

HEALTH_TIMEOUT_S = 3.0
ENDPOINT_TIMEOUT_S = 10.0
# A plan may be this share too high; a run is refused only if it would not fit even then.
PLAN_ERROR = 0.15


def memory(config: Config) -> str:
    """Check that what a run needs at its peak is there at all.

    Raises OutOfMemory, naming what is needed, what there is, and the settings that lower it.
    """
    planned, here = plan(config), room()
    if planned.peak_bytes is None or planned.training_bytes is None:
        return "not known without the model's folder"
    if here is None:
        return f"about {gigabytes(planned.peak_bytes)} on a device; it is not started yet"
    # The plan is measured on CPUs. What lies on an accelerator between steps is known exactly.
    least = planned.training_bytes
    if computes_on_host():
        least = round(planned.peak_bytes * (1 - PLAN_ERROR))
    if least > here.total:
        largest = f"training step {gigabytes(planned.step_bytes or 0)}"
        largest += f", engine {gigabytes(planned.engine_bytes)}" if planned.engine_bytes else ""
        raise OutOfMemory(
            f"the run does not fit into memory: it needs about {gigabytes(planned.peak_bytes)} at "
            f"its peak ({largest}), with {here}. Lower it by "
            f"{'; or '.join(keys_that_lower(config, planned))}"
        )
    return f"about {gigabytes(planned.peak_bytes)} at the peak; {here}"


def tight(config: Config) -> str | None:
    """Return a warning where a run fits into memory, and not into what is free of it now."""
    planned, here = plan(config), room()
    if here is None or planned.peak_bytes is None or planned.peak_bytes <= here.free:
        return None
    return (
        f"the run needs about {gigabytes(planned.peak_bytes)} of memory at its peak, with {here}: "
        f"where it is killed without a message, lower "
        f"it by {'; or '.join(keys_that_lower(config, planned))}"
    )


def endpoints(config: Config) -> str:
    """Check that every endpoint answers and serves the model by name."""
    if not config.inference.endpoints:
        return "embedded server (none configured)"
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
