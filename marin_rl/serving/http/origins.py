"""Under which names the server answers, and which web pages may use it.

A page in a browser can reach a server on its user's machine, under a name of its own (DNS
rebinding) or from another site. So Host and Origin are checked, and CORS is off but for the
origins that are listed. Leaves out tokens (`auth`).
"""

import ipaddress
import re
import socket
from collections.abc import Mapping
from functools import lru_cache

from marin_rl.config import ServerConfig
from marin_rl.serving.http.errors import ApiError

_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(:\d{1,5})?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(, ?[A-Za-z0-9-]+){0,63}")
_EXPOSED = "x-request-id, retry-after"


class Origins:
    """The rules for Host and Origin of one server.

    `bound_host` is the address it listens on. Without a token only names of this machine are
    answered; with one, any IP address too, for a page cannot rebind an address, only a name.
    """

    def __init__(self, config: ServerConfig, bound_host: str, *, has_token: bool) -> None:
        exact = {name.lower().strip("[]") for name in config.hosts_allowed if "*" not in name}
        self._names = exact | {bound_host.lower()}
        if has_token and _is_any(bound_host):
            self._names.add(socket.gethostname().lower())
        self._suffixes = tuple(n[1:].lower() for n in config.hosts_allowed if n.startswith("*."))
        self._listed = frozenset(origin.lower() for origin in config.origins_allowed)
        self._has_token = has_token
        # most clients send one Host for ever
        self._is_ours = lru_cache(maxsize=256)(self._answers_to)

    def refusal(self, headers: Mapping[bytes, list[bytes]]) -> ApiError | None:
        """Why a request with these headers is not for us, or None."""
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return _forbidden(
                "the Host header names none of this server's hosts: see the setting "
                "inference.server.hosts_allowed",
                "host_not_allowed",
            )
        origins = _texts(headers.get(b"origin", []))
        if origins and (len(origins) > 1 or not self._may_call(origins[0], _text(hosts[0]))):
            return _forbidden(
                "web pages of this origin may not call this server: see the setting "
                "inference.server.origins_allowed",
                "origin_not_allowed",
            )
        return None

    def listed(self, headers: Mapping[bytes, list[bytes]]) -> str | None:
        """The request's origin if it is one that may read answers, else None."""
        origins = _texts(headers.get(b"origin", []))
        return origins[0] if len(origins) == 1 and origins[0] in self._listed else None

    def _answers_to(self, authority: bytes) -> bool:
        host = _host(_text(authority))
        if host in self._names or is_loopback(host):
            return bool(host)
        if self._suffixes and host.endswith(self._suffixes):
            return True
        return self._has_token and _is_address(host)

    def _may_call(self, origin: str, authority: str) -> bool:
        if origin in self._listed:
            return True
        scheme, separator, rest = origin.partition("://")
        if not separator or scheme not in ("http", "https"):
            return False
        return rest == authority or (not self._has_token and is_loopback(_host(rest)))


def is_loopback(host: str) -> bool:
    """True if a host name or address is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def cors_headers(origin: str) -> list[tuple[bytes, bytes]]:
    """CORS headers that let a page of a listed origin read an answer."""
    return [
        (b"access-control-allow-origin", origin.encode()),
        (b"access-control-expose-headers", _EXPOSED.encode()),
        (b"vary", b"Origin"),
    ]


def preflight_headers(
    origin: str, headers: Mapping[bytes, list[bytes]]
) -> list[tuple[bytes, bytes]]:
    """CORS headers that let a page of a listed origin send the headers it asks for."""
    asked = ", ".join(_texts(headers.get(b"access-control-request-headers", [])))
    allowed = asked if _HEADER_NAMES.fullmatch(asked) else "authorization, content-type"
    return [
        *cors_headers(origin),
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", allowed.encode()),
        (b"access-control-max-age", b"600"),
    ]


def _texts(values: list[bytes]) -> list[str]:
    return [_text(value) for value in values]


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip().lower()


def _host(authority: str) -> str:
    match = _AUTHORITY.fullmatch(authority)
    return "" if match is None else match["host"].strip("[]")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_any(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, message, type="permission_error", code=code)
