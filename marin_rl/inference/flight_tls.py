"""TLS of weights by Arrow Flight: the trainer's certificate, and the roots that followers trust.

A configuration has the names of files; what is in them is read when it is needed, and recorded
nowhere. Leaves out the connections themselves (`marin_rl.serving.weights.flight`).
"""

import re
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from marin_rl.config import InferenceConfig
from marin_rl.errors import ConfigError

TLS_SCHEME = "grpc+tls"
_FLIGHTS = 4  # messages each way: a TLS handshake has at most three

# To gRPC a handshake that fails is a server that is away: only its words tell them apart.
_UNTRUSTED = re.compile(r"certificate verify failed: ([A-Za-z -]+)")
_OTHER_HOST = re.compile(r"(Peer name \S+ is not in peer certificate)")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate, with those of the authorities between, and its private key; both PEM."""

    chain: bytes
    key: bytes = field(repr=False)


def trainer_certificate(inference: InferenceConfig) -> Certificate | None:
    """Return the certificate of `inference.flight`; None for an address without TLS.

    Raises ConfigError for files that cannot be read, a key of another certificate, and a
    certificate that has expired or is for another host.
    """
    address = urlsplit(inference.flight or "")
    chain, key = inference.flight_certificate, inference.flight_key
    if address.scheme != TLS_SCHEME or chain is None or key is None:
        return None
    certificate = Certificate(_contents("flight_certificate", chain), _contents("flight_key", key))
    try:
        _rehearse(chain, key, address.hostname or "")
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"inference.flight_certificate {chain}: {error.verify_message}; expected a certificate "
            f"of {address.hostname} that is valid now"
        ) from None
    except ssl.SSLError as error:
        raise ConfigError(
            f"inference.flight_certificate {chain} and inference.flight_key {key}: expected PEM, a "
            f"certificate and its own key without a passphrase, found {error.reason or error}"
        ) from None
    return certificate


def trusted_roots(ca: str | None) -> bytes | None:
    """Return the certificates, PEM, that a follower trusts: of the file `ca`, else the system's.

    None where the system has them in no file that Python knows: gRPC looks for them then. Raises
    ConfigError for a file without a certificate.
    """
    if ca is None:
        system = ssl.get_default_verify_paths().cafile
        return None if system is None else Path(system).read_bytes()
    found = _contents("flight_ca", ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=ca)
    except ssl.SSLError as error:
        raise ConfigError(
            f"inference.flight_ca {ca}: expected certificates as PEM, found {error.reason or error}"
        ) from None
    return found


def tls_failure(message: str) -> str | None:
    """Explain gRPC's message of a handshake that failed; None for another message."""
    if (untrusted := _UNTRUSTED.search(message)) is not None:
        return (
            f"its certificate is refused: {untrusted[1].strip()}; expected one that is valid now "
            "and signed by an authority of inference.flight_ca, or of the system where that is null"
        )
    if (other := _OTHER_HOST.search(message)) is not None:
        return f"its certificate is of another host: {other[1]}"
    if "wrong version number" in message:
        return "it speaks no TLS: expected inference.flight grpc+tls://HOST:PORT there"
    return None


def _contents(key: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"inference.{key} {file}: {error.strerror or error}; expected a PEM file that this "
            "process can read"
        ) from None


def _rehearse(chain: str, key: str, host: str) -> None:
    """Shake hands with ourselves in memory, as a follower would that trusts this certificate.

    Only so does the standard library compare dates, host and key. Raises ssl.SSLError.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(chain, key, password=lambda: "")  # else it asks at the terminal
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cafile=chain)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # its authority may be unknown here
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_FLIGHTS):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
