"""Hostile bytes on a connection: after each attack an ordinary request is answered as before."""

import json
import socket
from contextlib import suppress

import pytest
from support.servers import asks_well, chat_body, raw, serving, talk, wait_until

from marin_rl.config import ServerConfig
from marin_rl.serving.server import PolicyServer

# The speed of the model does not matter here.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes; what a reset took is missing."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionError:
        pass
    return data


def status_of(answer: bytes) -> int:
    """The status of a raw answer; 0 if there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


MEGABYTE = 2**20


def test_a_connection_beyond_the_limit_is_a_503_until_another_ends() -> None:
    with serving(ServerConfig(connections_max=3)) as server:
        assert asks_well(server)
        busy = [raw(server) for _ in range(3)]
        for connection in busy:
            connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n")
            assert status_of(connection.recv(65536)) == 100
        assert talk(server, "GET", "/v1/models")[0] == 503
        for connection in busy:
            connection.close()
        wait_until(lambda: talk(server, "GET", "/v1/models")[0] != 503)
        assert asks_well(server)


def test_a_body_declared_too_large_is_a_413_before_it_is_sent(server: PolicyServer) -> None:
    with raw(server) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (200 * MEGABYTE))
        answer = connection.recv(65536)
    assert status_of(answer) == 413
    assert b"at most 16777216 bytes" in answer
    assert asks_well(server)


def test_a_body_in_chunks_is_cut_off_at_the_limit(server: PolicyServer) -> None:
    piece = b"100000\r\n%s\r\n" % (b"x" * MEGABYTE)
    with raw(server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        with suppress(OSError):  # the server may have closed the connection
            for _ in range(17):
                connection.sendall(piece)
        answer = connection.recv(65536)
    assert status_of(answer) == 413
    assert asks_well(server)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ending", [b"\x00\xff garbage\r\n\r\n" * 100, b""], ids=["garbage", "end"])
def test_a_client_that_stops_speaking_http_or_leaves_frees_its_slots(server, ending, stream):
    body = json.dumps(chat_body(n=64, max_tokens=90, stream=stream)).encode()
    with raw(server) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: server.engine.active)
        if ending:
            connection.sendall(ending)
            read_all(connection)
    wait_until(lambda: not (server.engine.active or server.engine.queued))
    assert asks_well(server)
