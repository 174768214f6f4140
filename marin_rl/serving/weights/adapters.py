"""Adapters of a running server: read from PEFT folders, loaded under names, and unloaded.

Owns the names, which are model ids like that of the base; the check of a folder against the served
base; and the versions of a run's adapter: each has a name such as `policy@00012-1a2b3c4d`, and the
server's own name stands for the version that was loaded last. Requests that were sent to a version
before end on it. Leaves out the places that an admin may read from (`checkpoint_loader`), the
engine's room (`marin_rl.inference.adapters`), and the routes (`admin`).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config, InferenceConfig
from marin_rl.errors import CorruptObject, InputError, MarinRLError, StalePolicy
from marin_rl.inference.adapters import AdapterGone, LoadedAdapter
from marin_rl.inference.client.protocol import is_version_of, parse_served_model_id, served_model_id
from marin_rl.inference.engine import Engine
from marin_rl.lora.adapter import Adapter, Shapes, check_adapter_name, policy_digest
from marin_rl.lora.peft import read_peft
from marin_rl.models.module import LanguageModel
from marin_rl.serving.http.prometheus import Telemetry
from marin_rl.serving.weights.canary import canary_ids, rehearse
from marin_rl.serving.weights.checkpoint_loader import Loaded
from marin_rl.serving.weights.weight_updates import one_at_a_time
from marin_rl.storage.runs import Run, checkpoint_at, round_of
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.model import digest_of, with_parameters
from marin_rl.types import SlotRef

# Room of a run's own engine: this version and the one before, on which requests may still run.
VERSIONS_ROOM = 2
LOADING = "another adapter is being loaded or unloaded"


class NameTaken(InputError):
    """An adapter, or the base, is served under this name already."""


class ServedAdapters:
    """Adapters of one engine by name. Safe from any thread. `reserved` are names of the base."""

    def __init__(
        self,
        engine: Engine,
        shapes: Shapes,
        telemetry: Telemetry,
        *,
        reserved: Callable[[], list[str]],
    ) -> None:
        self._engine, self._shapes = engine, shapes
        self._telemetry, self._reserved = telemetry, reserved
        self._by_name: dict[str, LoadedAdapter] = {}
        self._loading = threading.Lock()
        # the adapter that the server's own name stands for, unloaded or not; None: the base
        self.current: LoadedAdapter | None = None

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def get(self, name: str) -> LoadedAdapter | None:
        return self._by_name.get(name)

    def load(
        self,
        name: str,
        adapter: Adapter | str,
        *,
        in_place: bool = False,
        version: int | None = None,
        promised: str | None = None,
        row: int = 0,
    ) -> LoadedAdapter:
        """Load an adapter, or a PEFT folder, under a name; requests may use it from then on.

        `version` is that of the policy, by default the one in the name, and `promised` the digest
        of base and adapter together that the caller expects, if any. `row` is the row of the
        engine's bank that it gets if that is free. With `in_place` it replaces the one of its name:
        requests that were sent to that before end on it. Raises NameTaken, UpdateRunning during
        another load, InputError for a folder that is no adapter of the served base, StalePolicy for
        another adapter or base than was promised, and what the engine raises.
        """
        started = time.monotonic()
        try:
            with one_at_a_time(self._loading, LOADING):
                self._check_name(name, in_place=in_place)  # before a large file is read
                if isinstance(adapter, str):
                    adapter = read_peft(adapter, self._shapes)
                base = self._engine.policy.parameters_digest
                digest = policy_digest(base, adapter.modules, adapter.digest)
                if promised not in (None, digest):
                    raise StalePolicy(
                        f"expected the policy with the digest {promised}, found {digest} "
                        f"(of this adapter over the base {base[:16]}): another adapter than "
                        "promised, or one that was trained on another base"
                    )
                before = self._by_name.get(name)
                if version is None:
                    parsed = parse_served_model_id(name)
                    version = 0 if parsed is None else parsed.weight_version
                loaded = self._engine.adapters.load(
                    adapter,
                    name=name,
                    weight_version=version,
                    parameters_digest=digest,
                    in_place_of=0 if before is None else before.number,
                    row=row,
                )
                # only now: until the engine has it, requests under this name go to the one before
                self._by_name[name] = loaded
        except MarinRLError:
            self._telemetry.count("adapter_load_failures_total")
            raise
        self._telemetry.count("adapter_load_seconds_total", time.monotonic() - started)
        return loaded

    def unload(self, name: str) -> None:
        """Let no further request use an adapter; running requests end on it.

        Raises AdapterGone for a name that no adapter has.
        """
        with one_at_a_time(self._loading, LOADING):
            adapter = self._by_name.pop(name, None)
            if adapter is None:
                known = ", ".join(self._by_name) or "none"
                raise AdapterGone(f"no adapter {name!r:.200} is loaded; loaded: {known}")
            # after the name: no new request can come with a number that is gone
            self._engine.adapters.unload(adapter.number)

    def serve_version(self, model: str, version: int, digest: str, adapter: Adapter) -> None:
        """Serve a version under its own name, which the server's name stands for from then on.

        The version that was served before stays, unless its row is this one's: the row follows from
        the version, since the last bits of a sum depend on it, and servers that begin at different
        versions are to agree. Older versions are unloaded. Raises as `load` does.
        """
        name, row = served_model_id(model, version, digest), _row_of(version)
        current = self.current
        kept = {name}
        if current is not None and (current.row, _row_of(current.weight_version)) != (row, row):
            kept.add(current.name)
        for other in self.names:
            # first, so that there is room; names that are no version's are the user's own adapters
            if other not in kept and is_version_of(other, model):
                self.unload(other)
        # There already where a run that is resumed asks for this version again.
        loaded = self.get(name)
        if loaded is None:
            loaded = self.load(name, adapter, version=version, promised=digest, row=row)
        # last: until it is loaded the server's own name stands for the one before
        self.current = loaded

    def _check_name(self, name: str, *, in_place: bool) -> None:
        check_adapter_name(name)
        if name in self._reserved():
            raise NameTaken(f"{name!r} is a name of the base model: give the adapter another one")
        if name in self._by_name and not in_place:
            # in vLLM's own words
            raise NameTaken(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )


def _row_of(version: int) -> int:
    # rows of an engine's bank: versions take turns
    return 1 + version % VERSIONS_ROOM


def with_adapters_room(config: Config, rank: int, adapters: int = VERSIONS_ROOM) -> Config:
    """The configuration with room for adapters of a rank, where it does not say how much.

    By default for the versions of one.
    """
    engine = config.inference.engine
    room = {
        "adapters_max": engine.adapters_max or adapters,
        "adapter_rank_max": engine.adapter_rank_max or rank,
    }
    inference = config.inference.model_copy(update={"engine": engine.model_copy(update=room)})
    return config.model_copy(update={"inference": inference})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """The adapter of a committed checkpoint, and the digest of the policy that it makes."""

    round: int
    adapter: Adapter
    base_digest: str
    parameters_digest: str


def version_of(run: Run, ref: SlotRef, promised: str | None = None) -> AdapterVersion:
    """The adapter in a committed slot, verified by its digest.

    Raises CorruptObject for a checkpoint that is damaged or no adapter, StalePolicy where it is
    another one than its manifest, or the caller, promises.
    """
    from marin_rl.training.policy_source import read_trained
    from marin_rl.training.state import identity_of, template_of

    identity = identity_of(run, ref)
    if identity.adapter is None:
        raise CorruptObject(
            f"{run.store.url_of(ref.slot)} has all parameters of a policy, expected an adapter: "
            "run `marin-rl fsck`"
        )
    template = template_of(run.config.policy, tokenizer_for(run.config.policy))
    arrays = read_trained(run, ref, template)
    digest = identity.adapter.policy_digest(digest_of(arrays))
    for expected in (identity.parameters_digest, promised):
        if expected not in (None, digest):
            raise StalePolicy(
                f"expected the policy with the digest {expected}, found {digest}: this is another "
                "adapter than promised, or it was damaged; restore the checkpoint from a copy"
            )
    return AdapterVersion(
        round=round_of(ref.slot.rpartition("/")[2]) or 0,
        adapter=Adapter(modules=identity.adapter.modules, arrays=arrays),
        base_digest=identity.adapter.base_digest,
        parameters_digest=digest,
    )


def read_base_of(run: Run, version: AdapterVersion) -> Loaded:
    """The base of a run's adapter as a model to be served. Raises as `read_base` does."""
    from marin_rl.training.policy_source import read_base
    from marin_rl.training.state import template_of

    template = template_of(run.config.policy, tokenizer_for(run.config.policy))
    model = with_parameters(template, read_base(run, version.base_digest, template))
    return Loaded(model=model, parameters_digest=version.base_digest)


def adapter_checkpoints(
    adapters: ServedAdapters,
    run: Run,
    base: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    inference: InferenceConfig,
) -> Callable[[int, str | None], None]:
    """Take the adapter of a round as a version next to its base.

    It is proven first, by an engine that no request reaches: it decodes with the adapter what the
    merged model computes. Raises as `version_of`, `rehearse` and `serve_version` do.
    """
    dtype = jnp.dtype(run.config.policy.compute_dtype)
    ids = canary_ids(tokenizer)  # now, for two threads must not use one tokenizer

    def take(round: int, promised: str | None = None) -> None:
        version = version_of(run, checkpoint_at(run, round), promised)
        rehearse(base, ids, inference, dtype, version.adapter)
        digest = version.parameters_digest
        adapters.serve_version(inference.model, version.round, digest, version.adapter)

    return take
