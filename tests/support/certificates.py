"""Certificates made at test time: an authority, and those that it signs for this machine."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority that writes into `folder`; its own certificate is `path`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = _builder(self._name, self._name, days=1).public_key(self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(_pem(own.sign(self._key, hashes.SHA256())))

    def sign(
        self, name: str, *, days: int = 1, host: str = LOOPBACK, passphrase: str = ""
    ) -> Files:
        """A certificate of `host` that is valid for `days` from now; negative ones have expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        places = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        builder = _builder(_named(name), self._name, days=days).public_key(key.public_key())
        signed = builder.add_extension(places, critical=False).sign(self._key, hashes.SHA256())
        files = Files(
            certificate=self._folder / f"{name}.crt.pem", key=self._folder / f"{name}.key.pem"
        )
        files.certificate.write_bytes(_pem(signed))
        locked: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase:
            locked = serialization.BestAvailableEncryption(passphrase.encode())
        files.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
        )
        return files


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, *, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now + timedelta(days=days))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
