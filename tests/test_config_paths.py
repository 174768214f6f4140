"""Relative paths of a configuration: one origin, whichever folder a command runs in."""

import logging
from pathlib import Path

import pytest
import yaml

from marin_rl.config import fingerprint_fields, load_config, parse_config
from marin_rl.environments.registry import loaded_environment
from marin_rl.errors import InputError
from marin_rl.storage.runs import Run

ROWS = "".join(f'{{"prompt": "q{n}", "answer": "{n}"}}\n' for n in range(30))
CHAT = {"name": "chat", "options": {"path": "rows.jsonl"}}
HF = {"init": "hf", "hf_path": "model", "tokenizer": "model"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with files of all kinds, next to the one in which commands run."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "model").mkdir()
    for name in ("rows.jsonl", "data/a-1.jsonl", "pairs.jsonl", "tls.pem"):
        (folder / name).write_text(ROWS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def written(folder, **sections):
    """Path of a YAML file in `folder`."""
    folder.mkdir(exist_ok=True)
    tree = {"policy": {"context_length": 64}, **sections}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def options(config):
    """Options of the environment."""
    return config.environment.options


CASES = {
    "rows": ({"environment": CHAT}, lambda c: options(c)["path"], "rows.jsonl"),
    "pattern": (
        {"environment": {"name": "chat", "options": {"path": "data/a-*.jsonl"}}},
        lambda c: options(c)["path"],
        "data/a-*.jsonl",
    ),
    "dotted": (
        {"environment": {"name": "math", "options": {"path": "./data/../rows.jsonl"}}},
        lambda c: options(c)["path"],
        "rows.jsonl",
    ),
    "option of a class": (
        {"environment": {"name": "installed.module:Class", "options": {"path": "rows.jsonl"}}},
        lambda c: options(c)["path"],
        "rows.jsonl",
    ),
    "mixture": (
        {"environment": [CHAT, {"name": "echo"}]},
        lambda c: c.environment.mixture[0].options["path"],
        "rows.jsonl",
    ),
    "held out": (
        {"evaluation": {"sets": {"v1.0": CHAT}}},
        lambda c: c.evaluation.sets["v1.0"].options["path"],
        "rows.jsonl",
    ),
    "warm start": (
        {"sft": {"environment": CHAT}},
        lambda c: c.sft.environment.options["path"],
        "rows.jsonl",
    ),
    "model": ({"policy": HF}, lambda c: c.policy.hf_path, "model"),
    "tokenizer": ({"policy": HF}, lambda c: c.policy.tokenizer, "model"),
    "adapter": (
        {"policy": HF | {"lora": {"init_from": "model"}}},
        lambda c: c.policy.lora.init_from,
        "model",
    ),
    "pairs": (
        {"reward_model": {"pairs": "pairs.jsonl"}},
        lambda c: c.reward_model.pairs,
        "pairs.jsonl",
    ),
    "endpoints": (
        {"inference": {"endpoints": ["file:rows.jsonl zone=eu"]}},
        lambda c: c.inference.endpoints[0].removeprefix("file:").removesuffix(" zone=eu"),
        "rows.jsonl",
    ),
}


@pytest.mark.parametrize(("sections", "value", "file"), CASES.values(), ids=CASES)
def test_a_path_begins_in_the_folder_of_the_yaml_file(project, sections, value, file, caplog):
    place = Path(value(load_config(written(project, **sections))))
    assert place.is_absolute()
    assert place.resolve() == project / file
    assert not caplog.records


@pytest.mark.parametrize(
    "policy", [{}, {"init": "hf", "hf_path": "/models/x", "tokenizer": "/models/x"}]
)
def test_texts_that_are_no_relative_path_are_not_changed(project, policy):
    environment = {"name": "installed.module:Class", "options": {"path": "/v1", "python": "python"}}
    other = {"name": "other", "options": {"path": "a route", "interpreter": "python3"}}
    sets = {"evaluation": {"sets": {"other": other}}, "policy": policy}
    config = load_config(written(project, environment=environment, **sets))
    assert options(config) == environment["options"]
    assert config.evaluation.sets["other"].options == other["options"]
    for name, expected in policy.items():
        assert getattr(config.policy, name) == expected
    assert config.policy.tokenizer in ("characters", "/models/x")


def test_rows_are_read_from_any_folder(project):
    environment = loaded_environment(load_config(written(project, environment=CHAT)).environment)
    assert environment.example(0, 0, "train").messages


def test_the_current_folder_is_said_where_the_yaml_files_has_none(project, monkeypatch, caplog):
    file = written(project.parent / "settings", environment=CHAT)
    monkeypatch.chdir(project)
    config = load_config(file)
    assert Path(options(config)["path"]) == project / "rows.jsonl"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "environment.options.path" in record.message
    for place in (project, file.parent):
        assert f"{place}/rows.jsonl" in record.message


def test_two_files_are_both_named(project, caplog):
    Path("rows.jsonl").write_text("{}\n")
    config = load_config(written(project, environment=CHAT))
    assert Path(options(config)["path"]) == project / "rows.jsonl"
    expected = f"{project}/rows.jsonl is read, next to the YAML file, and not {Path.cwd()}/rows"
    assert expected in caplog.text


def test_a_missing_file_is_named_with_the_folder_of_the_yaml_file(project):
    (project / "rows.jsonl").rename(project / "row.jsonl")
    environment = load_config(written(project, environment=CHAT)).environment
    expected = rf"no file rows.jsonl in {project}; a relative path begins next to the YAML file"
    with pytest.raises(InputError, match=expected):
        loaded_environment(environment)


@pytest.mark.parametrize("both", [True, False])
def test_an_override_begins_in_the_current_folder(project, both, caplog):
    file = written(project, environment=CHAT | {"options": {"path": "pairs.jsonl"}})
    (project / "rewards.py").write_text("def score(example, completion): return 1.0\n")
    for name in ("rows.jsonl", "rewards.py") if both else ():
        Path(name).write_text("def score(example, completion): return 2.0\n")
    keys = {"path": "rows.jsonl", "reward": "rewards.py:score"}
    config = load_config(file, [f"environment.options.{key}={keys[key]}" for key in keys])
    assert Path(options(config)["path"]) == (Path.cwd() if both else project) / "rows.jsonl"
    again = load_config(file, ["environment.options.reward=rewards.py:score"])
    assert options(again)["reward"] == options(config)["reward"]
    (project / "rewards.py").write_text("def score(example, completion): return 3.0\n")
    changed = load_config(file, ["environment.options.reward=rewards.py:score"])
    assert (options(changed)["reward"] == options(config)["reward"]) == both
    assert not caplog.records


def test_a_recipe_has_an_origin_of_its_own(project, tmp_path):
    shared = tmp_path / "shared"
    written(shared, environment=CHAT, policy=HF | {"context_length": 64})
    (shared / "rows.jsonl").write_text(ROWS)
    config = load_config(written(project, recipe="../shared/run.yaml", seed=3))
    assert Path(options(config)["path"]) == shared / "rows.jsonl"
    assert Path(config.policy.hf_path) == project / "model"  # the recipe's folder has none


def test_content_is_what_is_written(project, monkeypatch):
    file = written(project, environment=CHAT, policy=HF | {"context_length": 64})
    config = load_config(file)
    fields = fingerprint_fields(config)
    assert fields["environment"]["options"]["path"] == "rows.jsonl"
    assert fields["policy"]["hf_path"] == "model"
    assert parse_config(config.model_dump(mode="json")) == config
    monkeypatch.chdir(project)
    assert fingerprint_fields(load_config(file.name)) == fields


def begun(folder, root):
    """A run from the YAML file of a folder."""
    return Run.create_or_open(load_config(folder / "run.yaml", [f'root="{root}"']))


def test_a_run_goes_on_from_another_folder_and_after_its_files_have_moved(project, monkeypatch):
    root = project.parent / "runs"
    written(project, environment=CHAT)
    begun(project, root)
    monkeypatch.chdir(project)
    here = begun(Path(), root)
    assert Path(options(here.config)["path"]) == project / "rows.jsonl"
    moved = project.rename(project.with_name("moved"))
    monkeypatch.chdir("/")
    run = begun(moved, root)
    assert Path(options(run.config)["path"]) == moved / "rows.jsonl"
    # A task in a process of its own, and a command that has the run's folder alone.
    assert options(Run.of(run.reference).config) == options(run.config)
    monkeypatch.chdir(moved)
    opened = Run.open(str(root), "debug").config
    assert Path(options(opened)["path"]) == moved / "rows.jsonl"


def test_a_run_that_was_begun_with_paths_as_typed_goes_on(project, monkeypatch):
    root = str(project.parent / "runs")
    tree = {"root": root, "policy": {"context_length": 64}, "environment": CHAT}
    monkeypatch.chdir(project)
    old = Run.create_or_open(parse_config(tree))
    assert options(Run.of(old.reference).config)["path"].endswith("rows.jsonl")
    written(project, environment=CHAT)
    for folder in (project, project.parent):
        monkeypatch.chdir(folder)
        run = begun(project, root)
        assert fingerprint_fields(run.config) == fingerprint_fields(old.config)
        assert Path(options(run.config)["path"]) == project / "rows.jsonl"
