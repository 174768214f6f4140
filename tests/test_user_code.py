"""Code of the user: the file that is meant, its errors, and that nothing else is imported."""

import asyncio
import json
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from marin_rl.config import load_config
from marin_rl.environments.checks import environment_of
from marin_rl.environments.scoring import Scorer
from marin_rl.errors import ConfigError, InputError
from marin_rl.user_code import load, parse_spec, pin

# Names of modules of ours and of the standard library, as files next to the user's own.
TRAPS = ("tasks", "flows", "schemas", "types", "errors", "marin_rl", "json")
REWARD = "def score(example, completion):\n    return float(completion == example.answer)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: a configuration, prompts, a reward, and files with dangerous names."""
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported by mistake')\n")
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(30)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.yaml").write_text(
        "environment:\n  name: chat\n"
        f"  options: {{path: {tmp_path}/p.jsonl, reward: 'rewards.py:score'}}\n"
    )
    return tmp_path


def test_a_file_is_named_by_its_content(folder: Path) -> None:
    config = load_config(folder / "a.yaml")
    digest = sha256(REWARD.encode()).hexdigest()
    assert config.environment.options["reward"] == f"rewards.py:score#{digest}"


def test_a_reward_of_a_file_scores_in_its_process(folder: Path) -> None:
    """Next to files named like our packages, and from another working directory."""
    config = load_config(folder / "a.yaml")
    environment = environment_of(config)
    example = environment.example(0, 0, "train")
    scorer = Scorer(environment, config.environment)
    try:
        scores = asyncio.run(scorer.score(example, [example.answer or "", "no"]))
    finally:
        scorer.close()
    assert [part.value for score in scores for part in score] == [1.0, 0.0]
    assert str(folder) not in sys.path


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reward.py:score", r"no file reward\.py in .*did you mean rewards\.py:score\?"),
        ("rewards.py:scor", r"defines no 'scor'; it defines score; did you mean rewards\.py:score"),
        ("../rewards.py:score", "in the folder of the configuration or below"),
        ("/etc/rewards.py:score", "in the folder of the configuration or below"),
        ("broken.py:score", r"broken\.py, line 2: .*return \("),
        ("rewards.py:score#" + "0" * 64, "was changed: expected SHA-256 0000"),
    ],
)
def test_a_wrong_name_is_refused_when_the_configuration_is_read(folder, spec, message):
    (folder / "broken.py").write_text("def score(example, completion):\n    return (\n")
    with pytest.raises(ConfigError, match=r"environment\.options\.reward: .*" + message):
        load_config(folder / "a.yaml", [f"environment.options.reward={spec}"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("score = 3\n", "is not callable: expected a function or class, found 3"),
        ("score = 1\n1 / 0\n", "line 2: ZeroDivisionError"),
        ("import sys\nsys.exit()\nscore = 1\n", "line 2: SystemExit"),
        ("import rewards\nscore = rewards.score\n", "line 1: ModuleNotFoundError.*its neighbours"),
        ("from . import rewards\nscore = rewards.score\n", "line 1: ImportError.*its neighbours"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(folder: Path, source: str, message: str) -> None:
    (folder / "mine.py").write_text(source)
    pinned = pin("mine.py:score", folder, "key")
    with pytest.raises(InputError, match=f"reward function 'mine.py:score'.*{message}"):
        load(pinned, "reward function")


def test_a_changed_file_is_another_module(folder: Path) -> None:
    first = pin("rewards.py:score", folder, "key")
    (folder / "rewards.py").write_text("def score(example, completion):\n    return 2.0\n")
    second = pin("rewards.py:score", folder, "key")
    assert load(second, "reward")(None, "") == 2.0
    with pytest.raises(AttributeError):  # what was read first is what runs
        load(first, "reward")(None, "")


def test_unknown_code_is_refused() -> None:
    with pytest.raises(InputError, match="is not here: name its file in a configuration"):
        load(f"x.py:score#{'1' * 64}", "reward")


def test_other_texts_are_no_names_of_code() -> None:
    assert [parse_spec(text) for text in ("echo", "a b:c", "a.py", 3, "x:y z")] == [None] * 5
