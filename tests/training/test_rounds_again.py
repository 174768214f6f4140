"""The last round of a run done again from its files, by the trainer that made it and by a new one.

Whole runs, forks and the command itself are in test_replay.py, for the slow suite.
"""

from support.batches import commit_round, random_batch

from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, checkpoint_slot, committed, committed_checkpoint
from marin_rl.training.loop import Trainer
from marin_rl.training.model import digest_of
from marin_rl.training.replay import replay_round
from marin_rl.training.state import identity_of

LENGTH = 32


def test_a_round_done_again_ends_in_the_same_bits_and_leaves_nothing(debug, tokenizer):
    run = Run.create_or_open(
        debug("policy.model.layers=1", "training.microbatch_sequences=4", "training.epochs=2")
    )
    trainer = Trainer(run, tokenizer)
    checkpoint, batches = trainer.init_policy(), None
    for round in range(2):
        made = [random_batch(5 + step, LENGTH, seed=100 * round + step) for step in range(2)]
        batches = commit_round(run, round, made, LENGTH)
        checkpoint = trainer.train_round(round, batches, checkpoint)
    before, recorded = run.store.list(), identity_of(run, checkpoint).parameters_digest
    start = committed_checkpoint(run, 1)
    assert start is not None
    assert batches is not None
    state, metrics = trainer.replay_round(1, batches, start)
    assert digest_of(state.parameters) == recorded
    totals = manifest_of(run.store, checkpoint).totals
    assert {name: metrics[name] for name in ("loss", "grad_norm")} == {
        name: totals[name] for name in ("loss", "grad_norm")
    }
    assert committed(run, checkpoint_slot(2)) == checkpoint
    found = replay_round(run, 1)
    assert found.equal
    assert found.compared > 20
    assert run.store.list() == before
