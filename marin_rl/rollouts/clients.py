"""Clients of a run's policy: one version, or whatever is served (`asynchrony.in_flight_updates`).

A version is that of a checkpoint of the run, and its parameters are those that the checkpoint's
manifest names: also for workers on other machines, which nothing else tells of it. Endpoints of a
fleet are proven by the canary of each version, which the trainer leaves next to the run.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from marin_rl.config import Config
from marin_rl.errors import EndpointUnavailable, ObjectMissing, StalePolicy, StorageError
from marin_rl.inference.client.fleet import FleetOptions
from marin_rl.inference.client.fleet_sources import EndpointSource, board_of
from marin_rl.inference.client.policy_client import PolicyClient, client_of
from marin_rl.inference.client.proofs import PolicyProof, VersionsProof
from marin_rl.inference.client.publishing import Publisher
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.types import Canary, ServedPolicy

Connect = Callable[..., PolicyClient]

_log = logging.getLogger(__name__)


def policy_client(
    config: Config, policy: ServedPolicy, connect: Connect | None = None, **options: Any
) -> PolicyClient:
    """A client of a policy's endpoints; `connect` makes it, by default as `inference.route` says.

    `options` override the configured ones.
    """
    inference = config.inference
    if connect is None:
        connect = client_of(inference, TemplateBridge(config.policy))
        # A policy with a canary is served by a fleet, which the client proves as it joins.
        if policy.canary is not None:
            options = {
                **_fleet_options(config, policy),
                "proof": PolicyProof(canary=policy.canary, weights=_sent_weights(config, policy)),
                "admin_key": os.environ.get(inference.server.admin_key_variable),
                **options,
            }
    given = {
        "endpoints": policy.endpoints,
        "model": policy.model,
        "api_key": os.environ.get(inference.api_key_variable),
        "timeout_s": inference.request_timeout_s,
        "attempts_max": inference.request_attempts_max,
        "in_flight_max": inference.requests_in_flight_max,
        "turns_per_request": inference.turns_per_request or 1,
    }
    return connect(**given | options)


def stream_client(run: Run, policy: ServedPolicy) -> PolicyClient:
    """A client that takes tokens of `policy`; with in-flight updates of later checkpoints too."""
    config, inference, version = run.config, run.config.inference, policy.weight_version
    if not config.in_flight_updates:
        return policy_client(config, policy)
    versions, fleet = _Versions(run, {version: policy.parameters_digest}), inference.has_fleet
    if policy.canary is not None:
        versions.canaries[version] = policy.canary
    proof = VersionsProof(
        version=version,
        digest_of=versions.digest_in_time if fleet else versions.digest_of,
        canary_of=versions.canary_of if fleet else None,
    )
    options = _fleet_options(config, policy) if fleet else {}
    connect = client_of(inference, TemplateBridge(config.policy))
    # Asked for by the model's name, and no version of it.
    return policy_client(config, policy, connect, model=inference.model, proof=proof, **options)


def _fleet_options(config: Config, policy: ServedPolicy) -> dict[str, Any]:
    """Options of a client of the endpoints that are there at the moment."""
    names = policy.tokenizer_digest, policy.chat_template_digest
    inference = config.inference
    return {
        "source": EndpointSource.of(config, *names, policy.weight_version),
        "fleet": FleetOptions(zone=inference.zone, timeout_s=inference.fleet_timeout_s),
    }


def _sent_weights(config: Config, policy: ServedPolicy) -> Publisher | None:
    """Publisher of the weights to endpoints; None if the endpoints load them themselves."""
    publish = config.inference.publish
    if policy.weights is None or (
        publish != "vllm_reload" and publish != "update_weights_from_disk"
    ):
        return None
    return Publisher(
        kind=publish,
        folder=policy.weights,
        version=policy.weight_version,
        digest=policy.parameters_digest,
    )


@dataclass(slots=True)
class _Versions:
    """Digests and canaries of a run's checkpoints, by version, as far as they were asked for."""

    run: Run
    digests: dict[int, str]
    canaries: dict[int, Canary] = field(default_factory=dict[int, Canary])

    async def digest_of(self, version: int) -> str:
        """Digest of the parameters of a version. Raises StalePolicy for one without checkpoint."""
        if version not in self.digests:
            self.digests[version] = await asyncio.to_thread(_digest_of, self.run, version)
        return self.digests[version]

    async def digest_in_time(self, version: int) -> str:
        """The same; EndpointUnavailable, so that it is tried again, while the store is away."""
        try:
            return await self.digest_of(version)
        except StorageError as error:
            raise EndpointUnavailable(f"cannot verify version {version}: {error}") from error

    async def canary_of(self, version: int) -> Canary | None:
        """The canary of a version; None as long as the trainer has not proven it."""
        if version not in self.canaries:
            digest = await self.digest_in_time(version)
            canary = await asyncio.to_thread(_canary_of, self.run, version, digest)
            if canary is None:
                return None
            self.canaries[version] = canary
        return self.canaries[version]


def _canary_of(run: Run, version: int, digest: str) -> Canary | None:
    try:
        board = board_of(run.config.inference, run.folder)
        proven = board.canaries(run_sha256(run.folder)).get(version)
    except StorageError as error:
        _log.warning("cannot read the canaries of %s: %s", run.run_id, error)
        return None
    return proven.canary if proven is not None and proven.parameters_digest == digest else None


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
