"""Remote endpoints: sending them a checkpoint's weights, and the model id that they then serve.

The weights travel as a Hugging Face folder on a file system that trainer and endpoints share, and
each endpoint loads it on request. Of an adapter run only the adapter travels, as a PEFT folder,
under a name for each version: prefix caches of servers are keyed by it. The canary proves that the
endpoint samples with them.
"""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from marin_rl.config import InferenceConfig
from marin_rl.errors import ConfigError, StalePolicy
from marin_rl.inference.client.adapters import NewAdapter, load_adapter, unload_adapters
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import parse_served_model_id, served_model_id
from marin_rl.storage.runs import Run, round_name, round_of
from marin_rl.storage.stores.local import check_way

Save = Callable[[Path], None]

# Versions whose adapters stay at the endpoints: this round's, and the one before, on which
# requests of other workers may still run.
ADAPTERS_KEPT = 2


def publish(run: Run, version: int, digest: str, save: Save) -> str:
    """Make every endpoint of a run serve these parameters; the model id they answer to.

    `save` writes them as a Hugging Face folder, with `publish: lora_adapter` as a PEFT folder.
    Without `inference.publish`, endpoints must serve the model already. Raises StalePolicy where
    they do not, ConfigError without a shared folder, and what the client raises.
    """
    inference = run.config.inference
    if inference.publish == "lora_adapter":
        return asyncio.run(_load_adapter(run, version, digest, save))
    if inference.publish == "update_weights_from_disk":
        folder = _exported(run, version, digest, save)
        asyncio.run(_update(inference, folder, version, digest))
    return asyncio.run(_model_id(inference, version, digest))


def _exported(run: Run, version: int, digest: str, save: Save) -> Path:
    """The folder with the parameters; all but the newest of the older ones are removed."""
    folder = _exports(run) / f"{round_name(version)}-{digest[:16]}"
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        save(partial)
        partial.rename(folder)
    older = sorted(path for path in folder.parent.iterdir() if path.name < folder.name)
    for path in older[:-1]:  # an endpoint may still be reading the last one
        shutil.rmtree(path)
    return folder


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


async def _load_adapter(run: Run, version: int, digest: str, save: Save) -> str:
    """Unload what no request needs any more, then load this version under a name of its own."""
    inference = run.config.inference
    name = served_model_id(inference.model, version, digest)
    old = _adapters_before(run, version)
    async with _client(inference, inference.model) as client:
        # first, so that there is room; only names of this run, for others may share the endpoints
        await unload_adapters(client, old)
        adapter = NewAdapter(
            name=name,
            folder=str(_exported(run, version, digest, save)),
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


async def _update(inference: InferenceConfig, folder: Path, version: int, digest: str) -> None:
    async with _client(inference, inference.model) as client:
        await client.update_weights(str(folder), version, digest)


async def _model_id(inference: InferenceConfig, version: int, digest: str) -> str:
    """The model id with its version where the endpoints have versions, else the plain name.

    An endpoint that names another version did not load these weights.
    """
    exact = served_model_id(inference.model, version, digest)
    async with _client(inference, exact) as client:
        served = await client.models_of_each()
    common = set.intersection(*served.values())
    others = {
        url: sorted(name for name in names if _speaks_of_versions(name, inference.model))
        for url, names in served.items()
        if exact not in names
    }
    if exact in common:
        return exact
    if inference.model in common and not any(others.values()):
        return inference.model
    serving = "; ".join(
        f"{', '.join(other or sorted(served[url])) or 'no model'} at {url}"
        for url, other in others.items()
    )
    raise StalePolicy(
        f"expected {exact} (parameters {digest[:16]}) or {inference.model} at every endpoint, "
        f"found {serving}: load the checkpoint there, or set inference.publish"
    )


def _speaks_of_versions(name: str, model: str) -> bool:
    parsed = parse_served_model_id(name)
    return parsed is not None and parsed.name == model


def _client(inference: InferenceConfig, model: str) -> PolicyClient:
    return PolicyClient(
        endpoints=inference.endpoints,
        model=model,
        api_key=os.environ.get(inference.api_key_variable),
        admin_key=os.environ.get(inference.server.admin_key_variable),
        timeout_s=inference.request_timeout_s,
        attempts_max=inference.request_attempts_max,
        in_flight_max=len(inference.endpoints),
    )
