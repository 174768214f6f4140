"""Games of TextArena by its package, in an interpreter of its own."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from integrations.chat_stand_in import chat_stand_in
from integrations.libraries import interpreter_with
from integrations.library_runs import FAILED, check_trained, configuration, following, played

from marin_rl import run, scan_rollouts
from marin_rl.environments.checks import make_environment
from marin_rl.environments.episode_pool import open_episodes
from marin_rl.errors import InputError, RewardFault
from marin_rl.types import Sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python(interpreters: Path) -> Path:
    """An interpreter that has the package."""
    return interpreter_with(interpreters / "textarena", "textarena==0.7.4")


def test_textarena_repeats_a_game_and_plays_two_sides(tmp_path: Path, python: Path):
    (tmp_path / "other.py").write_text(
        "import random\n"
        "def move(text):\n    return f'[{random.choice([6, 7, 8])}]'\n"  # the first may be taken
    )
    config = configuration(
        tmp_path, python, "textarena", id="TicTacToe-v0", players=2, opponent="other.py:move"
    )

    script = following("[0] [1] [2]", "[2] [1] [0]", "[1] [0] [2]")
    for group in played(config, script):
        for rollout in group.rollouts:
            assert rollout.turns[0].content.startswith("You are Player 0 in Tic Tac Toe.")
            assert rollout.finish_reason == "stop"
            assert rollout.reward == 1.0
    single = configuration(tmp_path / "single", python, "textarena", id="FrozenLake-v0")
    script = following("[right] x x x", "[down] x x x", "walk x x x")
    starts = {group.rollouts[0].turns[0].content for group in played(single, script)}
    assert len(starts) == 2  # another lake for another seed


def test_textarena_plays_the_policy_against_itself(tmp_path: Path, python: Path):
    options = {"id": "TicTacToe-v0", "players": 2, "opponent": "policy"}
    config = configuration(tmp_path, python, "textarena", **options)
    with run(config) as training:
        (trained,) = training
    assert trained.metrics["completions/mean_length"] > 0
    rollouts = scan_rollouts(config.root).collect()
    assert rollouts.height == 6
    assert not FAILED & set(rollouts["finish_reason"])
    for row in rollouts.iter_rows(named=True):
        assert row["turns"][0]["content"].startswith("You are Player 0 in Tic Tac Toe.")
        sampled = sum(t["end"] - t["start"] for t in row["turns"] if t["role"] == "assistant")
        assert sum(row["loss_mask"]) == sampled  # of the trained player alone


def test_the_policy_may_begin_a_game_against_itself(tmp_path: Path, python: Path):
    options = {"id": "TicTacToe-v0", "players": 2, "player": 1, "opponent": "policy"}
    settings = configuration(tmp_path, python, "textarena", **options).environment
    environment = make_environment(settings)
    example = environment.example(0, 1, "train")

    async def first(url: str) -> str:
        policy = {"endpoints": [url], "model": "m", "sampling": asdict(Sampling(max_tokens=9))}
        given = replace(example, metadata={"policy": policy})
        (episode,) = open_episodes(environment, settings, given, 1)
        return (await episode.start()).messages[-1].content

    with chat_stand_in("[4]", "x", "x") as (url, bodies):
        text = asyncio.run(first(url))
        assert text.startswith("You are Player 1 in Tic Tac Toe.")
        assert "placed their symbol (O) in cell 4" in text
        assert bodies[0]["messages"][0]["content"].startswith("You are Player 0 in Tic Tac Toe.")
        with pytest.raises(RewardFault, match="opening ended the game before the model's turn"):
            asyncio.run(first(url))
    (episode,) = open_episodes(environment, settings, example, 1)
    with pytest.raises(RewardFault, match="such a game is played by a run"):
        asyncio.run(episode.start())


def test_a_game_that_textarena_lacks_is_refused(tmp_path: Path, python: Path):
    config = configuration(tmp_path, python, "textarena", id="NoGame-v0")
    with pytest.raises(InputError, match="NoGame-v0 not found"):
        make_environment(config.environment)


def test_a_round_is_trained_in_it(tmp_path: Path, python: Path):
    config = configuration(tmp_path, python, "textarena", id="GuessTheNumber-v0")
    check_trained("textarena", config)
