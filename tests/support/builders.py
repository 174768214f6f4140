"""Rollouts by hand: small groups with known tokens and rewards, and rounds of them in a run."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from marin_rl.config import Config, parse_config
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import commit_shard, seal_round
from marin_rl.types import (
    Example,
    InferenceMetadata,
    Message,
    PreferencePair,
    RewardComponent,
    Rollout,
    RolloutGroup,
    Sampling,
    ServedPolicy,
    SlotRef,
    Status,
    Timing,
    Turn,
)

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
CHECKPOINT = SlotRef(slot="checkpoints/round-00000", sha256="c" * 64)
FINGERPRINT = "f" * 64


def policy(version: int = 0) -> ServedPolicy:
    """A served policy of some version."""
    return ServedPolicy(
        endpoints=("http://127.0.0.1:1/v1",),
        model=f"policy@{version:05d}-dddddddd",
        weight_version=version,
        parameters_digest="d" * 64,
        tokenizer_digest="e" * 64,
        chat_template_digest="a" * 64,
        checkpoint=CHECKPOINT,
    )


def rollout(
    name: str,
    *,
    index: int = 0,
    reward: float | None = 1.0,
    prompt: Sequence[int] = (5, 6, 7),
    completion: Sequence[int] = (8, 9),
    status: Status = "complete",
    version: int = 0,
    policy_versions: Sequence[int] | None = None,
) -> Rollout:
    """A rollout whose logprobs are -0.5, -1, … over its completion; empty if it failed."""
    failed = status in ("error", "aborted")
    prompt, completion = ((), ()) if failed else (prompt, completion)
    length = len(prompt) + len(completion)
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=3, max_tokens=16, stop=("\n",), seed=7)
    logprobs = np.zeros(length, np.float32)
    logprobs[len(prompt) :] = -0.5 * np.arange(1, len(completion) + 1)
    answer = Turn(
        role="assistant",
        content="".join(chr(64 + token % 26) for token in completion),
        start=len(prompt),
        end=length,
        logprobs=logprobs[len(prompt) :],
        inference_metadata=InferenceMetadata(
            model="policy", weight_version=version, sampling=sampling, request_id="r1"
        ),
    )
    return Rollout(
        rollout_id=name,
        index_in_group=index,
        status=status,
        reward=None if failed else reward,
        reward_components=()
        if failed or reward is None
        else (RewardComponent(name="correct", value=reward, weight=1.0),),
        finish_reason="" if failed else "stop",
        error="it broke" if failed else None,
        token_ids=np.array([*prompt, *completion], np.int32),
        loss_mask=np.array([0] * len(prompt) + [1] * len(completion), np.int32),
        logprobs=logprobs,
        policy_versions=None if policy_versions is None else np.array(policy_versions, np.int32),
        policy_version_min=version,
        policy_version_max=version,
        n_prompt_tokens=len(prompt),
        n_completion_tokens=len(completion),
        sampling=sampling,
        turns=(Turn(role="user", content="what?"), *(() if failed else (answer,))),
        timing=Timing(started_at=MOMENT, finished_at=MOMENT, decode_s=0.25, worker="w"),
    )


def group(name: str, rewards: Iterable[float | None], **options: Any) -> RolloutGroup:
    """A group with one rollout per reward; `options` go to `rollout`."""
    rollouts = tuple(
        rollout(f"{name}/{index}", index=index, reward=reward, **options)
        for index, reward in enumerate(rewards)
    )
    return group_of(name, rollouts)


def group_of(name: str, rollouts: Sequence[Rollout]) -> RolloutGroup:
    """A group of these rollouts."""
    example = Example(
        environment="echo",
        environment_version="1",
        example_id=f"echo-{name}",
        split="train",
        seed=11,
        messages=(Message(role="system", content="be kind"), Message(role="user", content="é?")),
        answer="42",
        metadata={"difficulty": {"digits": 3}, "tags": ["a", "b"], "ratio": 0.5},
    )
    return RolloutGroup(
        group_id=name, example=example, rollouts=tuple(rollouts), group_size=len(rollouts)
    )


def configuration(root: str, *, shards: int = 1, groups: int = 8, **sections: Any) -> Config:
    """A small configuration; `sections` are merged into the tree."""
    tree: dict[str, Any] = {
        "root": root,
        "run_id": "run",
        "rollouts": {"groups_per_round": groups, "shards_per_round": shards, "group_size": 4},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return parse_config(tree)


def commit_round(run: Run, round: int, shards: Sequence[Sequence[RolloutGroup]]) -> SlotRef:
    """Commit and seal a round of rollouts; one sequence of groups per shard."""
    refs = [
        commit_shard(run, round, shard, groups, FINGERPRINT, policy(round))
        for shard, groups in enumerate(shards)
    ]
    return seal_round(run, round, refs, [CHECKPOINT])


def sampled_pair() -> PreferencePair:
    """A preference pair with everything that one from rollouts has."""
    return PreferencePair(
        id="run/round-00000/group-00001",
        messages=(Message(role="system", content="é"), Message(role="user", content="say")),
        chosen="yes",
        rejected="",
        margin=0.5,
        split="eval",
        source="run",
        chosen_id="r/1",
        rejected_id="r/2",
        chosen_reward=1.0,
        rejected_reward=-0.25,
        chosen_token_ids=np.array([3, 4], np.int32),
        rejected_token_ids=np.array([3], np.int32),
        tokenizer_digest="t",
        chat_template_digest="c",
    )
