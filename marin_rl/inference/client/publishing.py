"""Sending weights to a server that loads them from a folder: vLLM's routes, and SGLang's.

One `Publisher` is one set of weights; it is given to endpoints one by one, also to those that come
back in the middle of a round with whatever they were started on. Leaves out how a request is sent
(`policy_client`) and how the folder is made (`inference.endpoints`).

vLLM (0.32, VLLM_SERVER_DEV_MODE=1) has no route that loads and checks in one: requests are paused,
the weights are read, what the prefix cache computed with the old ones is dropped, the version is
set, and requests go on. A reload that fails half way leaves it without weights, and the next
request would end its engine, so such a server is lost: it stays paused until it is restarted.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from marin_rl.errors import EndpointUnavailable, InputError, RequestRejected, StalePolicy
from marin_rl.inference.client.protocol import UPDATE_WEIGHTS_ROUTE, label_of
from schemas.strict_json import parse_json

Send = Callable[[str, str, dict[str, Any] | None], Awaitable[bytes]]  # method, path, body


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Weights in a Hugging Face folder that endpoints can read, and the way to have them loaded.

    `digest` identifies the policy; `saved` is that of the folder's parameters where it is another,
    as where an adapter is merged into its base.
    """

    kind: Literal["vllm_reload", "update_weights_from_disk"]
    folder: str
    version: int
    digest: str
    saved: str | None = None
    recompute_kv_cache: bool = False  # of what is under way; by our servers

    @property
    def label(self) -> str:
        """The version that vLLM is given: round and digest, as in a served id."""
        return label_of(self.version, self.digest)

    async def publish(self, send: Send) -> None:
        """Have one endpoint serve the weights; `send` takes paths from its root.

        Raises InputError for a folder that is not complete, before vLLM is sent anything;
        EndpointUnavailable for a server that is lost, StalePolicy, and what `send` raises.
        """
        if self.kind == "vllm_reload":
            check_complete(Path(self.folder))
            await self._reload(send)
        else:
            await self._update(send)

    async def check(self, send: Send) -> None:
        """Raise StalePolicy where the endpoint says that it serves other weights."""
        if self.kind != "vllm_reload":
            return
        version = _field(await send("GET", "/weight_info", None), "weight_version")
        if version != self.label:
            raise StalePolicy(f"serves weights {version!r}, not {self.label!r}: it was restarted")

    async def _reload(self, send: Send) -> None:
        await send("POST", "/pause?mode=keep", None)
        body = {"method": "reload_weights", "kwargs": {"weights_path": self.folder}}
        try:
            await send("POST", "/collective_rpc", body)
        except EndpointUnavailable as error:
            raise EndpointUnavailable(
                f"the reload of {self.folder} failed ({error}), and the server has no weights now: "
                "restart it, it is sent them again"
            ) from None
        # Requests run on over the pause: without the flag the cache would be left as it is.
        await send("POST", "/reset_prefix_cache?reset_running_requests=true", None)
        # Before `resume`: the first token of the new weights is to have their label.
        await send("POST", "/update_weight_version", {"new_version": self.label})
        await send("POST", "/resume", None)
        # One that was restarted in between has other weights, and answered the rest all the same.
        await self.check(send)

    async def _update(self, send: Send) -> None:
        """SGLang's route, and ours; the digest is for ours, which verifies it."""
        body: dict[str, Any] = {
            "model_path": self.folder,
            "weight_version": str(self.version),
            "parameters_digest": self.saved or self.digest,
        }
        if self.saved is not None:
            body["policy_digest"] = self.digest
        if self.recompute_kv_cache:
            body["recompute_kv_cache"] = True
        if not await _is_sglang(send):  # ours switches between two chunks, without a pause
            await send("POST", UPDATE_WEIGHTS_ROUTE, body)
            return
        body = {key: body[key] for key in ("model_path", "weight_version")}
        # Running requests go back to the queue, and are prefilled again with the new weights.
        await send("POST", "/pause_generation", {"mode": "retract"})
        try:
            done = await send("POST", UPDATE_WEIGHTS_ROUTE, {**body, "flush_cache": True})
        finally:
            # Also after a failure, or the server would stay paused.
            await send("POST", "/continue_generation", {})
        if _field(done, "success") is False:
            raise StalePolicy(f"did not load {self.folder}: {_field(done, 'message')}")


async def _is_sglang(send: Send) -> bool:
    try:
        models = parse_json(await send("GET", "/v1/models", None))["data"]
        return any(isinstance(m, dict) and m.get("owned_by") == "sglang" for m in models)
    except (RequestRejected, ValueError, KeyError, TypeError):
        return False


def _field(data: bytes, name: str) -> object:
    try:
        return parse_json(data).get(name)
    except (ValueError, AttributeError):
        return None


def check_complete(folder: Path) -> None:
    """Raise InputError unless a folder has settings, a tokenizer and every byte of its weights."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InputError(f"{folder} is not complete: it has no {name}; nothing was sent")
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    for path in (folder / name for name in names):
        try:
            # compares the size with what the header says, and reads no tensor
            with safe_open(str(path), framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} is not complete ({error}); nothing was sent") from None
