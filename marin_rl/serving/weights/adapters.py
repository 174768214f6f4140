"""Adapters of a running server: read from PEFT folders, loaded under names, and unloaded.

Owns the names, which are model ids like that of the base; the check of a folder against the served
base; and which adapter the server's own name stands for, where a run is followed whose policies are
adapters. Leaves out the places that an admin may read from (`checkpoint_loader`), the engine's room
(`marin_rl.inference.adapters`), and the routes (`adapter_routes`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from marin_rl.errors import InputError, MarinRLError, StalePolicy
from marin_rl.inference.adapters import AdapterGone, LoadedAdapter
from marin_rl.inference.client.protocol import parse_served_model_id
from marin_rl.inference.engine import Engine
from marin_rl.lora import Adapter, Shapes, check_adapter_name, policy_digest, read_peft
from marin_rl.serving.weights.weight_updates import UpdateRunning


class NameTaken(InputError):
    """An adapter, or the base, is served under this name already."""


class ServedAdapters:
    """Adapters of one engine by name. Safe from any thread.

    `reserved` are names of the base. `on_load` gets the seconds of a load, `on_failure` is called
    where one is refused.
    """

    def __init__(
        self,
        engine: Engine,
        shapes: Shapes,
        *,
        reserved: Callable[[], list[str]],
        on_load: Callable[[float], None] = lambda seconds: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._shapes = engine, shapes
        self._reserved = reserved
        self._on_load, self._on_failure = on_load, on_failure
        self._by_name: dict[str, LoadedAdapter] = {}
        self._loading = threading.Lock()
        self._current: LoadedAdapter | None = None

    @property
    def names(self) -> list[str]:
        """Names that requests may give as their model, in the order of loading."""
        return list(self._by_name)

    @property
    def current(self) -> LoadedAdapter | None:
        """The adapter that the server's own name stands for, unloaded or not; None: the base."""
        return self._current

    def get(self, name: str) -> LoadedAdapter | None:
        """The adapter of a name, or None."""
        return self._by_name.get(name)

    def serve_as_current(self, name: str) -> None:
        """Let the server's own name stand for an adapter that is loaded."""
        self._current = self._by_name[name]

    def load_folder(
        self,
        name: str,
        folder: str,
        *,
        in_place: bool = False,
        version: int | None = None,
        promised: str | None = None,
    ) -> LoadedAdapter:
        """Load an adapter from a PEFT folder. Raises as `load` does, and InputError for a folder
        that is no adapter of the served base.
        """
        with self._counted():
            self._check_name(name, in_place=in_place)  # before a large file is read
            adapter = read_peft(folder, self._shapes)
            return self._load(name, adapter, version, promised, in_place=in_place)

    def load(
        self,
        name: str,
        adapter: Adapter,
        *,
        in_place: bool = False,
        version: int | None = None,
        promised: str | None = None,
        row: int = 0,
    ) -> LoadedAdapter:
        """Load an adapter under a name; requests may use it from then on.

        With `in_place`, it takes the place of the one that has the name, on which the requests that
        were sent before end. `version` is that of the policy, by default the one in the name, and
        `promised` the digest of base and adapter together that the caller expects, if any. `row` is
        the row of the engine's bank that it gets if that is free. Raises NameTaken without
        `in_place`, UpdateRunning during another load, StalePolicy for another adapter or base than
        was promised, and what the engine raises.
        """
        with self._counted():
            self._check_name(name, in_place=in_place)
            return self._load(name, adapter, version, promised, in_place=in_place, row=row)

    def unload(self, name: str) -> LoadedAdapter:
        """Let no further request use an adapter; those that were sent end on it.

        Raises AdapterGone for a name that no adapter has.
        """
        with self._one_at_a_time():
            adapter = self._by_name.pop(name, None)
            if adapter is None:
                known = ", ".join(self._by_name) or "none"
                raise AdapterGone(f"no adapter {name!r:.200} is loaded; loaded: {known}")
            # after the name: no new request can come with a number that is gone
            self._engine.adapters.unload(adapter.number)
            return adapter

    def _load(
        self,
        name: str,
        adapter: Adapter,
        version: int | None,
        promised: str | None,
        *,
        in_place: bool,
        row: int = 0,
    ) -> LoadedAdapter:
        base = self._engine.policy.parameters_digest
        digest = policy_digest(base, adapter.modules, adapter.digest)
        if promised not in (None, digest):
            raise StalePolicy(
                f"expected the policy with the digest {promised}, found {digest} "
                f"(of this adapter over the base {base[:16]}): another adapter than promised, or "
                "one that was trained on another base"
            )
        before = self._by_name.get(name) if in_place else None
        loaded = self._engine.adapters.load(
            adapter,
            name=name,
            weight_version=_version_of(name) if version is None else version,
            parameters_digest=digest,
            in_place_of=0 if before is None else before.number,
            row=row,
        )
        # only now: until the engine has it, requests under this name go to the one before
        self._by_name[name] = loaded
        return loaded

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

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        # refused rather than queued, as updates of the weights are
        if not self._loading.acquire(blocking=False):
            raise UpdateRunning("another adapter is being loaded or unloaded")
        try:
            yield
        finally:
            self._loading.release()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """One load at a time, timed."""
        started = time.monotonic()
        try:
            with self._one_at_a_time():
                yield
        except MarinRLError:
            self._on_failure()
            raise
        self._on_load(time.monotonic() - started)


def _version_of(name: str) -> int:
    """The version in an id of ours; 0 for another name."""
    parsed = parse_served_model_id(name)
    return 0 if parsed is None else parsed.weight_version
