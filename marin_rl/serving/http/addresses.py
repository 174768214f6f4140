"""Addresses to listen on, uvicorn's options, names that are answered, and web pages that may ask.

Whether an address can be had is checked before a model is loaded: a wrong one costs a second, not
minutes. A page in a browser can reach a server on its user's machine, under a name of its own (DNS
rebinding) or from another site, so Host and Origin are checked, and CORS is off but for the origins
that are listed. Starlette's TrustedHostMiddleware knows lists of names only; any address of this
machine's is answered here, and a refusal is an error like all others. Leaves out tokens (`auth`).
"""

import ipaddress
import logging
import re
import socket
from collections.abc import Mapping
from functools import lru_cache

import uvicorn
from starlette.types import ASGIApp

from marin_rl.config import ServerConfig
from marin_rl.errors import ConfigError
from marin_rl.serving.http.errors import ApiError

KEEP_ALIVE_S = 10  # that a connection may be idle
STOP_S = 5  # that clients get to take in their last bytes

_log = logging.getLogger(__name__)
_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(:\d{1,5})?")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; port 0 takes a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        listener.close()
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    return listener


def http_server(app: ASGIApp, config: ServerConfig, host: str) -> uvicorn.Server:
    """Return uvicorn's server of `app`, not started yet; warn of an address beyond this machine."""
    if not is_loopback(host):
        _log.warning(
            "%s is open to other machines, without TLS and without timeouts for slow clients: put "
            'a reverse proxy in front (docs/serving.md, "Beyond this machine")',
            host,
        )
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            loop="uvloop",
            lifespan="off",
            log_config=None,
            log_level="critical",  # a line for each malformed request otherwise
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=config.connections_max + 1,  # uvicorn refuses at this number
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
        )
    )


class Origins:
    """The rules for Host and Origin of one server.

    `bound_host` is the address it listens on. Without a token only names of this machine are
    answered; with one, any IP address too, for a page cannot rebind an address, only a name.
    """

    def __init__(self, config: ServerConfig, bound_host: str, *, has_token: bool) -> None:
        exact = {name.lower().strip("[]") for name in config.hosts_allowed if "*" not in name}
        self._names = exact | {bound_host.lower()}
        address = _address(bound_host)
        if has_token and address is not None and address.is_unspecified:
            self._names.add(socket.gethostname().lower())
        self._suffixes = tuple(n[1:].lower() for n in config.hosts_allowed if n.startswith("*."))
        self._listed = frozenset(origin.lower() for origin in config.origins_allowed)
        self._has_token = has_token
        # most clients send one Host for ever
        self._is_ours = lru_cache(maxsize=256)(self._answers_to)

    def check(self, headers: Mapping[bytes, list[bytes]]) -> None:
        """Raise ApiError 403 for a request whose Host or Origin is not ours."""
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise ApiError(
                403,
                "the Host header names none of this server's hosts: see the setting "
                "inference.server.hosts_allowed",
                code="host_not_allowed",
            )
        origins = headers.get(b"origin", [])
        if origins and (len(origins) > 1 or not self._may_call(_text(origins[0]), _text(hosts[0]))):
            raise ApiError(
                403,
                "web pages of this origin may not call this server: see the setting "
                "inference.server.origins_allowed",
                code="origin_not_allowed",
            )

    def is_listed(self, headers: Mapping[bytes, list[bytes]]) -> bool:
        """Return True for a request of a web page that may read responses (CORS)."""
        origins = headers.get(b"origin", [])
        return len(origins) == 1 and _text(origins[0]) in self._listed

    def _answers_to(self, authority: bytes) -> bool:
        host = _host(_text(authority))
        if host in self._names or is_loopback(host):
            return bool(host)
        if self._suffixes and host.endswith(self._suffixes):
            return True
        return self._has_token and _address(host) is not None

    def _may_call(self, origin: str, authority: str) -> bool:
        if origin in self._listed:
            return True
        scheme, separator, origin_authority = origin.partition("://")
        if not separator or scheme not in ("http", "https"):
            return False
        if origin_authority == authority:  # a page of this server's own
            return True
        return not self._has_token and is_loopback(_host(origin_authority))


def is_loopback(host: str) -> bool:
    """Return True for a host name or address of this machine's loopback."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip().lower()


def _host(authority: str) -> str:
    match = _AUTHORITY.fullmatch(authority)
    return "" if match is None else match["host"].strip("[]")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
