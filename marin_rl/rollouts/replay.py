"""Recorded rollouts played again, or scored by another reward function; nothing is sampled.

An environment that is a function of example and actions gives the recorded messages, rewards and
ends again: `replay_rollouts` checks it, and writes nothing. The scores of `rescore_round` go into a
table of their own; its function runs in a worker process, under the run's time limit, as while
sampling. Leaves out the training step, which `training.replay` plays again.
"""

import asyncio
import hashlib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from marin_rl.config import Config, EnvironmentConfig
from marin_rl.environments.base import Environment, reward_of
from marin_rl.environments.episode import Conversation, StepResult
from marin_rl.environments.episode_pool import PlayedEpisode, open_episodes
from marin_rl.environments.registry import EnvironmentPart, construct, loaded_environment, part_for
from marin_rl.environments.scoring import Score, Scorer, fault_of, scorer_for
from marin_rl.errors import InputError, MarinRLError, RewardFault
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.rollouts.replay_calls import replayed_calls
from marin_rl.rollouts.tool_turns import ToolTurns, score_recorded
from marin_rl.rollouts.trajectories import (
    ENVIRONMENT_ERROR,
    LENGTH,
    TIMEOUT,
    TOOL_ERROR,
    all_of,
    end_of,
    last_completion,
    too_long,
)
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.provenance import code_version
from marin_rl.storage.run_records import keep_code
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rewards import (
    RewardSource,
    RewardTable,
    commit_rewards,
    committed_rewards,
)
from marin_rl.storage.tables.rollouts import groups_of, iter_row_groups, rollouts_manifest
from marin_rl.tokenizers import template_options
from marin_rl.types import Message, Rollout, RolloutGroup, Turn
from marin_rl.user_code import parse_spec, pin
from schemas.tables import REWARDS

SIDE_BY_SIDE = 256  # episodes that are played at once
SHOWN_MAX = 120  # characters of a text in a difference
FAULTS = (ENVIRONMENT_ERROR, TIMEOUT, TOOL_ERROR)

_ID = re.compile(r"round-(\d{5,})/group-\d{5,}/\d{3,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedTurn:
    """A turn of the model, counted from 1, and the first difference in what followed it.

    Turn 0 is the start of the episode; the turn after the last is the score of the whole.
    """

    turn: int
    difference: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEpisode:
    rollout_id: str
    finish_reason: str
    turns: tuple[ReplayedTurn, ...]

    @property
    def equal(self) -> bool:
        return all(turn.difference is None for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replays:
    """Episodes of a round, and what `changed` since they were recorded: then, and now."""

    round: int
    episodes: tuple[ReplayedEpisode, ...]
    changed: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])

    @property
    def equal(self) -> bool:
        return all(episode.equal for episode in self.episodes)


def round_of_rollout(rollout_id: str) -> int:
    """The round of a rollout. Raises InputError for another form of an id."""
    match = _ID.fullmatch(rollout_id)
    if match is None:
        raise InputError(
            f"expected the id of a rollout, such as round-00003/group-00002/001, found "
            f"{rollout_id[:100]!r}; `marin-rl rollouts` shows ids"
        )
    return int(match[1])


def replay_rollouts(run: Run, round: int, rollout_id: str | None = None) -> Replays:
    """Play the rollouts of a sealed round again, or one of them.

    Code that the run names must be allowed (`trust.check_named`). Raises ObjectMissing while the
    round is not sealed, InputError for an unknown id and for environments that say they cannot be
    played again, CorruptObject.
    """
    player = run.at_round(round)
    manifest = rollouts_manifest(player, round)
    groups = [g for table in iter_row_groups(player, manifest) for g in groups_of(table)]
    wanted = {r.rollout_id for group in groups for r in group.rollouts}
    if rollout_id is not None:
        if rollout_id not in wanted:
            raise InputError(
                f"round {round} of {run.run_id!r} has no rollout {rollout_id}: it has "
                f"{min(wanted)} to {max(wanted)}"
            )
        wanted = {rollout_id}
        groups = [g for g in groups if any(r.rollout_id == rollout_id for r in g.rollouts)]
    environment = loaded_environment(player.config.environment)
    parts = [part_for(environment, player.config.environment, group.example) for group in groups]
    code = {name: str(value) for name, value in code_version().items()}
    changed = {
        f"code.{name}": (str(then), code.get(name, "nothing"))
        for name, then in manifest.code.items()
        if code.get(name) != str(then)
    }
    for group, part in zip(groups, parts, strict=True):
        _check_replayable(part.environment)
        then, now = group.example.environment_version, part.environment.version
        if then != now:
            changed["environment version" + (part.label and f" of {part.label}")] = then, now

    async def replayed() -> list[list[ReplayedEpisode]]:
        places = asyncio.Semaphore(SIDE_BY_SIDE)
        players = {part.label: _Replayer(player.config, part, places) for part in parts}
        pairs = zip(groups, parts, strict=True)
        return await all_of(players[part.label].group(group, wanted) for group, part in pairs)

    episodes = [episode for group in asyncio.run(replayed()) for episode in group]
    return Replays(round=round, episodes=tuple(episodes), changed=changed)


def _check_replayable(environment: Environment) -> None:
    if environment.returns_rollouts:
        raise InputError(
            f"environment {environment.name!r} sampled its rollouts by itself: there are no "
            "steps to play again"
        )
    if not environment.replayable and not environment.replays_calls:
        raise InputError(
            f"environment {environment.name!r} says `replayable = False`: its steps have "
            "effects outside of their process, or answers that differ"
        )


class _Replayer:
    """Plays the episodes of one environment again; `places` bounds those at once."""

    def __init__(self, config: Config, part: EnvironmentPart, places: asyncio.Semaphore) -> None:
        self._environment, self._settings, self._places = part.environment, part.config, places
        self._tool_turns = ToolTurns(config.policy, part.config)
        options = template_options(config.policy, part.config)
        self._bridge = TemplateBridge(config.policy, options)
        self._context_length = config.policy.context_length
        learned = config.environment.reward_model
        self._by_steps = {"steps"} if learned is None else {"steps", learned.name}

    async def group(self, group: RolloutGroup, wanted: set[str]) -> list[ReplayedEpisode]:
        chosen = [rollout for rollout in group.rollouts if rollout.rollout_id in wanted]
        episodes = await all_of(self._rollout(group, rollout) for rollout in chosen)
        scored = [
            rollout
            for rollout in group.rollouts
            if _is_scored(rollout)
            and not {part.name for part in rollout.reward_components} <= self._by_steps
        ]
        scorer = scorer_for(self._environment, self._settings)
        scores = await score_recorded(scorer, group.example, scored, self._tool_turns)
        return [
            replace(episode, turns=(*episode.turns, *_scored(rollout, episode, scores)))
            for rollout, episode in zip(chosen, episodes, strict=True)
        ]

    async def _rollout(self, group: RolloutGroup, rollout: Rollout) -> ReplayedEpisode:
        async with self._places:
            (episode,) = open_episodes(self._environment, self._settings, group.example, 1)
            try:
                played = self._calls if self._environment.replays_calls else self._turns
                turns = [turn async for turn in played(episode, rollout)]
            finally:
                await episode.close()
        return ReplayedEpisode(
            rollout_id=rollout.rollout_id, finish_reason=rollout.finish_reason, turns=tuple(turns)
        )

    async def _calls(self, episode: PlayedEpisode, rollout: Rollout):
        """Requests of a program, up to the first that differs."""
        if not len(rollout.token_ids):
            yield ReplayedTurn(turn=0, difference="it failed, and has no answers to play again")
            return
        number = 0
        try:
            requests = replayed_calls(episode, rollout, self._tool_turns, self._refusal)
            async for number, difference in requests:
                yield ReplayedTurn(turn=number, difference=difference)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
            yield ReplayedTurn(turn=number + 1, difference=f"now {fault_of(error)}")

    def _refusal(self, conversation: Conversation) -> str | None:
        tokens, limit = len(self._bridge.prompt(*conversation)), self._context_length
        return too_long(tokens, limit) if tokens >= limit else None

    async def _turns(self, episode: PlayedEpisode, rollout: Rollout):
        """Turns in order, up to the first that differs."""
        # The opening messages, and each turn of the model with what the environment answered.
        parts: list[list[Turn]] = [[]]
        for turn in rollout.turns:
            sampled = turn.role == "assistant" and (
                turn.inference_metadata is not None or turn.start is None
            )
            if sampled and (parts[0] or len(parts) > 1):
                parts.append([turn])
            else:
                parts[-1].append(turn)
        opening, *exchanges = parts
        try:
            start = await episode.start()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is other people's code
            yield ReplayedTurn(turn=0, difference=_fault_difference(rollout, error, last=True))
            return
        difference = _messages_difference(opening, start.messages)
        yield ReplayedTurn(turn=0, difference=difference)
        for number, (turn, *observed) in enumerate(exchanges, start=1):
            if difference is not None:
                return
            last = number == len(exchanges)
            try:
                action = self._tool_turns.recorded(rollout, turn, start.tools, number - 1)
                result = await episode.step(action)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
                difference = _fault_difference(rollout, error, last=last)
            else:
                messages = tuple(map(self._tool_turns.limited, result.messages))
                result = replace(result, messages=messages)
                difference = _step_difference(rollout, turn, observed, result, last=last)
            yield ReplayedTurn(turn=number, difference=difference)


def _is_scored(rollout: Rollout) -> bool:
    """True if the environment scored a rollout as a whole, whether its steps had rewards or not."""
    names = {component.name for component in rollout.reward_components}
    return rollout.status in ("complete", "truncated") and names != {"steps"}


def _scored(
    rollout: Rollout, episode: ReplayedEpisode, scores: Mapping[str, Score]
) -> Iterator[ReplayedTurn]:
    if rollout.rollout_id not in scores or not episode.equal:
        return
    score, number = scores[rollout.rollout_id], len(episode.turns)
    if isinstance(score, MarinRLError):
        yield ReplayedTurn(turn=number, difference=f"scored before, now {score}")
        return
    recorded = {component.name: component.value for component in rollout.reward_components}
    for component in score:  # a learned reward's component is not the environment's
        if recorded.get(component.name) != component.value:
            then = recorded.get(component.name)
            difference = f"reward {component.name}: {then!r} then, {component.value!r} now"
            yield ReplayedTurn(turn=number, difference=difference)
            return
    yield ReplayedTurn(turn=number)


def _messages_difference(then: Sequence[Turn], now: Sequence[Message]) -> str | None:
    for place, (turn, message) in enumerate(zip(then, now, strict=False), start=1):
        if (turn.role, turn.content) != (message.role, message.content):
            return (
                f"message {place}: {turn.role} {_shown(turn.content)} then, {message.role} "
                f"{_shown(message.content)} now"
            )
    return None if len(then) == len(now) else f"{len(then)} messages then, {len(now)} now"


def _step_difference(
    rollout: Rollout, turn: Turn, observed: Sequence[Turn], result: StepResult, *, last: bool
) -> str | None:
    if last and rollout.status == "error" and rollout.finish_reason in FAULTS:
        return f"{rollout.finish_reason} then, an answer now"
    if not last or observed:
        difference = _messages_difference(observed, result.messages)
        if difference is not None:
            return difference
    # the last turn of an episode that is scored as a whole has that score, too
    if not (last and _is_scored(rollout)) and turn.reward != result.received:
        return f"reward {turn.reward!r} then, {result.received!r} now"
    if turn.rewards != result.rewards:
        then, now = ({part.name: part.value for part in r.rewards} for r in (turn, result))
        return f"rewards {then!r} then, {now!r} now"
    expected_done = last and rollout.finish_reason == "stop"
    if result.done != expected_done and not (last and rollout.finish_reason in (LENGTH, "abort")):
        return f"done {expected_done} then, {result.done} now"
    return None


def _fault_difference(rollout: Rollout, error: BaseException, *, last: bool) -> str | None:
    fault = fault_of(error)
    if last and rollout.finish_reason == end_of(fault):
        return None
    return f"{rollout.finish_reason if last else 'an answer'} then, now {fault}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """The table, and how its rewards compare: means, and how many rollouts changed or failed."""

    table: RewardTable
    rollouts: int
    changed: int
    failed: int
    mean_before: float | None
    mean_after: float | None


def rescore_round(run: Run, round: int, function: str, name: str) -> Rescored:
    """Score the rollouts of a sealed round by `function`, FILE.py:name or module:name.

    The function gets the last message of the assistant; it is not asked where its table is there. A
    file is sought in the current folder, and a copy of it is kept with the run. Raises InputError
    where it cannot be imported, ObjectMissing while the round is not sealed, ConfigError for an
    invalid name and for a missing file, CorruptObject.
    """
    function = pin(function, Path(), "--reward")
    sealed = rollouts_manifest(run, round)
    parent = read_manifest(run.store, sealed.slot)
    assert parent is not None, "it was read above"
    source = RewardSource(
        function=function.partition("#")[0],
        source_sha256=source_digest(function),
        rollouts_sha256=parent[1],
    )
    existing = committed_rewards(run, round, name, source)
    if existing is not None:
        return _compared(*existing)
    keep_code(run.folder, function)
    groups = [g for table in iter_row_groups(run, sealed) for g in groups_of(table)]
    config = EnvironmentConfig(
        name="chat",
        options={"path": "no file: rollouts have their examples", "reward": function},
        reward_timeout_s=run.config.environment.reward_timeout_s,
    )
    tool_turns = ToolTurns(run.config.policy, run.config.environment)
    rows = asyncio.run(_rescored(groups, config, tool_turns))
    made = commit_rewards(run, round, name, source, pa.Table.from_pylist(rows, schema=REWARDS))
    existing = committed_rewards(run, round, name, source)  # ours, or another process's
    assert existing is not None, "it was committed above"
    return _compared(made, existing[1])


def _compared(table: RewardTable, rows: pa.Table) -> Rescored:
    before, after = (rows[name].to_pylist() for name in ("reward_before", "reward"))
    return Rescored(
        table=table,
        rollouts=rows.num_rows,
        changed=sum(new != old for new, old in zip(after, before, strict=True)),
        failed=rows.num_rows - rows["error"].null_count,
        mean_before=_mean(before),
        mean_after=_mean(after),
    )


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None


def source_digest(function: str) -> str:
    """SHA-256 of the module that a function is in: another text may give other rewards.

    What that module imports is not covered.
    Raises InputError where it cannot be imported.
    """
    spec = parse_spec(function)
    if spec is not None and spec.is_file:
        return spec.sha256
    module, _, attribute = function.partition(":")
    try:
        loaded = importlib.import_module(module)
        getattr(loaded, attribute)
        return hashlib.sha256(inspect.getsource(loaded).encode()).hexdigest()
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise InputError(
            f"cannot import {function!r}: {error}; expected FILE.py:function, or module:function "
            "of an installed package"
        ) from error


async def _rescored(
    groups: Sequence[RolloutGroup], config: EnvironmentConfig, tool_turns: ToolTurns
) -> list[dict]:
    scorer = Scorer(construct(config), config)
    try:
        rows: list[dict] = []
        for group in groups:
            sound = [r for r in group.rollouts if r.status in ("complete", "truncated")]
            answered = [r for r in sound if last_completion(r) is not None]
            scores = await score_recorded(scorer, group.example, answered, tool_turns)
            rows += [_row(rollout, scores.get(rollout.rollout_id)) for rollout in group.rollouts]
        return rows
    finally:
        scorer.close()


def _row(rollout: Rollout, score: Score | None) -> dict:
    fault = score if isinstance(score, RewardFault) else None
    components = () if score is None or isinstance(score, RewardFault) else score
    return {
        "rollout_id": rollout.rollout_id,
        "reward": reward_of(components) if components else None,
        "reward_before": rollout.reward,
        "reward_components": [asdict(component) for component in components],
        "error": None if fault is None else str(fault),
    }
