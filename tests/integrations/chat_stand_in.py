"""A server of chat completions whose texts are written beforehand."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.http_threads import HttpThread


@contextmanager
def chat_stand_in(*texts: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Base URL of a server, and the bodies that it got; 500 once its texts are used up."""
    bodies: list[dict[str, Any]] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            bodies.append(json.loads(self.rfile.read(length)))
            left = len(bodies) <= len(texts)
            text = texts[len(bodies) - 1] if left else ""
            answer = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            self.send_response(200 if left else 500)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Write nothing."""

    with HttpThread(ThreadingHTTPServer(("127.0.0.1", 0), Answers), "/v1") as running:
        yield running.url, bodies
