"""Copies of the user's code with a run: committed, checked, exported, run with consent alone."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from support.run_factories import whole_run

from marin_rl import user_code
from marin_rl.config import parse_config
from marin_rl.errors import ConfigError, InputError
from marin_rl.storage.run_records import stored_config
from marin_rl.storage.runs import Run, refuse_other_content
from marin_rl.storage.upkeep.archive import verify_archive, write_archive
from marin_rl.storage.upkeep.forks import fork_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.trust import Consent, check_named, pin_function, remember
from marin_rl.user_code import load, pin

SOURCE = "def score(example, completion):\n    return 1.0  # {}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with rewards.py, unlike that of other tests, where no run is remembered."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(SOURCE.format(tmp_path))
    return tmp_path


def environment(folder: Path) -> dict:
    """The section of a configuration that names the file as it is now."""
    reward = pin("rewards.py:score", folder, "key")
    return {"name": "chat", "options": {"path": "p.jsonl", "reward": reward}}


@pytest.fixture
def run(folder: Path) -> Run:
    return whole_run(str(folder / "runs"), 1, environment=environment(folder))


def elsewhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, str]:
    """The run as a process finds it that has not read the file; and its reward."""
    monkeypatch.setattr(user_code, "_sources", {})
    Path("rewards.py").unlink()
    opened = Run.open(run.config.root, run.run_id)
    return opened, opened.config.environment.options["reward"]


def test_a_run_records_its_code_and_keeps_a_copy(folder: Path, run: Run) -> None:
    data = (folder / "rewards.py").read_bytes()
    digest = sha256(data).hexdigest()
    record = json.loads((folder / "runs/run/run.json").read_text())
    assert record["user_code"] == [
        {"key": "environment.options.reward", "spec": "rewards.py:score", "sha256": digest}
    ]
    assert (folder / f"runs/run/code/{digest}.py").read_bytes() == data
    assert check_run(run.config.root, "run").faults == ()


@pytest.mark.slow
def test_installed_code_is_recorded_with_its_version(folder: Path) -> None:
    options = {"path": "p.jsonl", "reward": "pytest:fail"}
    whole_run(str(folder / "runs"), 0, environment={"name": "chat", "options": options})
    (record,) = json.loads((folder / "runs/run/run.json").read_text())["user_code"]
    assert (record["spec"], record["distribution"]) == ("pytest:fail", "pytest")
    assert record["version"] == pytest.__version__
    assert record["sha256"] == sha256(Path(str(pytest.__file__)).read_bytes()).hexdigest()
    assert not (folder / "runs/run/code").exists()


def test_a_copy_runs_where_the_file_is_gone_with_consent_alone(run, monkeypatch):
    opened, reward = elsewhere(run, monkeypatch)
    with pytest.raises(InputError, match="is code of a run that is not yours; add --trust"):
        load(reward, "reward function")
    with pytest.raises(
        ConfigError, match=r"options\.reward: imports rewards\.py:score#.*a copy in"
    ):
        check_named(opened, opened.config, Consent())
    with pytest.raises(InputError):
        load(reward, "reward function")
    check_named(opened, opened.config, Consent(trust=True))
    assert load(reward, "reward function")(None, "") == 1.0


def test_ones_own_run_needs_no_word_of_trust(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(run)
    opened, reward = elsewhere(run, monkeypatch)
    check_named(opened, opened.config, Consent())
    assert load(reward, "reward function")(None, "") == 1.0


def test_a_task_of_the_run_needs_no_word_of_trust(run, monkeypatch):
    _, reward = elsewhere(run, monkeypatch)
    Run.of(run.reference)
    assert load(reward, "reward function")(None, "") == 1.0


def test_a_run_whose_file_changed_is_not_continued(folder: Path, run: Run) -> None:
    (folder / "rewards.py").write_text("def score(example, completion):\n    return 2.0\n")
    tree = run.config.model_dump(mode="json") | {"environment": environment(folder)}
    with pytest.raises(ConfigError) as caught:
        refuse_other_content(parse_config(tree))
    message = str(caught.value)
    assert "run 'run' was started with other code" in message
    assert 'environment.options.reward: "rewards.py:score#' in message
    assert "choose another --run-id, or fork this one" in message
    assert f"marin-rl run {run.config.root}/run" in message


def test_a_run_names_no_file_without_its_digest(folder: Path, run: Run) -> None:
    """It would be taken from the folder in which the run is read."""
    tree = json.loads((folder / "runs/run/run.json").read_text())["config"]
    tree["environment"]["options"]["reward"] = "rewards.py:score"
    with pytest.raises(ConfigError, match=r"options\.reward names 'rewards\.py:score' without"):
        stored_config({"config": tree}, "run.json")
    with pytest.raises(ConfigError, match=r"options\.reward names 'rewards\.py:score' without"):
        Run.create_or_open(parse_config(tree | {"run_id": "other"}))


def test_a_fork_has_the_code_it_names(folder: Path, run: Run) -> None:
    (folder / "rewards.py").write_text("def score(example, completion):\n    return 2.0\n")
    key = "environment.options.reward"
    fork = fork_run(run, 1, "fork", [f"{key}=rewards.py:score"])
    digest = sha256((folder / "rewards.py").read_bytes()).hexdigest()
    assert fork.config.environment.options["reward"] == f"rewards.py:score#{digest}"
    assert fork.folder.list("code") == [f"code/{digest}.py"]
    assert fork_run(run, 1, "same").folder.list("code") == run.folder.list("code")
    assert all(check_run(run.config.root, name).whole for name in ("run", "fork", "same"))


@pytest.mark.parametrize("damage", ["altered", "missing"])
def test_a_damaged_copy_is_a_fault_and_is_not_run(run, monkeypatch, damage):
    (key,) = run.folder.list("code")
    path = run.folder.local_path(key)
    assert path is not None
    if damage == "altered":
        path.chmod(0o644)
        path.write_text("def score(example, completion):\n    return 3.0\n")
    else:
        path.unlink()
    (fault,) = check_run(run.config.root, "run").faults
    assert (fault.kind, fault.place) == (damage, run.folder.url_of(key))
    opened, reward = elsewhere(run, monkeypatch)
    check_named(opened, opened.config, Consent(trust=True))
    with pytest.raises(Exception, match=r"expected SHA-256|does not exist"):
        load(reward, "reward function")


def test_an_export_has_the_copies(folder: Path, run: Run) -> None:
    archived = write_archive(run, folder / "run.tar")
    verified = verify_archive(folder / "run.tar", archived.root_hash)
    assert verified.faults == ()
    (key,) = run.folder.list("code")
    assert f"run/{key}".encode() in (folder / "run.tar").read_bytes()


def test_a_typed_function_is_that_of_the_file_here_else_of_the_copy(folder, run, monkeypatch):
    Path("rewards.py").write_text("def score(example, completion):\n    return 2.0\n")
    here = pin_function(run, "rewards.py:score", "--reward", trust=False)
    assert load(here, "reward")(None, "") == 2.0
    opened, recorded = elsewhere(run, monkeypatch)
    with pytest.raises(ConfigError, match=r"--reward: there is no file rewards\.py here.*--trust"):
        pin_function(opened, "rewards.py:score", "--reward", trust=False)
    assert pin_function(opened, "rewards.py:score", "--reward", trust=True) == recorded
    assert load(recorded, "reward")(None, "") == 1.0
    with pytest.raises(ConfigError, match=r"--reward: no file others\.py"):
        pin_function(opened, "others.py:score", "--reward", trust=True)


def test_the_copy_in_ones_own_run_needs_no_consent(run, monkeypatch):
    remember(run)
    opened, recorded = elsewhere(run, monkeypatch)
    assert pin_function(opened, "rewards.py:score", "--reward", trust=False) == recorded
