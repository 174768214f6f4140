"""A committed round scored again by another reward function, without sampling anything.

Scores go into a table of their own; the shards stay as they are. The function runs in a worker
process, under the run's time limit, as while sampling.
"""

import asyncio
import hashlib
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import reward_of
from marin_rl.environments.registry import construct
from marin_rl.environments.scoring import Score, Scorer
from marin_rl.errors import InputError, RewardFault
from marin_rl.rollouts.tool_turns import ToolTurns, score_recorded
from marin_rl.rollouts.trajectories import last_completion
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.run_records import keep_code
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rewards import (
    RewardSource,
    RewardTable,
    commit_rewards,
    committed_rewards,
)
from marin_rl.storage.tables.rollouts import groups_of, iter_row_groups, rollouts_manifest
from marin_rl.types import Rollout, RolloutGroup
from marin_rl.user_code import parse_spec, pin
from schemas.tables import REWARDS


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
    where it cannot be imported, ObjectMissing while the round is not sealed, ConfigError for a name
    that is none and for a file that is not there, CorruptObject.
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
    rows = asyncio.run(_scored(groups, config, tool_turns))
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


async def _scored(
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
