"""Games: their rules by known answers, their examples, and a whole game through its episode."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from support.cases import optimal_mean_guesses

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.episode import StepResult
from marin_rl.environments.game import (
    DIGITS,
    HIGHER,
    LOWER,
    GameEnvironment,
    Mastermind,
    Nim,
    Position,
    feedback,
    nim_sum,
)
from marin_rl.environments.registry import construct
from marin_rl.errors import ConfigError
from marin_rl.types import Example, Turn

Policy = Callable[[list[str]], str]  # a move by the texts so far, from the prompt on


def environment(**options: Any) -> GameEnvironment:
    made = construct(EnvironmentConfig(name="game", options=options))
    assert isinstance(made, GameEnvironment)
    return made


def play(game: GameEnvironment, example: Example, policy: Policy) -> tuple[float, int]:
    """The reward of a game, and the number of its turns."""
    episode = game.episode(example)
    messages, tools = episode.start()
    assert not tools
    texts = [message.content for message in messages]
    result, turns = StepResult(), 0
    while not result.done:
        texts.append(policy(texts))
        result = asyncio.run(episode.step(Turn(role="assistant", content=texts[-1])))
        texts += [message.content for message in result.messages]
        turns += 1
    assert result.reward is not None
    return result.reward, turns


def halving(size: int) -> Policy:
    """Binary search."""

    def move(texts: list[str]) -> str:
        low, high = 1, size
        for guess, answer in zip(texts[1::2], texts[2::2], strict=True):
            number = DIGITS.index(guess) + 1
            low, high = (number + 1, high) if answer == HIGHER else (low, number - 1)
        return DIGITS[(low + high) // 2 - 1]

    return move


def test_the_optimal_mean_number_of_guesses() -> None:
    # by hand: 1 number in one guess, 2 in two, 4 in three, the eighth in four
    assert optimal_mean_guesses(8) == (1 + 2 * 2 + 4 * 3 + 4) / 8 == 2.625
    assert optimal_mean_guesses(16) == 3.375
    assert [optimal_mean_guesses(size) for size in (1, 3)] == [1.0, 5 / 3]


@pytest.mark.parametrize("size", [8, 16])
def test_binary_search_plays_every_held_out_number_in_the_optimal_mean(size: int) -> None:
    game = environment(game="guess", size=size, turns_max=6)
    assert game.eval_size == size
    examples = [game.example(0, index, "eval") for index in range(size)]
    assert sorted(DIGITS.index(str(example.answer)) for example in examples) == list(range(size))
    played = [play(game, example, halving(size)) for example in examples]
    assert sum(turns for _, turns in played) / size == optimal_mean_guesses(size)
    for reward, turns in played:
        assert reward == pytest.approx(1 - 0.5 * (turns - 1) / 5)


def test_an_illegal_move_costs_a_turn_and_a_game_ends() -> None:
    game = environment(turns_max=4)
    example = game.example(0, 0, "eval")
    for illegal in ("", "12", "9", "x", "1 "):
        if illegal.strip() == example.answer:
            continue
        moves = iter([illegal, illegal, illegal, str(example.answer)])
        reward, turns = play(game, example, lambda _, moves=moves: next(moves))
        assert (reward, turns) == (0.5, 4), illegal
    assert play(game, example, lambda _: "") == (0.0, 4)


def test_examples_are_functions_of_their_arguments_and_training_has_every_number() -> None:
    game = environment()
    drawn = [game.example(7, index, "train") for index in range(200)]
    assert [game.example(7, index, "train") for index in range(200)] == drawn
    assert {example.answer for example in drawn} == set("12345678")
    assert {example.messages for example in drawn} == {drawn[0].messages}, "the secret is hidden"


def test_a_warm_start_shows_moves_without_a_strategy() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    game = environment(opening="random")
    examples = [game.example(seed, index, "train") for index in range(1600)]
    moves = [str(game.demonstration(example)) for example in examples]
    # each of 8 numbers 200 times, with a standard deviation of 13: six of them
    for count in Counter(moves).values():
        assert abs(count - 200) < 80
    ruled_out = [
        move > guess if answer == LOWER else move < guess
        for move, example in zip(moves, examples, strict=True)
        if len(example.messages) > 1
        for guess, answer in [(m.content for m in example.messages[-2:])]
    ]
    # uniform moves contradict the last answer as often as not: a player of sense never does
    assert 0.2 < sum(ruled_out) / len(ruled_out) < 0.5
    assert environment().demonstration(environment().example(0, 0, "train")) is None


@lru_cache
def wins(position: Position) -> bool:
    """Search of the whole game: the player to move can win."""
    rules = Nim(9)
    return any(not wins(rules._after(position, move)) for move in rules.legal_moves(position))


def test_nim_starts_are_the_positions_that_can_be_won() -> None:
    rules = Nim(3)
    starts = {rules.start(number) for number in range(rules.starts())}
    assert len(starts) == 48  # of 64, 16 have an exclusive or of 0
    for number in range(64):
        heaps = (number // 16, number // 4 % 4, number % 4)
        assert (heaps in starts) == wins(heaps) == bool(nim_sum(heaps))


@pytest.mark.parametrize("opponent", ["random", "optimal"])
def test_optimal_nim_wins_every_held_out_position(opponent: str) -> None:
    game = environment(game="nim", size=4, opponent=opponent, turns_max=20)
    rules = Nim(4)

    def optimal(texts: list[str]) -> str:
        heaps = tuple(map(int, texts[-1]))
        return next(m for m in rules.legal_moves(heaps) if not nim_sum(rules._after(heaps, m)))

    for index in range(game.eval_size):
        assert play(game, game.example(0, index, "eval"), optimal)[0] == 1.0


def test_an_optimal_opponent_wins_after_one_mistake() -> None:
    game = Nim(5, "optimal")
    position, draw = (3, 4, 5), random.Random(0)
    reply = game.reply(position, "c1", draw)  # leaves 3 4 4, which is won for the opponent
    while reply.won is None:
        reply = game.reply(reply.position, game.legal_moves(reply.position)[0], draw)
    assert reply.won is False


@pytest.mark.parametrize(
    ("code", "guess", "told"),
    [
        ("aabb", "aabb", "40"),
        ("aabb", "bbaa", "04"),
        ("aabb", "abab", "22"),
        ("abcd", "dcba", "04"),
        ("aaab", "baaa", "22"),
        ("abbc", "aadd", "10"),
    ],
)
def test_mastermind_feedback(code: str, guess: str, told: str) -> None:
    assert feedback(code, guess) == feedback(guess, code) == told


def test_mastermind_is_won_by_the_codes_that_are_left() -> None:
    game = environment(game="mastermind", size=3, colours=4, turns_max=8)
    codes = [Mastermind(3, 4).start(number) for number in range(64)]
    assert len(set(codes)) == 64

    def consistent(texts: list[str]) -> str:
        told = list(zip(texts[1::2], texts[2::2], strict=True))
        return next(c for c in codes if all(feedback(c, guess) == said for guess, said in told))

    for index in range(game.eval_size):
        reward, turns = play(game, game.example(0, index, "eval"), consistent)
        assert reward == pytest.approx(1 - 0.5 * (turns - 1) / 7)


@pytest.mark.parametrize("options", [{"game": "nim", "size": 3}, {"game": "mastermind", "size": 3}])
def test_held_out_positions_are_never_trained_on(options: dict[str, Any]) -> None:
    game = environment(**options)
    trained = {game.example(0, index, "train").metadata["start"] for index in range(600)}
    held_out = {game.example(0, index, "eval").metadata["start"] for index in range(game.eval_size)}
    assert len(held_out) == game.eval_size
    assert not trained & held_out
    assert len(trained) + len(held_out) == game._game.starts()


@pytest.mark.parametrize(
    "options", [{"game": "chess"}, {"game": "nim", "size": 10}, {"game": "mastermind", "size": 5}]
)
def test_games_that_are_not_there_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        environment(**options)
