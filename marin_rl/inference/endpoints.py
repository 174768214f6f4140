"""Remote endpoints: sending them a checkpoint's weights, and the model id that they then serve.

Weights that are sent travel as a Hugging Face folder on a file system that trainer and endpoints
share, and each endpoint loads it on request. Of an adapter run only the adapter travels, as a PEFT
folder, under a name for each version: prefix caches of servers are keyed by it. Servers that follow
the run get the name of the checkpoint to serve, and are waited for. The canary proves that each
endpoint samples with them.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from marin_rl.config import InferenceConfig
from marin_rl.errors import ConfigError, EndpointUnavailable, FleetEmpty, InputError, StalePolicy
from marin_rl.inference.client.adapters import NewAdapter, load_adapter, unload_adapters
from marin_rl.inference.client.fleet import FleetOptions
from marin_rl.inference.client.fleet_sources import EndpointSource, board_of
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import is_version_of, served_model_id
from marin_rl.inference.client.publishing import Publisher, check_complete
from marin_rl.storage.fleet import Target, run_sha256
from marin_rl.storage.runs import Run, round_name, round_of
from marin_rl.storage.stores.local import check_way

Save = Callable[[Path], None]

# Versions whose adapters stay at the endpoints: this round's, and the one before, on which
# requests of other workers may still run.
ADAPTERS_KEPT = 2
LOOK_S = 1.0  # between two looks at endpoints that are away

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Endpoints that serve a policy, its model id there, and the folder they were sent, if any."""

    endpoints: tuple[str, ...]
    model: str
    weights: str | None = None


def publish(
    run: Run,
    version: int,
    digest: str,
    tokenizer: tuple[str, str],
    save: Save,
    saved: str | None = None,
    *,
    session: str,
) -> Published:
    """Make every endpoint of a run serve these parameters.

    `tokenizer` are its digest and that of its chat template; `save` writes the parameters as a
    Hugging Face folder, with `publish: lora_adapter` as a PEFT folder. `saved` is the digest of the
    parameters in that folder where it is not that of the policy. `session` is a random text of
    this start of the trainer (`schemas.fleet.TargetRecord`). Without `inference.publish`, endpoints
    must serve the model already. Raises StalePolicy where they do not, FleetEmpty where
    there are none, ConfigError without a shared folder, and what the client raises.
    """
    inference = run.config.inference
    source = EndpointSource.of(run.config, *tokenizer, version)
    if inference.pulled:
        return _pulled(run, version, digest, source, session)
    endpoints, folder = _named(source, inference.fleet_timeout_s), None
    if inference.publish == "lora_adapter":
        model = asyncio.run(_load_adapter(run, endpoints, version, digest, save))
        return Published(endpoints=endpoints, model=model)
    if inference.publish == "update_weights_from_disk" or inference.publish == "vllm_reload":
        folder = str(_exported(run, version, digest, save, _is_complete))
        weights = Publisher(kind=inference.publish, folder=folder, version=version, digest=digest)
        again = run.config.recompute_kv_cache
        weights = replace(weights, saved=saved, recompute_kv_cache=again)
        endpoints = asyncio.run(_send(inference, endpoints, weights))
    model = asyncio.run(_model_id(inference, endpoints, version, digest))
    return Published(endpoints=endpoints, model=model, weights=folder)


def unpublish(run: Run) -> None:
    """Let servers that follow the run go on to its newest checkpoint. Raises StorageError."""
    if run.config.inference.pulled:
        board_of(run.config.inference, run.folder).release()


def _pulled(run: Run, version: int, digest: str, source: EndpointSource, session: str) -> Published:
    """Have followers serve a checkpoint, and wait until one does. Raises FleetEmpty."""
    inference = run.config.inference
    board_of(inference, run.folder).aim(
        Target(
            run_sha256=run_sha256(run.folder),
            version=version,
            # No trainer at work is further ahead: its round is sampled before later ones end.
            through=version + run.config.max_staleness + 1,
            parameters_digest=digest,
            session=session,
        )
    )
    model = served_model_id(inference.model, version, digest)
    endpoints = asyncio.run(_ready(inference, source, model))
    return Published(endpoints=endpoints, model=model)


async def _ready(inference: InferenceConfig, source: EndpointSource, model: str) -> tuple[str, ...]:
    """URLs of the endpoints that serve a model, once there are some. Raises FleetEmpty."""
    async with PolicyClient(
        source=source,
        fleet=FleetOptions(timeout_s=inference.fleet_timeout_s),
        model=model,
        api_key=os.environ.get(inference.api_key_variable),
        timeout_s=inference.request_timeout_s,
    ) as client:
        return tuple(await client.wait_until_ready())


def _named(source: EndpointSource, timeout_s: float) -> tuple[str, ...]:
    """URLs that a source names, once there are some. Raises FleetEmpty."""
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
        time.sleep(LOOK_S)


def _exported(
    run: Run, version: int, digest: str, save: Save, is_complete: Callable[[Path], bool]
) -> Path:
    """The folder with the parameters; all but the newest of the older ones are removed."""
    folder = _exports(run) / f"{round_name(version)}-{digest[:16]}"
    if not is_complete(folder):
        # hidden until it is complete, and of this process alone
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        save(partial)
        _give_name(partial, folder, is_complete)
    names = sorted(path.name for path in folder.parent.iterdir())
    older = [name for name in names if not name.startswith(".") and name < folder.name]
    # of processes that ended amid an older version: of this one another may be at work
    cut_short = [name for name in names if name.startswith(".") and name[1:] < folder.name]
    for name in (*older[:-1], *cut_short):  # an endpoint may still be reading the last one
        with suppress(FileNotFoundError):  # another process removes them too
            shutil.rmtree(folder.with_name(name))
    return folder


def _give_name(partial: Path, folder: Path, is_complete: Callable[[Path], bool]) -> None:
    """Rename a complete export to `folder`, unless another process was first."""
    try:
        partial.rename(folder)  # fails where there is a folder with anything in it
        return
    except OSError:
        if not folder.exists():
            raise
    # endpoints may read it by now
    if is_complete(folder):
        shutil.rmtree(partial)
        return
    # cut short by someone: the new one takes its place in two renames
    old = partial.with_suffix(".old")
    folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _exports(run: Run) -> Path:
    if run.config.inference.publish_root is not None:
        return Path(run.config.inference.publish_root, run.run_id)
    local = run.store.local_path("exports")
    if local is None:
        raise ConfigError(
            f"inference.publish needs a folder that the endpoints can read, and {run.store.url} is "
            "an object store: set inference.publish_root to a shared folder"
        )
    check_way(local / "below", "exports/below")
    return local.resolve()


async def _load_adapter(
    run: Run, endpoints: Sequence[str], version: int, digest: str, save: Save
) -> str:
    """Unload what no request needs any more, then load this version under a name of its own."""
    inference = run.config.inference
    name = served_model_id(inference.model, version, digest)
    old = _adapters_before(run, version)
    async with _client(inference, endpoints, inference.model) as client:
        # first, so that there is room; only names of this run, for others may share the endpoints
        await unload_adapters(client, old)
        adapter = NewAdapter(
            name=name,
            folder=str(_exported(run, version, digest, save, Path.exists)),
            weight_version=version,
            parameters_digest=digest,
        )
        return await load_adapter(client, adapter, inference.model)


def _adapters_before(run: Run, version: int) -> list[str]:
    """Names of the adapters that this run has exported, but for the last ones."""
    folders = [path.name for path in _exports(run).glob("round-*-*") if path.is_dir()]
    parts = [name.rpartition("-") for name in folders]
    versions = [(round_of(name), digest) for name, _, digest in parts]
    return [
        served_model_id(run.config.inference.model, other, digest)
        for other, digest in versions
        if other is not None and other + ADAPTERS_KEPT <= version
    ]


def _is_complete(folder: Path) -> bool:
    try:
        check_complete(folder)
    except InputError:
        return False
    return True


async def _send(
    inference: InferenceConfig, endpoints: Sequence[str], weights: Publisher
) -> tuple[str, ...]:
    """URLs of the endpoints that have loaded the weights: all, or of vLLM those that are not lost.

    Where all are, one that is restarted is waited for. Raises FleetEmpty where none is in time, and
    what loading raises.
    """
    deadline, known = time.monotonic() + inference.fleet_timeout_s, set[str]()
    while True:
        lost = await _lost(inference, endpoints, weights)
        for url, error in lost.items():
            if url not in known:
                _log.warning("endpoint %s is lost: %s", url, error)
        known.update(lost)
        if len(lost) < len(endpoints):
            return tuple(url for url in endpoints if url not in lost)
        if time.monotonic() > deadline:
            shown = "; ".join(f"{url}: {error}" for url, error in lost.items())
            raise FleetEmpty(
                f"no endpoint took the weights for {inference.fleet_timeout_s:g} s "
                f"(inference.fleet_timeout_s): {shown}. Restart the servers and run again: nothing "
                "is lost"
            )
        await asyncio.sleep(LOOK_S)


async def _lost(
    inference: InferenceConfig, endpoints: Sequence[str], weights: Publisher
) -> dict[str, EndpointUnavailable]:
    """Have endpoints load weights; of vLLM those that are lost. Raises what loading raises."""
    async with _client(inference, endpoints, inference.model) as client:
        calls = (client.publish(weights, url) for url in endpoints)
        # all end before one is raised: none goes on with a client that is closed
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    lost: dict[str, EndpointUnavailable] = {}
    for url, outcome in zip(endpoints, outcomes, strict=True):
        if isinstance(outcome, EndpointUnavailable) and weights.kind == "vllm_reload":
            lost[url] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
    return lost


async def _model_id(
    inference: InferenceConfig, endpoints: Sequence[str], version: int, digest: str
) -> str:
    """The model id with its version where the endpoints have versions, else the plain name.

    An endpoint that names another version did not load these weights; but for vLLM, which was asked
    for the version of its weights, and whose other names are adapters of other runs.
    """
    exact = served_model_id(inference.model, version, digest)
    async with _client(inference, endpoints, exact) as client:
        served = await client.models_of_each()
    common = set.intersection(*served.values())
    others = {
        url: sorted(name for name in names if is_version_of(name, inference.model))
        for url, names in served.items()
        if exact not in names
    }
    if exact in common:
        return exact
    if inference.model in common and (
        inference.publish == "vllm_reload" or not any(others.values())
    ):
        return inference.model
    serving = "; ".join(
        f"{', '.join(other or sorted(served[url])) or 'no model'} at {url}"
        for url, other in others.items()
    )
    raise StalePolicy(
        f"expected {exact} (parameters {digest[:16]}) or {inference.model} at every endpoint, "
        f"found {serving}: load the checkpoint there, or set inference.publish"
    )


def _client(inference: InferenceConfig, endpoints: Sequence[str], model: str) -> PolicyClient:
    return PolicyClient(
        endpoints=endpoints,
        model=model,
        api_key=os.environ.get(inference.api_key_variable),
        admin_key=os.environ.get(inference.server.admin_key_variable),
        timeout_s=inference.request_timeout_s,
        attempts_max=inference.request_attempts_max,
        in_flight_max=len(endpoints),
    )
