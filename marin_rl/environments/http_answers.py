"""Answers of HTTP servers that others run: whole, in time, of a bounded size, and from that server.

httpx limits the time of each read alone, so a body that drips, or never ends, would be read for
ever. Redirects are refused: a server does not choose the address that this process asks next.
Leaves out what an answer means.
"""

import asyncio
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from schemas import Malformed
from schemas.strict_json import parse_json

ANSWER_BYTES_MAX = 64 << 20
SHOWN = 200
_HEADERS = {"Accept-Encoding": "identity"}


class UnfitAnswer(ValueError):
    """An answer that is no use whatever it says: too large, a redirect, or no JSON object."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status and body of an answer that arrived whole."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    @property
    def words(self) -> str:
        return f"{self.status}: {self.text[:SHOWN]}"

    def object(self) -> dict[str, Any]:
        """Return the JSON object that the body is. Raises UnfitAnswer."""
        try:
            value = parse_json(self.body)
        except Malformed as error:
            raise UnfitAnswer(
                f"expected a JSON object, found {self.text[:SHOWN]!r} ({error})"
            ) from None
        if not isinstance(value, dict):
            raise UnfitAnswer(f"expected a JSON object, found {value!r:.100}")
        return value

    def completion(self) -> str:
        """Return the text of the chat completion that the body is. Raises UnfitAnswer."""
        try:
            text: Any = self.object()["choices"][0]["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError(f"content {text!r:.80}")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UnfitAnswer(
                f"expected a chat completion, found {self.text[:SHOWN]!r} "
                f"({type(error).__name__}: {error})"
            ) from None
        return text


def is_number(value: object) -> bool:
    """Return True for a finite number that float64 can hold, booleans included."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


async def ask(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    timeout_s: float,
    bytes_max: int = ANSWER_BYTES_MAX,
    **request: Any,
) -> HttpAnswer:
    """Send a request, and read its answer to the end within `timeout_s`.

    Raises UnfitAnswer, and httpx.HTTPError (ReadTimeout for an answer that takes longer).
    """
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(
                method, url, headers=_HEADERS, follow_redirects=False, **request
            ) as response,
        ):
            unzip, body = _decompressor(response), bytearray()
            async for chunk in response.aiter_raw():
                body += chunk if unzip is None else unzip.decompress(chunk, bytes_max + 1)
                if len(body) > bytes_max:
                    raise UnfitAnswer(f"answers with more than {bytes_max} bytes")
    except TimeoutError:
        raise httpx.ReadTimeout(f"no whole answer in {timeout_s:g} s") from None
    except zlib.error as error:
        raise UnfitAnswer(f"answers with what is no gzip: {error}") from None
    if unzip is not None and not unzip.eof:
        raise UnfitAnswer("answers with a part of a body in gzip")
    return HttpAnswer(response.status_code, bytes(body))


def _decompressor(response: httpx.Response) -> Any:
    """Decompressor of a body in gzip; None for a plain one. Raises UnfitAnswer for any other."""
    if response.is_redirect:
        raise UnfitAnswer(
            f"answers {response.status_code}, a redirect, and none is followed: name the address "
            "that it leads to"
        )
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity", "gzip"):
        raise UnfitAnswer(f"answers in {coding!r:.40}: expected a body that is not compressed")
    return zlib.decompressobj(zlib.MAX_WBITS | 16) if coding == "gzip" else None


def ask_once(method: str, url: str, *, timeout_s: float, **request: Any) -> HttpAnswer:
    """Do the same from synchronous code, on a new connection. Raises as `ask` does.

    It may be called while an event loop runs in this thread.
    """

    async def asked() -> HttpAnswer:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
            return await ask(client, method, url, timeout_s=timeout_s, **request)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(asked())).result()
