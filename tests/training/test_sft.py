"""The warm start: what it is shown, that it learns, and that segments resume to the bit."""

import json

import numpy as np
import pytest
from support.chat_folders import QWEN3, chat_folder

from marin_rl.config import fingerprint_fields
from marin_rl.doctor.data import learned_rows
from marin_rl.doctor.stages import RL
from marin_rl.doctor.start import check_files
from marin_rl.environments.checks import make_environment
from marin_rl.environments.registry import loaded_environment
from marin_rl.errors import InputError
from marin_rl.progress import listening
from marin_rl.rollouts.pinned import as_begun
from marin_rl.storage.runs import Run, latest_sft
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.logprobs import sequence_scores
from marin_rl.training.loop import Trainer
from marin_rl.training.model import with_parameters
from marin_rl.training.sft import WarmStart, supervised_batch
from marin_rl.training.state import identity_of
from marin_rl.types import segment_lengths

SETTINGS = (
    "policy.model.layers=1", "policy.init=sft", "sft.steps=40", "sft.steps_per_checkpoint=20",
    "sft.learning_rate=0.01",
)  # fmt: skip


def test_rows_are_prompts_and_answers_with_the_answers_masked(debug, tokenizer):
    config = debug(*SETTINGS)
    environment = make_environment(config.environment)
    environment.load_examples()
    batch = supervised_batch(config, environment, tokenizer, 3)
    rows = config.sft.sequences_per_step
    assert batch.token_ids.shape[0] == rows
    assert batch.token_ids.shape[1] % 8 == 0
    for row in range(rows):
        example = environment.example(0, 3 * rows + row, "train")
        answer = batch.token_ids[row][batch.loss_mask[row] == 1]
        assert tokenizer.decode(answer) == f"{environment.demonstration(example)}<|end|>"
        inside = batch.segment_ids[row] == 1
        text = tokenizer.decode(batch.token_ids[row][inside])
        assert example.messages[-1].content in text
        np.testing.assert_array_equal(batch.positions[row][inside], np.arange(inside.sum()))
        assert not batch.token_ids[row][~inside].any()


def test_all_answers_of_a_dialogue_are_trained_on_where_that_is_asked(debug, tokenizer, tmp_path):
    turns = [("user", "ab"), ("assistant", "ba"), ("user", "cd"), ("assistant", "dc")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    rows = ("environment.name=chat", f"environment.options.path={tmp_path / 'rows.jsonl'}")
    for choice, expected in (("last", ["dc<|end|>"]), ("all", ["ba<|end|>", "dc<|end|>"])):
        config = debug(*SETTINGS, *rows, f"sft.train_on={choice}")
        assert learned_rows(config) == "1 rows"
        environment = loaded_environment(config.environment, "train")
        batch = supervised_batch(config, environment, tokenizer, 0)
        for ids, mask in zip(batch.token_ids, batch.loss_mask, strict=True):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
            pairs = zip(edges[::2], edges[1::2], strict=True)
            assert [tokenizer.decode(ids[start:end]) for start, end in pairs] == expected
    same = [fingerprint_fields(debug(f"sft.train_on={choice}").sft) for choice in ("null", "last")]
    assert same[0] == same[1] == fingerprint_fields(debug().sft)


def test_weights_of_answers_weigh_the_losses_of_their_tokens(debug, tokenizer, tmp_path):
    rows = [
        [("ab", "ba", {"weight": 0.5}), ("cd", "dc", {})],
        [("ab", "ba", {"weight": 2}), ("cd", "dc", {"train": False})],
    ]
    for number, row in enumerate(rows):
        messages = [
            message
            for question, answer, flags in row
            for message in (
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer, **flags},
            )
        ]
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"id": number, "messages": messages}) + "\n")
    config = debug(
        *SETTINGS, "environment.name=chat", f"environment.options.path={tmp_path / 'rows.jsonl'}",
        "environment.options.eval_fraction=1.0e-9", "sft.train_on=flagged", "sft.steps=1",
        "sft.sequences_per_step=2", "sft.steps_per_checkpoint=1",
    )  # fmt: skip
    assert learned_rows(config) == "2 rows"
    environment = loaded_environment(config.environment, "train")
    batch = supervised_batch(config, environment, tokenizer, 0)
    order = [environment.example(0, row, "train").example_id for row in range(2)]
    assert batch.loss_weights is not None
    # An answer is two characters and its end; those of the second row weigh 2 and 0.
    expected = {"0": [0.5, 0.5, 0.5, 1, 1, 1], "1": [2, 2, 2]}
    for row, name in enumerate(order):
        weights = batch.loss_weights[row]
        np.testing.assert_array_equal(weights[weights > 0], expected[name])
        np.testing.assert_array_equal(weights > 0, batch.loss_mask[row] == 1)
    warm = WarmStart(Run.create_or_open(config), tokenizer)
    model = with_parameters(warm._program.template, warm._first_parameters())
    shape = batch.token_ids, batch.segment_ids, batch.loss_mask
    logprobs = np.asarray(sequence_scores(model, *shape, 1.0), np.float64)
    by_hand = -(logprobs * batch.loss_weights).sum() / (1.5 + 3 + 6)
    loss = warm.run_segment(0).summary["sft/loss"]
    assert loss == pytest.approx(by_hand, rel=1e-5)
    assert loss != pytest.approx(-(logprobs * batch.loss_mask).sum() / 9, rel=1e-4)


def test_an_example_that_is_cut_fills_several_rows(debug, tmp_path):
    folder = chat_folder(tmp_path / "tokenizer", QWEN3, "<|im_end|>")
    turns = [("user", "ab"), ("assistant", "ba"), ("user", "cd"), ("assistant", "dc")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    config = debug(
        *SETTINGS, "environment.name=chat", f"environment.options.path={tmp_path / 'rows.jsonl'}",
        "environment.on_broken_prefix=segments", "sft.train_on=all", f"policy.tokenizer={folder}",
        "policy.context_length=256", "sampling.max_tokens=8", "batching.length_buckets=[256]",
        "sft.steps=1", "sft.sequences_per_step=3", "sft.microbatch_sequences=2",
    )  # fmt: skip
    assert learned_rows(config) == "1 rows"
    config = as_begun(config)
    tokenizer = tokenizer_for(config.policy)
    environment = loaded_environment(config.environment, "train")
    batch = supervised_batch(config, environment, tokenizer, 0)
    thought = "<think>\n\n</think>\n\n"
    learned = [
        tokenizer.decode(ids[mask == 1])
        for ids, mask in zip(batch.token_ids, batch.loss_mask, strict=True)
    ]
    assert learned == 3 * [f"{thought}dc<|im_end|>", f"{thought}ba<|im_end|>"]
    ref = WarmStart(Run.create_or_open(config), tokenizer).run_segment(0)
    assert np.isfinite(ref.summary["sft/loss"])


def test_examples_share_rows_where_the_run_packs_and_learn_the_same(debug, tokenizer, tmp_path):
    lengths = [3, 30, 5, 9, 2, 28, 7, 4]
    rows = [{"prompt": "ab", "answer": "x" * length} for length in lengths]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = (
        *SETTINGS, "environment.name=chat", f"environment.options.path={tmp_path / 'rows.jsonl'}",
        "environment.options.eval_fraction=1.0e-9", "policy.context_length=64",
        "batching.length_buckets=[]", "sft.steps=2", "sft.steps_per_checkpoint=2",
    )  # fmt: skip
    batches, ends = [], []
    for name in ("none", "auto"):
        config = debug(*shared, f"batching.packing={name}", f"root={tmp_path / name}")
        environment = loaded_environment(config.environment, "train")
        batches.append(supervised_batch(config, environment, tokenizer, 0))
        warm = WarmStart(Run.create_or_open(config), tokenizer)
        ends.append(warm.run_segment(0).summary)
    padded, packed = batches
    # The longest of 36 tokens: rows of 4 times 64, and all eight examples are in the first.
    assert (padded.token_ids.shape, padded.microbatch_rows) == ((8, 40), None)
    assert (packed.token_ids.shape, packed.microbatch_rows) == ((1, 256), 2)
    assert packed.segment_ids.max() == 8
    for field in ("token_ids", "loss_mask", "positions"):
        values = [getattr(batch, field)[batch.segment_ids > 0] for batch in batches]
        np.testing.assert_array_equal(*values)
    np.testing.assert_array_equal(segment_lengths(padded), segment_lengths(packed))
    assert ends[1] == pytest.approx(ends[0], rel=1e-4)


def test_it_learns_and_segments_end_in_the_same_bits_if_interrupted(debug, tokenizer, tmp_path):
    run = Run.create_or_open(debug(*SETTINGS))
    warm, events = WarmStart(run, tokenizer), []
    with listening(events.append):
        first = warm.run_segment(0)
        last = warm.run_segment(20)
    assert (first.slot, last.slot) == ("sft/step-00020", "sft/step-00040")
    assert [event.done for event in events] == [10, 20, 30, 40]
    assert {(event.stage, event.total) for event in events} == {("sft", 40)}
    losses = [event.metrics["sft/loss"] for event in events]
    assert losses[-1] < losses[0] - 0.3 < losses[0] < np.log(103)
    assert latest_sft(run) == last
    assert warm.run_segment(20).reused
    other = Run.create_or_open(debug(*SETTINGS, f"root={tmp_path / 'other'}"))
    assert WarmStart(other, tokenizer).run_segment(0).summary == first.summary
    again = WarmStart(other, tokenizer).run_segment(20)
    assert identity_of(other, again) == identity_of(run, last)
    assert identity_of(run, last).step == 40
    # What the loop begins from is the warm start's parameters, with a fresh optimizer.
    begun = Trainer(run, tokenizer).init_policy()
    assert identity_of(run, begun).parameters_digest == identity_of(run, last).parameters_digest
    assert identity_of(run, begun).step == 0


def test_an_example_that_does_not_fit_the_context_is_refused(debug, tokenizer):
    config = debug(*SETTINGS, "policy.context_length=12", "sampling.max_tokens=4")
    environment = make_environment(config.environment)
    environment.load_examples()
    with pytest.raises(InputError, match=r"has \d+ tokens, but policy.context_length is 12"):
        supervised_batch(config, environment, tokenizer, 0)


@pytest.mark.slow
def test_a_file_of_demonstrations_need_not_hold_out_a_row(debug, tokenizer, tmp_path):
    file = tmp_path / "shown.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    shown = f"sft.environment={{name: chat, options: {{path: {file}, eval_fraction: 1.0e-9}}}}"
    config = debug(*SETTINGS, "sft.steps=1", "sft.steps_per_checkpoint=1", shown)
    check_files(config, RL)
    assert WarmStart(Run.create_or_open(config), tokenizer).run_segment(0).slot == "sft/step-00001"
