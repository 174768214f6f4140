"""Weights by Arrow Flight: straight from a trainer to servers that follow its run.

A ticket is the digest of the parameters, so that no one gets others than it asked for. Of a run
that trains an adapter the adapter's arrays have the digest of the policy, and those of its base,
which servers ask for once, the base's. Arrays travel in pieces of `PIECE_BYTES`; what arrives must
have the names, shapes and bytes of the served architecture, and its digest is compared by those who
asked. Leaves out the checkpoint's identity and the files that are read where this fails
(`checkpoint_loader`, `trainer_source`).
"""

import hmac
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from pyarrow import flight

from marin_rl.errors import ConfigError, EndpointUnavailable, InputError
from marin_rl.inference.flight_tls import TLS_SCHEME, Certificate, tls_failure, trusted_roots
from marin_rl.serving.http.addresses import is_loopback

PIECE_BYTES = 16 * 2**20
FETCH_S = 600.0  # for all parameters

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("offset", pa.int64()),  # bytes from the beginning of the array
        ("data", pa.binary()),
    ]
)
_TOKEN = "authorization"


class WeightServer:
    """Hands out one set of parameters at a time, at `address` (grpc://HOST:PORT, 0 a free port).

    And the base of an adapter, for as long as the server lives. With a token every caller must have
    it; grpc+tls://HOST:PORT has a certificate. Raises ConfigError for an address that others reach
    and no token, or that is taken.
    """

    def __init__(
        self, address: str, token: str | None, certificate: Certificate | None = None
    ) -> None:
        host = urlsplit(address).hostname or ""
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"inference.flight {address} is open to others: set a token in the environment "
                "variable that inference.api_key_variable names, or use grpc://127.0.0.1:0"
            )
        pairs = [] if certificate is None else [(certificate.chain, certificate.key)]
        try:
            self._server = _Server(
                address, tls_certificates=pairs, middleware={"token": _Token(token)}
            )
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"inference.flight: cannot listen on {address} ({error}): expected a free port on "
                "an address of this machine"
            ) from None
        self.url = f"{urlsplit(address).scheme}://{host}:{self._server.port}"

    def offer(self, digest: str, parameters: Mapping[str, Any]) -> None:
        """Hand out these parameters from now on; arrays are copied, for the trainer reuses its."""
        copied = {name: np.array(array, order="C") for name, array in parameters.items()}
        # One assignment: a call sees the old pair or the new one, never a mix.
        self._server.offered = digest, copied

    def keep(self, digest: str, read: Callable[[], Mapping[str, Any]]) -> None:
        """Hand out a base as `read` returns it, at each call: no copy of it is kept."""
        self._server.base = digest, read

    def close(self) -> None:
        """End it; calls that are under way are broken off."""
        # It waits for calls that are under way, and a reader may have stopped reading.
        threading.Thread(target=self._server.shutdown, name="flight-end", daemon=True).start()


class _Server(flight.FlightServerBase):
    """The part of it that Arrow calls, from threads of its own."""

    offered: tuple[str, Mapping[str, np.ndarray]] = "", MappingProxyType({})
    base: tuple[str, Callable[[], Mapping[str, Any]]] = "", dict[str, Any]

    def do_get(self, _context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        digest, parameters = self.offered  # one read: a later offer changes nothing of this call
        asked = ticket.ticket.decode(errors="replace")
        base_digest, read_base = self.base
        if asked == base_digest:
            digest, parameters = asked, read_base()
        if asked != digest:
            raise flight.FlightServerError(f"has parameters {digest:.16}, not {asked:.16}")
        return flight.GeneratorStream(SCHEMA, _pieces(parameters))


class _Token(flight.ServerMiddlewareFactory):
    """Refuses calls without the token."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()

    def start_call(self, _info: Any, headers: Mapping[str, list[str]]) -> None:
        """Raise FlightUnauthenticatedError unless a header has the token."""
        given = [value.encode() for value in headers.get(_TOKEN, [])]
        # `compare_digest`: the time that it takes says nothing about the token.
        if self._expected is not None and not any(
            hmac.compare_digest(self._expected, value) for value in given
        ):
            raise flight.FlightUnauthenticatedError("expected the API token of the run's servers")


def _pieces(parameters: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    for name, value in parameters.items():
        array = np.asarray(value, order="C")
        # As bytes, with the dtype by name: Arrow has no bfloat16.
        data = array.reshape(-1).view(np.uint8)
        for offset in range(0, max(array.nbytes, 1), PIECE_BYTES):  # one piece of an empty array
            piece = data[offset : offset + PIECE_BYTES]
            ends = pa.py_buffer(np.array([0, len(piece)], np.int32))
            column = pa.BinaryArray.from_buffers(
                pa.binary(), 1, [None, ends, pa.py_buffer(piece)]
            )  # without a copy
            fields = [
                pa.array([name]),
                pa.array([array.dtype.name]),
                pa.array([list(array.shape)], pa.list_(pa.int64())),
                pa.array([offset]),
                column,
            ]
            yield pa.record_batch(fields, schema=SCHEMA)


def fetch(
    url: str,
    digest: str,
    shapes: Mapping[str, tuple[int, ...]],
    token: str | None,
    ca: str | None = None,
) -> dict[str, np.ndarray]:
    """The parameters with a digest from the trainer at `url`, of these shapes.

    With grpc+tls its certificate is verified by the PEM file `ca` (None: the system's roots).
    Raises EndpointUnavailable where it does not give them, InputError for others than `shapes`,
    ConfigError for a `ca` that cannot be read.
    """
    tls = urlsplit(url).scheme == TLS_SCHEME
    trusted = {"tls_root_certs": trusted_roots(ca)} if tls else {}
    headers = [] if token is None else [(_TOKEN.encode(), f"Bearer {token}".encode())]
    options = flight.FlightCallOptions(timeout=FETCH_S, headers=headers)
    arrays: dict[str, np.ndarray] = {}
    filled = dict.fromkeys(shapes, 0)
    try:
        with flight.connect(url, **trusted) as client:
            for chunk in client.do_get(flight.Ticket(digest.encode()), options):
                _fill(arrays, filled, chunk.data, shapes)
    except (pa.ArrowException, OSError) as error:
        plain = str(error).partition(". Detail:")[0]
        raise EndpointUnavailable(f"{url}: {tls_failure(plain) or plain:.300}") from None
    short = [
        name for name, size in filled.items() if name not in arrays or size < arrays[name].nbytes
    ]
    if short:
        raise InputError(f"{url}: expected all of {len(shapes)} parameters, without {short[0]}")
    return arrays


def _fill(
    arrays: dict[str, np.ndarray],
    filled: dict[str, int],
    batch: pa.RecordBatch,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Copy a piece to its place. Raises InputError for one that has none."""
    if batch.schema != SCHEMA or batch.num_rows != 1:
        raise InputError(f"expected a row of {SCHEMA.names}, found {batch.schema.names}")
    absent = [name for name in SCHEMA.names if batch.column(name).null_count]
    if absent:  # Arrow lets a column that is not nullable have nulls
        raise InputError(f"expected a row of {SCHEMA.names}, found nulls in {absent}")
    name, dtype, shape, offset = (batch.column(n)[0].as_py() for n in SCHEMA.names[:-1])
    if shapes.get(name) != tuple(shape) or dtype not in ("float32", "bfloat16"):
        raise InputError(
            f"parameter {name:.100}: expected shape {shapes.get(name)}, found {dtype:.20} {shape}"
        )
    if name not in arrays:
        arrays[name] = np.empty(shape, np.dtype(dtype))
    data = np.frombuffer(batch.column("data")[0].as_buffer(), np.uint8)
    place = arrays[name].reshape(-1).view(np.uint8)
    # In order and without gaps: what is not filled is whatever lay in that memory.
    if offset != filled[name] or offset + len(data) > len(place):
        raise InputError(
            f"parameter {name:.100}: expected byte {filled[name]} next, found {offset}"
        )
    place[offset : offset + len(data)] = data
    filled[name] += len(data)
