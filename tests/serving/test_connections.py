"""A hostile network: after each attack an ordinary request is answered as if nothing had been."""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import orjson
import pytest
import uvicorn
from support.servers import CHAT, asks_well, chat_body, raw, read_all, serving, status_of, talk

from marin_rl.config import ServerConfig
from marin_rl.serving.server import PolicyServer

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
LIMITS = ServerConfig(header_timeout_s=1.0, body_timeout_s=1.0, connections_max=64)
MEGABYTE = 2**20
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def patient() -> Iterator[PolicyServer]:
    """One that gives large bodies the time they take on a busy machine."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving(LIMITS) as running:
        yield running


def test_uvicorn_is_the_version_whose_private_parts_are_overridden() -> None:
    assert uvicorn.__version__.startswith("0.54."), (
        "expected uvicorn 0.54, whose private protocol classes `serving/http/connections.py` "
        f"overrides, found {uvicorn.__version__}: read the changes of HttpToolsProtocol, "
        "RequestResponseCycle and FlowControl, run this file and attacks/test_connections.py, "
        "then raise the bound here and in pyproject.toml"
    )


def metric(server: PolicyServer, line: str) -> float:
    text = talk(server, "GET", "/metrics")[2]
    values = [row.split()[-1] for row in text.splitlines() if row.startswith(line + " ")]
    return float(values[0]) if values else 0.0


@pytest.mark.slow
def test_a_head_that_trickles_in_is_cut_off(server: PolicyServer) -> None:
    before = metric(server, 'marin_rl_connections_refused_total{reason="header_timeout"}')
    started, answer = time.monotonic(), b""
    with raw(server) as slow:
        slow.sendall(HEAD)
        slow.settimeout(0.1)
        while not answer and time.monotonic() - started < 60:
            try:
                slow.sendall(b"X-A: b\r\n")
                answer = slow.recv(65536)
            except TimeoutError:
                continue
        took_s = time.monotonic() - started
    assert status_of(answer) == 408
    assert b'"code":"header_timeout"' in answer
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", answer)
    assert took_s > 0.8
    assert metric(server, 'marin_rl_connections_refused_total{reason="header_timeout"}') > before
    assert asks_well(server)


def test_idle_connections_are_closed_and_those_in_use_are_kept(server: PolicyServer) -> None:
    with raw(server) as idle, raw(server) as used:
        idle.settimeout(0.1)
        deadline, answer = time.monotonic() + 120, b"none yet"
        while answer and time.monotonic() < deadline:
            used.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(read_health(used)) == 200
            with suppress(TimeoutError):
                answer = idle.recv(65536)
        assert answer == b""
        for _ in range(3):
            used.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(read_health(used)) == 200
    assert asks_well(server)


def read_health(connection: socket.socket) -> bytes:
    """One answer of /healthz on a connection that stays open; it may come in several pieces."""
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        piece = connection.recv(65536)
        assert piece, answer
        answer += piece
    return answer


def test_bytes_between_requests_do_not_keep_a_connection(server: PolicyServer) -> None:
    """uvicorn's own timer for idle connections ends with the first byte that comes."""
    with raw(server) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(read_health(slow)) == 200
        slow.sendall(b"G")
        started = time.monotonic()
        assert status_of(read_all(slow)) == 408
        assert time.monotonic() - started < 60


def test_many_idle_connections_leave_room_for_a_request(server: PolicyServer) -> None:
    crowd = [raw(server) for _ in range(3 * LIMITS.connections_max)]
    try:
        assert asks_well(server)
        assert metric(server, "marin_rl_connections") <= LIMITS.connections_max + 1
    finally:
        for connection in crowd:
            connection.close()
    assert asks_well(server)


def test_a_connection_beyond_the_limit_is_refused_if_all_are_at_work() -> None:
    with serving(ServerConfig(connections_max=3)) as server:
        assert asks_well(server)
        busy = [raw(server) for _ in range(3)]
        for connection in busy:
            connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n")
            assert status_of(connection.recv(65536)) == 100
        with raw(server) as late:
            answer = read_all(late)
        assert status_of(answer) == 503
        assert b"too_many_connections" in answer
        assert b"Retry-After" in answer
        for connection in busy:
            connection.close()
        deadline, well = time.monotonic() + 60, False
        while not well:
            assert time.monotonic() < deadline
            with suppress(ConnectionError):  # refused until the server has seen a connection close
                well = asks_well(server)


def fill(connection: socket.socket, data: bytes) -> None:
    """Send without reading, until nothing more is taken for a moment."""
    connection.settimeout(0.2)
    try:
        while True:
            connection.sendall(data)
    except TimeoutError:
        return


def raw_unbuffered(server: PolicyServer) -> socket.socket:
    """A connection for which the server's kernel keeps little: thousands of answers fill more."""
    assert server._uvicorn
    (listener,) = server._uvicorn.servers[0].sockets
    with socket.socket(fileno=os.dup(listener.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = raw(server)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return connection


@pytest.mark.slow
def test_a_client_that_reads_no_answers_does_not_keep_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refusals cost no token, and an answer that is not read waits for its reader."""
    monkeypatch.setenv("MARIN_RL_API_KEY", "token")
    limits = ServerConfig(connections_max=1, header_timeout_s=1.0, body_timeout_s=1.0)
    with serving(limits) as server, raw_unbuffered(server) as deaf:
        fill(deaf, 1000 * b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deadline = time.monotonic() + 120
        while talk(server, "GET", "/healthz")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = 'marin_rl_connections_refused_total{reason="unread"}'
        token = {"Authorization": "Bearer token"}
        assert f"{refused} 1" in talk(server, "GET", "/metrics", headers=token)[2]
        assert talk(server, "GET", "/v1/models", headers=token)[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
        b"\r\n\r\n\r\n\x00\x00\x00\x00\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e3\r\n\r\n",
        HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Bad Header: x\r\n\r\n",
        HEAD + b"X: \x00\r\n\r\n",
    ],
    ids=lambda sent: repr(sent[:40]),
)
def test_bytes_that_are_not_http_get_a_4xx_and_nothing_else(
    server: PolicyServer, sent: bytes
) -> None:
    with raw(server) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert 400 <= status_of(answer) < 502, answer
    assert b"Traceback" not in answer
    assert b"site-packages" not in answer
    assert asks_well(server)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "piece by piece"])
@pytest.mark.parametrize(
    "line", [b"X-%07d: abcdefghijklmnopqrstuvwxyz\r\n", b"X-%07d: " + b"y" * 4096 + b"\r\n"]
)
def test_a_flood_of_headers_is_refused(server: PolicyServer, line: bytes, at_once) -> None:
    flood = b"".join(line % number for number in range(2 * MEGABYTE // len(line)))
    pieces = [flood] if at_once else [flood[i : i + 8192] for i in range(0, len(flood), 8192)]
    with raw(server) as connection:
        try:
            connection.sendall(HEAD)
            for piece in pieces:
                connection.sendall(piece)
            connection.sendall(b"\r\n")
        except ConnectionError:
            pass  # refused before all was sent
        answer = read_all(connection)
    assert status_of(answer) in (0, 431), answer  # a reset may take the answer with it
    assert asks_well(server)


@pytest.mark.parametrize(
    "begun",
    [b"5;x=", b"5\r\nabcde\r\n6;x=", b"0\r\nX: ", b"5\r\nabcde\r\n0\r\nX: "],
    ids=["extension", "later extension", "trailer", "trailer of a body"],
)
def test_bytes_between_the_chunks_of_a_body_are_bounded(server: PolicyServer, begun: bytes) -> None:
    """The parser keeps a header, or throws an extension away, but counts neither."""
    with raw(server) as connection:
        try:
            connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + begun)
            for _ in range(2 * MEGABYTE // 8192):
                connection.sendall(b"y" * 8192)
        except ConnectionError:
            pass  # refused before all was sent
        answer = read_all(connection)
    assert status_of(answer) in (0, 431), answer
    assert asks_well(server)


def test_requests_behind_one_that_waits_are_not_read_for_ever(server: PolicyServer) -> None:
    body = b'{"model":"policy","messages":[{"role":"user","content":""}],"max_tokens":2}'
    flood = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000
    server.engine.pause()
    try:
        with raw(server, timeout_s=1) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            sent = taken(connection, flood, 256 * MEGABYTE)
        assert sent < 64 * MEGABYTE  # what sockets hold, and one read of ours
    finally:
        server.engine.resume()
    assert asks_well(server)


def taken(connection: socket.socket, data: bytes, most: int) -> int:
    """Send data over and over, until nothing is taken for a while; the bytes that went."""
    sent = 0
    while sent < most:
        try:
            sent += connection.send(data)
        except TimeoutError:
            break
    return sent


def test_a_head_just_too_large_is_a_431(server: PolicyServer) -> None:
    with raw(server) as connection:
        connection.sendall(HEAD + b"X: " + b"y" * 70_000 + b"\r\n\r\n")
        answer = read_all(connection)
    assert status_of(answer) == 431
    assert b"at most 65536 bytes" in answer


def test_an_address_counts_as_part_of_the_head(server: PolicyServer) -> None:
    with raw(server) as connection:
        line = b"GET /v1/models?" + b"y" * 65_000 + b" HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(line + b"X: " + b"y" * 600 + b"\r\n\r\n")
        connection.settimeout(10)
        assert status_of(connection.recv(65536)) == 431
    assert asks_well(server)


def test_200_megabytes_that_are_declared_are_refused_unread(server: PolicyServer) -> None:
    with raw(server) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (200 * MEGABYTE))
        sent = pour(connection, 200, b"%s")
        answer = read_all(connection)
    assert status_of(answer) in (0, 413), answer
    assert sent <= 200
    assert asks_well(server)


def test_a_body_declared_too_large_is_a_413_before_it_is_sent(server: PolicyServer) -> None:
    with raw(server) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (200 * MEGABYTE))
        answer = read_all(connection)
    assert status_of(answer) == 413
    assert b"at most 16777216 bytes" in answer


def test_200_megabytes_in_chunks_are_cut_off(patient: PolicyServer) -> None:
    with raw(patient) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        pour(connection, 200, b"100000\r\n%s\r\n")
        answer = read_all(connection)
    assert status_of(answer) in (0, 413), answer
    assert asks_well(patient)


@pytest.mark.parametrize("asked", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
def test_a_body_in_chunks_just_too_large_is_a_413(patient: PolicyServer, asked: bytes) -> None:
    with raw(patient) as connection:
        connection.sendall(HEAD + asked + b"Transfer-Encoding: chunked\r\n\r\n")
        pour(connection, 17, b"100000\r\n%s\r\n")
        answer = read_all(connection)
    assert status_of(answer) == 413
    assert asks_well(patient)


def pour(connection: socket.socket, megabytes: int, shape: bytes) -> int:
    """Send `megabytes`, or until the server refuses more; returns how many were sent."""
    piece = shape % (b"x" * MEGABYTE)
    for sent in range(megabytes):
        try:
            connection.sendall(piece)
        except OSError:
            return sent
    return megabytes


def test_10_000_stop_strings_are_a_400(server: PolicyServer) -> None:
    status, _, answer = talk(server, "POST", CHAT, chat_body(stop=["x"] * 10_000))
    assert (status, answer["error"]["param"]) == (400, "stop")
    assert asks_well(server)


def test_a_thousand_requests_down_one_connection_are_answered_in_order(
    server: PolicyServer,
) -> None:
    with raw(server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 999)
        connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200 OK") == 1000
    assert answers.rstrip().endswith(b'{"status":"ready"}')


@pytest.mark.slow
def test_a_large_unread_answer_does_not_keep_its_connection(
    server: PolicyServer,
) -> None:
    body = orjson.dumps(chat_body(n=96, max_tokens=90, logprobs=True, top_logprobs=20))
    before = server.engine.stats.requests
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # most stays over there
        connection.connect((HOST, urlsplit(server.base_url).port))
        head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        deadline = time.monotonic() + 120
        while server.engine.stats.requests == before and time.monotonic() < deadline:
            time.sleep(0.001)
        while (server.engine.active or server.engine.queued) and time.monotonic() < deadline:
            time.sleep(0.01)
        while metric(server, "marin_rl_connections") > 1 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert metric(server, "marin_rl_connections") == 1  # the one that asks
        answer = read_all(connection)
    declared = re.search(rb"content-length: (\d+)\r\n", answer)
    assert declared
    assert (
        0 < len(answer) < int(declared[1])
    )  # the content of the kernels' buffers: the rest is lost
    assert asks_well(server)


def test_garbage_behind_a_running_request_ends_it_and_frees_its_slots(
    server: PolicyServer,
) -> None:
    body = b'{"model":"policy","messages":[{"role":"user","content":""}],"n":64,"max_tokens":90}'
    with raw(server) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + 120
        while not server.engine.active and time.monotonic() < deadline:
            time.sleep(0.001)
        connection.sendall(b"\x00\xff garbage\r\n\r\n" * 100)
        read_all(connection)
    while (server.engine.active or server.engine.queued) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (server.engine.active, server.engine.queued) == (0, 0)
    assert asks_well(server)


def test_a_websocket_is_not_spoken_here(server: PolicyServer) -> None:
    with raw(server) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert status_of(read_all(connection)) == 403  # and the connection ends
    assert asks_well(server)
