"""Weight sync: have the servers that a run samples from serve one of its checkpoints.

A `Transport` is the way to one kind of server, and `transport_of` chooses it. `InMemory` hands the
trainer's arrays to the server of this process. `FromFolder` exports a Hugging Face folder to a file
system that the endpoints share, and each loads it on request; `AsAdapter` does so with a PEFT
folder, under a name for each version, because prefix caches of servers are keyed by it. `Pull`
announces the checkpoint to servers that follow the run, and waits for one. Leaves out what is sent
to vLLM and SGLang (`inference.client`: `publishing`, `adapters`), and the proof that every endpoint
samples with the weights (`serving.weights.canary`).
"""

import asyncio
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from marin_rl.compilation import spare_long_lived_objects
from marin_rl.config import InferenceConfig
from marin_rl.errors import (
    ConfigError,
    EndpointUnavailable,
    FleetEmpty,
    InputError,
    StalePolicy,
    StorageError,
)
from marin_rl.inference.client.adapters import NewAdapter, load_adapter, unload_adapters
from marin_rl.inference.client.fleet import FleetOptions
from marin_rl.inference.client.fleet_sources import EndpointSource, board_of
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import is_version_of, served_model_id
from marin_rl.inference.client.publishing import Publisher, check_complete
from marin_rl.lora.adapter import Adapter
from marin_rl.models.module import LanguageModel
from marin_rl.processes import all_to_first, leads, own_address
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.adapters import read_base_of, version_of, with_adapters_room
from marin_rl.serving.weights.checkpoint_loader import read_slot, with_update_root
from marin_rl.serving.weights.export import export, export_peft, exports_of
from marin_rl.storage.fleet import Target, run_sha256
from marin_rl.storage.runs import Run, round_name, round_of
from marin_rl.storage.written_behind import settle
from marin_rl.training.adapters import merged_model
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.loop import Trainer
from marin_rl.training.model import digest_of, named_parameters
from marin_rl.training.state import Identity, identity_of
from marin_rl.types import SlotRef

# Versions whose adapters stay at the endpoints: this round's, and the one before, on which
# requests of other workers may still run.
ADAPTERS_KEPT = 2
POLL_S = 1.0  # between two looks at endpoints that are away

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The model of a checkpoint, to be served, and its identity.

    `trained` is the model as it is trained, which may be an adapter next to a base; endpoints are
    proven by it. With `adapter`, `model` is the base that it is served next to.
    """

    version: int
    model: LanguageModel
    trained: LanguageModel
    identity: Identity
    adapter: Adapter | None = None

    @property
    def bytes(self) -> int:
        """Size of what a server is given: all parameters, or an adapter."""
        arrays = named_parameters(self.model) if self.adapter is None else self.adapter.arrays
        return sum(array.nbytes for array in arrays.values())


def trained_weights(trainer: Trainer, version: int, *, apart: bool) -> Weights:
    """The trainer's own arrays of the checkpoint that it has loaded."""
    assert trainer.identity is not None, "a checkpoint is loaded"
    (trained, model, adapter), identity = trainer.models(apart=apart), trainer.identity
    return Weights(
        version=version, model=model, trained=trained, identity=identity, adapter=adapter
    )


def committed_weights(run: Run, checkpoint: SlotRef, version: int, *, apart: bool) -> Weights:
    """The weights of a checkpoint from its files."""
    merged = read_slot(run, checkpoint).model
    model, adapter = merged, None
    if apart:
        committed = version_of(run, checkpoint)
        model, adapter = read_base_of(run, committed).model, committed.adapter
    identity = identity_of(run, checkpoint)
    return Weights(version=version, model=model, trained=merged, identity=identity, adapter=adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Endpoints that serve a policy, its model id there, and the folder they were sent, if any.

    `copies` counts the servers that the weights were transferred to.
    """

    endpoints: tuple[str, ...]
    model: str
    copies: int
    weights: str | None = None


class Transport(ABC):
    """The way of a run's weights to its servers. Methods are called by one thread at a time."""

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        self._run, self._tokenizer = run, tokenizer
        self._inference = run.config.inference

    @property
    def apart(self) -> bool:
        return self._run.config.policy.lora is not None and self._inference.serve_merged is False

    @abstractmethod
    def publish(self, weights: Weights) -> Published:
        """Make every server serve the weights. Raises what the client or the engine raises."""

    def publish_beside(self, weights: Weights) -> None:  # noqa: B027 - endpoints are of process 0
        """Have other processes of this run serve the weights too, in a call that all make."""

    def sleep(self) -> None:  # noqa: B027 - only servers of this process share its device
        """Leave the device's memory to training."""

    def close(self) -> None:  # noqa: B027 - other people's endpoints keep running
        """Stop serving the run."""


def transport_of(run: Run, tokenizer: PreTrainedTokenizerBase) -> Transport:
    """The transport that `inference.endpoints` and `inference.publish` choose."""
    inference = run.config.inference
    if not inference.endpoints:
        return InMemory(run, tokenizer)
    if inference.pulled:
        return Pull(run, tokenizer)
    if inference.publish == "lora_adapter":
        return AsAdapter(run, tokenizer)
    return FromFolder(run, tokenizer)


class InMemory(Transport):
    """The server of this process. It starts on first use, and takes arrays by reference.

    Where several processes train, each has one: those of the others are further endpoints.
    """

    server: PolicyServer | None = None
    _beside: tuple[str, ...] = ()

    def publish_beside(self, weights: Weights) -> None:
        own = () if leads() else self.publish(weights).endpoints
        self._beside = tuple(url for urls in all_to_first([*own]) for url in urls)

    def publish(self, weights: Weights) -> Published:
        if self.server is not None and not self.server.engine.alive:
            self.close()  # an engine that ended by itself answers no request any more
        config, identity, server = self._run.config, weights.identity, self.server
        digest, version = identity.parameters_digest, weights.version
        if weights.adapter is not None:
            if server is None:
                assert identity.base_digest is not None, "an adapter has a base"
                roomy = with_adapters_room(config, weights.adapter.rank_max).inference
                server = self._start(roomy, weights.model, 0, identity.base_digest)
            adapter = weights.adapter
            server.adapters.serve_version(config.inference.model, version, digest, adapter)
        elif server is None:
            server = self._start(config.inference, weights.model, version, digest)
        else:
            again = config.recompute_kv_cache
            server.updater.swap(weights.model, version, digest, recompute_kv_cache=again)
        endpoints = (server.base_url, *self._beside)
        return Published(endpoints=endpoints, model=server.model_id, copies=len(endpoints))

    def _start(
        self, inference: InferenceConfig, model: LanguageModel, version: int, digest: str
    ) -> PolicyServer:
        policy = self._run.config.policy
        server = PolicyServer(
            model,
            self._tokenizer,
            with_update_root(inference, self._run.config.root),
            context_length=policy.context_length,
            weight_version=version,
            parameters_digest=digest,
            dtype=jnp.dtype(policy.compute_dtype),
        )
        if leads():
            server.start(inference.host or "127.0.0.1", inference.port or 0)
        else:
            server.start(own_address())
        self.server = server
        spare_long_lived_objects()
        return server

    def sleep(self) -> None:
        if self.server is not None:
            self.server.engine.sleep()

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None


class Pull(Transport):
    """Servers that follow the run: they are told the checkpoint to serve, and read it themselves.

    Raises FleetEmpty where none serves it in time.
    """

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(run, tokenizer)
        self._session = secrets.token_hex(16)  # of this start of the trainer
        self._announced = False

    def publish(self, weights: Weights) -> Published:
        run, inference, version = self._run, self._inference, weights.version
        digest, source = weights.identity.parameters_digest, _source(run, weights)
        settle()  # they can read what is committed
        self._announced = True
        target = Target(
            run_sha256=run_sha256(run.folder),
            version=version,
            # No trainer at work is further ahead: its round is sampled before later ones end.
            through=version + run.config.max_staleness + 1,
            parameters_digest=digest,
            session=self._session,
        )
        board_of(inference, run.folder).aim(target)
        model = served_model_id(inference.model, version, digest)

        async def ready() -> tuple[str, ...]:
            async with PolicyClient(
                source=source,
                fleet=FleetOptions(timeout_s=inference.fleet_timeout_s),
                model=model,
                api_key=os.environ.get(inference.api_key_variable),
                timeout_s=inference.request_timeout_s,
            ) as client:
                return tuple(await client.wait_until_ready())

        endpoints = asyncio.run(ready())
        return Published(endpoints=endpoints, model=model, copies=len(endpoints))

    def close(self) -> None:
        if self._announced:
            self._announced = False
            with suppress(StorageError):  # servers find by themselves that it is out of date
                board_of(self._inference, self._run.folder).release()


class FromFolder(Transport):
    """Endpoints that load a Hugging Face folder on request, or with `publish: none` serve already.

    Raises StalePolicy where one serves another version, FleetEmpty where none is there in time,
    ConfigError without a folder that endpoints can read.
    """

    @property
    def apart(self) -> bool:
        return False

    def publish(self, weights: Weights) -> Published:
        run, kind = self._run, self._inference.publish
        version, digest = weights.version, weights.identity.parameters_digest
        endpoints, folder = self._endpoints(weights), None
        if kind == "update_weights_from_disk" or kind == "vllm_reload":
            saved = None
            if kind == "update_weights_from_disk" and run.config.policy.lora is not None:
                # A policy with an adapter has the identity of both, but is sent merged.
                saved = digest_of(named_parameters(merged_model(weights.model)))
            folder = str(self._exported(weights))
            publisher = Publisher(
                kind=kind,
                folder=folder,
                version=version,
                digest=digest,
                saved=saved,
                recompute_kv_cache=run.config.recompute_kv_cache,
            )
            endpoints = asyncio.run(self._send(endpoints, publisher))
        model = asyncio.run(self._model_id(endpoints, version, digest))
        copies = len(endpoints) if folder else 0  # that must have the weights already get none
        return Published(endpoints=endpoints, model=model, copies=copies, weights=folder)

    def save(self, weights: Weights, folder: Path) -> None:
        save_hf(merged_model(weights.model), self._tokenizer, folder)

    def is_complete(self, folder: Path) -> bool:
        """True where an export, which another process may have made, can be loaded."""
        try:
            check_complete(folder)
        except InputError:
            return False
        return True

    def _endpoints(self, weights: Weights) -> tuple[str, ...]:
        """URLs that `inference.endpoints` names, once there are some. Raises FleetEmpty."""
        source, timeout_s = _source(self._run, weights), self._inference.fleet_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            usable = tuple(endpoint.url for endpoint in source.resolve() if not endpoint.refused)
            if usable:
                return usable
            if time.monotonic() > deadline:
                raise FleetEmpty(
                    f"inference.endpoints named no endpoint for {timeout_s:g} s "
                    f"(inference.fleet_timeout_s): {source.advice} and run again; nothing is lost"
                )
            time.sleep(POLL_S)

    def _exported(self, weights: Weights) -> Path:
        name = f"{round_name(weights.version)}-{weights.identity.parameters_digest[:16]}"
        folder = exports_of(self._run) / name
        export(folder, partial(self.save, weights), self.is_complete)
        return folder

    async def _send(self, endpoints: Sequence[str], publisher: Publisher) -> tuple[str, ...]:
        """URLs of the endpoints that have loaded the weights: all, or of vLLM those not lost.

        Where all are lost, wait for one to be restarted. Raises FleetEmpty where none is in
        time, and what loading raises.
        """
        timeout_s = self._inference.fleet_timeout_s
        deadline, known = time.monotonic() + timeout_s, set[str]()
        while True:
            async with self._client(endpoints, self._inference.model) as client:
                calls = (client.publish(publisher, url) for url in endpoints)
                # all end before one is raised: none may use a client that is closed
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
            lost: dict[str, EndpointUnavailable] = {}
            for url, outcome in zip(endpoints, outcomes, strict=True):
                if isinstance(outcome, EndpointUnavailable) and publisher.kind == "vllm_reload":
                    lost[url] = outcome
                elif isinstance(outcome, BaseException):
                    raise outcome
            for url in lost.keys() - known:
                _log.warning("endpoint %s is lost: %s", url, lost[url])
            known.update(lost)
            if len(lost) < len(endpoints):
                return tuple(url for url in endpoints if url not in lost)
            if time.monotonic() > deadline:
                shown = "; ".join(f"{url}: {error}" for url, error in lost.items())
                raise FleetEmpty(
                    f"no endpoint took the weights for {timeout_s:g} s "
                    f"(inference.fleet_timeout_s): {shown}. Restart the servers and run again: "
                    "nothing is lost"
                )
            await asyncio.sleep(POLL_S)

    async def _model_id(self, endpoints: Sequence[str], version: int, digest: str) -> str:
        """The model id with its version where the endpoints have versions, else the plain name.

        An endpoint that names another version did not load these weights; but for vLLM, which was
        asked for the version of its weights, and whose other names are adapters of other runs.
        """
        name = self._inference.model
        exact = served_model_id(name, version, digest)
        async with self._client(endpoints, exact) as client:
            served = await client.models_of_each()
        common = set.intersection(*served.values())
        others = {
            url: sorted(other for other in names if is_version_of(other, name))
            for url, names in served.items()
            if exact not in names
        }
        if exact in common:
            return exact
        reloaded = self._inference.publish == "vllm_reload"
        if name in common and (reloaded or not any(others.values())):
            return name
        serving = "; ".join(
            f"{', '.join(other or sorted(served[url])) or 'no model'} at {url}"
            for url, other in others.items()
        )
        raise StalePolicy(
            f"expected {exact} (parameters {digest[:16]}) or {name} at every endpoint, "
            f"found {serving}: load the checkpoint there, or set inference.publish"
        )

    def _client(self, endpoints: Sequence[str], model: str) -> PolicyClient:
        inference = self._inference
        return PolicyClient(
            endpoints=endpoints,
            model=model,
            api_key=os.environ.get(inference.api_key_variable),
            admin_key=os.environ.get(inference.server.admin_key_variable),
            timeout_s=inference.request_timeout_s,
            attempts_max=inference.request_attempts_max,
            in_flight_max=len(endpoints),
        )


class AsAdapter(FromFolder):
    """Endpoints of the base that load an adapter, by vLLM's route or SGLang's, from a PEFT folder.

    Names are never used twice: an endpoint that has a name has that adapter. Raises ConfigError for
    a run that trains all parameters, InputError where an endpoint cannot load adapters or refuses
    one, StalePolicy where it would serve another policy than promised.
    """

    @property
    def apart(self) -> bool:
        return self._run.config.policy.lora is not None

    def publish(self, weights: Weights) -> Published:
        if self._run.config.policy.lora is None:
            raise ConfigError(
                "inference.publish lora_adapter is for runs that train an adapter, and this one "
                "trains all parameters: set inference.publish to update_weights_from_disk"
            )
        endpoints = self._endpoints(weights)
        model = asyncio.run(self._load(endpoints, weights))
        return Published(endpoints=endpoints, model=model, copies=len(endpoints))

    def save(self, weights: Weights, folder: Path) -> None:
        export_peft(self._run, weights.version, folder)

    def is_complete(self, folder: Path) -> bool:
        return folder.exists()

    async def _load(self, endpoints: Sequence[str], weights: Weights) -> str:
        """Unload what no request needs any more, then load this version; its model id there."""
        base, digest = self._inference.model, weights.identity.parameters_digest
        old = self._names_before(weights.version)
        async with self._client(endpoints, base) as client:
            # First, so that there is room; only names of this run, for others may share the
            # endpoints.
            await unload_adapters(client, old)
            adapter = NewAdapter(
                name=served_model_id(base, weights.version, digest),
                folder=str(self._exported(weights)),
                weight_version=weights.version,
                parameters_digest=digest,
            )
            return await load_adapter(client, adapter, base)

    def _names_before(self, version: int) -> list[str]:
        """Names of the adapters that this run has exported, but for the last ones."""
        names: list[str] = []
        for path in exports_of(self._run).glob("round-*-*"):
            name, _, digest = path.name.rpartition("-")
            other = round_of(name) if path.is_dir() else None
            if other is not None and other + ADAPTERS_KEPT <= version:
                names.append(served_model_id(self._inference.model, other, digest))
        return names


def _source(run: Run, weights: Weights) -> EndpointSource:
    identity = weights.identity
    names = identity.tokenizer_digest, identity.chat_template_digest
    return EndpointSource.of(run.config, *names, weights.version)
