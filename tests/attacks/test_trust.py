"""Run folders from somebody else: what they name outside of themselves is not used."""

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.cases import others_slow
from support.run_factories import configuration, whole_run
from typer.testing import CliRunner

from marin_rl.cli import app
from marin_rl.commands.serve import serving_config
from marin_rl.config import EnvironmentConfig, outward_keys, parse_config
from marin_rl.environments.registry import construct
from marin_rl.environments.scoring import answers_in, scorers
from marin_rl.errors import ConfigError
from marin_rl.rollouts.evaluate import extractors_of
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.runs import Run
from marin_rl.trust import Consent, check_named, remember, remembered, settings_of, state_folder
from schemas.manifests import sealed_json

SECRET = "the-secret-of-another-service"


class Listener(ThreadingHTTPServer):
    """Takes down what it is asked, on a free port of this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.heard: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Listener)
        self.server.heard.append(f"{self.path} {self.headers.get('Authorization')}")
        body = json.dumps({"object": "list", "data": [{"id": "policy", "object": "model"}]})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that writes the file `imported` next to it when it is imported."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "foreign_code.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_name('imported').write_text(str(os.getpid()))\n"
        "def reward(example, completion): return 1.0\n"
        "def process(completion): return str(os.getpid())\n"
        "def hang(completion):\n"
        "    if 'hang' in completion: time.sleep(600)\n"
        "    if 'exit' in completion: os._exit(3)\n"
        "    return completion.upper()\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("foreign_code", None)
    return folder


def forge(folder: Path, **sections: Any) -> None:
    """Change the configuration in a run.json and make its digest again, as a forger would."""
    path = folder / RUN_KEY
    record = json.loads(path.read_bytes())
    for name, values in sections.items():
        record["config"][name] = {**record["config"][name], **values}
    del record["digest"]
    path.write_bytes(sealed_json(record))


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def refusal(*arguments: str) -> str:
    """The error by which a command refuses."""
    result = invoke(*arguments)
    assert isinstance(result.exception, ConfigError), (result.exception, result.output)
    return str(result.exception)


def test_endpoints_and_keys_of_a_run_are_not_used(tmp_path, listener, monkeypatch):
    whole_run(str(tmp_path), 1, environment={"name": "echo"})
    boards = tmp_path / "boards"
    forge(
        tmp_path / "run",
        inference={"endpoints": [listener.url], "api_key_variable": "AWS_SECRET_ACCESS_KEY"},
        trackers={"tensorboard": str(boards)},
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    folder, root = str(tmp_path / "run"), str(tmp_path)
    for command in (
        ("evaluate", "run", "--root", root),
        ("run", folder),
        ("sft", folder),
        ("doctor", folder),
        ("serve", "run", "--root", root),
    ):
        said = refusal(*command)
        assert 'inference.api_key_variable="AWS_SECRET_ACCESS_KEY"' in said
        sends = command[0] != "serve"  # a server sends nothing anywhere, and does not go by these
        assert (f"inference.endpoints={json.dumps([listener.url])}" in said) == sends
        assert ("trackers.tensorboard" in said) == sends
        assert "--set" in said
        assert "--trust" in said
    assert listener.heard == []
    assert not boards.exists()
    for command in (("evaluate", "run", "--root", root, "--trust"), ("doctor", folder, "--trust")):
        assert "MARIN_RL_" in refusal(*command)  # not even --trust takes such a variable
    assert listener.heard == []


def test_a_server_on_another_machine_needs_no_consent_to_a_trainers_endpoints(tmp_path):
    whole_run(str(tmp_path), 1, environment={"name": "echo"})
    forge(tmp_path / "run", inference={"endpoints": ["registered"], "publish": "pull"})
    config = serving_config(None, None, str(tmp_path), "run")
    assert (config.inference.endpoints, config.inference.publish) == ((), "none")


def test_named_settings_take_the_place_of_the_runs(tmp_path, listener, monkeypatch):
    whole_run(str(tmp_path), 1, environment={"name": "echo"})
    forge(tmp_path / "run", inference={"endpoints": ["http://127.0.0.1:1/v1"]})
    folder = str(tmp_path / "run")
    result = invoke("doctor", folder, "--set", "inference.endpoints=[]")
    assert "embedded server" in result.output
    monkeypatch.setenv("ANY_NAME_AT_ALL", SECRET)
    monkeypatch.setenv("MARIN_RL_API_KEY", "another")
    chosen = ("--set", f"inference.endpoints=['{listener.url}']")
    invoke("doctor", folder, *chosen, "--api-key-variable", "ANY_NAME_AT_ALL")
    assert listener.heard == [f"/v1/models Bearer {SECRET}"]
    own = tmp_path / "own.yaml"
    own.write_text(f"inference: {{endpoints: ['{listener.url}'], request_attempts_max: 2}}\n")
    run = Run.open(str(tmp_path), "run")
    config = settings_of(run, Consent(file=own))
    assert config.inference.endpoints == (listener.url,)
    assert config.inference.request_attempts_max == 2
    assert config.run_id == "run"


def test_no_free_key_that_reaches_beyond_the_folder_is_read_from_it(tmp_path: Path) -> None:
    whole_run(str(tmp_path), 1)
    server = {"hosts_allowed": ["*.example.org"], "access_log": False, "admin_key_variable": "PATH"}
    forge(
        tmp_path / "run",
        inference={
            "endpoints": ["http://127.0.0.1:1/v1"],
            "publish": "update_weights_from_disk",
            "publish_root": "/",
            "server": server,
        },
        trackers={"wandb_project": "p", "wandb_mode": "online", "trackio_project": "t"},
        flow={"retries": 99},
    )
    run, fresh = Run.open(str(tmp_path), "run"), configuration(str(tmp_path))
    for key in outward_keys():
        found, default = run.config.model_dump(), fresh.model_dump()
        for name in key.split("."):  # a section may be null, and a key that is null is left out
            found, default = (tree and tree.get(name) for tree in (found, default))
        assert found == default, key
    assert run.config.rounds == fresh.rounds  # the plan of a run is its own


def test_sections_that_are_null_by_default_are_compared_with_their_own_defaults(tmp_path):
    warm = {"name": "echo", "reward_timeout_s": 10.0}
    whole_run(str(tmp_path), 1, sft={"environment": warm})
    run = Run.open(str(tmp_path), "run")
    assert settings_of(run, Consent()).sft.environment == run.config.sft.environment
    forge(tmp_path / "run", sft={"environment": warm | {"pass_environment": ["HOME"]}})
    with pytest.raises(ConfigError, match=r'sft\.environment\.pass_environment=\["HOME"\]') as said:
        settings_of(Run.open(str(tmp_path), "run"), Consent())
    assert "--set 'sft.environment.pass_environment=[]'" in str(said.value)


@pytest.mark.parametrize("variable", ["AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "HF_TOKEN", ""])
def test_a_configuration_names_variables_of_ours_alone(variable: str) -> None:
    for section in ({"api_key_variable": variable}, {"server": {"admin_key_variable": variable}}):
        with pytest.raises(ConfigError, match="begins with MARIN_RL_"):
            parse_config({"inference": section})
    assert parse_config({"inference": {"api_key_variable": "MARIN_RL_KEY_2"}})


@pytest.mark.parametrize("key", others_slow(["reward", "extract"], "reward"))
def test_code_that_a_run_names_is_not_imported(tmp_path: Path, module: Path, key: str) -> None:
    whole_run(str(tmp_path), 1, evaluated=[0])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "answer": "b"}\n')
    options = {"path": str(prompts), key: "foreign_code:process"}
    forge(tmp_path / "run", environment={"name": "chat", "options": options})
    folder, root = str(tmp_path / "run"), str(tmp_path)
    for command in (
        ("metrics", "verify", "run", "--root", root),
        ("evaluate", "run", "--root", root),
        ("evaluate", "run", "--root", root, "--k", "1,2", "--samples", "2"),
        ("doctor", folder),
        ("run", folder),
        ("run", folder, "--run-id", "another"),
    ):
        said = refusal(*command)
        assert f"environment.options.{key}: imports foreign_code:process, from {module}" in said
        assert f"environment.options.path: reads {prompts}" in said
        assert "--trust" in said
    assert not (module / "imported").exists()
    run = Run.open(root, "run")
    check_named(run, run.config, Consent(trust=True))
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps({"environment": {"name": "chat", "options": options}}))
    check_named(run, run.config, Consent(file=own))
    assert not (module / "imported").exists()


def test_places_outside_of_a_run_are_named_before_they_are_read(tmp_path: Path) -> None:
    run = whole_run(str(tmp_path), 1)
    policy = {"tokenizer": "/somewhere", "checkpoint": "s3://bucket/run/checkpoints/round-00001"}
    forge(tmp_path / "run", policy={**run.config.policy.model_dump(mode="json"), **policy})
    said = refusal("serve", "run", "--root", str(tmp_path))
    assert "policy.tokenizer: reads /somewhere" in said
    assert "policy.checkpoint: reads s3://bucket/run/checkpoints/round-00001" in said
    chosen = Consent(overrides=tuple(f"policy.{key}={value}" for key, value in policy.items()))
    forged = Run.open(str(tmp_path), "run")
    check_named(forged, settings_of(forged, chosen), chosen)


def echo(value: object) -> dict[str, Any]:
    return {"environment": {"name": "echo", "options": {"any": value}}}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        (echo("/etc/x"), "environment.options.any: reads /etc/x"),
        (echo(["~/x"]), "environment.options.any.0: reads ~/x"),
        (echo("http://a"), "environment.options.any: sends to http://a"),
        ({"environment": {"name": "code", "options": {"interpreter": "py"}}}, "reads py"),
        ({"asynchrony": {"group_filter": "os:system"}}, "group_filter.score: imports os:system"),
        ({"policy": {"lora": {"init_from": "adapter"}}}, "policy.lora.init_from: reads adapter"),
    ],
)
def test_one_rule_holds_for_every_key(tmp_path: Path, sections: dict[str, Any], named: str) -> None:
    run = Run.create_or_open(configuration(str(tmp_path), **sections))
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_named(run, run.config, Consent())
    check_named(run, run.config, Consent(trust=True))


def test_code_of_the_package_needs_no_trust(tmp_path: Path) -> None:
    for environment in (
        {"name": "echo"},
        {"name": "reasoning_gym", "options": {"dataset": "chain_sum"}},
        {"name": "chat", "options": {"extract": "marin_rl.environments.answers:last_number"}},
    ):
        root = str(tmp_path / environment["name"])
        run = Run.create_or_open(configuration(root, environment=environment))
        check_named(run, run.config, Consent())
    inside = {"extract": "marin_rl.storage.upkeep.gc:collect", "path": "x"}
    run = Run.create_or_open(
        configuration(str(tmp_path / "in"), environment={"name": "chat", "options": inside})
    )
    with pytest.raises(ConfigError, match=r"imports marin_rl\.storage\.upkeep\.gc:collect"):
        check_named(run, run.config, Consent())


def test_settings_that_were_withdrawn_since_are_dropped_from_ones_own_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = Run.create_or_open(configuration(str(tmp_path), rounds=7))
    remember(run)
    (record,) = state_folder().iterdir()
    withdrawn = ("inference.server.header_timeout_s=5.0", 'flow.runner="root"')
    free = ["rounds=7", *withdrawn]
    record.write_text(json.dumps(json.loads(record.read_text()) | {"free": free}))
    assert settings_of(run, Consent()).rounds == 7


@pytest.mark.slow
def test_ones_own_run_has_its_settings_and_a_changed_one_has_not(tmp_path: Path) -> None:
    endpoint = "http://127.0.0.1:9/v1"
    environment = {"name": "chat", "options": {"path": "p.jsonl", "reward": "mine:reward"}}
    run = whole_run(str(tmp_path), 1, environment=environment)
    own = run.config.model_copy(
        update={"rounds": 7, "inference": run.config.inference.model_copy(
            update={"endpoints": (endpoint,)}
        )}
    )  # fmt: skip
    remember(Run.create_or_open(own))
    opened = Run.open(str(tmp_path), "run")
    settings = settings_of(opened, Consent())
    assert settings.inference.endpoints == (endpoint,)
    assert settings.rounds == 7
    check_named(opened, settings, Consent())
    made = invoke("fork", "run", "--round", "1", "--run-id", "f", "--root", str(tmp_path))
    assert made.exit_code == 0, made.output
    fork = Run.open(str(tmp_path), "f")
    assert settings_of(fork, Consent()).inference.endpoints == (endpoint,)
    shutil.copytree(tmp_path / "run", tmp_path / "moved/run")
    assert remembered(Run.open(str(tmp_path / "moved"), "run")) is not None
    forge(tmp_path / "run", sampling={"max_tokens": 9})
    changed = Run.open(str(tmp_path), "run")
    assert remembered(changed) is None
    with pytest.raises(ConfigError, match="was not started by you"):
        check_named(changed, changed.config, Consent())


def test_a_fork_of_another_users_run_is_not_trusted(tmp_path: Path) -> None:
    whole_run(str(tmp_path), 1)
    forge(
        tmp_path / "run",
        environment={"name": "chat", "options": {"path": "p", "reward": "evil:reward"}},
        trackers={"tensorboard": "/boards"},
    )
    made = invoke("fork", "run", "--round", "1", "--run-id", "f", "--root", str(tmp_path))
    assert made.exit_code == 0, made.output
    assert "/boards" not in (tmp_path / "f" / RUN_KEY).read_text()
    assert "imports evil:reward" in refusal("run", str(tmp_path / "f"))


@pytest.mark.slow
def test_extractors_run_where_they_can_be_killed(module: Path, tmp_path: Path) -> None:
    options = {"path": "none", "extract": "foreign_code:process"}
    config = configuration(str(tmp_path), environment={"name": "chat", "options": options})
    extractor = extractors_of(config)[None]
    try:
        (process,) = answers_in(extractor.environment, extractor.config, ["a"])
        assert process is not None
        assert int(process) != os.getpid()
        assert "foreign_code" not in sys.modules
        hanging = EnvironmentConfig(
            name="chat", options={**options, "extract": "foreign_code:hang"}, reward_timeout_s=3.0
        )
        texts = ["a", "hang", "b", "exit", "c"]
        assert answers_in(construct(hanging), hanging, texts) == ["A", None, "B", None, "C"]
    finally:
        scorers.close()
