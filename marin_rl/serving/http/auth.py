"""Access control: bearer tokens, addresses to listen on, and the pages that may ask.

Tokens come from the environment and are compared in constant time. Whether an address can be had is
checked before a model is loaded: a wrong one costs a second, not minutes. A page in a browser can
reach a server on its user's machine, under a name of its own (DNS rebinding) or from another site,
so Host and Origin are checked, and CORS is off but for the origins that are listed. Starlette's
TrustedHostMiddleware knows lists of names only; any address of this machine's is answered here, and
a refusal is an error like all others. Leaves out the middleware that asks for all this (`guard`).
"""

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from marin_rl.config import InferenceConfig, ServerConfig
from marin_rl.errors import ConfigError
from marin_rl.serving.http.access_log import record_of
from marin_rl.serving.http.errors import ApiError

# Compared with where no token is set, so that every comparison takes the same time.
_NO_TOKEN = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """SHA-256 digests of the API's and the admin's token; None where the variable is not set.

    Digests rather than tokens: they compare in constant time for any bytes a client sends, and a
    trace or a dump of this object gives nothing away.
    """

    api: bytes | None
    admin: bytes | None
    api_variable: str
    admin_variable: str

    @staticmethod
    def from_environment(config: InferenceConfig) -> "Keys":
        """Read both tokens. ConfigError for one with blanks inside, or one used for both."""
        variables = config.api_key_variable, config.server.admin_key_variable
        api, admin = map(_token_digest, variables)
        if api is not None and api == admin:
            raise ConfigError(
                f"{variables[0]} and {variables[1]} hold the same token: every caller of "
                "completions could replace the weights. Use two tokens"
            )
        return Keys(api=api, admin=admin, api_variable=variables[0], admin_variable=variables[1])

    def caller(self, authorization: Sequence[bytes], api_keys: Sequence[bytes] = ()) -> str:
        """Role of the sender of these headers: "admin", "api" or "local".

        `authorization` are the headers of this name; without any `api_keys` count, those of
        Anthropic's name `x-api-key`. "local" is every caller while no API token is set: then only
        this machine is answered. Raises ApiError 401 for an unknown token.
        """
        scheme, _, token = b"".join(authorization[:1]).partition(b" ")
        if not authorization:
            scheme, token = b"bearer", b"".join(api_keys[:1])
        # nothing for no header, several, or another scheme
        is_one = len(authorization or api_keys) == 1 and scheme.lower() == b"bearer"
        digest = hashlib.sha256(token.strip() if is_one else b"").digest()
        is_admin = hmac.compare_digest(digest, self.admin or _NO_TOKEN)
        is_api = hmac.compare_digest(digest, self.api or _NO_TOKEN)
        if is_admin:
            return "admin"
        if self.api is None:
            return "local"
        if is_api:
            return "api"
        raise ApiError(
            401,
            "expected the header 'Authorization: Bearer <token>', or 'x-api-key: <token>', with "
            "the server's token",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _token_digest(variable: str) -> bytes | None:
    # surrogateescape gives back the very bytes of an environment that is not UTF-8
    token = os.environ.get(variable, "").strip().encode("utf-8", "surrogateescape")
    if len(token.split()) > 1:
        raise ConfigError(f"{variable}: expected a token without blanks, found blanks in it")
    return hashlib.sha256(token).digest() if token else None


def check_address(config: InferenceConfig, host: str, port: int) -> None:
    """Raise ConfigError, in one line, for an address that a server would not start on."""
    check_reach(Keys.from_environment(config), host)
    listen(host, port).close()


def check_reach(keys: Keys, host: str) -> None:
    """Raise ConfigError for an address beyond this machine without an API token."""
    if keys.api is None and not is_loopback(host):
        raise ConfigError(
            f"a server on {host} is open to others: set a token in the environment variable "
            f"{keys.api_variable}, or bind to 127.0.0.1"
        )


OPEN_PATHS = ("/healthz", "/health", "/readyz", "/")

Endpoint = Callable[[Request], Awaitable[Response]]


def for_admin(endpoint: Endpoint) -> Endpoint:
    """The endpoint of an admin route: ApiError 403 for every other caller."""

    @wraps(endpoint)
    async def guarded(request: Request) -> Response:
        if record_of(request.scope).caller == "admin":
            return await endpoint(request)
        variable = request.scope["state"]["admin_variable"]
        message = (
            "expected the admin token, found another caller's"
            if variable is None
            else f"no admin token is set: start the server with one in the variable {variable}"
        )
        raise ApiError(403, message, code="admin_only")

    return guarded


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


def run_server(server: uvicorn.Server, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Answer until a signal; `ready` gets the address. Raises ConfigError for the address."""
    listener = listen(host, port)
    ready(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
    server.run(sockets=[listener])


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

    def check(self, headers: Mapping[bytes, list[bytes]]) -> None:
        """Raise ApiError 403 for a request whose Host or Origin is not ours."""
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self._answers_to(hosts[0]):
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
        origins = headers.get(b"origin", [])
        return len(origins) == 1 and _text(origins[0]) in self._listed

    def _answers_to(self, authority: bytes) -> bool:
        host = _host(_text(authority))
        if host in self._names or is_loopback(host):
            return bool(host)
        return host.endswith(self._suffixes) or (self._has_token and _address(host) is not None)

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
