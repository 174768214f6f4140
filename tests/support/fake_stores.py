"""Fake object stores with faults on request: Google Cloud Storage in memory, and moto's S3.

The fake GCS has the part of the JSON API that gcsfs uses. It honours `ifGenerationMatch=0` (unless
configured not to) and pages its listings. A fault comes before or after a request took effect: a
status, or a closed connection without an answer.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import Request, urlopen

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from support.faults import Names
from support.http_threads import HttpThread
from werkzeug.serving import make_server


@dataclass
class Fault:
    """Fault for the next `times` requests whose method and path contain the given texts.

    `when` says whether the request takes effect first; `status` None closes the connection.
    """

    method: str
    path: str
    when: Literal["before", "after"]
    status: int | None
    times: int = 1


class Faults:
    """Faults in waiting, and those of requests by name; `seen` counts all requests by method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waiting: list[Fault] = []
        self.names = Names[Fault]()
        self.seen: dict[str, int] = {}

    @property
    def count(self) -> int:
        """All requests since the last `clear`."""
        return sum(self.seen.values())

    def add(self, *faults: Fault) -> None:
        """Let these happen, first come first served."""
        with self._lock:
            self.waiting.extend(faults)

    def clear(self, named: Mapping[str, Fault] | None = None) -> None:
        """Forget what has not happened yet, and the counts; `named` are those to come by name."""
        with self._lock:
            self.waiting.clear()
            self.names = Names(named)
            self.seen.clear()

    def take(self, method: str, path: str) -> Fault | None:
        """The fault that this request meets, if any."""
        with self._lock:
            self.seen[method] = self.seen.get(method, 0) + 1
            if (fault := self.names.fault(f"{method} {_object_of(path)}")) is not None:
                return fault
            for fault in self.waiting:
                if fault.method == method and fault.path in path:
                    fault.times -= 1
                    if not fault.times:
                        self.waiting.remove(fault)
                    return fault
        return None


def _object_of(path: str) -> str:
    """The path of a request; of an upload, the name in its body, without the bytes after it."""
    named = re.search(r'"name": ?"([^"]*)"', path)
    return named[1] if named else path


@dataclass
class FakeGCS:
    """The server's state. `honours_preconditions` False lets it overwrite, as some do."""

    objects: dict[str, dict[str, tuple[bytes, int]]] = field(default_factory=dict)
    uploads: dict[str, tuple[str, str, bool, bytes]] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    honours_preconditions: bool = True
    readonly: bool = False
    page_size: int = 1000
    lock: threading.Lock = field(default_factory=threading.Lock)
    generation: int = 0
    url: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Options of gcsfs for this server."""
        return {"endpoint_url": self.url, "token": "anon", "project": "fake"}

    def create_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        self.objects[name] = {}

    def put(self, bucket: str, name: str, data: bytes, *, if_absent: bool) -> tuple[int, Any]:
        """Store an object atomically; (status, body)."""
        with self.lock:
            if bucket not in self.objects:
                return _error(404, "The specified bucket does not exist.")
            if self.readonly:
                return _error(403, "caller does not have storage.objects.create access")
            if if_absent and self.honours_preconditions and name in self.objects[bucket]:
                return _error(412, "At least one of the pre-conditions did not hold.")
            self.generation += 1
            self.objects[bucket][name] = (data, self.generation)
            return 200, _resource(bucket, name, data, self.generation)

    def list(self, bucket: str, query: dict[str, str]) -> tuple[int, Any]:
        """One page of names below a prefix, rolled up at the delimiter."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        with self.lock:
            if bucket not in self.objects:
                return _error(404, "The specified bucket does not exist.")
            names: dict[str, dict[str, Any] | None] = {}
            for name, (data, generation) in sorted(self.objects[bucket].items()):
                if not name.startswith(prefix):
                    continue
                head, mark, _ = (
                    name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                )
                entry = prefix + head + mark if mark else name
                names[entry] = None if mark else _resource(bucket, name, data, generation)
        page = [name for name in names if name > query.get("pageToken", "")]
        body: dict[str, Any] = {"kind": "storage#objects"}
        if len(page) > self.page_size:
            page = page[: self.page_size]
            body["nextPageToken"] = page[-1]
        body["items"] = [names[name] for name in page if names[name] is not None]
        body["prefixes"] = [name for name in page if names[name] is None]
        return 200, body


@contextmanager
def fake_gcs() -> Iterator[FakeGCS]:
    """A running server on a free port of this machine."""
    state = FakeGCS()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    with HttpThread(server) as running:
        state.url = running.url
        yield state


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"code": status, "message": message}}


def _resource(bucket: str, name: str, data: bytes, generation: int) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(data)),
        "generation": str(generation),
        "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
        "updated": "2026-01-01T00:00:00.000Z",
        "timeCreated": "2026-01-01T00:00:00.000Z",
    }


class _Handler(BaseHTTPRequestHandler):
    state: FakeGCS
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        target = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(target.query).items()}
        fault = self.state.faults.take(method, unquote(self.path) + body[:300].decode("latin-1"))
        if fault and fault.when == "before":
            self._fail(fault)
            return
        status, answer, headers = self._answer(method, target.path, query, body)
        if fault:
            self._fail(fault)
        else:
            self._reply(status, answer, headers)

    def _fail(self, fault: Fault) -> None:
        if fault.status is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self._reply(*_error(fault.status, "injected"), {})

    def _reply(self, status: int, answer: Any, headers: dict[str, str]) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(
        self, method: str, path: str, query: dict[str, str], body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        segments = path.strip("/").split("/")
        bucket = unquote(segments[segments.index("b") + 1])
        name = unquote(segments[-1])
        if segments[0] == "upload":
            return self._upload(bucket, query, body)
        if segments[-1] == "o":
            return *self.state.list(bucket, query), {}
        if segments[-2] == "b":
            exists = bucket in self.state.objects
            return *((200, {"name": bucket}) if exists else _error(404, "no such bucket")), {}
        with self.state.lock:
            found = self.state.objects.get(bucket, {}).get(name)
            if found is None:
                return *_error(404, f"No such object: {bucket}/{name}"), {}
            if method == "DELETE":
                del self.state.objects[bucket][name]
                return 204, b"", {}
        if query.get("alt") == "media":
            return 200, found[0], {}
        return 200, _resource(bucket, name, *found), {}

    def _upload(
        self, bucket: str, query: dict[str, str], body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        if_absent = query.get("ifGenerationMatch") == "0"
        if query.get("uploadType") == "multipart":
            name, data = _parts(self.headers["Content-Type"], body)
            return *self.state.put(bucket, name, data, if_absent=if_absent), {}
        uploads = self.state.uploads
        if "upload_id" not in query:
            upload = f"upload-{len(uploads)}"
            uploads[upload] = (bucket, query["name"], if_absent, b"")
            location = f"{self.state.url}/upload/storage/v1/b/{bucket}/o?upload_id={upload}"
            return 200, {}, {"Location": location}
        bucket, name, if_absent, data = uploads[query["upload_id"]]
        data += body
        uploads[query["upload_id"]] = (bucket, name, if_absent, data)
        if len(data) < int(self.headers["Content-Range"].rpartition("/")[2]):
            return 308, b"", {"Range": f"bytes=0-{len(data) - 1}"}
        return *self.state.put(bucket, name, data, if_absent=if_absent), {}


def _parts(content_type: str, body: bytes) -> tuple[str, bytes]:
    """Name and content out of a multipart/related body as gcsfs writes it."""
    boundary = content_type.partition("boundary=")[2].strip('"').encode()
    _, header, rest = body.split(b"--" + boundary, 2)
    name = json.loads(header.partition(b"\n\n")[2])["name"]
    data = rest.partition(b"\n\n")[2].removesuffix(b"\n--" + boundary + b"--")
    return name, data


ERROR = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>injected</Message></Error>'
CODES = {
    403: b"AccessDenied",
    409: b"ConditionalRequestConflict",
    500: b"InternalError",
    503: b"ServiceUnavailable",
}


@dataclass
class FakeS3:
    """A running moto server and the faults in front of it."""

    url: str = ""
    faults: Faults = field(default_factory=Faults)

    @property
    def options(self) -> dict[str, Any]:
        """Options of s3fs for this server."""
        return {
            "endpoint_url": self.url,
            "key": "test",
            "secret": "test",
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def create_bucket(self, name: str) -> None:
        """Make an empty bucket."""
        urlopen(Request(f"{self.url}/{name}", method="PUT"), timeout=60).close()


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """A running server on a free port of this machine."""
    state = FakeS3()
    moto = DomainDispatcherApplication(create_backend_app)
    creating = threading.Lock()

    def inner(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return moto(environ, start)
        # moto looks and then writes, so two threads may both create: S3 does both as one
        with creating:
            return moto(environ, start)

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        fault = state.faults.take(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if fault is None:
            return inner(environ, start)
        if fault.when == "after":
            list(inner(environ, lambda *_, **__: None))
        return _fail(fault, environ, start)

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    with HttpThread(server) as running:
        state.url = running.url
        yield state


class _Quiet(MotoRequestHandler):
    def log_request(self, *args: Any, **kwargs: Any) -> None:
        """Say nothing."""


def _fail(fault: Fault, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    if fault.when == "before":  # the rest of the request must not be taken for the next one
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    if fault.status is None:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionError("the fake drops this connection")
    body = ERROR % CODES[fault.status]
    start(f"{fault.status} Injected", [("Content-Length", str(len(body)))])
    return [body]
