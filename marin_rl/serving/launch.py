"""Launch a server: until a signal (`marin-rl serve`), or in this process for one task.

The first is behind `marin-rl serve`; `serve_folder` and its like serve a model for work outside a
run's rounds, where no trainer has the weights and so no canary can compare. What is served first
goes the way of every later update: read whole, verified, and rehearsed before the port opens.
Inside a run the server lives in the flow's process instead and takes the trainer's arrays (see
`marin_rl.runtime`).
"""

import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from marin_rl.compilation import enable_compilation_cache, keep_freed_memory
from marin_rl.config import Config, InferenceConfig, PolicyConfig
from marin_rl.devices import start_devices
from marin_rl.errors import ConfigError
from marin_rl.inference.client.fleet_sources import board_of
from marin_rl.lora.adapter import Adapter
from marin_rl.lora.peft import read_peft
from marin_rl.machine import give_back_freed_memory
from marin_rl.models.module import LanguageModel
from marin_rl.planning import CONTEXT_TOKENS_MAX, within_memory
from marin_rl.serving.server import PolicyServer, Report, serve_forever
from marin_rl.serving.weights.adapters import (
    ServedAdapters,
    adapter_checkpoints,
    read_base_of,
    version_of,
    with_adapters_room,
)
from marin_rl.serving.weights.canary import canary_ids, rehearse
from marin_rl.serving.weights.checkpoint_loader import (
    Loaded,
    read_checkpoint,
    read_folder,
    with_update_root,
)
from marin_rl.serving.weights.following import (
    POLL_S,
    Announcement,
    CheckpointWatcher,
    Registration,
    Take,
    whole_checkpoints,
)
from marin_rl.storage.fleet import FleetBoard
from marin_rl.storage.runs import Run, checkpoint_at, latest_checkpoint
from marin_rl.tokenizers import TokenizerIdentity, add_ends, template_ends, tokenizer_for
from marin_rl.training.hf_weights import begin_reading
from marin_rl.training.model import parameter_shapes
from marin_rl.types import ServedPolicy, SlotRef

# Adapters that a server which is given some has room for, and the step of their rank: rows of the
# bank are then whole vectors of the processor.
ADAPTERS_ROOM, RANK_STEP = 4, 8

NO_ADAPTERS: Mapping[str, Any] = MappingProxyType({})


def serve_checkpoint(  # noqa: PLR0913 - each is an option that people type
    root: str,
    run_id: str,
    round: int | None,
    host: str,
    port: int,
    *,
    config: Config | None = None,
    adapters: Mapping[str, Path] = NO_ADAPTERS,
    follow: bool = False,
    poll_s: float | int = POLL_S,
    register: Announcement | None = None,
    report: Report | None = None,
) -> int:
    """Serve a committed checkpoint of a run (default: the latest); the process's exit code.

    Of `config` the section `inference` counts, else the run's own. `adapters` are PEFT folders by
    name. With `follow`, every later checkpoint takes the place of the one before as it is
    committed, or as the run's trainer asks for it, which it cannot while adapters are loaded on it;
    see `_apart` for checkpoints of an adapter. `register` announces the server to the trainer.
    Raises ObjectMissing, what `read_slot` raises, InferenceError where the engine decodes something
    else than was trained, and ConfigError for the address.
    """
    enable_compilation_cache()
    run = Run.open(root, run_id)
    start_devices(run.config.policy.compute_dtype)
    keep_freed_memory()
    # a fleet may be started before its trainer
    if register is not None and latest_checkpoint(run) is None:
        _announce(f"waiting for the first checkpoint of {run.folder.url}")
        while latest_checkpoint(run) is None:
            time.sleep(poll_s)
    which = "the latest checkpoint" if round is None else f"checkpoint {round}"
    _announce(f"loading {which} of {run.folder.url}")
    inference = run.config.inference if config is None else config.inference
    settings = run.config.model_copy(update={"inference": with_update_root(inference, root)})
    board = board_of(inference, run.folder) if follow else None
    registered = register is not None
    follower = proven_follower(run, settings, round, adapters, board, registered=registered)
    with ExitStack() as stack:
        answer = None
        if register is not None:
            engine = follower.server.engine
            registration = Registration(run, settings, engine, register, adapters=follower.adapters)
            stack.callback(registration.stop)
            report, answer = _registered(registration, report), registration.answer
        if follow:
            take, first = follower.take, follower.round
            stack.enter_context(
                CheckpointWatcher(take, run, first, board=board, answer=answer, poll_s=poll_s)
            )
        return serve_forever(follower.server, host, port, announce=_announce, report=report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """A server of a run's checkpoint `round`, not started yet, and the way to its other ones.

    With `adapters` it serves the versions of an adapter next to their base.
    """

    server: PolicyServer
    take: Take
    round: int
    adapters: ServedAdapters | None = None


def proven_follower(
    run: Run,
    settings: Config,
    round: int | None,
    adapters: Mapping[str, Path] = NO_ADAPTERS,
    board: FleetBoard | None = None,
    *,
    registered: bool = False,
) -> Follower:
    """A server of a checkpoint of a run (None: the latest), proven first.

    `board` is that of the run which is followed; without one the checkpoint stays. Raises as
    `serve_checkpoint` does.
    """
    apart = board is not None and _apart(run, settings.inference, registered=registered)
    version = version_of(run, checkpoint_at(run, round)) if apart else None
    loaded = read_checkpoint(run, round) if version is None else read_base_of(run, version)
    shapes = parameter_shapes(loaded.model)
    read = {name: read_peft(path, shapes) for name, path in adapters.items()}
    if version is None:
        roomy = with_room(settings, read)
    elif registered:  # trainers sample from it: sized as a run's own engine, for equal bits
        roomy = with_adapters_room(settings, version.adapter.rank_max)
    else:
        roomy = with_room(settings, {"the run's adapter": version.adapter, **read})
    _announce("proving that the engine decodes as trained")
    tokenizer = tokenizer_for(settings.policy)
    server = proven_server(loaded, tokenizer, roomy, read)
    if version is None:
        take = whole_checkpoints(server.updater, run)
        return Follower(server=server, take=take, round=loaded.round or 0)
    take = adapter_checkpoints(server.adapters, run, loaded.model, tokenizer, roomy.inference)
    take(version.round, version.parameters_digest)
    return Follower(server=server, take=take, round=version.round, adapters=server.adapters)


def _apart(run: Run, inference: InferenceConfig, *, registered: bool) -> bool:
    """True where each version of a run's adapter is served next to its base.

    By default it is; registered servers do so only where `serve_merged` is false, as new runs of a
    fleet have it.
    """
    policy = run.config.policy
    if policy.lora is None or policy.quantize_base is not None:
        return False
    # A run from before this was recorded keeps the bits of merged weights.
    return inference.serve_merged is False if registered else inference.serve_merged is not True


def _registered(registration: Registration, report: Report | None) -> Report:
    def tell(state: Mapping[str, Any]) -> None:
        if state["state"] == "ready":
            registration.start(state["url"])
        elif state["state"] == "draining":
            registration.stop()
        if report is not None:
            report(state)

    return tell


def serve_folder(
    folder: Path,
    config: Config,
    host: str,
    port: int,
    *,
    adapters: Mapping[str, Path] = NO_ADAPTERS,
    report: Report | None = None,
    begun: "Future[tuple[LanguageModel, str]] | None" = None,
) -> int:
    """Serve a Hugging Face folder with a configuration's engine and context length.

    `begun` are its weights, where they are being read already.
    Where the configuration does not say how long, it is as long as the model is made for, up to
    CONTEXT_TOKENS_MAX, and there are no more slots than CACHE_BYTES_MAX hold. `adapters` are PEFT
    folders by name. Raises InputError for a folder that cannot be served exactly, InferenceError
    where the engine decodes something else than the folder's model, ConfigError for the address.
    """
    enable_compilation_cache()
    start_devices(config.policy.compute_dtype)
    keep_freed_memory()
    _announce(f"loading {folder}")
    tokenizer = folder_tokenizer(folder, config.policy)
    loaded = read_folder(str(folder), begun=begun or begin_reading(folder))
    if "context_length" not in config.policy.model_fields_set:
        longest = min(loaded.model.spec.context_length, CONTEXT_TOKENS_MAX)
        known = {"init": "hf", "hf_path": str(folder), "context_length": longest}
        policy = config.policy.model_copy(update=known)
        config = within_memory(config.model_copy(update={"policy": policy}))
    inference = with_update_root(config.inference, folder.resolve().parent)
    shapes = parameter_shapes(loaded.model)
    read = {name: read_peft(path, shapes) for name, path in adapters.items()}
    config = with_room(config.model_copy(update={"inference": inference}), read)
    _announce("proving that the engine decodes as the model computes")
    engine = config.inference.engine
    fixed = engine.lanes or engine.prefix_cache or engine.adapters_max
    # On a CPU the cache follows use, where nothing asks for a fixed one.
    if fixed or jax.default_backend() != "cpu":
        server = proven_server(loaded, tokenizer, config, read)
    else:
        server = growing_server(loaded, tokenizer, config)
    server.add_name(folder.resolve().name)
    return serve_forever(server, host, port, announce=_announce, report=report)


def growing_server(
    loaded: Loaded, tokenizer: PreTrainedTokenizerBase, config: Config
) -> PolicyServer:
    """A server, not started yet, whose engine compiles what requests need, when they need it.

    The canary is its first request, and compiles the programs of the next one.
    """
    give_back_freed_memory()  # of reading the folder
    server = _server(loaded, tokenizer, config, grows=True)
    growing = server.engine.growing
    assert growing is not None
    growing.announce = _announce
    try:
        ids, dtype = canary_ids(tokenizer), jnp.dtype(config.policy.compute_dtype)
        rehearse(loaded.model, ids, config.inference, dtype, engine=server.engine)
    except BaseException:
        server.stop()
        raise
    give_back_freed_memory()  # of compiling
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.model))
    _announce(
        f"weights {weights / 1e9:.2f} GB, cache {growing.cache_bytes / 1e9:.2f} GB; with use it "
        f"grows to {growing.cache_bytes_max / 1e9:.2f} GB, {server.engine.slots} sequences of "
        f"{server.engine.context_length} tokens: inference.engine.slots and "
        "policy.context_length lower that"
    )
    return server


def proven_server(
    loaded: Loaded,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    adapters: Mapping[str, Adapter] = NO_ADAPTERS,
) -> PolicyServer:
    """A server, not started yet, of weights that the engine is proven to decode as trained.

    With the adapters loaded; the proof is one for the base, and one for the first of them.
    """
    dtype = jnp.dtype(config.policy.compute_dtype)
    for adapter in (None, *list(adapters.values())[:1]):
        rehearse(loaded.model, canary_ids(tokenizer), config.inference, dtype, adapter)
    server = _server(loaded, tokenizer, config)
    for name, adapter in adapters.items():
        policy = server.adapters.load(name, adapter)
        _announce(f"adapter {name}: rank {policy.rank}, policy {policy.parameters_digest[:16]}")
    return server


def _server(
    loaded: Loaded, tokenizer: PreTrainedTokenizerBase, config: Config, *, grows: bool = False
) -> PolicyServer:
    return PolicyServer(
        loaded.model,
        tokenizer,
        config.inference,
        context_length=config.policy.context_length,
        weight_version=loaded.round or 0,
        parameters_digest=loaded.parameters_digest,
        dtype=jnp.dtype(config.policy.compute_dtype),
        grows=grows,
    )


def with_room(config: Config, adapters: Mapping[str, Adapter]) -> Config:
    """The configuration with room for these adapters, where it does not say how much there is.

    For a few more of the same rank too, which are loaded later. Raises ConfigError where it says
    less than they need.
    """
    if not adapters:
        return config
    engine, rank = config.inference.engine, max(one.rank_max for one in adapters.values())
    for key, room, needed in (
        ("adapters_max", engine.adapters_max, len(adapters)),
        ("adapter_rank_max", engine.adapter_rank_max, rank),
    ):
        if room is not None and room < needed:
            raise ConfigError(
                f"expected inference.engine.{key} of at least {needed} for the adapters "
                f"{', '.join(adapters)}, found {room}"
            )
    ranks = -(-rank // RANK_STEP) * RANK_STEP
    return with_adapters_room(config, ranks, max(ADAPTERS_ROOM, len(adapters)))


def _announce(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def folder_tokenizer(folder: Path, policy: PolicyConfig | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, with the options and end tokens of a policy.

    Where that names no end tokens, the one that the chat template writes. Raises InputError.
    """
    named = (policy or PolicyConfig()).model_copy(update={"tokenizer": str(folder)})
    # No run has begun, so the template's date is the day of the request.
    tokenizer = tokenizer_for(named)
    if not named.end_tokens:
        add_ends(tokenizer, template_ends(tokenizer))
    return tokenizer


@contextmanager
def serving(
    loaded: Loaded, tokenizer: PreTrainedTokenizerBase, source: SlotRef, config: Config
) -> Iterator[ServedPolicy]:
    """A model behind the OpenAI protocol, on loopback, until the context ends."""
    enable_compilation_cache()
    names = TokenizerIdentity.of(tokenizer)
    server = _server(loaded, tokenizer, config)
    try:
        server.start()
        yield ServedPolicy(
            endpoints=(server.base_url,),
            model=server.model_id,
            weight_version=loaded.round or 0,
            parameters_digest=loaded.parameters_digest,
            tokenizer_digest=names.tokenizer_digest,
            chat_template_digest=names.chat_template_digest,
            checkpoint=source,
        )
    finally:
        server.stop()
