"""HTTP servers of tests, each in a thread of its own."""

import threading
from http.server import HTTPServer
from typing import Self


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
