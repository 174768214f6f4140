"""From checkpoint to checkpoint: reuse, resume to the bit, empty rounds, and every way to begin."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from support.fault_injection import inject_faults
from support.faults import NamedOperations
from training.batches import commit_round, random_batch
from training.trained_runs import LENGTH, batches_of, begin, play

from marin_rl.analysis.status import run_status
from marin_rl.compilation import enable_compilation_cache
from marin_rl.config import load_config
from marin_rl.errors import (
    CommitConflict,
    ConfigError,
    DeviceLost,
    InputError,
    NonFiniteUpdate,
    StoreUnavailable,
)
from marin_rl.progress import listening
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import (
    Run,
    batches_slot,
    checkpoint_slot,
    committed,
    committed_checkpoint,
)
from marin_rl.storage.stores.filesystem import open_store
from marin_rl.tokenizers import TokenizerIdentity, character_tokenizer
from marin_rl.training.backend import DeviceBackend
from marin_rl.training.compiled_step import rows_compiled_for
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.loop import Trainer
from marin_rl.training.model import build_model, digest_of, parameters_digest
from marin_rl.training.replay import replay_round
from marin_rl.training.state import identity_of

SETTINGS = ("policy.model.layers=1", "training.microbatch_sequences=4")


@pytest.mark.slow
def test_rounds_end_in_the_same_bits_however_they_are_interrupted(debug, tokenizer, tmp_path):
    config = debug(*SETTINGS, "training.epochs=2")
    run, trainer, first = begin(config, tokenizer)
    events = []
    with listening(events.append):
        last = play(run, trainer, first, range(3))
    assert [event.done for event in events] == [1, 2, 3, 4] * 3
    assert {event.total for event in events} == {4}
    digest = identity_of(run, last).parameters_digest
    assert digest == parameters_digest(trainer.models()[0])
    assert identity_of(run, last).step == 12
    # A new trainer after every round, from the files alone.
    other = Run.create_or_open(debug(*SETTINGS, "training.epochs=2", f"root={tmp_path / 'other'}"))
    checkpoint = Trainer(other, tokenizer).init_policy()
    for round in range(2):
        checkpoint = play(other, Trainer(other, tokenizer), checkpoint, [round])
    # The last round in a process of its own.
    script = "import sys; from test_loop import resume; sys.stdout.write(resume(*sys.argv[1:]))"
    places = [str(Path(__file__).parents[folder]) for folder in (0, 1, 2)]
    answer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "other"), checkpoint.sha256],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == digest


def resume(root, sha256):
    """Play round 2 of the run under `root` and return the digest: called in a new process."""
    enable_compilation_cache()
    run = Run.open(root, "debug")
    checkpoint = committed_checkpoint(run, 2)
    assert checkpoint is not None
    assert checkpoint.sha256 == sha256
    last = play(run, Trainer(run, character_tokenizer()), checkpoint, [2])
    return identity_of(run, last).parameters_digest


def test_a_round_done_again_ends_in_the_same_bits_and_leaves_nothing(debug, tokenizer):
    """Whole runs, forks and the command are in test_replay.py."""
    corrected = ("training.epochs=2", "objective.importance_correction=truncated")
    run, trainer, first = begin(debug(*SETTINGS, *corrected), tokenizer)
    last = play(run, trainer, first, range(2))
    before, batches = run.store.list(), committed(run, batches_slot(1))
    start = committed_checkpoint(run, 1)
    assert start is not None
    assert batches is not None
    state, metrics = trainer.replay_round(1, batches, start)
    assert digest_of(state.parameters) == identity_of(run, last).parameters_digest
    totals = manifest_of(run.store, last).totals
    for name in ("loss", "grad_norm"):
        assert metrics[name] == totals[name]
    assert committed(run, checkpoint_slot(2)) == last
    found = replay_round(run, 1)
    assert found.equal
    assert found.compared > 20
    assert run.store.list() == before


def test_a_round_that_is_trained_is_returned_and_not_trained_again(debug, tokenizer):
    run, trainer, first = begin(debug(*SETTINGS), tokenizer)
    batches = batches_of(run, 0)
    done = trainer.train_round(0, batches, first)
    again = Trainer(run, tokenizer).train_round(0, batches, first)
    assert again == done
    assert again.reused
    assert again.summary == done.summary
    assert {"loss", "lr", "grad_norm", "mismatch_kl", "updates/steps"} <= set(done.summary)
    parents = [parent.slot for parent in manifest_of(run.store, done).parents]
    assert parents == [checkpoint_slot(0), "batches/round-00000"]
    other = run.__class__(
        config=debug(*SETTINGS, "training.learning_rate=0.5"), run_id=run.run_id, store=run.store
    )
    with pytest.raises(CommitConflict):
        Trainer(other, tokenizer).train_round(0, batches, first)


@pytest.mark.bits
@pytest.mark.parametrize("skipped", range(4))
def test_a_store_that_fails_after_a_commit_leaves_no_state_of_another_name(
    debug, tokenizer, skipped
):
    """Each read of the new checkpoint fails once: what is served next has its own digest."""
    run, trainer, first = begin(debug(*SETTINGS), tokenizer)
    batches, slot = batches_of(run, 0), checkpoint_slot(1)
    every = NamedOperations(run.store.url, {f"read {slot}/manifest.json #{skipped + 1}": "fail"})
    with inject_faults(every), suppress(StoreUnavailable):
        store = open_store(run.store.url)
        faulty = run.__class__(config=run.config, run_id=run.run_id, store=store)
        trainer = Trainer(faulty, tokenizer)
        trainer.train_round(0, batches, first)
    every.names.waiting.clear()
    done = trainer.train_round(0, batches, first)
    trainer.load(done)
    assert trainer.identity == identity_of(run, done)
    assert parameters_digest(trainer.models()[0]) == identity_of(run, done).parameters_digest


def test_a_round_without_batches_commits_the_parameters_unchanged(debug, tokenizer):
    run, trainer, first = begin(debug(*SETTINGS), tokenizer)
    after = trainer.train_round(0, commit_round(run, 0, [], LENGTH), first)
    assert after.slot == checkpoint_slot(1)
    assert after.summary == {}
    assert identity_of(run, after).parameters_digest == identity_of(run, first).parameters_digest


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 2), (2, 2), (3, 8), (8, 8), (9, 32), (33, 128), (128, 128)]
)
def test_packed_rows_are_compiled_for_few_numbers(rows, expected):
    assert rows_compiled_for(rows, 128) == expected


def test_too_many_refused_updates_end_the_round_and_commit_nothing(debug, tokenizer):
    config = debug(*SETTINGS, "training.nonfinite_updates_max=2")
    run, trainer, first = begin(config, tokenizer)
    batch = random_batch(5, LENGTH)
    batch.advantages[:] = np.inf
    poisoned = commit_round(run, 0, [batch, batch], LENGTH)
    with pytest.raises(NonFiniteUpdate, match="2 updates in a row were not finite"):
        trainer.train_round(0, poisoned, first)
    assert committed_checkpoint(run, 1) is None
    # One bad update is survived, and the trainer goes on from the committed checkpoint.
    one = commit_round(run, 1, [batch, random_batch(5, LENGTH)], LENGTH)
    after = trainer.train_round(1, one, first)
    assert after.summary["updates/skipped"] == 1
    assert after.summary["updates/steps"] == 1


@pytest.mark.bits
@pytest.mark.slow
def test_a_card_lost_in_a_round_costs_that_round_alone_and_no_bit(
    debug, tokenizer, tmp_path, monkeypatch
):
    undisturbed, trainer, first = begin(debug(*SETTINGS, f"root={tmp_path / 'other'}"), tokenizer)
    expected = identity_of(undisturbed, play(undisturbed, trainer, first, [0])).parameters_digest
    run, trainer, first = begin(debug(*SETTINGS), tokenizer)
    batches = batches_of(run, 0)

    def lost(backend):
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: an ECC error")

    with monkeypatch.context() as card:
        card.setattr(DeviceBackend, "_optim_step", lost)
        with pytest.raises(DeviceLost, match="continues from its last checkpoint"):
            trainer.train_round(0, batches, first)
    assert committed_checkpoint(run, 1) is None
    # as in the process that is started again
    after = Trainer(run, tokenizer).train_round(0, batches, first)
    assert identity_of(run, after).parameters_digest == expected


@pytest.mark.bits
def test_a_run_begins_from_another_runs_checkpoint(debug, tokenizer):
    run, trainer, first = begin(debug(*SETTINGS), tokenizer)
    trained = play(run, trainer, first, [0])
    source = f"{run.config.root}/debug/{trained.slot}"
    start = ("policy.init=checkpoint", f"policy.checkpoint={source}")
    fork, _, forked = begin(debug(*SETTINGS, "run_id=fork", *start), tokenizer)
    assert (
        identity_of(fork, forked).parameters_digest == identity_of(run, trained).parameters_digest
    )
    assert identity_of(fork, forked).step == 0
    missing = source.replace("round-00001", "round-00007")
    wrongs = {missing: "not committed", "nonsense": "expected ROOT/RUN_ID"}
    for wrong, told in wrongs.items():
        config = debug(
            *SETTINGS,
            f"run_id=fork-{len(told)}",
            "policy.init=checkpoint",
            f"policy.checkpoint={wrong}",
        )
        with pytest.raises(ConfigError, match=told):
            begin(config, tokenizer)


def test_a_run_begins_from_a_model_folder(debug, tokenizer, tmp_path):
    policy = load_config(Path(__file__).parents[2] / "configs/debug.yaml").policy
    model = build_model(policy, len(tokenizer), 5)
    save_hf(model, tokenizer, tmp_path / "hf")
    start = ("policy.init=hf", f"policy.hf_path={tmp_path / 'hf'}")
    run, trainer, first = begin(debug(*start), tokenizer)
    assert identity_of(run, first).parameters_digest == parameters_digest(model)
    assert parameters_digest(trainer.models()[0]) == parameters_digest(model)
    names = TokenizerIdentity.of(tokenizer)
    folder = tmp_path / "hf"
    assert run_status(run.config.root, run.run_id).policy == (
        f"init hf ({folder}), tokenizer {folder} (digest {names.tokenizer_digest[:12]})"
    )
    buckets = ("batching.length_buckets=[65]",)
    longer = debug(*start, "run_id=longer", "policy.context_length=65", *buckets)
    with pytest.raises(InputError, match="made for 64 positions"):
        begin(longer, tokenizer)


def test_a_warm_start_that_is_not_there_is_asked_for(debug, tokenizer):
    with pytest.raises(ConfigError, match="run the warm start first"):
        begin(debug("policy.init=sft"), tokenizer)


def test_a_checkpoint_of_another_tokenizer_is_refused(debug, tokenizer):
    run, _, first = begin(debug(*SETTINGS), tokenizer)
    other = character_tokenizer()
    rules = json.loads(other.backend_tokenizer.to_str())
    rules["decoder"] = None
    other.backend_tokenizer.decoder = None
    with pytest.raises(InputError, match="another tokenizer"):
        Trainer(run, other).load(first)
