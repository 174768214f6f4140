"""Inference: the embedded engine, the servers we run, remote endpoints.

With the limits that a server sets for its callers. Leaves out what is sampled (sampling.py).
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from marin_rl.config.section import (
    Count,
    OneOrMany,
    Seconds,
    Section,
    field,
    optional_field,
    runtime_field,
)

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]")
KEY_VARIABLE = re.compile(r"MARIN_RL_[A-Z0-9_]+")
_ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.]{2,45}\])(:\d{1,5})?")


def _key_variable(name: str) -> str:
    """Require MARIN_RL_*: a file of somebody else must not choose which secret is sent out."""
    if not KEY_VARIABLE.fullmatch(name):
        raise ValueError(
            "expected the name of an environment variable that begins with MARIN_RL_; another one "
            "is named on the command line alone, by --api-key-variable or --admin-key-variable"
        )
    return name


KeyVariable = Annotated[str, AfterValidator(_key_variable)]

REGISTERED = "registered"
_LABEL = r"[A-Za-z0-9_.-]{1,63}=[A-Za-z0-9_.:-]{1,63}"
_LABEL_WORD = re.compile(_LABEL)
_PLACE = re.compile(rf"((dns:http|https?)://[^\s]+|file:[^\s].*?)( {_LABEL})*")


def _endpoint_entry(entry: str) -> str:
    if entry != REGISTERED and not _PLACE.fullmatch(entry):
        raise ValueError(
            f"expected http(s)://HOST/v1, dns:http://NAME:PORT/v1 or file:PATH, with labels like "
            f"zone=eu after a space, or {REGISTERED}; found {entry!r:.200}"
        )
    return entry


def split_labels(entry: str) -> tuple[str, dict[str, str]]:
    """The place of an entry, and the labels after it."""
    words = entry.split(" ")
    labels: dict[str, str] = {}
    while len(words) > 1 and _LABEL_WORD.fullmatch(words[-1]):
        name, _, value = words.pop().partition("=")
        labels[name] = value
    return " ".join(words), labels


PublishedBy = Literal["none", "pull", "update_weights_from_disk", "vllm_reload", "lora_adapter"]
EndpointEntry = Annotated[str, AfterValidator(_endpoint_entry)]


class EngineConfig(Section):
    """The embedded engine: fixed slots, decoded in chunks."""

    slots: Count = field(128, "sequences decoded in parallel", le=65536)
    chunk_steps: Count = field(
        16, "decode steps per device call; waiting requests are scheduled between calls", le=4096
    )
    prefill_rows: Count = field(16, "prompts prefilled in one call", le=65536)
    lanes: int = runtime_field(
        0,
        "parts into which the slots are divided and decoded in parallel; 0: with a small model "
        "on a CPU one per thread of XLA's pool, else one",
        ge=0,
        le=1024,
    )
    prefix_cache: bool | None = optional_field(
        "keep the KV cache of finished sequences until their slots are needed, and continue "
        "dialogues from it; prompts are then computed as if decoded, with other last bits than "
        "without; null: as the run began, and true for new runs whose environment has several "
        "turns, with a context of at least 512 tokens and at least 64 slots",
        as_begun=True,
    )
    adapters_max: int | None = optional_field(
        "adapters (LoRA) that are loaded at the same time, each sequence with its own or with "
        "none; up to adapters_max * adapter_rank_max = 64 all of them are applied at every step, "
        "beyond each sequence reads its own; null: 0, or what the run or the command line needs",
        ge=0,
        le=1024,
    )
    adapter_rank_max: int | None = optional_field(
        "largest rank of an adapter that is loaded; null: 16, or what the run or the command "
        "line needs",
        ge=1,
        le=1024,
    )


class ServerConfig(Section):
    """Access to a server that we run: callers, limits, timeouts."""

    admin_key_variable: KeyVariable = runtime_field(
        "MARIN_RL_ADMIN_KEY",
        "environment variable, MARIN_RL_*, that holds the bearer token of the admin routes",
    )
    hosts_allowed: tuple[str, ...] = runtime_field(
        (), "Further host names that are answered; '*.example.org' for all below it", max_length=256
    )
    origins_allowed: tuple[str, ...] = runtime_field(
        (),
        "web origins that browsers may call from (CORS), like https://app.example.org",
        max_length=256,
    )
    update_roots: tuple[str, ...] = runtime_field(
        (),
        "folders and URLs below which admins may load weights, in addition to the root of the "
        "run, or the folder above the model, that is served",
        max_length=256,
    )
    body_bytes_max: Count = runtime_field(
        16 * 2**20, "bytes of a request's body; beyond: 413", le=2**30
    )
    bodies_bytes_max: Count = runtime_field(
        256 * 2**20,
        "bytes of all bodies that are read or wait to be parsed, 64 KiB of each not counted; at "
        "least body_bytes_max; beyond: 503",
        le=2**36,
    )
    prompt_tokens_max: int | None = runtime_field(
        None, "largest number of tokens of a prompt; null: the context length", ge=1
    )
    new_tokens_max: int | None = runtime_field(
        None, "largest number of new tokens per completion; null: the rest of the context", ge=1
    )
    samples_max: Count = runtime_field(4096, "largest n of a request", le=2**20)
    prompts_max: Count = runtime_field(1024, "largest number of prompts of a request", le=2**20)
    samples_queued_max: Count = runtime_field(
        65536, "samples that wait for a slot; beyond: 503", le=2**24
    )
    connections_max: Count = runtime_field(
        2048, "open connections; requests on further ones: 503", le=65536
    )
    requests_per_second: float | None = runtime_field(
        None,
        "sustained requests per second of one bearer token; beyond: 429; null: no limit",
        gt=0,
        le=1e6,
    )
    requests_burst: int | None = runtime_field(
        None,
        "requests that one bearer token may send at once after a pause; null: those of one "
        "second, at least 1",
        ge=1,
        le=1_000_000,
    )
    queue_timeout_s: Seconds = runtime_field(
        600.0, "seconds until a request's first slot; beyond: 503"
    )
    request_timeout_s: Seconds = runtime_field(3600.0, "seconds for a whole answer; beyond: 504")
    drain_timeout_s: Seconds = runtime_field(
        30.0, "seconds for running requests to finish after SIGTERM"
    )
    access_log: bool = runtime_field(
        True, "one JSON line a request on stderr, if `marin-rl serve` runs it"
    )
    log_prompts: bool = runtime_field(
        False, "write request bodies to the access log, for debugging"
    )

    @model_validator(mode="after")
    def _each_key_has_a_meaning(self) -> "ServerConfig":
        if self.requests_burst is not None and self.requests_per_second is None:
            raise ValueError("requests_burst: expected with requests_per_second only")
        for name in self.hosts_allowed:
            if not _HOST.fullmatch(name):
                raise ValueError(f"hosts_allowed: expected a host name without a port: {name!r}")
        for origin in self.origins_allowed:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"origins_allowed: expected scheme://host[:port], found {origin!r}"
                )
        return self


class InferenceConfig(Section):
    """Source of completions: the embedded server, or remote OpenAI-compatible endpoints."""

    endpoints: Annotated[tuple[EndpointEntry, ...], OneOrMany] = runtime_field(
        (),
        "servers to sample from, a list or one of: base URLs ending in /v1; "
        "dns:http://NAME:PORT/v1 for every address of a name; file:PATH for such entries by "
        "line; registered for those that announce themselves next to the run; labels follow a "
        "space (zone=eu); empty: serve from this process",
    )
    zone: str | None = optional_field(
        "endpoints with this label zone are asked first, others while those are full; null: all "
        "alike",
        runtime_only=True,
        pattern=r"^[A-Za-z0-9_.:-]{1,63}$",
    )
    fleet_timeout_s: Seconds = runtime_field(
        300.0, "seconds that sampling waits while no endpoint serves the round's policy"
    )
    host: str | None = optional_field(
        "address of the server of this process; others than loopback need the token of "
        "api_key_variable; null: 127.0.0.1",
        runtime_only=True,
    )
    port: int | None = optional_field(
        "port of the server of this process, for others that sample from it; null: a free one",
        runtime_only=True,
        ge=1,
        lt=2**16,
    )
    model: str = field("policy", "name the policy is served under")
    api_key_variable: KeyVariable = runtime_field(
        "MARIN_RL_API_KEY", "environment variable, MARIN_RL_*, that holds the bearer token"
    )
    publish: PublishedBy = runtime_field(
        "none",
        "how remote endpoints receive new weights: not at all; pull: by following the run "
        "themselves (marin-rl serve --follow); by SGLang's route update_weights_from_disk; by "
        "vLLM's routes of its development mode (vllm_reload); or the adapter alone, of a run "
        "that trains one, by vLLM's route load_lora_adapter or SGLang's",
    )
    publish_root: str | None = runtime_field(
        None, "folder that this process and the endpoints share; null: the run's exports/"
    )
    route: Literal["chat", "sglang", "vllm_generate"] | None = optional_field(
        "how endpoints are asked: by OpenAI's chat routes with token ids, as vLLM and marin-rl "
        "have them, by SGLang's /generate, or by /inference/v1/generate (vllm_generate), which "
        "vLLM 0.32 has with --enable-scale-out and whose answers name the weights of each token; "
        "null: chat",
        runtime_only=True,
    )
    requests_in_flight_max: Count = runtime_field(64, "concurrent requests of one shard", le=65536)
    turns_per_request: Count | None = runtime_field(
        None,
        "further turns of different episodes that one request asks for, at most, each with its "
        "own seed; the answer comes when the longest is done, so it is for short turns; with "
        "marin-rl's own server; null: 1",
        le=65536,
    )
    request_timeout_s: Seconds = runtime_field(600.0, "seconds for one completion request")
    request_attempts_max: Count = runtime_field(5, "tries per request, with back-off", le=100)
    canary_tolerance: float | None = runtime_field(
        None,
        "largest accepted mean |engine - trainer| of a canary's log-probabilities, in nats; "
        "null: 0.001 if policy.compute_dtype is float32, 0.1 if it is bfloat16",
        gt=0,
        le=10,
    )
    serve_merged: bool | None = optional_field(
        "how a server of ours serves a policy with an adapter: true, as whole weights W + scale "
        "B A; false, as the base and the adapter next to it, which differs in the last bits and "
        "swaps faster; null: as the run began, and for new runs whose servers follow them "
        "(publish: pull) false, or true with asynchrony.in_flight_updates; else true; marin-rl "
        "serve RUN --follow without --register serves each version under a name of its own "
        "unless it is true",
        as_begun=True,
    )
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _weights_reach_the_endpoints(self) -> "InferenceConfig":
        if self.route == "sglang" and self.publish == "lora_adapter":
            raise ValueError(
                "route: sglang samples from the base model alone; expected the chat route with "
                "publish: lora_adapter"
            )
        if self.route == "vllm_generate" and self.publish == "lora_adapter":
            raise ValueError(
                "route: vllm_generate names the weights of each token by the label of whole "
                "weights, which adapters have none of; expected the chat route with "
                "publish: lora_adapter"
            )
        if REGISTERED in self.endpoints and not self.pulled:
            raise ValueError(
                f"publish is {self.publish}, but endpoints has registered: such servers take each "
                "checkpoint by themselves; expected pull"
            )
        if self.pulled and not self.endpoints:
            raise ValueError("publish is pull, but endpoints is empty: expected registered or URLs")
        return self

    @property
    def pulled(self) -> bool:
        return self.publish == "pull"

    @property
    def has_fleet(self) -> bool:
        """True where endpoints are looked up and proven all along, not once for each round.

        A plain list of URLs is no fleet. Adapters, and SGLang's own route, are asked for in ways
        that a fleet's client does not know.
        """
        if not self.endpoints or self.publish == "lora_adapter" or self.route == "sglang":
            return False
        return not self.is_listed or self.publish in ("pull", "vllm_reload")

    @property
    def is_listed(self) -> bool:
        return all(entry.startswith("http") and " " not in entry for entry in self.endpoints)
