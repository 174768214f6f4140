"""New weights for a running engine: loaded, proven, and switched, one at a time.

Owns the one path that weights from disk take, for every caller (the admin routes, the watcher that
follows a run), the swap in memory, and the record of both. Until everything about new weights is
known to be right the old ones answer, and after any failure they go on. Leaves out reading and
verifying (`checkpoint_loader`) and who may ask (`admin`).

A switch replaces a reference between two chunks of decode steps: nothing is copied, no request is
interrupted, and no chunk sees both. For a sample with a prompt of P tokens of which the old weights
drew the first m >= 1, let s = P + m - 1 be the position of the last of these. The keys and values
of positions below s stay in the cache as the old weights computed them. From position s on they are
computed by the new weights, whose attention reads that cache. So the logprob of each of the first m
tokens is that of the old model's full forward; that of every later one is the new model's over a
prefix whose keys and values below s are the old model's: exactly the probability with which it was
drawn, and the full forward of neither model. With `recompute_kv_cache` positions below s are
computed by the new weights too, before the next chunk, so that the logprob of every later token is
that of the new model's full forward. `policy_versions` tells where m is. A sample that gets
its slot after the switch, however long it waited, is the new model's from its first position on.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.config import InferenceConfig
from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.engine import Engine
from marin_rl.serving.weights.canary import PROMPT, rehearse
from marin_rl.serving.weights.checkpoint_loader import (
    Architecture,
    Loaded,
    Served,
    Source,
    check_positions,
)
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.model import LmHeadModel

ErrorText = Callable[[Exception], str]


class UpdateRunning(InferenceError):
    """Another update of the weights is under way."""

    transient = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of one update. `refused` is the reason why the old weights went on; empty if they did
    not.

    `source` is "memory", "disk" or "watcher"; `ended_at` is Unix time; `bytes` are those that
    were read, 0 for arrays that this process had already.
    """

    source: str
    weight_version: int
    parameters_digest: str
    refused: str
    bytes: int
    seconds: float
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """Sums since the start: updates that were switched to, those that were refused, what they cost.

    `seconds` counts both kinds; `last` is None until one ended.
    """

    transfers: int = 0
    failures: int = 0
    bytes: int = 0
    seconds: float = 0.0
    last: Update | None = None

    def after(self, update: Update) -> "UpdateStats":
        """The sums with one more update."""
        return UpdateStats(
            transfers=self.transfers + (not update.refused),
            failures=self.failures + bool(update.refused),
            bytes=self.bytes + update.bytes,
            seconds=self.seconds + update.seconds,
            last=update,
        )


class WeightUpdater:
    """Changes the weights of one engine. Safe from any thread.

    `on_update` gets the record of each update, also of a refused one. Raises InputError
    where the model that is served first is none that could be updated.
    """

    def __init__(
        self,
        engine: Engine,
        model: LmHeadModel,
        tokenizer: PreTrainedTokenizerBase,
        config: InferenceConfig,
        dtype: jnp.dtype | type,
        on_update: Callable[[Update], None],
    ) -> None:
        self._engine, self._config, self._dtype = engine, config, dtype
        self._on_update = on_update
        check_positions(model, engine.context_length)
        # all that is asked of the tokenizer is asked now: two threads must not use one
        self._tokenizer = TokenizerIdentity.of(tokenizer)
        # shapes alone: a reference to the first weights would keep them in memory
        self._template: LmHeadModel = eqx.filter_eval_shape(lambda model: model, model)
        self._canary_ids = canary_ids(tokenizer)
        self._update_lock = threading.Lock()
        self._stats_lock = threading.Lock()
        self._stats = UpdateStats()

    @property
    def stats(self) -> UpdateStats:
        """Statistics of the updates so far."""
        return self._stats

    @property
    def busy(self) -> bool:
        """True while an update from disk is in progress."""
        return self._update_lock.locked()

    def swap(
        self,
        model: LmHeadModel,
        weight_version: int,
        parameters_digest: str,
        *,
        recompute_kv_cache: bool = False,
    ) -> Update:
        """Switch to arrays that this process has already: no copy, and no wait for an update.

        Raises, and keeps the old weights, as `Engine.swap` does.
        """
        # Without the update lock: a trainer that swaps must not wait for a slow read from disk.
        with self._recorded("memory", str) as record:
            self._engine.swap(
                model, weight_version, parameters_digest, recompute_kv_cache=recompute_kv_cache
            )
            return record(weight_version, parameters_digest, 0)

    def load(
        self,
        source: Source,
        weight_version: int | None = None,
        *,
        recompute_kv_cache: bool = False,
    ) -> Update:
        """Read weights, prove them, and switch to them; errors are raised as they are.

        Their version is the one given, else the round they are of, else the next one. Raises
        UpdateRunning during another update, InferenceError where the engine does not compute what
        the trainer does with them, and what `Engine.swap` and reading them raise.
        """
        # Refused rather than queued: by the time of its turn, the weights it names may be old.
        if not self._update_lock.acquire(blocking=False):
            raise UpdateRunning("another update of the weights is under way")
        try:
            with self._recorded(source.kind, source.error_text) as record:
                loaded = source.read(self._served)
                # The model itself: what `read` could check before was a template without arrays.
                self._served.architecture.check(loaded.model)
                # Before the swap: a model that decodes to something else is never served.
                rehearse(loaded.model, self._canary_ids, self._config, self._dtype)
                version = self._version(loaded, weight_version)
                self._engine.swap(
                    loaded.model,
                    version,
                    loaded.parameters_digest,
                    recompute_kv_cache=recompute_kv_cache,
                )
                return record(version, loaded.parameters_digest, loaded.bytes)
        finally:
            self._update_lock.release()

    @cached_property
    def _served(self) -> Served:
        """Tokenizer and architecture, computed at the first update: many servers never load from
        disk.
        """
        architecture = Architecture.of(self._template, self._engine.context_length)
        return Served(tokenizer=self._tokenizer, architecture=architecture)

    def _version(self, loaded: Loaded, requested: int | None) -> int:
        if requested is not None:
            return requested
        return self._engine.policy.weight_version + 1 if loaded.round is None else loaded.round

    @contextmanager
    def _recorded(
        self, source: str, error_text: ErrorText
    ) -> Iterator[Callable[[int, str, int], Update]]:
        """Time what happens inside, and keep how it ended."""
        started = time.monotonic()

        def record(version: int, digest: str, size: int, refused: str = "") -> Update:
            update = Update(
                source=source,
                weight_version=version,
                parameters_digest=digest,
                refused=refused,
                bytes=size,
                seconds=time.monotonic() - started,
                ended_at=time.time(),
            )
            # A lock of its own: a swap in memory may end while an update from disk does.
            with self._stats_lock:
                self._stats = self._stats.after(update)
            # Outside of the lock, for it is the caller's code.
            self._on_update(update)
            return update

        try:
            yield record
        except Exception as error:
            policy = self._engine.policy
            record(policy.weight_version, policy.parameters_digest, 0, error_text(error))
            raise


def canary_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The prompt of the rehearsal. Raises InputError for a tokenizer that encodes nothing."""
    ids = np.asarray(tokenizer.encode(PROMPT[0].content), np.int32)
    if not len(ids):
        raise InputError("the tokenizer makes no ids of plain text")
    return ids
