"""Entries of `inference.endpoints`, and the endpoints that they stand for at the moment.

An entry is a base URL, every address of a DNS name, a file with entries by line, or the heartbeats
that servers of the run write next to it. Files, names and heartbeats are looked at again all the
time, so that servers come and go. Leaves out whether an endpoint is alive and serves the policy
(`fleet_watch`).
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from marin_rl.config import REGISTERED, Config, InferenceConfig, split_labels
from marin_rl.errors import ConfigError
from marin_rl.storage.fleet import FleetBoard, Identity, Unreadable, run_sha256, served_settings
from marin_rl.storage.provenance import code_digest
from marin_rl.storage.stores.filesystem import ObjectStore, open_store

LINES_MAX = 10_000  # of a file of endpoints
ADVICE_MAX = 3  # entries that an error has an advice for


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint that an entry names. `refused` says why it may not be used; empty where it may.

    `slots` is the number of sequences that it says it decodes side by side. With `awaited` its
    server may end the refusal by its next heartbeat.
    """

    url: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: str = ""
    slots: int | None = None
    awaited: bool = False


class EndpointSource:
    """The endpoints behind the entries of a configuration. `resolve` may be called from any thread.

    `identity` is what registered servers must share, `version` the policy that the trainer has
    them serve at least; both only for `registered`.
    """

    def __init__(
        self,
        entries: Sequence[str],
        board: FleetBoard | None = None,
        identity: Identity | None = None,
        version: int = 0,
    ) -> None:
        self._entries, self._board, self._identity = tuple(entries), board, identity
        self._version = version

    @classmethod
    def of(
        cls, config: Config, tokenizer: str, chat_template: str, version: int
    ) -> "EndpointSource":
        """The source of a run's endpoints for a version of its policy.

        `tokenizer` and `chat_template` are the digests of the run's.
        """
        entries = config.inference.endpoints
        if REGISTERED not in entries:
            return cls(entries)
        folder = open_store(config.root, config.storage_options).at(config.run_id)
        identity = identity_of(config, folder, tokenizer, chat_template)
        return cls(entries, board_of(config.inference, folder), identity, version)

    @property
    def advice(self) -> str:
        """Advice where no endpoint can be used, as a phrase."""
        ways: list[str] = []
        for entry in self._entries[:ADVICE_MAX]:
            kind, _, place = split_labels(entry)[0].partition(":")
            if entry == REGISTERED:
                ways.append("start servers (marin-rl serve RUN --follow --register)")
            elif kind == "file":
                ways.append(f"put the URL of a server that answers on a line of {place}")
            elif kind == "dns":
                ways.append(f"start servers behind the name of {place}")
            else:
                ways.append(f"start the server at {split_labels(entry)[0]}")
        return " or ".join(ways) or "name endpoints in inference.endpoints"

    def resolve(self) -> list[Endpoint]:
        """The endpoints of now, by URL; an entry before counts for a URL that two name.

        Raises ConfigError for a file that cannot be read, StoreUnavailable.
        """
        named: dict[str, Endpoint] = {}
        for entry in self._entries:
            for endpoint in self._of_entry(entry):
                named.setdefault(endpoint.url, endpoint)
        return list(named.values())

    def _of_entry(self, entry: str) -> Iterator[Endpoint]:
        if entry == REGISTERED:
            yield from self._registered()
            return
        place, labels = split_labels(entry)
        if place.startswith("dns:"):
            yield from (Endpoint(url=url, labels=labels) for url in _addresses(place))
        elif place.startswith("file:"):
            yield from self._in_file(Path(place.removeprefix("file:")))
        else:
            yield Endpoint(url=place.rstrip("/"), labels=labels)

    def _in_file(self, path: Path) -> Iterator[Endpoint]:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"inference.endpoints: cannot read {path} ({error}): expected a text file with an "
                "endpoint per line"
            ) from None
        for number, line in enumerate(lines[:LINES_MAX], 1):
            text = line.partition("#")[0].strip()
            # No `file:` in a file: one that names itself would have no end.
            if text.startswith(("http://", "https://", "dns:http://")):
                yield from self._of_entry(text)
            elif text:
                raise ConfigError(
                    f"{path}, line {number}: expected a URL like http://HOST:8000/v1, found "
                    f"{text!r:.100}"
                )

    def _registered(self) -> Iterator[Endpoint]:
        assert self._board is not None, "see `of`"
        assert self._identity is not None, "see `of`"
        target = self._board.target()
        for beat in self._board.heartbeats():
            if isinstance(beat, Unreadable):
                yield Endpoint(url=beat.name, refused=beat.error)
                continue
            refused = self._identity.refusal(beat)
            aged = "no trainer asks servers of the run for a version"
            if target is not None:
                aged = target.aged(beat, self._version)
            yield Endpoint(
                url=beat.url,
                labels=beat.labels,
                refused=refused or aged,
                slots=beat.slots,
                awaited=not refused and bool(aged),
            )


def board_of(inference: InferenceConfig, folder: ObjectStore) -> FleetBoard:
    return FleetBoard(folder, os.environ.get(inference.api_key_variable))


def identity_of(
    config: Config, folder: ObjectStore, tokenizer: str, chat_template: str
) -> Identity:
    """Facts that servers of a run must have in common with this process. Raises ObjectMissing."""
    return Identity(
        run_sha256=run_sha256(folder),
        code=code_digest(),
        tokenizer=tokenizer,
        chat_template=chat_template,
        settings=served_settings(config),
    )


def _addresses(place: str) -> list[str]:
    """URLs of every address of a name; none while the name has none."""
    parts = urlsplit(place.removeprefix("dns:"))
    try:
        answers = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = sorted({str(address[0]) for *_, address in answers})
    shown = [f"[{host}]" if ":" in host else host for host in hosts]
    netlocs = [f"{host}:{parts.port or 80}" for host in shown]
    return [urlunsplit(("http", netloc, parts.path.rstrip("/"), "", "")) for netloc in netlocs]
