"""The files of deploy/: what they name exists, runs as an ordinary user, and fits together.

No container is built here: images, volumes and networks are checked by their files alone.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer import Typer
from typer.main import get_command

from flows.stack import POOL
from marin_rl.commands.serve import serve
from marin_rl.config import ServerConfig, load_config

TOP = Path(__file__).parents[1]
DEPLOY = TOP / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = list(
    yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
)
ROUTES = ("/readyz", "/healthz", "/api/health")


def pods() -> dict[str, dict[str, Any]]:
    """Specifications of the manifest's pods, by name."""
    kinds = ("Deployment", "Job")
    made = [item for item in KUBERNETES if item["kind"] in kinds]
    return {item["metadata"]["name"]: item["spec"]["template"]["spec"] for item in made}


def test_the_image_runs_as_an_ordinary_user_and_copies_what_there_is() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001"]
    assert lines.index("USER 10001") < lines.index('ENTRYPOINT ["marin-rl"]')
    assert [name for name in copied_from_the_context() if not (TOP / name).exists()] == []


def copied_from_the_context() -> list[str]:
    """Names of the files and folders that the Dockerfile takes from this checkout."""
    names: list[str] = []
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, _ = [word for word in line.split()[1:] if not word.startswith("--")]
            names += sources
    return names


def test_the_library_begins_without_git(tmp_path: Path) -> None:
    program = "import marin_rl, git, shutil; print(shutil.which('git'))"
    bare = {key: value for key, value in os.environ.items() if not key.startswith("GIT_PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=bare | {"PATH": str(tmp_path)},
        cwd=TOP,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def test_pods_are_ordinary_users_and_their_probes_are_routes_of_the_server() -> None:
    assert set(pods()) == {"database", "prefect", "deployments", "worker", "engine"}
    claims = {c["metadata"]["name"] for c in KUBERNETES if c["kind"] == "PersistentVolumeClaim"}
    services = {s["metadata"]["name"] for s in KUBERNETES if s["kind"] == "Service"}
    assert services == {"database", "prefect"}
    for name, pod in pods().items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        listed = pod.get("volumes", [])
        volumes = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in listed}
        assert set(volumes.values()) <= claims
        for container in pod["containers"]:
            assert {m["name"] for m in container.get("volumeMounts", [])} <= set(volumes)
            for kind in ("readinessProbe", "startupProbe", "livenessProbe"):
                probe = container.get(kind, {}).get("httpGet")
                assert probe is None or probe["path"] in ROUTES, name
    for item in KUBERNETES:
        if item["kind"] == "Deployment":
            labels = item["spec"]["template"]["metadata"]["labels"]
            assert item["spec"]["selector"]["matchLabels"] == labels


def test_secrets_are_asked_for_and_never_written_down() -> None:
    text = (DEPLOY / "docker-compose.yaml").read_text()
    assert "${MARIN_RL_API_KEY:?" in text
    assert "${POSTGRES_PASSWORD:?" in text
    for pod in pods().values():
        for container in pod["containers"]:
            for variable in container.get("env", []):
                if re.search("KEY|PASSWORD", variable["name"]):
                    assert set(variable) == {"name", "valueFrom"}, variable


def test_the_fleet_is_started_by_a_command_that_there_is() -> None:
    compose = COMPOSE["services"]["engine"]["command"]
    kubernetes = pods()["engine"]["containers"][0]["args"]
    for command in (compose, kubernetes):
        name, run_name, *flags = command
        alone = Typer()
        alone.command()(serve)
        parsed = get_command(alone).make_context(name, [run_name, *flags])
        assert parsed.params["follow"]
        assert parsed.params["register"]
        assert parsed.params["host"] == "0.0.0.0"
        assert parsed.params["port"] == 8000


def test_the_demo_is_run_on_a_pool_and_with_settings_that_there_are() -> None:
    deployments = yaml.safe_load((TOP / "prefect.yaml").read_text())["deployments"]
    names = {f"{item['entrypoint'].rpartition(':')[2]}/{item['name']}" for item in deployments}
    assert "rl_loop/demo" in names
    scripts = (
        COMPOSE["services"]["deployments"]["command"][0],
        pods()["deployments"]["containers"][0]["args"][0],
    )
    for script in scripts:
        words = shlex.split(script.replace(";", " ; "))
        assert POOL in words
        assert "rl-loop/demo" in words
        overrides = next(w for w in words if w.startswith("overrides="))
        chosen = yaml.safe_load(overrides.removeprefix("overrides="))
        config = load_config(TOP / "configs/demo.yaml", chosen)
        assert config.inference.endpoints == ("registered",)
        assert config.inference.pulled
        assert config.root == "/runs"
    workers = (COMPOSE["services"]["worker"]["entrypoint"], pods()["worker"]["containers"][0])
    assert workers[0] == workers[1]["command"] == ["prefect", "worker", "start", "--pool", POOL]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("nginx.conf", ("client_max_body_size {mib}m;", "proxy_read_timeout {answer_s}s;")),
        ("Caddyfile", ("max_size {mib}MiB ", "write {answer_s}s ")),
    ],
)
def test_a_proxy_has_the_limits_of_the_server_behind_it(name: str, limits: tuple[str, ...]) -> None:
    text = (DEPLOY / name).read_text()
    usual = ServerConfig()
    for limit in limits:
        assert limit.format(mib=usual.body_bytes_max >> 20, answer_s=3600) in text
    assert usual.request_timeout_s == 3600
    (chosen,) = re.findall(r"--set '(.+)'", text)
    config = load_config(TOP / "configs/demo.yaml", [chosen])
    assert config.inference.server.hosts_allowed == ("policy.example.org",)
