"""Access control: bearer tokens, and the routes that only the admin's opens.

Tokens come from the environment and are compared in constant time. Leaves out the hosts and pages
that are answered (`addresses`) and the middleware that asks for a token (`guard`).
"""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from marin_rl.config import InferenceConfig
from marin_rl.errors import ConfigError
from marin_rl.serving.http.access_log import record_of
from marin_rl.serving.http.addresses import is_loopback, listen
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
        api = _token(config.api_key_variable)
        admin = _token(config.server.admin_key_variable)
        if api is not None and api == admin:
            raise ConfigError(
                f"{config.api_key_variable} and {config.server.admin_key_variable} hold the same "
                "token: every caller of completions could replace the weights. Use two tokens"
            )
        return Keys(
            api=None if api is None else hashlib.sha256(api).digest(),
            admin=None if admin is None else hashlib.sha256(admin).digest(),
            api_variable=config.api_key_variable,
            admin_variable=config.server.admin_key_variable,
        )

    def caller(self, authorization: Sequence[bytes]) -> str:
        """Role of the sender of these Authorization headers: "admin", "api" or "local".

        "local" is every caller while no API token is set: then only this machine is answered.
        Raises ApiError 401 for an unknown token.
        """
        scheme, _, token = b"".join(authorization[:1]).partition(b" ")
        # nothing for no header, several, or another scheme
        is_bearer = len(authorization) == 1 and scheme.lower() == b"bearer"
        digest = hashlib.sha256(token.strip() if is_bearer else b"").digest()
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
            "expected the header 'Authorization: Bearer <token>' with the server's token",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _token(variable: str) -> bytes | None:
    # surrogateescape gives back the very bytes of an environment that is not UTF-8
    token = os.environ.get(variable, "").strip().encode("utf-8", "surrogateescape")
    if len(token.split()) > 1:
        raise ConfigError(f"{variable}: expected a token without blanks, found blanks in it")
    return token or None


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


OPEN_PATHS = ("/healthz", "/health", "/readyz")

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
