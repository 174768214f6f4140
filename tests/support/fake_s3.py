"""moto's S3 behind the same faults as the fake GCS: what a lost reply or a 5xx does to s3fs."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request, urlopen

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from support.fake_gcs import Fault, Faults
from werkzeug.serving import make_server

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
    inner = DomainDispatcherApplication(create_backend_app)

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        fault = state.faults.take(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if fault is None:
            return inner(environ, start)
        if fault.when == "after":
            list(inner(environ, lambda *_, **__: None))
        return _fail(fault, environ, start)

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
