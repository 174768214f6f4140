"""Rounds of a trainer alone: random batches in the place of rollouts."""

from collections.abc import Iterable

from training.batches import commit_round, random_batch
from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config
from marin_rl.storage.runs import Run
from marin_rl.storage.written_behind import settle
from marin_rl.training.loop import Trainer
from marin_rl.types import SlotRef

LENGTH = 32


def begin(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[Run, Trainer, SlotRef]:
    """A run, its trainer, and its first checkpoint."""
    run = Run.create_or_open(config)
    trainer = Trainer(run, tokenizer)
    return run, trainer, trainer.init_policy()


def batches_of(run: Run, round: int, steps: int = 2) -> SlotRef:
    """Committed batches of a round, of as many steps."""
    made = [random_batch(5 + step, LENGTH, seed=100 * round + step) for step in range(steps)]
    return commit_round(run, round, made, LENGTH)


def play(run: Run, trainer: Trainer, checkpoint: SlotRef, rounds: Iterable[int]) -> SlotRef:
    """The checkpoint after these rounds, each of two steps."""
    for round in rounds:
        checkpoint = trainer.train_round(round, batches_of(run, round), checkpoint)
    settle()  # for tests that look at files
    return checkpoint
