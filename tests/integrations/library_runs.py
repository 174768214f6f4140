"""Runs of a tiny policy in environments of other libraries, by their real packages."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from support.scripted_policies import Script, record, write_tokenizer
from support.templates import QWEN

from marin_rl import run, scan_rollouts
from marin_rl.config import Config, load_config
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.types import Message, Rollout, RolloutGroup


def configuration(tmp_path: Path, python: Path | None, name: str, **options: Any) -> Config:
    """A run of a tiny policy in an environment of a library; None: it is on a server."""
    tmp_path.mkdir(exist_ok=True)
    write_tokenizer(tmp_path / "tokenizer", QWEN, "<|im_end|>")
    values = {
        "run_id": name.partition(".")[0],
        "rounds": 1,
        "root": str(tmp_path / "runs"),
        "policy": {
            "init": "random",
            "tokenizer": str(tmp_path / "tokenizer"),
            "context_length": 2048,
            "model": {
                "hidden_size": 16,
                "layers": 1,
                "heads": 2,
                "kv_heads": 1,
                "intermediate_size": 32,
            },
        },
        "environment": {
            "name": name,
            "turns_max": 4,
            "step_timeout_s": 300,
            "options": options if python is None else {"python": str(python), **options},
        },
        "batching": {"length_buckets": [2048]},
        "rollouts": {"groups_per_round": 2, "group_size": 3, "shards_per_round": 1},
        "sampling": {"max_tokens": 32},
        "training": {"microbatch_sequences": 2},
        "evaluation": {"examples": 2},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_config(path)


def played(config: Config, script: Script) -> list[RolloutGroup]:
    """A round that a script plays; it is committed, and equal when it is played again."""
    recorded, groups = record(config, script)
    replays = replay_rollouts(recorded, 0)
    assert replays.equal, replays
    assert len(replays.episodes) == 6
    assert all(has_sampled_ids(r) for group in groups for r in group.rollouts if len(r.token_ids))
    return groups


def has_sampled_ids(rollout: Rollout) -> bool:
    """True where what is trained on are the ids and logprobs (-1, a script's) of its own turns."""
    spans = np.zeros(len(rollout.token_ids), np.int32)
    for turn in rollout.turns:
        if turn.role == "assistant":
            spans[turn.start : turn.end] = 1
    logprobs = rollout.logprobs[spans == 1]
    return np.array_equal(spans, rollout.loss_mask) and bool(np.all(logprobs == -1.0))


def following(*ways: str) -> Script:
    """A script with a way for each member; their first words differ."""
    words = [way.split() for way in ways]

    def say(messages: Sequence[Message], member: int) -> str:
        said = [message.content for message in messages if message.role == "assistant"]
        (way,) = [way for way in words if way[: len(said)] == said] if said else [words[member]]
        return way[len(said)]

    return say


def texts(group: RolloutGroup, member: int) -> list[tuple[str, str]]:
    """Roles and texts of a rollout's turns."""
    return [(turn.role, turn.content) for turn in group.rollouts[member].turns]


FAILED = {"environment_error", "aborted", "timeout"}  # ends that no policy brings about


def check_trained(package: str, config: Config) -> None:
    """Train a round on what the policy samples; no rollout fails by what no policy brings about."""
    with run(config) as training:
        (round,) = training
    assert round.metrics["completions/mean_length"] > 0
    rollouts = scan_rollouts(config.root).collect()
    assert set(rollouts["environment"]) == {config.environment.name}
    ends = rollouts["finish_reason"].to_list()
    print(f"{package}: rewards {rollouts['reward'].to_list()}, {Counter(ends)}")
    assert len(ends) == 6
    assert not FAILED & set(ends)
