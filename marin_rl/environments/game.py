"""Games of several turns, in which a policy finds a strategy from reward alone.

A game has `starts()` first positions, of which `start(number)` is one; the model reads `prompt` and
answers with one of `legal_moves`, to which `reply` is the game's; `answer` is the secret, for
people. Positions are immutable, so that members of a group may share one.

A move is one word, in a turn of its own; an illegal one costs a turn. No demonstration shows a
strategy: with `opening: random`, for a warm start, examples are games in which both sides have made
random legal moves so far, and the demonstration is one more.
"""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor
from typing import Any, Literal

from pydantic import Field, model_validator

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.base import Environment
from marin_rl.environments.episode import StepResult, Tool, user_message
from marin_rl.environments.registry import parse_options, register
from marin_rl.types import Example, Message, RewardComponent, Split, Turn

# Characters for numbers from 1 on, so that each is one token of the built-in tokenizer.
DIGITS = "123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Reply of a game to a move: what the model reads, the next position, and the end.

    `won` is None while the game goes on.
    """

    text: str
    position: Any
    won: bool | None = None


HIGHER, LOWER, RIGHT = ">", "<", "="


@dataclass(frozen=True, slots=True)
class Guess:
    """Guess a number from 1 to `size`: answers say whether it is higher or lower.

    A position is the secret. Halving the numbers that are left is optimal: the mean number of
    guesses over all numbers is the mean depth of a balanced binary search tree, 2.625 for 8
    numbers and 3.375 for 16.
    """

    size: int
    counts_turns: bool = True

    def starts(self) -> int:
        return self.size

    def start(self, number: int) -> int:
        return number + 1

    def prompt(self, position: int) -> str:
        return f"1-{DIGITS[self.size - 1]}"

    def answer(self, position: int) -> str:
        return DIGITS[position - 1]

    def legal_moves(self, position: int) -> Sequence[str]:
        return tuple(DIGITS[: self.size])

    def reply(self, position: int, move: str, draw: random.Random) -> Reply:
        number = DIGITS.index(move) + 1
        if number == position:
            return Reply(text=RIGHT, position=position, won=True)
        return Reply(text=HIGHER if position > number else LOWER, position=position)


COLOURS = "abcdef"


@dataclass(frozen=True, slots=True)
class Mastermind:
    """Find a secret code of `pegs` pegs of `colours` colours, which is a position.

    Each guess is answered by two digits: pegs of the right colour in the right place, and further
    pegs of a right colour in a wrong place (Knuth 1976, The computer as Master Mind).
    """

    pegs: int
    colours: int
    counts_turns: bool = True

    def starts(self) -> int:
        return self.colours**self.pegs

    def start(self, number: int) -> str:
        places = [number // self.colours**place % self.colours for place in range(self.pegs)]
        return "".join(COLOURS[place] for place in reversed(places))

    def prompt(self, position: str) -> str:
        return f"{self.pegs}{COLOURS[self.colours - 1]}"

    def answer(self, position: str) -> str:
        return position

    def legal_moves(self, position: str) -> Sequence[str]:
        return [self.start(number) for number in range(self.starts())]

    def reply(self, position: str, move: str, draw: random.Random) -> Reply:
        return Reply(
            text=feedback(position, move), position=position, won=True if move == position else None
        )


def feedback(code: str, guess: str) -> str:
    """Right places, and right colours in wrong places, as two digits."""
    places = sum(a == b for a, b in zip(code, guess, strict=True))
    colours = (Counter(code) & Counter(guess)).total()
    return f"{places}{colours - places}"


HEAPS = "abc"
NUMBERS = "0" + DIGITS

Position = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nim:
    """Take from one of three heaps of up to `size` objects; who takes the last object wins.

    A position, the heaps' sizes, is lost for the player to move exactly where their exclusive or is
    0 (Bouton 1901, doi:10.2307/1967631). Only positions that the player can win are first
    positions, so that optimal play wins every game.

    A move is a heap and a number, such as b2. The opponent plays at random or optimally: it leaves
    an exclusive or of 0 where it can.
    """

    size: int
    opponent: Literal["random", "optimal"] = "random"
    counts_turns: bool = False

    def starts(self) -> int:
        """Number of positions that the first player can win."""
        return len(self._starts())

    def start(self, number: int) -> Position:
        """Position `number` of those, in the order of their sizes."""
        return self._starts()[number]

    def _starts(self) -> list[Position]:
        sizes = range(self.size + 1)
        return [heaps for heaps in itertools.product(sizes, repeat=len(HEAPS)) if nim_sum(heaps)]

    def prompt(self, position: Position) -> str:
        return "".join(NUMBERS[heap] for heap in position)

    def answer(self, position: Position) -> None:
        """No secret: both players see all."""

    def legal_moves(self, position: Position) -> Sequence[str]:
        return [
            heap + NUMBERS[taken]
            for heap, held in zip(HEAPS, position, strict=True)
            for taken in range(1, held + 1)
        ]

    def reply(self, position: Position, move: str, draw: random.Random) -> Reply:
        left = self._after(position, move)
        if not any(left):
            return Reply(text=self.prompt(left), position=left, won=True)
        moves = self.legal_moves(left)
        if self.opponent == "optimal":
            moves = [each for each in moves if not nim_sum(self._after(left, each))] or moves
        left = self._after(left, draw.choice(moves))
        return Reply(text=self.prompt(left), position=left, won=None if any(left) else False)

    def _after(self, position: Position, move: str) -> Position:
        heap, taken = HEAPS.index(move[0]), NUMBERS.index(move[1])
        return tuple(held - taken * (i == heap) for i, held in enumerate(position))


def nim_sum(heaps: Sequence[int]) -> int:
    """Exclusive or of the heaps: 0 where the player to move loses against optimal play."""
    return reduce(xor, heaps, 0)


Game = Guess | Mastermind | Nim

SIZE_MAX = {"guess": 35, "nim": 9, "mastermind": 4}
ILLEGAL = "?"
LATE_REWARD = 0.5  # of a game that is won in the last turn, where fewer turns are better


class GameOptions(Section):
    """Options of `game`."""

    game: Literal["guess", "nim", "mastermind"] = Field(
        default="guess",
        description="guess: a number from 1 to size, by answers higher and lower; nim: three heaps "
        "of up to size objects; mastermind: a code of size pegs",
    )
    size: int = Field(
        default=8,
        ge=2,
        le=35,
        description="guess: largest number; nim: largest heap, at most 9; mastermind: pegs, at "
        "most 4",
    )
    colours: int = Field(default=4, ge=2, le=6, description="mastermind: number of colours")
    opponent: Literal["random", "optimal"] = Field(
        default="random", description="nim: how the other player moves"
    )
    turns_max: int = Field(
        default=6, ge=1, le=1000, description="turns of the model; a game not won by then is lost"
    )
    held_out_fraction: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="nim and mastermind: share of first positions that are for evaluation alone; "
        "guess has all its numbers in both",
    )
    opening: Literal["none", "random"] = Field(
        default="none",
        description="random: examples are games in which random legal moves were made, for a "
        "warm start that teaches the form of a move and nothing else",
    )

    @model_validator(mode="after")
    def _size_of_its_game(self) -> "GameOptions":
        most = SIZE_MAX[self.game]
        if self.size > most:
            raise ValueError(f"size: {self.game} has at most {most}, found {self.size}")
        return self


def game_of(options: GameOptions) -> Game:
    if options.game == "nim":
        return Nim(options.size, options.opponent)
    if options.game == "mastermind":
        return Mastermind(options.size, options.colours)
    return Guess(options.size)


def split_starts(options: GameOptions, game: Game) -> Mapping[Split, Sequence[int]]:
    """First positions of each split. All secrets of guess look alike, so none can be held out:
    a strategy that never guesses a number is no strategy.
    """
    everything = range(game.starts())
    if options.game == "guess":
        return {"train": everything, "eval": everything}
    shuffled = random.Random(f"{options.game} {options.size}").sample(everything, len(everything))
    held_out = max(1, round(len(shuffled) * options.held_out_fraction))
    return {"train": sorted(shuffled[held_out:]), "eval": sorted(shuffled[:held_out])}


@register("game", GameOptions)
class GameEnvironment(Environment):
    """Rewards a game that is won: 1, or less with each turn where fewer turns are better.

    Training draws first positions at random; evaluation takes each in turn.
    """

    name = "game"
    workers = 0

    def __init__(self, config: EnvironmentConfig) -> None:
        self._options = parse_options(GameOptions, config)
        self._game = game_of(self._options)
        self._starts = split_starts(self._options, self._game)
        self.eval_size = len(self._starts["eval"])

    def example(self, seed: int, index: int, split: Split) -> Example:
        draw = random.Random(f"{split} {seed + index}")
        starts = self._starts[split]
        number = draw.choice(starts) if split == "train" else starts[index % len(starts)]
        position: Any = self._game.start(number)
        messages = user_message(self._game.prompt(position))
        metadata: dict[str, Any] = {"start": number}
        if self._options.opening == "random":
            messages, metadata["move"] = self._opening(position, messages, draw)
        return self.make_example(
            messages,
            self._game.answer(position),
            seed=seed,
            index=index,
            split=split,
            metadata=metadata,
        )

    def demonstration(self, example: Example) -> str | None:
        return example.metadata.get("move")

    def _opening(
        self, position: Any, messages: tuple[Message, ...], draw: random.Random
    ) -> tuple[tuple[Message, ...], str]:
        """Messages of an unfinished game of random legal moves, and one more random legal move."""
        moves = draw.randrange(self._options.turns_max)
        for _ in range(moves):
            move = draw.choice(self._game.legal_moves(position))
            reply = self._game.reply(position, move, draw)
            if reply.won is not None:
                break
            position = reply.position
            messages += (
                Message(role="assistant", content=move),
                Message(role="user", content=reply.text),
            )
        return messages, draw.choice(self._game.legal_moves(position))

    def episode(self, example: Example) -> "GameEpisode":
        position: Any = self._game.start(example.metadata["start"])
        return GameEpisode(self._game, position, example, self._options.turns_max)

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """0: a game that was cut off in a turn is lost."""
        return (RewardComponent(name="won", value=0.0),)


class GameEpisode:
    """A game that is being played."""

    def __init__(self, game: Game, position: Any, example: Example, turns_max: int) -> None:
        self._game, self._position, self._example = game, position, example
        self._draw = random.Random(f"opponent {example.example_id}")
        self._turns, self._turns_max = 0, turns_max

    def start(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        return self._example.messages, ()

    async def step(self, turn: Turn) -> StepResult:
        move = turn.content.strip()
        self._turns += 1
        reply = Reply(text=ILLEGAL, position=self._position)
        if move in self._game.legal_moves(self._position):
            reply = self._game.reply(self._position, move, self._draw)
        self._position, messages = reply.position, user_message(reply.text)
        if reply.won is None and self._turns < self._turns_max:
            return StepResult(messages=messages)
        reward = self._reward() if reply.won else 0.0
        return StepResult(reward=reward, done=True, messages=messages)

    def _reward(self) -> float:
        """1 in the first turn, `LATE_REWARD` in the last one, on a line between them."""
        if not self._game.counts_turns or self._turns_max == 1:
            return 1.0
        return 1.0 - (1.0 - LATE_REWARD) * (self._turns - 1) / (self._turns_max - 1)

    async def close(self) -> None:
        """Release nothing."""
