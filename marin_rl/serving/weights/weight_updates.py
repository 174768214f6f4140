"""New weights for a running engine: loaded, proven, and switched, one at a time.

Owns the one path of weights from disk, for the admin routes and the watcher that follows a run, the
swap in memory, and the record of both. Until everything about new weights is known to be right the
old ones answer, and after any failure they go on. Leaves out reading and verifying
(`checkpoint_loader`) and who may ask (`admin`).

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

import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from marin_rl.config import InferenceConfig
from marin_rl.errors import InferenceError
from marin_rl.inference.engine import Engine
from marin_rl.models.module import LanguageModel
from marin_rl.serving.http.prometheus import Telemetry
from marin_rl.serving.weights.canary import canary_ids, rehearse
from marin_rl.serving.weights.checkpoint_loader import Served, Source, check_positions
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.model import parameter_shapes

NewWeights = tuple[LanguageModel, int, str, int]  # with version, digest, bytes that were read


class UpdateRunning(InferenceError):
    """Another update of the weights is under way."""

    transient = True


@contextmanager
def one_at_a_time(lock: threading.Lock, message: str) -> Iterator[None]:
    """Hold a lock; UpdateRunning where another has it.

    Refused rather than queued: by the time of its turn, the weights it names may be old.
    """
    if not lock.acquire(blocking=False):
        raise UpdateRunning(message)
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of one update. `refused`: why it was rejected; empty if applied.

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


class WeightUpdater:
    """Changes the weights of one engine, and counts applied and refused updates since the start.

    Safe from any thread. Raises InputError for a first model that could not be updated.
    """

    def __init__(
        self,
        engine: Engine,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        config: InferenceConfig,
        dtype: jnp.dtype | type,
        telemetry: Telemetry,
    ) -> None:
        self._engine, self._config, self._dtype = engine, config, dtype
        self._telemetry = telemetry
        check_positions(model, engine.context_length)
        # what changes a tokenizer is asked of it now: two threads must not use one
        self._canary_ids = canary_ids(tokenizer)
        self._tokenizer, self._spec, self._shapes = tokenizer, model.spec, parameter_shapes(model)
        self._update_lock = threading.Lock()
        # another lock: a swap in memory may end while an update from disk does
        self._stats_lock = threading.Lock()
        self.transfers = self.failures = 0
        self.last: Update | None = None

    @cached_property
    def _served(self) -> Served:
        # on first use, for it takes half a second; all of it is only read
        return Served(
            tokenizer=TokenizerIdentity.of(self._tokenizer),
            spec=self._spec,
            shapes=self._shapes,
            positions=self._engine.context_length,
        )

    @property
    def busy(self) -> bool:
        return self._update_lock.locked()

    def swap(
        self,
        model: LanguageModel,
        weight_version: int,
        parameters_digest: str,
        *,
        recompute_kv_cache: bool = False,
    ) -> None:
        """Switch to arrays that this process has already: no copy, and no wait for an update.

        Raises, and keeps the old weights, as `Engine.swap` does.
        """
        # Without the update lock: a trainer that swaps must not wait for a slow read from disk.
        new = model, weight_version, parameters_digest, 0
        self._switch("memory", str, lambda: new, recompute_kv_cache=recompute_kv_cache)

    def load(
        self, source: Source, weight_version: int | None = None, *, recompute_kv_cache: bool = False
    ) -> None:
        """Read weights, prove them, and switch to them; errors are raised as they are.

        Their version is the one given, else the round they are of, else the next one. Raises
        UpdateRunning during another update, InferenceError where the engine does not compute what
        the trainer does with them, and what `Engine.swap` and reading them raise.
        """

        def read() -> NewWeights:
            loaded = source.read(self._served)
            # The model itself: what `read` could check before was a template without arrays.
            self._served.check_model(loaded.model)
            # Before the swap: a model that decodes to something else is never served.
            rehearse(loaded.model, self._canary_ids, self._config, self._dtype)
            version = loaded.round if weight_version is None else weight_version
            if version is None:
                version = self._engine.policy.weight_version + 1
            return loaded.model, version, loaded.parameters_digest, loaded.bytes

        with one_at_a_time(self._update_lock, "another update of the weights is under way"):
            again = recompute_kv_cache
            self._switch(source.kind, source.error_text, read, recompute_kv_cache=again)

    def _switch(
        self,
        source: str,
        error_text: Callable[[Exception], str],
        read: Callable[[], NewWeights],
        *,
        recompute_kv_cache: bool,
    ) -> None:
        """Switch to the weights that `read` gives, and record how that ended."""
        started, failure = time.monotonic(), None
        try:
            model, version, digest, size = read()
            self._engine.swap(model, version, digest, recompute_kv_cache=recompute_kv_cache)
        except Exception as error:  # noqa: BLE001 - recorded, and raised again
            failure, policy = error, self._engine.policy
            version, digest, size = policy.weight_version, policy.parameters_digest, 0
        seconds = time.monotonic() - started
        if failure is None:
            self._telemetry.weights_updated(source=source, bytes=size, seconds=seconds)
        else:
            self._telemetry.count("weight_update_failures_total", 1, source)
        with self._stats_lock:
            self.transfers += failure is None
            self.failures += failure is not None
            self.last = Update(
                source=source,
                weight_version=version,
                parameters_digest=digest,
                refused="" if failure is None else error_text(failure),
                bytes=size,
                seconds=seconds,
                ended_at=time.time(),
            )
        if failure is not None:
            raise failure
