"""HTTP servers of tests, each in a thread of its own."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from typing import Any, Self


class HttpThread:
    """`with HttpThread(server) as running: … running.url`; the server is closed at the end."""

    def __init__(self, server: HTTPServer, path: str = "") -> None:
        self._http, self._path = server, path
        self._thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """The URL that clients are given."""
        return f"http://127.0.0.1:{self._http.server_port}{self._path}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextmanager
def running_application(application: Any, **options: Any) -> Iterator[str]:
    """The URL of an ASGI application, which is served while the block runs; uvicorn's options."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="error", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.002)
    (listener,) = server.servers[0].sockets
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
