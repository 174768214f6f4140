"""A policy that learns from pairs: exact starts, the same bits again, adapters, refused pairs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from support.cases import others_slow

from marin_rl.config import Config
from marin_rl.errors import CommitConflict, ConfigError, InputError
from marin_rl.progress import listening
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, committed, latest_preference, pairs_slot
from marin_rl.storage.tables.pairs import committed_pairs, write_pairs
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.training.loop import Trainer
from marin_rl.training.pair_phase import PreferenceTraining
from marin_rl.training.state import identity_of
from marin_rl.types import Message, PreferencePair, SlotRef

SETTINGS = (
    "policy.model.layers=1", "preference.steps=20", "preference.steps_per_checkpoint=10",
    "preference.pairs_per_step=8", "preference.microbatch_pairs=4",
    "preference.learning_rate=0.003",
)  # fmt: skip
ANSWERS = ("ok", "yes it is", "fine")
PAIRS = 40

Settings = Callable[..., Config]


def answers(count: int = PAIRS) -> list[PreferencePair]:
    """Any of three answers is better than `no`."""
    return [
        PreferencePair(
            id=f"{number}",
            messages=(Message(role="user", content=f"say {number}"),),
            chosen=ANSWERS[number % 3],
            rejected="no",
        )
        for number in range(count)
    ]


@pytest.fixture
def begun(debug: Settings, tmp_path: Path) -> Callable[..., Run]:
    write_pairs(tmp_path / "pairs.jsonl", answers())

    def begin(*overrides: str) -> Run:
        pairs = f"preference.pairs={tmp_path / 'pairs.jsonl'}"
        return Run.create_or_open(debug(*SETTINGS, pairs, *overrides))

    return begin


def played(run: Run, tokenizer, steps: Sequence[int] = (0, 10)) -> list[SlotRef]:
    """The segments that begin at `steps`, each by a process of its own as far as memory goes."""
    refs = []
    for step in steps:
        training = PreferenceTraining(run, tokenizer)
        refs.append(training.run_segment(step, training.prepare()))
    return refs


def test_it_learns(begun, tokenizer):
    run, events = begun(), []
    training = PreferenceTraining(run, tokenizer)
    pairs = training.prepare()
    with listening(events.append):
        refs = [training.run_segment(step, pairs) for step in (0, 10)]
    assert [ref.slot for ref in refs] == ["preference/step-00010", "preference/step-00020"]
    assert [(event.stage, event.done, event.total) for event in events] == [
        ("preference", done, 20) for done in (10, 10, 20, 20)
    ]
    assert refs[1].summary["preference/held_out_accuracy"] == 1.0
    assert refs[1].summary["preference/held_out_loss"] < 0.5 < refs[0].summary["preference/loss"]
    assert refs[1].summary["preference/held_out_margin"] > 0
    assert latest_preference(run) == refs[1]
    assert training.run_segment(10, pairs).reused
    parents = [parent.slot for parent in manifest_of(run.store, refs[1]).parents]
    assert parents == ["preference/step-00010", "pairs"]
    assert not check_run(run.config.root, run.run_id).faults


@pytest.mark.bits
@pytest.mark.parametrize("dtype", others_slow(["float32", "bfloat16"], "bfloat16"))
def test_the_first_step_begins_at_a_difference_of_exactly_nothing(begun, tokenizer, dtype):
    settings = "preference.steps=1", "preference.steps_per_checkpoint=1"
    run = begun(*settings, f"policy.compute_dtype={dtype}")
    (ref,) = played(run, tokenizer, [0])
    first = {name.removeprefix("preference/"): value for name, value in ref.summary.items()}
    assert (first["margin"], first["chosen_reward"], first["rejected_reward"]) == (0, 0, 0)
    np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-6)


def test_pairs_are_committed_with_the_references_log_probabilities(begun, tokenizer):
    run = begun("preference.steps=2", "preference.steps_per_checkpoint=2")
    ref = PreferenceTraining(run, tokenizer).prepare()
    pairs = committed_pairs(run, ref)
    scored = [pair for pair in pairs if pair.chosen_reference_logprobs is not None]
    held_out = [pair for pair in pairs if pair.split == "eval"]
    # 2 steps of 8, and those that are held out.
    assert len(scored) == 16 + len(held_out)
    for pair in scored:
        for mask, logprobs in (
            (pair.chosen_loss_mask, pair.chosen_reference_logprobs),
            (pair.rejected_loss_mask, pair.rejected_reference_logprobs),
        ):
            assert (logprobs[mask == 0] == 0).all()
            assert (logprobs[mask == 1] < 0).all()
    # The trainer's own, of the same policy.
    trainer = Trainer(run, tokenizer)
    trainer.load(trainer.init_policy())
    from marin_rl.training.logprobs import sequence_logprobs

    pair = scored[0]
    prompt = int(pair.chosen_loss_mask.argmax())
    ids = pair.chosen_token_ids
    expected = sequence_logprobs(trainer.models()[0], ids[:prompt], [ids[prompt:]], 1.0)
    own = pair.chosen_loss_mask[prompt:] > 0
    np.testing.assert_allclose(
        pair.chosen_reference_logprobs[prompt:][own], expected[own], rtol=0, atol=2e-5
    )


@pytest.mark.slow
def test_without_a_reference_nothing_is_scored(begun, tokenizer):
    run = begun(
        "preference.loss.type=simpo", "preference.loss.beta=2", "preference.loss.target_margin=0.5"
    )
    (ref,) = played(run, tokenizer, [0])
    pairs = committed_pairs(run, committed(run, pairs_slot()))
    assert all(pair.chosen_reference_logprobs is None for pair in pairs)
    assert ref.summary["preference/loss"] > ref.summary["preference/held_out_loss"]


@pytest.mark.slow
def test_answers_with_labels_are_learned_without_pairs(begun, tokenizer, tmp_path):
    rows = [
        {"prompt": f"say {number}", "completion": ANSWERS[number % 3], "label": True}
        for number in range(PAIRS)
    ]
    rows += [row | {"completion": "no", "label": False} for row in rows]
    (tmp_path / "pairs.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    run = begun("preference.loss.type=kto", "preference.loss.beta=0.5")
    refs = played(run, tokenizer)
    made = committed_pairs(run, committed(run, pairs_slot()))
    assert [pair.label for pair in made] == [True] * PAIRS + [False] * PAIRS
    # Scored by the reference, the mismatched answer too: the first step has a loss of exactly 1/2.
    assert all(
        (pair.rejected_reference_logprobs is None) == (pair.chosen_reference_logprobs is None)
        for pair in made
    )
    first, last = refs[0].summary, refs[1].summary
    assert last["preference/held_out_loss"] < first["preference/held_out_loss"] < 0.5
    assert last["preference/held_out_margin"] > 0
    assert last["preference/held_out_kl"] >= 0
    assert "preference/accuracy" not in last
    assert not check_run(run.config.root, run.run_id).faults


@pytest.mark.bits
def test_labels_begin_at_a_loss_of_exactly_one_half(begun, tokenizer):
    settings = "preference.steps=1", "preference.steps_per_checkpoint=1"
    run = begun(*settings, "preference.loss.type=kto")  # of pairs, two answers each
    (ref,) = played(run, tokenizer, [0])
    assert ref.summary["preference/loss"] == 0.5
    assert ref.summary["preference/kl"] == 0
    assert ref.summary["preference/margin"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["null", "nf4"])
def test_an_adapter_is_trained_and_its_base_is_the_reference(begun, tokenizer, scheme):
    lora = "policy.lora.rank=4", f"policy.quantize_base={scheme}"
    run = begun(*lora, "preference.learning_rate=0.002")
    refs = played(run, tokenizer)
    assert refs[1].summary["preference/held_out_accuracy"] == 1.0
    first = manifest_of(run.store, refs[0])
    assert [parent.slot for parent in first.parents] == ["base", "pairs"]
    assert identity_of(run, refs[1]).adapter is not None
    assert not check_run(run.config.root, run.run_id).faults


def test_another_run_begins_with_what_was_learned(begun, debug, tokenizer):
    run = begun("preference.steps=2", "preference.steps_per_checkpoint=2")
    (ref,) = played(run, tokenizer, [0])
    place = f"{run.config.root}/{run.run_id}/{ref.slot}"
    start = "policy.model.layers=1", "policy.init=checkpoint", f"policy.checkpoint={place}"
    other = Run.create_or_open(debug(*start, "run_id=other"))
    first = Trainer(other, tokenizer).init_policy()
    own = identity_of(other, first).parameters_digest
    assert own == identity_of(run, ref).parameters_digest


def test_the_file_may_go_but_not_change(begun, tokenizer, tmp_path):
    run = begun()
    pairs = PreferenceTraining(run, tokenizer).prepare()
    write_pairs(tmp_path / "pairs.jsonl", answers(PAIRS + 1))
    with pytest.raises(CommitConflict, match="pairs"):
        PreferenceTraining(run, tokenizer).prepare()
    (tmp_path / "pairs.jsonl").unlink()
    assert PreferenceTraining(run, tokenizer).prepare().sha256 == pairs.sha256


def test_pairs_that_cannot_be_learned_from_are_named_before_anything_is_scored(
    begun, tokenizer, tmp_path
):
    run = begun("run_id=first")
    made = committed_pairs(run, PreferenceTraining(run, tokenizer).prepare())
    bare = [replace(pair, split=None) for pair in made]

    def refused(name: str, told: str, **changed) -> None:
        pairs = [*bare[1:], replace(bare[0], **changed)]
        write_pairs(tmp_path / "pairs.jsonl", [without_scores(pair) for pair in pairs])
        training = PreferenceTraining(begun(f"run_id={name}"), tokenizer)
        with pytest.raises(InputError, match=told):
            training.prepare()

    without = {"chosen_loss_mask": None, "rejected_loss_mask": None}
    refused("masks", f"pair {bare[0].id}, field chosen_loss_mask: .*marin-rl pairs", **without)
    other = bare[0].rejected_token_ids.copy()
    other[1] = 9
    refused("prompts", f"pair {bare[0].id}: expected two answers to one", rejected_token_ids=other)
    mask = np.zeros_like(bare[0].chosen_loss_mask)
    refused("nothing", "a loss mask with 0 of", chosen_loss_mask=mask)


def without_scores(pair: PreferencePair) -> PreferencePair:
    return replace(pair, chosen_reference_logprobs=None, rejected_reference_logprobs=None)


def test_a_run_without_the_section_says_so(debug, tokenizer):
    with pytest.raises(ConfigError, match=r"no section preference: .*preference\.pairs"):
        PreferenceTraining(Run.create_or_open(debug()), tokenizer)
