"""Runs made by hand in a second, without JAX: groups, rounds, complete runs, a run to display.

Rounds of rollouts by hand, real batches, real metrics. Checkpoints have files and scores where a
trainer would put them, but cannot be restored. The completions of `shown_run` try to be HTML.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from marin_rl.batching.build import build_round
from marin_rl.config import Config, parse_config
from marin_rl.rounds import close_round
from marin_rl.storage.commits import (
    commit_manifest,
    commit_slot,
    fingerprint,
    new_attempt,
    new_manifest,
    parent_of,
    part_of,
)
from marin_rl.storage.runs import Run, checkpoint_slot, evals_slot
from marin_rl.storage.tables.batches import read_batches
from marin_rl.storage.tables.metrics import write_round_metrics
from marin_rl.storage.tables.rollouts import commit_shard, encode_shard, seal_round
from marin_rl.storage.tables.scores import ScoredStep, ScoresWriter
from marin_rl.storage.upkeep.audit import RoundAudit, audit_run
from marin_rl.tokenizers import character_tokenizer
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
    ToolCall,
    TrainingBatch,
    Turn,
    TurnTiming,
)
from schemas.manifests import Part
from schemas.tables import FLOATS

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
        timing=Timing(
            started_at=MOMENT,
            finished_at=MOMENT,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.25,
            worker="w",
        ),
    )


def dialogue(
    name: str, turns: Sequence[Turn], *, index: int = 0, finish_reason: str = "stop"
) -> Rollout:
    """A rollout of several turns: those of the assistant are sampled, every letter is a token.

    Its reward is the sum of the turns' rewards.
    """
    base, placed, ids, mask = rollout(name, index=index), [], list[int](), list[int]()
    sampled = base.turns[1].inference_metadata
    assert sampled is not None, "a rollout by hand says how it was sampled"
    for turn in turns:
        own = turn.role == "assistant"
        facts = replace(sampled, finish_reason="stop") if own else None
        start = len(ids)
        ids += list(character_tokenizer()(turn.content, add_special_tokens=False)["input_ids"])
        mask += [int(own)] * (len(ids) - start)
        placed.append(replace(turn, start=start, end=len(ids), inference_metadata=facts))
    loss_mask = np.array(mask, np.int32)
    return replace(
        base,
        reward=sum(turn.reward for turn in turns if turn.reward is not None),
        finish_reason=finish_reason,
        status="complete" if finish_reason == "stop" else "truncated",
        token_ids=np.array(ids, np.int32),
        loss_mask=loss_mask,
        logprobs=(-0.5 * loss_mask).astype(np.float32),
        n_prompt_tokens=int((1 - loss_mask).sum()),
        n_completion_tokens=int(loss_mask.sum()),
        turns=tuple(placed),
    )


SEARCHED = (
    Turn(role="user", content="who was it?"),
    Turn(
        role="assistant",
        content="let me look",
        reward=0.25,
        tool_calls=(
            ToolCall(id="call-1", name="search", arguments='{"for": "<i>Ada</i>"}'),
            ToolCall(id="call-2", name="weigh", arguments="{}"),
        ),
        timing=TurnTiming(queue_s=0.25, prefill_s=0.5, decode_s=1.0, environment_s=3.25),
    ),
    Turn(
        role="tool",
        content="\x1b[2J<b>Ada</b>",
        tool_name="search",
        tool_call_id="call-1",
        cut=True,
    ),
    Turn(role="assistant", content="Ada", reward=0.5),
)
GUESSED = (
    Turn(role="system", content="be brief"),
    Turn(role="user", content="1-8"),
    Turn(role="assistant", content="4"),
    Turn(role="user", content=">"),
    Turn(role="assistant", content="6"),
    Turn(role="user", content="<"),
    Turn(role="assistant", content="7", reward=0.5),
)


def dialogue_run(root: Path | str, *, run_id: str = "talks", **sections: Any) -> Run:
    """A run of a sealed round: dialogues with a tool and without, and single answers."""
    run = Run.create_or_open(configuration(str(root), groups=2, run_id=run_id, **sections))
    first = "round-00000/group-00000"
    talks = [
        dialogue(f"{first}/000", SEARCHED),
        dialogue(f"{first}/001", GUESSED, index=1, finish_reason="max_turns"),
    ]
    second = "round-00000/group-00001"
    single = [
        rollout(f"{second}/{index:03d}", index=index, reward=reward)
        for index, reward in enumerate([0.0, 1.0])
    ]
    groups = [group_of(first, talks), group_of(second, single)]
    commit_round(run, 0, [groups])
    return run


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


def audit_round(run: Run, round: int) -> RoundAudit:
    """The report on one round of an audit of the whole run."""
    (report,) = (report for report in audit_run(run) if report.round == round)
    return report


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


FILES = ("arrays-00000-00000.safetensors", "arrays-00000-00001.safetensors", "index-00000.json")


def checkpoint(
    run: Run,
    round: int,
    parents: tuple[SlotRef, ...] = (),
    scores: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> SlotRef:
    """Commit an imitation of a round's checkpoint; `scores` writes the scores next to it."""
    attempt, slot = new_attempt(), checkpoint_slot(round)
    parts = []
    for name in FILES:
        data = np.random.default_rng([round, len(name)]).bytes(1000 + round)
        run.store.put_part(f"{slot}/{attempt}/{name}", data)
        parts.append(part_of(f"{attempt}/{name}", data))
    if scores is not None:
        parts += scores(attempt)
    above = [parent_of(parent) for parent in parents]
    decided = fingerprint("checkpoint", {"round": round}, above)
    return commit_slot(
        run.store,
        slot,
        attempt=attempt,
        fingerprint=decided,
        parents=above,
        parts=parts,
        extra=extra or {},
    )


def sample(run: Run, round: int, shard: int, start: SlotRef) -> SlotRef:
    """One shard of a round, of one group."""
    name = f"{run.run_id}/round-{round:05d}/group-{shard}"
    groups = [group(name, [0.0, 1.0, 1.0, 0.5], version=round)]
    served = replace(policy(round), checkpoint=start)
    return commit_shard(run, round, shard, groups, FINGERPRINT, served)


def evaluate(run: Run, round: int, start: SlotRef, accuracy: float = 0.5) -> None:
    """Commit the evaluation of a checkpoint."""
    attempt, slot = new_attempt(), evals_slot(round)
    played = group(f"eval/{round}", [0.0, 1.0], version=round)
    data = encode_shard(
        [replace(played, example=replace(played.example, example_id="held-out"))],
        run_id=run.run_id,
        round=round,
        shard=0,
        attempt=attempt,
        replica="host:1",
        fingerprint=FINGERPRINT,
        policy=replace(policy(round), checkpoint=start),
    )
    name = f"evals-{attempt}.parquet"
    run.store.put_part(f"{slot}/{name}", data)
    manifest = new_manifest(
        slot,
        attempt=attempt,
        fingerprint=FINGERPRINT,
        parents=[parent_of(start)],
        parts=[part_of(name, data)],
        totals={"eval/accuracy": accuracy},
    )
    commit_manifest(run.store, manifest)


def play(
    run: Run, round: int, start: SlotRef, shards: int = 2, *, evaluated: bool = False
) -> SlotRef:
    """One round from a checkpoint to the next, all of it committed."""
    if evaluated:
        evaluate(run, round, start)
    refs = [sample(run, round, shard, start) for shard in range(shards)]
    batches = build_round(run, round, seal_round(run, round, refs, [start]))
    return train(run, round, start, batches)


def train(
    run: Run, round: int, start: SlotRef, batches: SlotRef, extra: Mapping[str, Any] | None = None
) -> SlotRef:
    """Commit the checkpoint after a round, with scores, and close the round."""

    def scores(attempt: str) -> tuple[Part, ...]:
        with ScoresWriter(run, round, attempt, 1) as writer:
            for batch in read_batches(run, batches):
                writer.write(scored(batch))
            return writer.parts()

    trained = checkpoint(run, round + 1, (start, batches), scores, extra)
    close_round(run, round, {"timing_s/round": 1.0})
    return trained


def scored(batch: TrainingBatch) -> ScoredStep:
    """Scores of a step that mean nothing."""
    values = np.zeros(batch.token_ids.shape, np.float32)
    return ScoredStep(
        rollout_ids=batch.rollout_ids,
        mask=batch.loss_mask > 0,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        clipped=np.zeros(batch.token_ids.shape, np.bool_),
        floats=dict.fromkeys(FLOATS, values),
    )


def whole_run(
    root: str, rounds: int = 3, shards: int = 2, *, evaluated: Collection[int] = (), **sections: Any
) -> Run:
    """A run of `rounds` closed rounds, the first `evaluated` of which began with an evaluation."""
    run = Run.create_or_open(configuration(root, shards=shards, groups=shards, **sections))
    start = checkpoint(run, 0)
    for round in range(rounds):
        start = play(run, round, start, shards, evaluated=round in evaluated)
    return run


HOSTILE = (
    "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'>",
    "<!-- <script> ]]> ${window.hurt = 3} \u2028 & ' \" </style><svg onload=window.hurt=4>",
)
ROUNDS, PLANNED = 3, 2  # of a run that is not complete: rounds there are, and rounds to come


def shown_run(
    root: Path | str, *, rounds: int = ROUNDS, run_id: str = "shown", **sections: Any
) -> Run:
    """A run of some rounds: in each a group that differs, an even one, and one that failed."""
    run = Run.create_or_open(
        configuration(str(root), groups=3, run_id=run_id, rounds=rounds + PLANNED, **sections)
    )
    add_checkpoint(run, 0)
    for round in range(rounds):
        add_round(run, round)
    return run


def add_round(run: Run, round: int) -> None:
    """Commit a round: rollouts, batches and dispositions, a checkpoint, metrics."""
    groups = [
        _group(round, 0, [0.0, 1.0, 0.25]),
        _group(round, 1, [0.5, 0.5]),
        _group(round, 2, [1.0, None]),
    ]
    build_round(run, round, commit_round(run, round, [groups]))
    add_checkpoint(run, round + 1)
    metrics = {
        "reward": 0.25 * round,
        "entropy": 1.0 / (round + 1),
        "eval/accuracy": 0.5,
        "eval/examples": 4.0,
        "completions/mean_length": 7.0,
        "frac_reward_zero_std": 0.5,
        "timing_s/round": 2.0,
    }
    write_round_metrics(run, round, metrics)


def add_checkpoint(run: Run, round: int) -> None:
    """A checkpoint's manifest without parts, which is enough for those who only look."""
    slot = checkpoint_slot(round)
    manifest = new_manifest(slot, attempt=new_attempt(), fingerprint=FINGERPRINT, parts=())
    commit_manifest(run.store, manifest)


def _group(round: int, place: int, rewards: list[float | None]) -> RolloutGroup:
    name = f"round-{round:05d}/group-{place:05d}"
    rollouts = [
        _rollout(f"{name}/{index:03d}", index, reward, round)
        for index, reward in enumerate(rewards)
    ]
    return group_of(name, rollouts)


def _rollout(name: str, index: int, reward: float | None, round: int) -> Rollout:
    if reward is None:
        return rollout(name, index=index, status="error", version=round)
    text = HOSTILE[index % len(HOSTILE)]
    ids = character_tokenizer()(text, add_special_tokens=False)["input_ids"]
    made = rollout(name, index=index, reward=reward, completion=[*ids, 1], version=round)
    turns = (made.turns[0], replace(made.turns[1], content=text))
    parts = (RewardComponent(name="<b>correct</b>", value=reward, weight=1.0),)
    return replace(made, turns=turns, reward_components=parts)
