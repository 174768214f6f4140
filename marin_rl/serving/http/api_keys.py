"""Bearer tokens: which there are, and whose request a token makes it.

Owns reading them from the environment and comparing them in constant time. Leaves out what a caller
may do (`auth`).
"""

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass

from marin_rl.config import InferenceConfig
from marin_rl.errors import ConfigError

# Another one's digest where no token is set, so that every comparison takes the same time.
_NOBODY = bytes(32)


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

    def caller(self, authorization: Sequence[bytes]) -> str | None:
        """Role of the sender of these Authorization headers: "admin", "api", "local", or None if
        unknown.

        "local" is every caller while no API token is set: then only this machine is answered.
        """
        given = hashlib.sha256(_bearer(authorization)).digest()
        is_admin = hmac.compare_digest(given, self.admin or _NOBODY)
        is_api = hmac.compare_digest(given, self.api or _NOBODY)
        if is_admin:
            return "admin"
        if self.api is None:
            return "local"
        return "api" if is_api else None


def _token(variable: str) -> bytes | None:
    # surrogateescape gives back the very bytes of an environment that is not UTF-8
    token = os.environ.get(variable, "").strip().encode("utf-8", "surrogateescape")
    if len(token.split()) > 1:
        raise ConfigError(f"{variable}: expected a token without blanks, found blanks in it")
    return token or None


def _bearer(authorization: Sequence[bytes]) -> bytes:
    """The token of the one Authorization header; nothing for none, several, or another scheme."""
    if len(authorization) != 1:
        return b""
    scheme, _, token = authorization[0].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""
