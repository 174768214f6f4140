"""Adapters at remote endpoints: loading one under a name of its own, and unloading old ones.

Owns the two dialects, vLLM's (`/v1/load_lora_adapter`) and SGLang's (`/load_lora_adapter`), which
differ in the routes and in how a request names an adapter. Leaves out files (`endpoints`) and the
proof that an endpoint samples with the adapter (`canary`).
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marin_rl.errors import BadResponse, InferenceError, InputError, NoSuchRoute, RequestRejected
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import (
    LOAD_ADAPTER_ROUTE,
    SGLANG_LOAD_ADAPTER_ROUTE,
    SGLANG_UNLOAD_ADAPTER_ROUTE,
    UNLOAD_ADAPTER_ROUTE,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAdapter:
    """A PEFT folder that endpoints can read, the name to serve it under, and its identity."""

    name: str
    folder: str
    weight_version: int
    parameters_digest: str


async def load_adapter(client: PolicyClient, adapter: NewAdapter, base: str) -> str:
    """Have every endpoint serve an adapter; the model id that requests name it by.

    Names are never used twice: an endpoint that has this one has this adapter. Raises InputError
    where an endpoint cannot load adapters or refuses this one, StalePolicy where it would serve
    another policy than promised, and what the client raises.
    """
    # first, for what an earlier attempt loaded: see `_load`
    served = await client.models_of_each()
    ids = await asyncio.gather(
        *(
            _load(client, url, adapter, base, loaded=adapter.name in names)
            for url, names in served.items()
        )
    )
    # a request names one id, and may go to any of them
    if len(set(ids)) > 1:
        raise BadResponse(
            f"endpoints name the adapter differently ({', '.join(sorted(set(ids)))}): list servers "
            "of one kind in inference.endpoints"
        )
    return ids[0]


async def unload_adapters(client: PolicyClient, names: Sequence[str]) -> None:
    """Have every endpoint unload what it serves of these names.

    One that refuses keeps them: the round goes on, and its log says so.
    """
    for url, known in (await client.models_of_each()).items():
        for name in sorted(known.intersection(names)):
            try:
                await _unload(client, url, name)
            except InferenceError as error:
                _log.warning("%s keeps the adapter %s: %s", url, name, error)


async def _load(
    client: PolicyClient, url: str, adapter: NewAdapter, base: str, *, loaded: bool
) -> str:
    """Load at one endpoint, by vLLM's route, else by SGLang's; the model id there."""
    body: dict[str, Any] = {"lora_name": adapter.name, "lora_path": adapter.folder}
    # for servers that verify it (ours); vLLM ignores it
    promise = {
        "weight_version": str(adapter.weight_version),
        "parameters_digest": adapter.parameters_digest,
    }
    answers: list[str] = []
    for route, fields, model in (
        (LOAD_ADAPTER_ROUTE, body | promise, adapter.name),
        (SGLANG_LOAD_ADAPTER_ROUTE, body, f"{base}:{adapter.name}"),
    ):
        try:
            await client.post_as_admin(url, route, fields)
        # before RequestRejected, of which it is one
        except NoSuchRoute as error:
            answers.append(str(error))
            continue
        except RequestRejected as error:
            # the answer to an earlier attempt was lost: the name is there, and stands for this one
            if not loaded:
                raise InputError(f"{url} refuses the adapter {adapter.name}: {error}") from error
        return model
    raise InputError(
        f"{url} cannot load {adapter.folder}: start vLLM with --enable-lora and "
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, SGLang with --enable-lora, marin-rl serve with "
        f"inference.engine.adapters_max, where that folder can be read; it answered: {answers[0]}"
    )


async def _unload(client: PolicyClient, url: str, name: str) -> None:
    try:
        await client.post_as_admin(url, UNLOAD_ADAPTER_ROUTE, {"lora_name": name})
    except NoSuchRoute:
        await client.post_as_admin(url, SGLANG_UNLOAD_ADAPTER_ROUTE, {"lora_name": name})
