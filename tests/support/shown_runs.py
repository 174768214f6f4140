"""A small finished run to look at, whose completions try to be HTML."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.builders import FINGERPRINT, commit_round, configuration, group_of, rollout

from marin_rl.batching.build import build_round
from marin_rl.storage.commits import commit_manifest, new_attempt, new_manifest
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.metrics import write_round_metrics
from marin_rl.tokenizers import character_tokenizer
from marin_rl.types import RewardComponent, Rollout, RolloutGroup

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
