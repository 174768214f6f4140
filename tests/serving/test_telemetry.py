"""Telemetry of the server: metrics that add up, one log line a request, and no secrets."""

import asyncio
import io
import json
import re
import time
from collections.abc import Callable
from typing import NoReturn

import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send
from support.models import tiny_model
from support.servers import CHAT, asks_well, chat_body, raw, serving, talk, wait_until

from marin_rl.config import ServerConfig
from marin_rl.serving.http.access_log import LINES_GATHERED_S, AccessLog, RequestRecord, access_line
from marin_rl.serving.http.auth import Keys, Origins
from marin_rl.serving.http.guard import CutShort, Guard
from marin_rl.serving.http.prometheus import METRICS
from marin_rl.serving.server import PolicyServer

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def log(server: PolicyServer) -> Callable[[], list[dict]]:
    """The lines that were logged since the test began."""
    stream = io.StringIO()
    server.log_requests(stream)

    def lines() -> list[dict]:
        deadline = time.monotonic() + 30
        time.sleep(3 * LINES_GATHERED_S)
        while not stream.getvalue().endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.005)
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    return lines


def scraped(server: PolicyServer) -> Samples:
    """Every sample, by name and labels; the text must be Prometheus'."""
    status, headers, text = talk(server, "GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(
        value
        for (found, given), value in samples.items()
        if found == f"marin_rl_{name}" and labels.items() <= dict(given).items()
    )


def test_requests_and_tokens_add_up(server: PolicyServer) -> None:
    before = scraped(server)
    _, _, answer = talk(server, "POST", CHAT, chat_body(n=3, max_tokens=5))
    talk(server, "POST", CHAT, b"{")
    talk(server, "GET", "/v1/models/unheard-of")
    after = scraped(server)
    talk(server, "POST", CHAT, chat_body(stream=True))
    name = "first_token_seconds_count"
    assert total(scraped(server), name) - total(after, name) == 1
    more = lambda name, **labels: total(after, name, **labels) - total(before, name, **labels)
    assert more("requests_total", route=CHAT, status="200") == 1
    assert more("requests_total", route=CHAT, status="400") == 1
    assert more("requests_total", route="/v1/models/{model:path}", status="404") == 1
    assert more("requests_rejected_total", reason="model_not_found") == 1
    assert more("request_seconds_count", route=CHAT) == 2
    assert more("completion_tokens_total") == answer["usage"]["completion_tokens"]
    assert more("prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    for phase in ("queue", "prefill", "decode"):
        assert more(f"{phase}_seconds_count") == 1
    assert more("engine_requests_total") == 1
    assert more("engine_tokens_total") >= answer["usage"]["completion_tokens"]
    assert total(after, "slots") == 8
    assert total(after, "requests_running") == 1  # the scrape itself
    assert total(after, "policy_version") == 3
    assert total(after, "policy_info", model=server.model_id) == 1


def test_paths_never_become_labels(server: PolicyServer) -> None:
    before = len(scraped(server))
    for number in range(50):
        talk(server, "GET", f"/made/up/{number}")
        talk(server, "GET", f"/v1/models/made-up-{number}")
        talk(server, f"BREW{number}", "/v1/models")
    samples = scraped(server)
    assert total(samples, "requests_total", route="(none)", status="404") >= 50
    assert len(samples) < before + 80  # a histogram or two, not one for each path
    assert not any("made" in str(key) for key in samples)


def test_weights_are_counted_by_source(server: PolicyServer) -> None:
    before = scraped(server)
    server.updater.swap(tiny_model(), 4, "ab" * 32)
    after = scraped(server)
    for name in ("swaps_total", "weight_updates_total"):
        assert total(after, name) - total(before, name) == 1
    assert total(after, "weight_update_age_seconds") < 60
    assert total(after, "policy_version") == 4


def test_the_table_names_exactly_what_is_exposed(server: PolicyServer) -> None:
    families = text_string_to_metric_families(server.telemetry.exposition().decode())
    kinds = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in families
        if not family.name.endswith("_created")
    }
    assert kinds == {spec.name: spec.kind for spec in METRICS}
    assert all(re.fullmatch(r"marin_rl_[a-z_]+", spec.name) for spec in METRICS)


def test_one_line_a_request_says_what_it_cost(server: PolicyServer, log) -> None:
    _, headers, answer = talk(server, "POST", CHAT, chat_body(n=2))
    (line,) = log()
    assert line["request_id"] == headers["x-request-id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", CHAT, 200)
    assert line["caller"] == "local"
    assert line["stream"] is False
    assert line["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert line["weight_version"] == answer["weight_version"]
    assert line["latency_s"] >= line["decode_s"] > 0
    assert line["queue_s"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_an_abandoned_request_is_logged_with_its_cost(server: PolicyServer, log) -> None:
    body = json.dumps(chat_body(n=8, max_tokens=80, stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with raw(server) as leaving:
        leaving.sendall(head.encode() + body)
        while b"data: " not in leaving.recv(65536):
            pass
        server.engine.pause()
    try:
        wait_until(log)
    finally:
        server.engine.resume()
    (line,) = log()
    assert (line["status"], line["stream"]) == (200, True)
    assert 0 < line["completion_tokens"] <= 640
    assert line["prompt_tokens"] > 0
    assert line["weight_version"] == server.engine.policy.weight_version
    assert line["queue_s"] >= 0


def test_prompts_tokens_and_paths_are_never_logged(server: PolicyServer, log) -> None:
    secret = "do-not-write-this"
    body = chat_body(messages=[{"role": "user", "content": secret}])
    talk(server, "POST", CHAT, body, {"Authorization": f"Bearer {secret}"})
    talk(server, "GET", f"/v1/models/{secret}?key={secret}")
    talk(server, "GET", f"/{secret}")
    talk(server, "POST", CHAT, b"{" + secret.encode())
    wait_until(lambda: len(log()) == 4)
    assert [line["status"] for line in log()] == [200, 404, 404, 400]
    assert secret not in json.dumps(log())


def test_prompts_are_logged_if_asked_for() -> None:
    with serving(ServerConfig(log_prompts=True)) as server:
        stream = io.StringIO()
        server.log_requests(stream)
        body = chat_body(messages=[{"role": "user", "content": "a\nb"}])
        assert talk(server, "POST", CHAT, body)[0] == 200
        server.stop()
        (line,) = stream.getvalue().splitlines()
        assert json.loads(json.loads(line)["body"]) == body


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123_x.y:z", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
        ('"}\t{"', False),
        ("", False),
    ],
)
def test_a_clients_own_id_is_kept_if_it_is_sane(server: PolicyServer, given: str, kept) -> None:
    headers = talk(server, "GET", "/v1/models", headers={"X-Request-Id": given})[1]
    assert (headers["x-request-id"] == given) == kept
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", headers["x-request-id"])


def record(**fields) -> RequestRecord:
    return RequestRecord(
        **{"request_id": "r", "method": "GET", "arrived_at": 0.0, "started": 0.0, **fields}
    )


def run_failing(begin: bool) -> tuple[list[Message], list[RequestRecord]]:  # noqa: FBT001
    """Messages to the client and log records of a route that fails, before or after its answer
    began.
    """
    sent: list[Message] = []
    ended: list[RequestRecord] = []

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if begin:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("no such thing in /etc/passwd")

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    config = ServerConfig()
    keys = Keys(api=None, admin=None, api_variable="API_KEY", admin_variable="ADMIN_KEY")
    ours = Origins(config, "127.0.0.1", has_token=False)
    guard = Guard(route, config=config, keys=keys, origins=lambda: ours, on_end=ended.append)
    scope: Scope = {"type": "http", "method": "GET", "path": "/", "state": {}}
    asyncio.run(guard(scope | {"headers": [(b"host", b"localhost")]}, receive, send))
    return sent, ended


def test_an_internal_error_shows_the_request_id_alone(caplog: pytest.LogCaptureFixture) -> None:
    (start, body), (ended,) = run_failing(begin=False)
    assert start["status"] == ended.status == 500
    assert (b"x-request-id", ended.request_id.encode()) in start["headers"]
    told = json.loads(body["body"])["error"]["message"]
    assert told == f"internal error; the server's log has it as {ended.request_id}"
    assert "no such thing in /etc/passwd" in caplog.text
    assert ended.request_id in caplog.text
    assert ended.reason == "internal_error"


def test_errors_of_the_device_are_in_the_log_alone(server, caplog):
    def fail(*args: object) -> NoReturn:
        raise jax.errors.JaxRuntimeError("INTERNAL: ptxas failed on /home/alice/prog.ptx")

    runner = server.engine._runner
    works, runner.decode = runner.decode, fail
    try:
        status, headers, answer = talk(server, "POST", CHAT, chat_body())
    finally:
        runner.decode = works
    number = headers["x-request-id"]
    assert (status, answer["error"]["code"]) == (500, "engine_failed")
    assert answer["error"]["message"] == f"the device failed; the server's log has it as {number}"
    assert [number in line and "/home/alice" in line for line in caplog.messages].count(True) == 1
    assert asks_well(server)


def test_an_answer_that_cannot_be_completed_is_cut_short_visibly() -> None:
    """An exception makes the HTTP server close without the end of the body."""
    with pytest.raises(CutShort):
        run_failing(begin=True)


def test_a_log_that_cannot_be_written_drops_lines_and_delays_no_request() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log = AccessLog(Broken())
    for _ in range(100):
        log.add(record())
    log.close()
    assert log.lines_dropped() == 100


def test_an_access_log_entry_is_one_line_of_json_for_any_request() -> None:
    line = access_line(record(method="BREW\n" * 100, body='"}\n{"'))
    assert "\n" not in line
    assert json.loads(line)["body"] == '"}\n{"'
    assert json.loads(line)["time"] == "1970-01-01T00:00:00.000+00:00"
