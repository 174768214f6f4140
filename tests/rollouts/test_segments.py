"""Episodes whose template drops earlier reasoning: ended, or played on in segments."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rollouts.scripted_pieces import TALKS
from support.run_factories import audit_round
from support.scripted_policies import record, write_tokenizer
from support.templates import QWEN

from marin_rl.analysis.dialogues import rollout_named
from marin_rl.analysis.verify import verify_run
from marin_rl.batching.build import build_round
from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.config import Config, load_config
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.rounds import close_round
from marin_rl.runtime import RunRuntime
from marin_rl.storage.runs import Run, committed, rollouts_slot
from marin_rl.storage.tables.batches import read_batches
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.tokenizers import load_tokenizer
from marin_rl.training.replay import replay_round
from marin_rl.types import Message, NamedReward, Rollout, SlotRef

ENVIRONMENT = (
    TALKS.replace("say w{index}", "say {index % 3}")
    + """
        text = turn.content
        reward = {"vowels": float(sum(map(text.count, "aeiou"))), "short": 1.0 / (1 + len(text))}
        reward["last"] = None if self.turns < 3 else 1.0
        messages = (Message(role="user", content=f"again {self.turns}"),)
        return StepResult(messages=messages, reward=reward, done=self.turns == 3)
"""
)
CONFIG = """
run_id: words
rounds: 1
root: ROOT/runs
policy: {init: random, tokenizer: ROOT/tokenizer, context_length: 512}
environment: {name: "words.py:Talks", CHOICE}
batching: {length_buckets: [512]}
rollouts: {groups_per_round: 1, group_size: 2, shards_per_round: 1}
sampling: {max_tokens: 64}
evaluation: {examples: 1}
"""
THOUGHT = "<think>\nhm\n</think>\n\n"


def script(messages: Sequence[Message], member: int) -> str:
    """Member 0 thinks in every turn; the other, and any later turn alone, never does."""
    turn = sum(message.role == "assistant" for message in messages)
    thinks = member == 0 if turn == 0 else THOUGHT in messages[1].content
    return (THOUGHT if thinks else "") + f"yes {turn}"


def configured(folder: Path, choice: str = "") -> Config:
    write_tokenizer(folder / "tokenizer", QWEN, "<|im_end|>")
    (folder / "words.py").write_text(ENVIRONMENT)
    text = CONFIG.replace("ROOT", str(folder)).replace("CHOICE", choice)
    (folder / "run.yaml").write_text(text)
    return load_config(folder / "run.yaml")


def segments_of(rollout: Rollout, array: np.ndarray) -> list[list[int]]:
    lengths = rollout.segment_lengths or (len(array),)
    return [part.tolist() for part in np.split(array, np.cumsum(lengths)[:-1])]


def test_by_default_an_episode_ends_where_the_prefix_breaks(tmp_path: Path) -> None:
    _, (group,) = record(configured(tmp_path), script)
    thinking, other = group.rollouts
    assert (thinking.status, thinking.finish_reason) == ("truncated", "bridge")
    assert (other.status, other.finish_reason) == ("complete", "stop")
    assert thinking.segment_lengths is other.segment_lengths is None


def test_with_segments_it_goes_on_from_what_the_template_renders(tmp_path: Path) -> None:
    config = configured(tmp_path, "on_broken_prefix: segments")
    run, (group,) = record(config, script)
    thinking, other = group.rollouts
    assert other.segment_lengths is None
    assert [rollout.finish_reason for rollout in group.rollouts] == ["stop", "stop"]
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    template, encode = ChatTemplate.of(tokenizer), tokenizer.encode
    dialogue, read, said = [{"role": "user", "content": "say 0"}], list[list[int]](), []
    for turn in range(3):
        opened = template.render(Conversation(messages=dialogue, opening=True)).text
        assert THOUGHT not in opened
        read.append(encode(opened, add_special_tokens=False))
        answer = f"{THOUGHT}yes {turn}"
        said.append([*encode(answer, add_special_tokens=False), tokenizer.eos_token_id])
        dialogue.append({"role": "assistant", "content": answer})
        dialogue.append({"role": "user", "content": f"again {turn + 1}"})
    # each turn is sampled from the whole dialogue as it is rendered, and trained on once
    pairs = list(zip(read, said, strict=True))
    assert segments_of(thinking, thinking.token_ids) == [[*a, *b] for a, b in pairs]
    masks = [[0] * len(a) + [1] * len(b) for a, b in pairs]
    assert segments_of(thinking, thinking.loss_mask) == masks
    assert thinking.n_completion_tokens == sum(map(len, said))
    own = [turn for turn in thinking.turns if turn.role == "assistant"]
    assert thinking.last_segment.tolist() == [*read[-1], *said[-1]]
    assert other.last_segment is other.token_ids
    spans = [thinking.token_ids[turn.start : turn.end].tolist() for turn in own]
    assert spans == said
    # no span is that of a message in a prompt that holds all the turns before
    assert [(t.start, t.end) for t in thinking.turns if t.role == "user"][1:] == [(None, None)] * 2
    assert own[0].rewards == (
        NamedReward(name="vowels", value=3.0),
        NamedReward(name="short", value=1 / 27),
    )
    assert [part.name for part in own[-1].rewards] == ["vowels", "short", "last"]
    assert own[0].reward == sum(part.value for part in own[0].rewards)
    # what is stored is read back, played again, processed and audited
    (table,) = iter_shards(run, 0, ["segment_lengths", "start_s"])
    lengths = [len(a) + len(b) for a, b in pairs]
    assert table["segment_lengths"].to_pylist() == [lengths, None]
    assert all(seconds >= 0 for seconds in table["start_s"].to_pylist())
    assert replay_rollouts(run, 0).equal
    (batch,) = read_batches(run, build_round(run, 0, rollouts_of(run)))
    assert [len(set(ids)) for ids in batch.rollout_ids] == [1, 1, 1, 1]
    assert audit_round(run, 0).offences == {}
    record_of = rollout_named(run, thinking.rollout_id)
    assert record_of["segment_lengths"] == lengths
    assert record_of["turns"][1]["rewards"][0] == {"name": "vowels", "value": 3.0}


def rollouts_of(run: Run) -> SlotRef:
    ref = committed(run, rollouts_slot(0))
    assert ref is not None
    return ref


def test_limits_are_those_of_a_segment_and_of_all(tmp_path: Path) -> None:
    """No segment is near the context, but the third would begin beyond `tokens_max`."""
    config = configured(tmp_path, "on_broken_prefix: segments, tokens_max: 160")
    _, (group,) = record(config, script)
    thinking, _ = group.rollouts
    assert thinking.segment_lengths is not None
    assert len(thinking.segment_lengths) == 2
    assert (thinking.status, thinking.finish_reason) == ("truncated", "length")
    assert len(thinking.token_ids) <= 160


# Rows of each kind, ratios and corrections of both levels, rewards and KL that go over segments.
OBJECTIVES = {
    "padded": ("objective.kl_placement=reward", "objective.kl_coefficient=0.1"),
    "packed gspo": (
        "batching.packing=sequences", "batching.row_tokens=512", "objective.surrogate=gspo",
        "objective.ratio_level=sequence_mean", "objective.aggregation=sequence_mean_token_mean",
    ),
    "shared, by turn": (
        "batching.packing=shared_prompt", "batching.row_tokens=512",
        "objective.turn_discount=0.9", "objective.ratio_level=token",
    ),
    "critic": (
        "objective.advantage=gae", "training.critic.trunk=own", "objective.ratio_level=token",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_round_of_segments_is_trained_verified_and_replayed(tmp_path, objective):
    configured(tmp_path, "on_broken_prefix: segments")
    small = [f"policy.model.{name}=16" for name in ("hidden_size", "intermediate_size")]
    config = load_config(tmp_path / "run.yaml", [*small, *OBJECTIVES[objective]])
    run, _ = record(config, script)
    batches = build_round(run, 0, rollouts_of(run))
    runtime = RunRuntime(run)
    try:
        runtime.train_round(0, batches, runtime.init_policy())
    finally:
        runtime.close()
    close_round(run, 0, {})
    # A script sampled them, and not the checkpoint that they name.
    assert [*audit_round(run, 0).offences] == ["sampled by other parameters than their version's"]
    findings = list(verify_run(run))
    assert [finding.message for finding in findings if finding.problem] == []
    assert sum(not finding.unchecked for finding in findings) > 50
    replayed = replay_round(run, 0)
    assert replayed.equal, replayed
    assert replayed.compared > 0
