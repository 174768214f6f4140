"""A reward model's training: committed segments, the same bits after an interruption, its use."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.run_factories import group_of, rollout

from marin_rl.config import Config, LearnedRewardConfig
from marin_rl.errors import CommitConflict, ConfigError, CorruptObject, InputError, ObjectMissing
from marin_rl.progress import listening
from marin_rl.rollouts.rewards import add_model_reward, reward_model_slot_of
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, base_slot, committed, latest_reward_model, reward_model_slot
from marin_rl.storage.tables.pairs import committed_pairs, write_pairs
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.bradley_terry import LearnedReward
from marin_rl.training.pair_phase import RewardModelTraining
from marin_rl.training.state import identity_of
from marin_rl.types import Message, PreferencePair, SlotRef

SETTINGS = (
    "policy.model.layers=1", "reward_model.steps=40", "reward_model.steps_per_checkpoint=20",
    "reward_model.pairs_per_step=8", "reward_model.microbatch_pairs=4",
    "reward_model.learning_rate=0.01",
)  # fmt: skip
PAIRS = 60

Settings = Callable[..., Config]


def answers(count: int = PAIRS) -> list[PreferencePair]:
    """For every prompt, `ok` is better than `no`."""
    return [
        PreferencePair(
            id=f"{number}",
            messages=(Message(role="user", content=f"say {number}"),),
            chosen="ok",
            rejected="no",
        )
        for number in range(count)
    ]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    write_pairs(tmp_path / "pairs.jsonl", answers())
    return tmp_path / "pairs.jsonl"


@pytest.fixture
def begun(debug: Settings, pairs: Path) -> Callable[..., Run]:
    def begin(*overrides: str) -> Run:
        return Run.create_or_open(debug(*SETTINGS, f"reward_model.pairs={pairs}", *overrides))

    return begin


def played(run: Run, tokenizer, steps: Sequence[int] = (0, 20)) -> list[SlotRef]:
    """The segments that begin at `steps`, each by a process of its own as far as memory goes."""
    refs = []
    for step in steps:
        training = RewardModelTraining(run, tokenizer)
        refs.append(training.run_segment(step, training.prepare()))
    return refs


@pytest.mark.slow
def test_it_learns_and_segments_end_in_the_same_bits_if_interrupted(begun, tokenizer, tmp_path):
    run, events = begun(), []
    training = RewardModelTraining(run, tokenizer)
    with listening(events.append):
        committed = training.prepare()
        refs = [training.run_segment(step, committed) for step in (0, 20)]
    assert [ref.slot for ref in refs] == ["reward_model/step-00020", "reward_model/step-00040"]
    assert [event.done for event in events] == [10, 20, 20, 30, 40, 40]
    assert {(event.stage, event.total) for event in events} == {("reward_model", 40)}
    assert refs[0].summary["reward_model/loss"] < np.log(2)
    assert refs[1].summary["reward_model/held_out_accuracy"] == 1.0
    assert refs[1].summary["reward_model/held_out_loss"] < 0.1
    assert latest_reward_model(run) == refs[1]
    assert training.run_segment(20, committed).reused
    other = begun(f"root={tmp_path / 'other'}")
    again = played(other, tokenizer)
    assert [ref.summary for ref in again] == [ref.summary for ref in refs]
    assert identity_of(other, again[1]) == identity_of(run, refs[1])
    parents = manifest_of(run.store, refs[1]).parents
    assert [parent.slot for parent in parents] == ["reward_model/step-00020", "pairs"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["null", "nf4"])
def test_one_with_an_adapter_trains_and_keeps_that_alone(begun, debug, tokenizer, scheme, tmp_path):
    lora = "policy.lora.rank=4", f"policy.quantize_base={scheme}"
    run = begun(*lora, "reward_model.learning_rate=0.002")
    training = RewardModelTraining(run, tokenizer)
    pairs = training.prepare()
    refs = [training.run_segment(step, pairs) for step in (0, 20)]
    assert refs[1].summary["reward_model/held_out_accuracy"] == 1.0
    first = manifest_of(run.store, refs[0])
    assert [parent.slot for parent in first.parents] == ["base", "pairs"]
    identity = identity_of(run, refs[1])
    assert identity.adapter is not None
    assert identity.quantize_base == (None if scheme == "null" else scheme)
    base = manifest_of(run.store, committed(run, base_slot()))
    assert identity.base_digest == base.extra["parameters_digest"]
    # The same bits from the files alone, segment by segment.
    other = begun(*lora, "reward_model.learning_rate=0.002", f"root={tmp_path / 'other'}")
    assert identity_of(other, played(other, tokenizer)[1]) == identity
    # A reader has the base by its digest, and gives the rewards of the trainer.
    checkpoint = f"{run.config.root}/{run.run_id}/{refs[1].slot}"
    config = debug(f"environment.reward_model.checkpoint={checkpoint}", "run_id=policy")
    names = TokenizerIdentity.of(tokenizer)
    slot = reward_model_slot_of(config, names.tokenizer_digest, names.chat_template_digest)
    texts = [f"<|user|>say 7<|assistant|>{word}<|end|>" for word in ("ok", "no")]
    rows = [np.array(tokenizer.encode(text), np.int32) for text in texts]
    state = training._restored(refs[1])
    frozen = training._source.frozen
    expected = training._scorer.score({**frozen, **state.parameters}, rows)
    assert expected[0] > expected[1]
    np.testing.assert_array_equal(LearnedReward(slot, tokenizer).score(rows), expected)
    faults = check_run(run.config.root, run.run_id).faults
    assert not faults, faults
    # Another base is not taken for it.
    run.store.local_path("base/manifest.json").unlink()
    with pytest.raises(ObjectMissing, match="expected the base that the run's adapter is of"):
        LearnedReward(slot, tokenizer)


def test_the_runs_own_pairs_have_tokens_and_outlive_the_file(begun, tokenizer, pairs):
    run = begun()
    training = RewardModelTraining(run, tokenizer)
    ref = training.prepare()
    kept = committed_pairs(run, ref)
    assert [pair.id for pair in kept] == [pair.id for pair in answers()]
    assert tokenizer.decode(kept[3].chosen_token_ids) == "<|user|>say 3<|assistant|>ok<|end|>"
    held_out = [pair for pair in kept if pair.split == "eval"]
    assert 0 < len(held_out) == ref.summary["held_out"] < PAIRS / 3
    write_pairs(pairs, answers(PAIRS + 1))
    with pytest.raises(CommitConflict, match="pairs is committed with fingerprint"):
        training.prepare()
    pairs.unlink()
    assert RewardModelTraining(run, tokenizer).prepare() == ref


def test_a_run_without_the_section_has_no_reward_model(debug, tokenizer):
    run = Run.create_or_open(debug())
    with pytest.raises(
        ConfigError, match=r"no section reward_model: add one .*reward_model\.pairs"
    ):
        RewardModelTraining(run, tokenizer)


def trained(begun: Callable[..., Run], tokenizer) -> tuple[Run, str]:
    run = begun()
    played(run, tokenizer, [0])
    return run, f"{run.config.root}/{run.run_id}/{reward_model_slot(20)}"


def test_a_committed_reward_model_judges_rollouts(begun, debug, tokenizer):
    _, checkpoint = trained(begun, tokenizer)
    config = debug(f"environment.reward_model.checkpoint={checkpoint}", "run_id=policy")
    names = TokenizerIdentity.of(tokenizer)
    slot = reward_model_slot_of(config, names.tokenizer_digest, names.chat_template_digest)
    scorer = LearnedReward(slot, tokenizer)
    good, bad = (  # both words are two characters and an end
        np.array(tokenizer.encode(f"<|user|>say 7<|assistant|>{word}<|end|>"), np.int32)
        for word in ("ok", "no")
    )
    raw = scorer.score([good, bad, good])
    assert raw[0] == raw[2] > raw[1]
    said = rollout("g/0", reward=0.5, prompt=good[:-3].tolist(), completion=good[-3:].tolist())
    judged = group_of("g", [said, rollout("g/1", index=1, reward=None)])
    settings = LearnedRewardConfig(checkpoint="x", weight=2.0, offset=1.0, environment_weight=0.5)
    (found,) = add_model_reward([judged], settings, scorer)
    value = (raw[0] - slot.identity.mean) / slot.identity.std + 1.0
    own, learned = found.rollouts[0].reward_components
    assert (own.name, own.value, own.weight) == ("correct", 0.5, 0.5)
    assert (learned.name, learned.weight) == ("reward_model", 2.0)
    assert learned.value == pytest.approx(value, rel=1e-12)
    assert found.rollouts[0].reward == pytest.approx(0.25 + 2 * value, rel=1e-12)
    assert found.rollouts[0].turns[-1].reward == found.rollouts[0].reward
    assert found.rollouts[1] is judged.rollouts[1]


@pytest.mark.slow
def test_a_reward_model_that_does_not_fit_is_refused(begun, debug, tokenizer):
    _, checkpoint = trained(begun, tokenizer)
    names = TokenizerIdentity.of(tokenizer)
    digests = names.tokenizer_digest, names.chat_template_digest
    key = "environment.reward_model.checkpoint"
    with pytest.raises(InputError, match="another tokenizer: expected digest ffff"):
        reward_model_slot_of(debug(f"{key}={checkpoint}"), "f" * 64, digests[1])
    with pytest.raises(InputError, match="another chat_template: expected digest ffff"):
        reward_model_slot_of(debug(f"{key}={checkpoint}"), digests[0], "f" * 64)
    wider = debug(f"{key}={checkpoint}", "policy.context_length=128", "batching.length_buckets=[]")
    with pytest.raises(ConfigError, match="context_length 64, but rollouts may have 128 tokens"):
        reward_model_slot_of(wider, *digests)
    later = debug(f"{key}={checkpoint.replace('00020', '00040')}")
    with pytest.raises(ConfigError, match="step-00040 is not committed"):
        reward_model_slot_of(later, *digests)
    with pytest.raises(ConfigError, match="expected ROOT/RUN_ID/reward_model/step-00200"):
        reward_model_slot_of(debug(f"{key}=somewhere"), *digests)
    slot = reward_model_slot_of(debug(f"{key}={checkpoint}"), *digests)
    forged = replace(slot, identity=replace(slot.identity, parameters_digest="f" * 64))
    with pytest.raises(CorruptObject, match="its manifest speaks of other weights"):
        LearnedReward(forged, tokenizer)
