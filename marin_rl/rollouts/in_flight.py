"""Client of a run whose policy changes within completions (`asynchrony.in_flight_updates`).

A version is that of a checkpoint of the run, and its parameters are those that the checkpoint's
manifest names: also for workers on other machines, which nothing else tells of it.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from marin_rl.errors import ObjectMissing, StalePolicy
from marin_rl.inference.client.in_flight_client import InFlightClient
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.types import ServedPolicy


def in_flight_client(run: Run, policy: ServedPolicy) -> Callable[..., PolicyClient] | None:
    """The class of client that takes tokens of `policy` and of later checkpoints.

    None where completions are of one policy.
    """
    if not run.config.in_flight_updates:
        return None
    known = {policy.weight_version: policy.parameters_digest}

    async def digest_of(version: int) -> str:
        if version not in known:
            known[version] = await asyncio.to_thread(_digest_of, run, version)
        return known[version]

    return partial(
        InFlightClient,
        name=run.config.inference.model,
        version=policy.weight_version,
        digest_of=digest_of,
    )


def _digest_of(run: Run, version: int) -> str:
    """Digest of the parameters of a checkpoint. Raises StalePolicy where there is none."""
    try:
        manifest = committed_manifest(run.store, checkpoint_slot(version))
    except ObjectMissing:
        raise StalePolicy(
            f"the endpoint answers with weights of version {version}, which is no checkpoint of "
            f"run {run.run_id!r}: it serves another run"
        ) from None
    return str(manifest.extra["parameters_digest"])
