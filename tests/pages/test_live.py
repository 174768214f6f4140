"""The live page: what it serves, to whom, and that it follows a run."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.testclient import TestClient
from support.cases import others_slow
from support.run_factories import add_round, shown_run
from typer.testing import CliRunner

from marin_rl.cli import app
from marin_rl.errors import ConfigError
from marin_rl.pages import live
from marin_rl.pages.document import RunPage
from marin_rl.pages.live import serve_view, view_app
from marin_rl.storage.runs import Run

HERE = "http://127.0.0.1:8765"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return shown_run(tmp_path, rounds=2)


@pytest.fixture
def client(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(live, "LOOK_EVERY_S", 0.0)
    with TestClient(view_app(RunPage(run), run.run_id), base_url=HERE) as client:
        yield client


def test_the_page_its_scripts_and_its_data(client: TestClient) -> None:
    page = client.get("/")
    assert (page.status_code, "<h1" in page.text) == (200, True)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    for name in ("plotly.js", "tables.js", "page.js"):
        assert f'src="/assets/{name}"' in page.text
        assert client.get(f"/assets/{name}").headers["content-type"].startswith("text/javascript")
    assert client.get("/assets/../document.py").status_code == 404
    data = client.get("/data.json")
    assert data.headers["content-type"] == "application/json"
    assert [item["round"] for item in data.json()["rounds"]] == [0, 1]


def test_data_is_sent_again_only_when_there_is_news(client: TestClient, run: Run) -> None:
    tag = client.get("/data.json").headers["etag"]
    assert client.get("/data.json", headers={"if-none-match": tag}).status_code == 304
    add_round(run, 2)
    later = client.get("/data.json", headers={"if-none-match": tag})
    assert later.status_code == 200
    assert [item["round"] for item in later.json()["rounds"]] == [0, 1, 2]
    assert later.headers["etag"] != tag


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "attacker.example"},
        {"host": "127.0.0.1.attacker.example:8765"},
        {"host": "192.168.1.7:8765"},
        {"origin": "https://attacker.example"},
        {"origin": "null"},
    ],
)
@pytest.mark.parametrize("path", others_slow(["/data.json", "/", "/assets/page.js"], first=1))
def test_other_names_and_other_pages_are_refused(client, headers, path):
    answer = client.get(path, headers=headers)
    assert (answer.status_code, answer.text) == (403, "this page is for this machine only")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    for path in ("/", "/data.json", "/assets/page.js"):
        assert client.request(method, path).status_code == 405


def test_an_unreadable_run_is_listed_with_its_error(client: TestClient, run: Run) -> None:
    path = run.store.local_path("rollouts/round-00001/manifest.json")
    assert path is not None
    path.write_bytes(json.dumps({"format": "other"}).encode())
    answer = client.get("/data.json")
    assert answer.status_code == 503
    assert "expected format" in answer.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_it_listens_on_this_machine_only(run: Run, host: str) -> None:
    with pytest.raises(ConfigError, match="bring a tunnel"):
        serve_view(RunPage(run), run.run_id, host, 0, lambda address: None)


@pytest.mark.parametrize("options", [["--json"], []])
def test_the_command_tells_where_it_listens_and_ends_with_ctrl_c(run, monkeypatch, options):
    """With --json one line that a program can wait for: the free port that --port 0 chose."""
    bound: list[tuple[str, int]] = []
    handlers = {reference() for reference in logging._handlerList}  # still theirs afterwards

    def interrupted(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        bound.extend(listener.getsockname()[:2] for listener in sockets)
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", interrupted)
    command = ["view", run.run_id, "--port", "0", "--root", run.config.root]
    shown = CliRunner().invoke(app, command + options)
    assert shown.exit_code == 0, shown.exception
    assert handlers - {None} <= {reference() for reference in logging._handlerList}
    ((host, port),) = bound
    address = f"http://{host}:{port}/"
    assert host == "127.0.0.1"
    if options:
        assert json.loads(shown.stdout) == {"run_id": run.run_id, "address": address}
    else:
        assert shown.stdout == f"{run.run_id} at {address} (Ctrl-C ends)\n"
