"""Requests whose framing is made to be read in two ways."""

import pytest
from support.servers import asks_well, raw, read_all, status_of

from marin_rl.serving.server import PolicyServer

# The speed of the model does not matter here.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

BODY = b'd\r\n{"prompt":"a"\r\n1\r\n}\r\n0\r\n\r\n'


@pytest.mark.parametrize(
    ("coding", "status"),
    [
        (b"chunked", 200),
        (b"Chunked", 200),
        (b"gzip, chunked", 501),
        (b"gzip,chunked", 501),
        (b"identity, chunked", 501),
        (b"deflate\r\nTransfer-Encoding: chunked", 501),
    ],
)
@pytest.mark.parametrize("path", [b"/tokenize", b"/healthz"])
def test_only_chunked_bodies_are_taken(
    server: PolicyServer, path: bytes, coding: bytes, status: int
) -> None:
    """A proxy in front may have decoded what we would take as it is (RFC 9112, 6.1)."""
    method = b"GET" if path == b"/healthz" else b"POST"
    head = (
        b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: %s\r\n\r\n"
    )
    with raw(server) as connection:
        connection.sendall(head % (method, path, coding) + BODY)
        answer = read_all(connection)
    assert status_of(answer) == status, answer
    if status == 501:
        assert b"unknown_transfer_coding" in answer
    assert asks_well(server)
