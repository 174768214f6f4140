"""Environments of gymnasium by its package, in an interpreter of its own."""

from pathlib import Path

import pytest
from integrations.libraries import interpreter_with
from integrations.library_runs import check_trained, configuration, following, played, texts

from marin_rl.environments.checks import make_environment
from marin_rl.errors import ConfigError, InputError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python(interpreters: Path) -> Path:
    """An interpreter that has the package."""
    return interpreter_with(interpreters / "gymnasium", "gymnasium==1.2.3")


def test_gymnasium_steps_by_names_of_actions(tmp_path: Path, python: Path):
    config = configuration(
        tmp_path,
        python,
        "gymnasium",
        id="FrozenLake-v1",
        kwargs={"is_slippery": False, "map_name": "4x4"},
        actions=["left", "down", "right", "up"],
        instructions="Reach 15.",
    )
    script = following("down down right down", "right down", "jump up up up")
    for group in played(config, script):
        first, second, third = group.rollouts
        assert texts(group, 0) == [
            ("user", "Reach 15.\n\n0"),
            ("assistant", "down"),
            ("user", "4"),
            ("assistant", "down"),
            ("user", "8"),
            ("assistant", "right"),
            ("user", "9"),
            ("assistant", "down"),
        ]
        assert (first.finish_reason, first.reward) == ("max_turns", 0.0)
        assert (second.finish_reason, second.reward) == ("stop", 0.0)  # a hole
        assert texts(group, 2)[2] == ("user", "expected one of left, down, right, up")
        assert third.finish_reason == "max_turns"


def test_gymnasium_takes_functions_of_the_user(tmp_path: Path, python: Path):
    (tmp_path / "lake.py").write_text(
        "def text(observation, info):\n    return f'at {observation} with {sorted(info)}'\n"
        "def action(text):\n    return {'d': 1, 'r': 2}[text]\n"
    )
    config = configuration(
        tmp_path,
        python,
        "gymnasium",
        id="FrozenLake-v1",
        kwargs={"is_slippery": False},
        to_text="lake.py:text",
        to_action="lake.py:action",
    )

    script = following("d d r x", "r x", "x")
    for group in played(config, script):
        assert texts(group, 0)[2] == ("user", "at 4 with ['prob', 'truncated']")
        assert group.rollouts[0].finish_reason == "environment_error"
        assert "KeyError: 'x'" in str(group.rollouts[0].error)


def test_names_that_gymnasium_lacks_are_refused(tmp_path: Path, python: Path):
    for options, kind, expected in (
        ({"id": "NoLake-v1"}, InputError, "NoLake"),
        ({"id": "FrozenLake-v1", "actions": ["left"]}, ConfigError, "found 1"),
    ):
        config = configuration(tmp_path, python, "gymnasium", **options)
        with pytest.raises(kind, match=expected):
            make_environment(config.environment)


def test_a_round_is_trained_in_it(tmp_path: Path, python: Path):
    config = configuration(tmp_path, python, "gymnasium", id="FrozenLake-v1")
    check_trained("gymnasium", config)
