"""Access to the server: tokens, names, pages, a walk over every route; rates, sizes, deadlines."""

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.servers import CHAT, asks_well, chat_body, serving, talk, wait_until

from marin_rl.config import InferenceConfig, ServerConfig
from marin_rl.errors import ConfigError
from marin_rl.inference.generation import GenerationRequest
from marin_rl.serving.http.auth import OPEN_PATHS, Keys, Origins
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.http.guard import TokenBucket
from marin_rl.serving.server import PolicyServer
from marin_rl.types import Sampling

API, ADMIN = "sésame", "open-the-mountain"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
PAGE = "https://app.example.org"


def wire(text: str) -> str:
    """Text as `http.client` must get it so that UTF-8 is sent."""
    return text.encode().decode("latin-1")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": wire(f"Bearer {token}")}


@pytest.fixture(scope="module")
def closed() -> Iterator[PolicyServer]:
    """A server with both tokens, and one page that may call it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARIN_RL_API_KEY", API)
        patch.setenv("MARIN_RL_ADMIN_KEY", ADMIN)
        limits = ServerConfig(hosts_allowed=("*.lan.example",), origins_allowed=(PAGE,))
        with serving(limits) as server:
            yield server


@pytest.fixture(scope="module")
def local() -> Iterator[PolicyServer]:
    """A server without any token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MARIN_RL_API_KEY", raising=False)
        patch.delenv("MARIN_RL_ADMIN_KEY", raising=False)
        with serving() as server:
            yield server


def keys(api: str | None, admin: str | None) -> Keys:
    digest = lambda token: None if token is None else hashlib.sha256(token.encode()).digest()
    return Keys(
        api=digest(api), admin=digest(admin), api_variable="API_KEY", admin_variable="ADMIN_KEY"
    )


@pytest.mark.parametrize(
    ("api", "admin", "headers", "api_keys", "caller"),
    [
        ("a", "b", [b"Bearer a"], [], "api"),
        ("a", "b", [b"Bearer b"], [], "admin"),
        ("a", "b", [], [], None),
        ("a", "b", [b"Bearer c"], [], None),
        ("a", "b", [b"Basic a"], [], None),
        ("a", "b", [b"Bearer a", b"Bearer a"], [], None),
        ("\u00fc", None, ["Bearer \u00fc".encode()], [], "api"),
        ("\u00fc", None, ["Bearer \u00fc".encode("latin-1")], [], None),
        (None, "b", [], [], "local"),
        (None, "b", [b"Bearer b"], [], "admin"),
        (None, None, [b"Bearer "], [], "local"),
        # Anthropic's header is as good where there is no other
        ("a", "b", [], [b"a"], "api"),
        ("a", "b", [], [b"b"], "admin"),
        ("a", "b", [], [b"a", b"a"], None),
        ("a", "b", [b"Bearer a"], [b"c"], "api"),
        ("a", "b", [b"Bearer c"], [b"a"], None),
    ],
)
def test_the_caller_of_a_request(api, admin, headers, api_keys, caller):
    if caller is not None:
        assert keys(api, admin).caller(headers, api_keys) == caller
        return
    with pytest.raises(ApiError) as refused:
        keys(api, admin).caller(headers, api_keys)
    assert refused.value.status == 401


def test_tokens_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = InferenceConfig()
    monkeypatch.setenv("MARIN_RL_API_KEY", "  ")
    monkeypatch.setenv("MARIN_RL_ADMIN_KEY", " x\n")
    found = Keys.from_environment(config)
    assert (found.api, found.admin) == (None, hashlib.sha256(b"x").digest())
    monkeypatch.setenv("MARIN_RL_API_KEY", "x")
    with pytest.raises(ConfigError, match="hold the same token"):
        Keys.from_environment(config)
    monkeypatch.setenv("MARIN_RL_API_KEY", "two words")
    with pytest.raises(ConfigError, match="MARIN_RL_API_KEY: expected a token without blanks"):
        Keys.from_environment(config)


def rules(host: str = "127.0.0.1", *, token: bool = True, **given: tuple[str, ...]) -> Origins:
    return Origins(ServerConfig(**given), host, has_token=token)  # type: ignore[arg-type]


def answered(origins: Origins, headers: dict[bytes, list[bytes]]) -> bool:
    try:
        origins.check(headers)
    except ApiError as error:
        return error.status != 403
    return True


@pytest.mark.parametrize(
    ("origins", "host", "ours"),
    [
        (rules(token=False), "localhost:8000", True),
        (rules(token=False), "127.0.0.1", True),
        (rules(token=False), "[::1]:8000", True),
        (rules(token=False), "evil.example", False),
        (rules(token=False), "127.0.0.1.evil.example", False),
        (rules(token=False), "", False),
        (rules(token=False), "[::1", False),
        (rules(token=False), "localhost:8000@evil.example", False),
        (rules(token=False), "localhost, evil.example", False),
        (rules("0.0.0.0"), "10.0.0.5:80", True),
        (rules("0.0.0.0"), "evil.example", False),
        (rules("0.0.0.0", hosts_allowed=("api.example.org",)), "API.example.org:8000", True),
        (rules("0.0.0.0", hosts_allowed=("*.example.org",)), "a.b.example.org", True),
        (rules("0.0.0.0", hosts_allowed=("*.example.org",)), "badexample.org", False),
        (rules("gpu-7"), "gpu-7:8000", True),
    ],
)
def test_hosts_that_the_server_answers_to(origins: Origins, host: str, ours) -> None:
    assert answered(origins, {b"host": [host.encode()]}) == ours


def test_one_host_is_named_exactly_once() -> None:
    assert not answered(rules(), {})
    assert not answered(rules(), {b"host": [b"localhost", b"localhost"]})


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (rules(token=False), "http://localhost:3000", True),
        (rules(token=False), "https://evil.example", False),
        (rules(token=False), "null", False),
        (rules(token=False), "http://localhost.evil.example", False),
        (rules(), "http://localhost:8000", True),  # the server's own pages
        (rules(), "http://localhost:3000", False),
        (rules(origins_allowed=(PAGE,)), PAGE, True),
        (rules(origins_allowed=(PAGE,)), PAGE + ".evil.example", False),
        (rules(origins_allowed=(PAGE,)), "http://app.example.org", False),
    ],
)
def test_pages_that_may_call_the_server(origins: Origins, origin: str, allowed) -> None:
    headers = {b"host": [b"localhost:8000"], b"origin": [origin.encode()]}
    assert answered(origins, headers) == allowed


def methods_of(server: PolicyServer) -> dict[str, set[str]]:
    """Methods of the server's routes, by path."""
    methods: dict[str, set[str]] = {}
    for route in server.routes:
        methods.setdefault(route.path, set()).update(route.methods or ())
    return methods


def every_path(server: PolicyServer) -> list[str]:
    known = [path.replace("{model:path}", "policy") for path in methods_of(server)]
    assert len(known) >= 15
    assert not any("{" in path for path in known)
    assert {CHAT, "/metrics", "/admin/pause", "/update_weights_from_disk"} <= set(known)
    strange = ["/", "/docs", "/openapi.json", "/redoc", "//healthz", "/healthz/", "/HEALTHZ"]
    return [*known, *strange, "/healthz/../v1/models", "/readyz;x", "*", "/invocations", "/%00"]


def test_every_route_but_health_is_closed_without_a_token(closed: PolicyServer) -> None:
    for path in every_path(closed):
        for method in METHODS:
            status, headers, answer = talk(closed, method, path)
            if path in OPEN_PATHS:
                assert status in (200, 405), (method, path)
                continue
            assert status == 401, (method, path)
            assert headers["www-authenticate"] == "Bearer"
            if path.startswith("/v1/messages") and method != "HEAD":
                assert answer["error"]["type"] == "authentication_error"
            elif method != "HEAD":
                assert answer["error"]["code"] == "invalid_api_key"


def test_the_right_token_opens_the_api_and_the_admins_too(closed: PolicyServer) -> None:
    assert asks_well(closed, bearer(API))
    assert asks_well(closed, bearer(ADMIN))
    status, headers, _ = talk(closed, "PUT", "/v1/models", headers=bearer(API))
    assert (status, set(headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
    assert talk(closed, "GET", "/v1/nothing", headers=bearer(API))[0] == 404


def admin_routes(server: PolicyServer) -> list[tuple[str, str]]:
    """Every method of the routes that change the server or tell how it is."""
    return [
        (method, path)
        for path, methods in methods_of(server).items()
        if path.startswith("/admin") or "weights" in path or "lora" in path
        for method in sorted(methods - {"HEAD"})  # whose answers have no body
    ]


def test_either_header_opens_the_api(closed: PolicyServer) -> None:
    for headers in (bearer(API), {"x-api-key": wire(API)}):
        assert talk(closed, "GET", "/v1/models", headers=headers)[0] == 200


def test_admin_routes_are_closed_to_the_api_token(closed: PolicyServer) -> None:
    routes = admin_routes(closed)
    assert len(routes) >= 10
    for method, path in routes:
        status, _, answer = talk(closed, method, path, b"{}", bearer(API))
        assert (status, answer["error"]["code"]) == (403, "admin_only"), (method, path)
        assert "admin token" in answer["error"]["message"]
    assert talk(closed, "GET", "/admin/status", headers=bearer(ADMIN))[0] == 200


def test_without_an_admin_token_admin_routes_say_which_variable_to_set(local):
    for method, path in admin_routes(local):
        status, _, answer = talk(local, method, path, b"{}")
        assert status == 403
        assert "MARIN_RL_ADMIN_KEY" in answer["error"]["message"]


def test_host_and_origin_are_checked_with_a_token_too(closed: PolicyServer) -> None:
    good = bearer(API)
    for host, status in (("evil.example", 403), ("gpu.lan.example", 200), ("10.1.2.3", 200)):
        assert talk(closed, "GET", "/v1/models", headers=good | {"Host": host})[0] == status
    for origin, status in (("https://evil.example", 403), (PAGE, 200), ("null", 403)):
        assert talk(closed, "GET", "/v1/models", headers=good | {"Origin": origin})[0] == status


def test_a_listed_page_may_read_answers_and_errors_and_others_may_not(closed):
    names = "authorization, x-stainless-os"
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    asked |= {"Access-Control-Request-Headers": names}
    status, headers, _ = talk(closed, "OPTIONS", CHAT, headers=asked)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert headers["access-control-allow-methods"] == "GET, POST"
    assert headers["access-control-allow-headers"] == names
    assert "access-control-allow-credentials" not in headers
    for token, expected in ((bearer(API), 200), ({}, 401)):
        status, headers, _ = talk(closed, "GET", "/v1/models", headers=token | {"Origin": PAGE})
        assert (status, headers["access-control-allow-origin"]) == (expected, PAGE)
        assert headers["vary"] == "Origin"
    evil = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    status, headers, _ = talk(closed, "OPTIONS", CHAT, headers=evil)
    assert status == 403
    assert not any(name.startswith("access-control") for name in headers)
    _, headers, _ = talk(closed, "GET", "/v1/models", headers=bearer(API))
    assert not any(name.startswith("access-control") for name in headers)


SECRET = "the-other-clients-words"


class Clock:
    """Clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, 3, clock=clock)
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.5]
    clock.now += 0.25
    assert bucket.take() == pytest.approx(0.25)
    clock.now += 0.25
    assert bucket.take() == 0
    clock.now += 60
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.5]


def test_a_burst_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="requests_burst: expected with requests_per_second only"):
        ServerConfig(requests_burst=3)


def test_too_many_requests_are_a_429_but_of_the_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limits = Clock(), ServerConfig(requests_per_second=2.0, requests_burst=3)
    limited = partial(TokenBucket, clock=clock)
    monkeypatch.setattr("marin_rl.serving.http.guard.TokenBucket", limited)
    monkeypatch.setenv("MARIN_RL_API_KEY", API)
    monkeypatch.setenv("MARIN_RL_ADMIN_KEY", ADMIN)
    with serving(limits) as server:

        def ask(token: str) -> tuple[int, Any, Any]:
            return talk(server, "GET", "/v1/models", headers=bearer(token))

        answers = [ask(API) for _ in range(5)]
        assert [status for status, _, _ in answers] == [200] * 3 + [429] * 2
        status, headers, body = answers[-1]
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        wait_s = int(headers["retry-after-ms"]) / 1000
        assert wait_s == 0.5
        assert int(headers["retry-after"]) == 1
        assert all(talk(server, "GET", "/healthz")[0] == 200 for _ in range(20))
        assert all(ask(ADMIN)[0] == 200 for _ in range(20))
        clock.now += wait_s
        assert ask(API)[0] == 200


def test_a_full_queue_is_a_503_that_says_when_to_come_again() -> None:
    with serving(ServerConfig(samples_queued_max=16)) as server:
        status, headers, answer = talk(server, "POST", CHAT, chat_body(n=17))
        assert (status, answer["error"]["code"]) == (400, "limit_exceeded")
        assert "retry-after" not in headers
        server.engine.pause()
        waiting = server.engine.submit(
            GenerationRequest(
                prompt_ids=np.array([4], np.int32), n=9, sampling=Sampling(max_tokens=1)
            )
        )
        status, headers, answer = talk(server, "POST", CHAT, chat_body(n=8))
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert int(headers["retry-after"]) >= 1
        waiting.cancel()
        server.engine.resume()
        assert asks_well(server)


@pytest.mark.slow
def test_a_request_without_a_slot_in_time_is_a_503_and_leaves_nothing_behind() -> None:
    with serving(ServerConfig(queue_timeout_s=3.0)) as server:
        server.engine.pause()
        try:
            status, headers, answer = talk(server, "POST", CHAT, chat_body(n=3))
        finally:
            server.engine.resume()
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        assert int(headers["retry-after"]) >= 1
        assert asks_well(server)
        assert (server.engine.queued, server.engine.active) == (0, 0)


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_a_504_and_frees_its_slots() -> None:
    with serving(ServerConfig(request_timeout_s=3.0, samples_max=50_000)) as server:
        assert talk(server, "POST", CHAT, chat_body(max_tokens=1))[0] in (200, 504)  # may compile
        status, _, answer = talk(server, "POST", CHAT, chat_body(n=50_000, max_tokens=80))
        assert (status, answer["error"]["code"]) == (504, "request_timeout")
        wait_until(lambda: not (server.engine.queued or server.engine.active))
        assert talk(server, "POST", CHAT, chat_body(max_tokens=1))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", CHAT, b"{"),
        ("POST", CHAT, b'{"model": "gpt"}'),
        ("POST", CHAT, b"\xff\xfe\x00"),
        ("POST", CHAT, b"[" * 100_000),
        ("POST", "/detokenize", b'{"tokens": [1000000]}'),
        ("POST", "/tokenize", b'{"prompt": 3}'),
        ("POST", "/v1/completions", b'{"model": "policy", "prompt": [-1]}'),
        ("GET", "/v1/models/../../etc/passwd", b""),
        ("GET", "/v1/nothing", b""),
        ("DELETE", CHAT, b""),
    ],
)
def test_no_error_tells_of_files_traces_or_other_requests(closed, method, path, body):
    told = chat_body(messages=[{"role": "user", "content": SECRET}])
    talk(closed, "POST", CHAT, told, bearer(API))
    status, headers, answer = talk(closed, method, path, body, bearer(API))
    assert 400 <= status < 500
    text = str(answer)
    for leak in ("Traceback", "site-packages", "/work", "/home", ".py", SECRET, API, ADMIN):
        assert leak not in text, (leak, text)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert headers["x-request-id"]
