"""Loads and unloads of adapters while an engine runs.

Owns the way of one adapter: checked against the room there is, brought to the device by the thread
that asks for it, and written into the bank by the engine's thread between two chunks. Leaves out
the bank and the table of its rows (`adapters`), and names that callers use for adapters.
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from marin_rl.errors import InferenceError, InputError
from marin_rl.inference.adapters import (
    AdapterBank,
    AdapterGone,
    AdapterTable,
    Bank,
    BankSizes,
    LoadedAdapter,
)
from marin_rl.inference.jobs import Job
from marin_rl.lora import Adapter


@dataclass(slots=True)
class AdapterStats:
    """Counts since the start; `write_s` are the seconds that decoding waited for all loads."""

    loads: int = 0
    unloads: int = 0
    write_s: float = 0.0

    def snapshot(self) -> "AdapterStats":
        """The counts as they are now; safe from any thread."""
        return replace(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Write:
    """Rows to be written, and the future of their load."""

    adapter: LoadedAdapter
    rows: Bank
    done: "Future[LoadedAdapter]"


class AdapterLoads:
    """Adapters of one engine, whose lock `changed` guards them, and whose requests use them."""

    def __init__(
        self,
        bank: AdapterBank | None,
        sizes: BankSizes,
        changed: threading.Condition,
        in_flight: Mapping[Job, None],
    ) -> None:
        self.stats = AdapterStats()
        self._bank = bank
        self._table = AdapterTable(sizes)
        self._changed = changed
        self._in_flight = in_flight
        self._writes: list[_Write] = []
        self._closed = False

    @property
    def sizes(self) -> BankSizes:
        """Room for adapters, and for their rank."""
        return self._table.sizes

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """Adapters that requests may name."""
        with self._changed:
            return self._table.loaded

    @property
    def in_use(self) -> set[LoadedAdapter]:
        """Adapters that requests run on or wait for, also of those that are unloaded."""
        # a copy: the engine's thread removes requests that end
        return {job.adapter for job in list(self._in_flight) if job.adapter is not None}

    def get(self, number: int) -> LoadedAdapter | None:
        """The adapter of a load; None for 0, the base model. Under the lock.

        Raises AdapterGone for one that is not loaded.
        """
        return None if number == 0 else self._table.get(number)

    def load(
        self,
        adapter: Adapter,
        *,
        name: str,
        weight_version: int,
        parameters_digest: str,
        in_place_of: int = 0,
        row: int = 0,
    ) -> LoadedAdapter:
        """Load an adapter between two chunks; returns when requests can be sampled with it.

        `parameters_digest` stands for base and adapter together. With `in_place_of`, the number of
        another load, that one is unloaded at the same time. `row` is the row of the bank that it
        gets if that is free. Requests that run are never touched.
        Raises InputError beyond the engine's room, or for numbers that are not finite in its dtype,
        and InferenceError once the engine is closed. Not for the engine's own thread, which
        could never return.
        """
        if self._bank is None:
            raise InputError(
                "the engine has no room for adapters: expected inference.engine.adapters_max of at "
                f"least 1, found {self.sizes.adapters}; start it with room for them"
            )
        new = LoadedAdapter(
            number=0,
            row=row,
            rank=adapter.rank_max,
            name=name,
            weight_version=weight_version,
            parameters_digest=parameters_digest,
        )
        # before `rows`, which could not place a rank beyond the bank's
        self._table.check_rank(new)
        # outside of the lock: moving arrays to the device must not hold up decoding
        rows = self._bank.rows(adapter)
        _check_finite(name, rows)
        done: Future[LoadedAdapter] = Future()
        with self._changed:
            if self._closed:
                raise InferenceError("the engine is closed: it takes no adapters any more")
            # its row is taken at once: two loads at a time never get the same one
            added = self._table.add(new, self.in_use, in_place_of)
            # written by the engine's thread: the programs that it runs have the bank's arrays as
            # arguments
            self._writes.append(_Write(adapter=added, rows=rows, done=done))
            self._changed.notify_all()
        # after the lock is released, which the write takes
        return done.result()

    def unload(self, number: int) -> None:
        """Let no further request use an adapter; those that were submitted end on it.

        Raises AdapterGone for one that is not loaded.
        """
        with self._changed:
            self._table.remove(number)
            self.stats.unloads += 1

    def write(self) -> None:
        """Write what waits to be loaded. On the engine's thread, between chunks, under the lock."""
        while self._writes:
            write = self._writes.pop(0)
            try:
                self._write(write)
            except Exception as error:  # noqa: BLE001 - the caller of `load` gets it
                # its row holds what was there before, so no request may name it
                with suppress(AdapterGone):  # it may have been unloaded before it was written
                    self._table.remove(write.adapter.number)
                write.done.set_exception(error)

    def _write(self, write: _Write) -> None:
        assert self._bank is not None
        started = time.monotonic()
        self._bank.write(write.adapter.row, write.rows)
        self.stats.write_s += time.monotonic() - started
        self.stats.loads += 1
        write.done.set_result(write.adapter)

    def close(self) -> None:
        """Fail what waits to be loaded. Under the lock."""
        self._closed = True
        # their callers wait for these futures without a time limit
        for write in self._writes:
            write.done.set_exception(InferenceError("the engine was closed"))
        self._writes.clear()


def _check_finite(name: str, rows: Bank) -> None:
    """InputError for infinities, which may come of rounding to the engine's dtype, and for NaN."""
    import jax

    leaves = jax.tree.leaves(rows)
    if all(bool(np.isfinite(np.asarray(leaf, np.float32)).all()) for leaf in leaves):
        return
    raise InputError(
        f"expected finite numbers in the adapter {name}, found infinities or NaN in the dtype of "
        f"the engine ({leaves[0].dtype}): it was damaged, or trained to such numbers"
    )
