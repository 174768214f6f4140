"""Versions of a run's adapter next to their base: each under a name of its own, old ones unloaded.

The name is that of the policy, such as `policy@00012-1a2b3c4d`, and the server's own name stands
for the version that was loaded last. Requests that were sent to a version before end on it. Leaves
out how a run's own process has the arrays (`runtime`) and when to look for new ones
(`checkpoint_watcher`).
"""

import time
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config, InferenceConfig
from marin_rl.errors import CorruptObject, StalePolicy
from marin_rl.inference.adapters import LoadedAdapter
from marin_rl.inference.client.protocol import is_version_of, served_model_id
from marin_rl.lora import Adapter
from marin_rl.serving.weights.adapters import ServedAdapters
from marin_rl.serving.weights.canary import rehearse
from marin_rl.serving.weights.checkpoint_loader import Loaded
from marin_rl.serving.weights.weight_updates import Update, canary_ids
from marin_rl.storage.runs import Run, checkpoint_at, round_of
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.model import LmHeadModel, digest_of, with_parameters
from marin_rl.training.policy_source import read_base, read_trained
from marin_rl.training.state import identity_of, template_of
from marin_rl.types import SlotRef

# Room of a run's own engine: this version and the one before, on which requests may still run.
VERSIONS_ROOM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """The adapter of a committed checkpoint, and the digest of the policy that it makes."""

    round: int
    adapter: Adapter
    base_digest: str
    parameters_digest: str


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


def serve_version(
    adapters: ServedAdapters, model: str, version: int, digest: str, adapter: Adapter
) -> LoadedAdapter:
    """Serve a version under a name of its own, which the server's name stands for from then on.

    Of the older ones, that which was served before stays, unless its row is this one's: the row
    follows from the version, since the last bits of a sum depend on it, and servers that begin at
    different versions are to agree. Raises as `ServedAdapters.load` does.
    """
    name, row = served_model_id(model, version, digest), _row_of(version)
    current = adapters.current
    kept = {name}
    if current is not None and (current.row, _row_of(current.weight_version)) != (row, row):
        kept.add(current.name)
    for other in adapters.names:
        # first, so that there is room; names that are no version's are the user's own adapters
        if other not in kept and is_version_of(other, model):
            adapters.unload(other)
    # There already where a run that is resumed asks for this version again.
    loaded = adapters.get(name)
    if loaded is None:
        loaded = adapters.load(name, adapter, version=version, promised=digest, row=row)
    # last: until it is loaded the server's own name stands for the one before
    adapters.serve_as_current(name)
    return loaded


def _row_of(version: int) -> int:
    """Row of an engine's bank that a version has where it is free: versions take turns."""
    return 1 + version % VERSIONS_ROOM


def read_version(run: Run, round: int | None, promised: str | None = None) -> AdapterVersion:
    """The adapter of a committed checkpoint (None: the latest), verified by its digest.

    Raises ObjectMissing where it is not committed,
    CorruptObject for a checkpoint that is damaged or no adapter, StalePolicy where it is another
    one than its manifest, or the caller, promises.
    """
    return version_of(run, checkpoint_at(run, round), promised)


def version_of(run: Run, ref: SlotRef, promised: str | None = None) -> AdapterVersion:
    """The adapter in a committed slot, verified. Raises as `read_version` does."""
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
    template = template_of(run.config.policy, tokenizer_for(run.config.policy))
    parameters = read_base(run, version.base_digest, template)
    size = sum(array.nbytes for array in parameters.values())
    model = with_parameters(template, parameters)
    return Loaded(model=model, parameters_digest=version.base_digest, bytes=size)


class VersionUpdater:
    """Serves the adapters of a run's checkpoints on a server of their base. Safe from any thread.

    Each is proven first: a private engine decodes with it what the merged model computes.
    """

    def __init__(
        self,
        adapters: ServedAdapters,
        run: Run,
        base: LmHeadModel,
        tokenizer: PreTrainedTokenizerBase,
        inference: InferenceConfig,
    ) -> None:
        self._adapters, self._run, self._base = adapters, run, base
        self._inference = inference
        self._dtype = jnp.dtype(run.config.policy.compute_dtype)
        # now, for two threads must not use one tokenizer
        self._canary_ids = canary_ids(tokenizer)

    def take(self, round: int, promised: str | None = None) -> Update:
        """Read, prove and serve the adapter of a round; errors are raised as they are.

        Raises as `read_version` and `rehearse` do, and what the engine raises without room.
        """
        began, run = time.monotonic(), self._run
        version = read_version(run, round, promised)
        # before it is served, by an engine that no request reaches
        rehearse(self._base, self._canary_ids, self._inference, self._dtype, version.adapter)
        digest, adapter = version.parameters_digest, version.adapter
        serve_version(self._adapters, self._inference.model, version.round, digest, adapter)
        return Update(
            source="watcher",
            weight_version=version.round,
            parameters_digest=digest,
            refused="",
            bytes=sum(np.asarray(array).nbytes for array in adapter.arrays.values()),
            seconds=time.monotonic() - began,
            ended_at=time.time(),
        )
