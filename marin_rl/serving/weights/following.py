"""Following a run: the checkpoint that its trainer asks for, else the newest one, as committed.

A trainer that samples from followers names a checkpoint next to the run (`storage.fleet.Target`):
the policy of a round follows from its number, and a run that is resumed may go back by one. A
server may announce itself next to the run, so that trainers sample from it: a thread writes a
heartbeat every few seconds, and removes it when the server drains. Leaves out how weights are
loaded, proven and switched (`weight_updates`), and what a heartbeat says (`storage.fleet`).
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from marin_rl.config import Config
from marin_rl.errors import (
    ConfigError,
    CorruptObject,
    MarinRLError,
    NewerSchema,
    ObjectMissing,
    StorageError,
)
from marin_rl.inference.client.fleet_sources import board_of, identity_of
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.inference.engine import Engine
from marin_rl.serving.weights.adapters import ServedAdapters
from marin_rl.serving.weights.checkpoint_loader import Loaded, Served, Source, read_checkpoint
from marin_rl.serving.weights.weight_updates import UpdateRunning, WeightUpdater
from marin_rl.storage.fleet import FleetBoard, Heartbeat, Identity, Target, run_sha256
from marin_rl.storage.runs import Run, committed_checkpoint, round_of
from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for

POLL_S = 2.0
BACK_OFF_MAX_S = 60.0  # between looks at a store that is away
REFUSED_FIRST_S = 15.0  # before a checkpoint that was refused is read again
REFUSED_MAX_S = 600.0
STOP_S = 30.0  # for an update that is under way

_log = logging.getLogger(__name__)


Take = Callable[[int, str | None], None]  # serves a round, with the digest promised of it
Answer = Callable[[Target], None]


def whole_checkpoints(updater: WeightUpdater, run: Run) -> Take:
    """Take the checkpoint of a round as new weights of the engine: see `WeightUpdater.load`."""

    def take(round: int, promised: str | None) -> None:
        def read(served: Served) -> Loaded:
            return read_checkpoint(run, round, promised, served)

        source = Source(kind="watcher", place=run.store.url, read=read)
        updater.load(source, recompute_kv_cache=run.config.recompute_kv_cache)

    return take


class Refusal(NamedTuple):
    again_at: float
    pause_s: float


class CheckpointWatcher:
    """Serves the checkpoint that is asked for on `board`, else the newest of `run` that can be.

    As a context it looks from a thread. `take` serves the checkpoint of a round; `answer` gets each
    target that is read, before that. It begins after `round`. A round is taken once: weights that
    are loaded by hand stay until the next one is committed. A refused round is looked at again
    after `again_s`, and then less and less often.
    """

    def __init__(
        self,
        take: Take,
        run: Run,
        round: int,
        *,
        board: FleetBoard | None = None,
        answer: Answer | None = None,
        poll_s: float | int = POLL_S,
        again_s: float | int = REFUSED_FIRST_S,
    ) -> None:
        self._board, self._ignored, self._answer = board, "", answer
        self._take, self._run = take, run
        self._poll_s, self._again_s = float(poll_s), float(again_s)
        # the round whose checkpoint was taken last
        self.round = round
        self._refused: dict[int, Refusal] = {}
        self._stopping = threading.Event()
        # a daemon: an update that outlasts STOP_S must not keep the process alive
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> "CheckpointWatcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(timeout=STOP_S)

    def _follow(self) -> None:
        pause_s = self._poll_s
        while not self._stopping.wait(pause_s):
            longer_s = min(2 * pause_s, max(BACK_OFF_MAX_S, self._poll_s))
            pause_s, url = self._poll_s, self._run.store.url
            try:
                self.look()
            except (MarinRLError, OSError) as error:
                pause_s = longer_s
                _log.warning("cannot look at %s, again in %.3g s: %s", url, pause_s, error)
            except (RuntimeError, ValueError, LookupError, TypeError):
                # a fault of ours; a server that silently stopped to follow would be worse
                pause_s = longer_s
                _log.exception("looking at %s failed", url)

    def look(self) -> None:
        """Take the checkpoint that is asked for, else the newest one that is newer than the last.

        Raises what the store raises where that may pass; nothing is refused for it.
        """
        target = self._target()
        if target is not None:
            if self._answer is not None:
                self._answer(target)
            # unequal, and not larger: a run that is resumed may go back by one
            if target.version != self.round and self._may_try(target.version):
                self._load(target.version, target.parameters_digest)
            return
        # Newest first: after an outage of an hour only the last checkpoint is read.
        for round in sorted((r for r in self._rounds() if r > self.round), reverse=True):
            if self._may_try(round) and self._is_committed(round) and self._load(round):
                return

    def _may_try(self, round: int) -> bool:
        return round not in self._refused or time.monotonic() >= self._refused[round].again_at

    def _target(self) -> Target | None:
        """The checkpoint that a trainer asks for; None where none does, or none does any more."""
        if self._board is None:
            return None
        try:
            target = self._board.target()
            if target is None or target.run_sha256 != run_sha256(self._run.folder):
                return None
        except (CorruptObject, NewerSchema, ObjectMissing) as error:
            if str(error) != self._ignored:
                self._ignored = str(error)
                _log.warning("what a trainer asks for is ignored: %s", error)
            return None
        # One that was killed left it behind, once others have trained beyond what it can have.
        beyond = (r for r in self._rounds() if r > target.through)
        return None if any(map(self._is_committed, beyond)) else target

    def _rounds(self) -> list[int]:
        rounds = map(round_of, self._run.store.children("checkpoints"))
        return [round for round in rounds if round is not None]

    def _is_committed(self, round: int) -> bool:
        try:
            return committed_checkpoint(self._run, round) is not None
        except CorruptObject:
            return True  # and refused, with a word on why, by those who load it

    def _load(self, round: int, promised: str | None = None) -> bool:
        run, began = self._run, time.monotonic()
        try:
            self._take(round, promised)
        except UpdateRunning:
            return True  # nothing older is wanted either: next time
        except MarinRLError as error:
            # no fault of the checkpoint: the same one is tried at the next look
            if error.transient:
                raise
            before = self._refused.get(round)
            # Doubled: a checkpoint that is damaged for good is read hundreds of times otherwise.
            pause_s = self._again_s if before is None else min(2 * before.pause_s, REFUSED_MAX_S)
            self._refused[round] = Refusal(time.monotonic() + pause_s, pause_s)
            _log.warning(
                "round %d of %s is refused, round %d goes on; looked at again in %.3g s: %s",
                *(round, run.run_id, self.round, pause_s, error),
            )
            return False
        took_s = time.monotonic() - began
        _log.info("round %d of %s is served after %.3g s", round, run.run_id, took_s)
        self.round = round
        # Older refusals are forgotten, since older rounds are not looked at again.
        self._refused = {r: refusal for r, refusal in self._refused.items() if r > round}
        return True


HEARTBEAT_S = 5.0
WITHDRAW_S = 10.0  # for a heartbeat that is being written

_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Announcement of a server: labels, and its address where others reach it by another."""

    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    url: str | None = None


class Registration:
    """Heartbeats of one server of `run`, written from a thread between `start` and `stop`.

    `config` is what trainers compare with their own, its tokenizer too. With `adapters` it serves
    the versions of the run's adapter next to their base.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        engine: Engine,
        announcement: Announcement,
        *,
        adapters: ServedAdapters | None = None,
        every_s: float | int = HEARTBEAT_S,
    ) -> None:
        self._board: FleetBoard = board_of(config.inference, run.folder)
        tokenizer = TokenizerIdentity.of(tokenizer_for(config.policy))
        self._identity: Identity = identity_of(
            config, run.folder, tokenizer.tokenizer_digest, tokenizer.chat_template_digest
        )
        self._name, self._engine, self._announcement = config.inference.model, engine, announcement
        self._adapters = adapters
        self._server = secrets.token_hex(8)
        self._every_s, self._started_at = float(every_s), time.time()
        self._beat, self._tokens, self._computed_s, self._reported_at = 0, 0, 0.0, time.monotonic()
        self._url = ""
        self._target: Target | None = None
        self._stopping, self._due = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._announce, name="heartbeat", daemon=True)

    def start(self, base_url: str) -> None:
        self._url = self._announcement.url or reachable(base_url)
        _log.info("announcing %s as %s", self._url, self._server)
        self._thread.start()

    def answer(self, target: Target) -> None:
        if target != self._target:
            self._target = target
            self._due.set()

    def stop(self) -> None:
        """Withdraw the server, so that trainers stop looking for it."""
        self._stopping.set()
        self._due.set()
        # It was never started, and has nothing to withdraw.
        if self._thread.ident is None:
            return
        # First, or a heartbeat on its way would come after the withdrawal.
        self._thread.join(timeout=WITHDRAW_S)
        try:
            self._board.withdraw(self._server)
        except StorageError as error:
            _log.warning("the heartbeat stays, gc takes it later: %s", error)

    def _announce(self) -> None:
        while not self._stopping.is_set():
            self._due.clear()
            try:
                self._board.announce(self._heartbeat())
            except StorageError as error:
                _log.warning("cannot write a heartbeat, again in %g s: %s", self._every_s, error)
            self._due.wait(self._every_s)

    def _heartbeat(self) -> Heartbeat:
        stats, now, target = self._engine.stats.snapshot(), time.monotonic(), self._target
        # Not 0: two heartbeats may come within one tick of the clock.
        passed_s, computed_s = max(now - self._reported_at, 1e-9), stats.prefill_s + stats.decode_s
        rate = (stats.tokens - self._tokens) / passed_s
        # A step is counted at its end, so it may have begun before the last heartbeat.
        idle = min(1.0, max(0.0, 1 - (computed_s - self._computed_s) / passed_s))
        self._tokens, self._computed_s = stats.tokens, computed_s
        self._reported_at, self._beat = now, self._beat + 1
        base, adapters = self._engine.policy, self._adapters
        # the policy that the server's own name stands for, and adapters next to a base
        policy = base if adapters is None else adapters.current or base
        version, digest = policy.weight_version, policy.parameters_digest
        apart: dict[str, Any] = {}
        if adapters is not None:
            apart = {"base_digest": base.parameters_digest, "adapters": adapters.names}
        return Heartbeat(
            **apart,
            model=served_model_id(self._name, version, digest),
            weight_version=version,
            parameters_digest=digest,
            server=self._server,
            url=self._url,
            run_sha256=self._identity.run_sha256,
            labels=dict(self._announcement.labels),
            code=self._identity.code,
            tokenizer=self._identity.tokenizer,
            chat_template=self._identity.chat_template,
            settings=dict(self._identity.settings),
            beat=self._beat,
            slots=self._engine.slots,
            busy=self._engine.active,
            queued=self._engine.queued,
            tokens_per_second=rate,
            idle=idle,
            session=target and target.session,
            target_version=target and target.version,
            started_at=self._started_at,
            beat_at=time.time(),
        )


def reachable(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.hostname not in _WILDCARDS:
        return base_url
    return urlunsplit(parts._replace(netloc=f"{socket.gethostname().lower()}:{parts.port}"))


def announcement_of(labels: list[str] | None, url: str | None) -> Announcement:
    """Labels and address as the command line has them. Raises ConfigError."""
    named: dict[str, str] = {}
    for text in labels or ():
        name, separator, value = text.partition("=")
        if not (name and separator and value) or " " in text:
            raise ConfigError(f"--label: expected NAME=VALUE without spaces, found {text!r}")
        named[name] = value
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--announce: expected a URL like http://HOST:8000/v1, found {url!r}")
    if url is not None and not url.rstrip("/").endswith("/v1"):
        raise ConfigError(f"--announce: expected a base URL that ends in /v1, found {url!r}")
    return Announcement(labels=named, url=url and url.rstrip("/"))
