"""Announcing a server next to the run that it follows, so that trainers of the run sample from it.

A thread writes a heartbeat every few seconds and removes it when the server drains. A store that is
away for a while does no harm: those who know the address ask the server itself. Leaves out what a
heartbeat says and how it is signed (`storage.fleet`).
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from marin_rl.config import Config
from marin_rl.errors import ConfigError, StorageError
from marin_rl.inference.client.fleet_sources import board_of, identity_of
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.inference.engine import Engine
from marin_rl.serving.weights.adapters import ServedAdapters
from marin_rl.storage.fleet import FleetBoard, Heartbeat, Identity, Target
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import TokenizerIdentity

HEARTBEAT_S = 5.0
STOP_S = 10.0  # for a heartbeat that is being written

_WILDCARDS = ("0.0.0.0", "::")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Announcement of a server: labels, and its address where others reach it by another."""

    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    url: str | None = None


class Registration:
    """Heartbeats of one server of `run`, written from a thread between `start` and `stop`.

    `config` is what trainers compare with their own. With `adapters` it serves the versions of the
    run's adapter next to their base.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        tokenizer: TokenizerIdentity,
        engine: Engine,
        announcement: Announcement,
        *,
        adapters: ServedAdapters | None = None,
        every_s: float | int = HEARTBEAT_S,
    ) -> None:
        self._board: FleetBoard = board_of(config.inference, run.folder)
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
        self._thread.join(timeout=STOP_S)
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
    """Replace a wildcard address in a base URL by this machine's name."""
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
