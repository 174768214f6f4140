"""Addresses to listen on: who could reach the server there, and is the port free.

Can be asked before a model is loaded, so that a wrong address costs a second and not minutes.
"""

import socket

from marin_rl.config import InferenceConfig
from marin_rl.errors import ConfigError
from marin_rl.serving.http.auth import Keys
from marin_rl.serving.http.origins import is_loopback


def check_address(config: InferenceConfig, host: str, port: int) -> None:
    """Raise ConfigError, in one line, for an address that a server would not start on."""
    check_reach(Keys.from_environment(config), host)
    listen(host, port).close()


def check_reach(keys: Keys, host: str) -> None:
    """ConfigError for an address beyond this machine without an API token."""
    if keys.api is None and not is_loopback(host):
        raise ConfigError(
            f"a server on {host} is open to others: set a token in the environment variable "
            f"{keys.api_variable}, or bind to 127.0.0.1"
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes a free one. ConfigError if it is not to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        listener.close()
        told = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {told}") from error
    return listener
