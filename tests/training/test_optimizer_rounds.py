"""Checkpoints without the optimizer's state: the rounds since the last whole one, trained again."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import jax
import numpy as np
import pytest
from training.trained_runs import begin, play
from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config, RetentionConfig
from marin_rl.errors import CorruptObject, InputError, ObjectMissing
from marin_rl.planning import plan
from marin_rl.storage.commits import manifest_of, read_manifest
from marin_rl.storage.run_progress import OPTIMIZER_ROUND, optimizer_round
from marin_rl.storage.runs import Run, checkpoint_slot, committed
from marin_rl.storage.tables.tombstones import array_parts
from marin_rl.storage.upkeep.forks import fork_run
from marin_rl.storage.upkeep.gc import collect
from marin_rl.training.loop import Trainer
from marin_rl.training.replay import replay_round
from marin_rl.training.state import identity_of, tree_of
from marin_rl.types import SlotRef

SETTINGS = ("policy.model.layers=1", "training.microbatch_sequences=4", "rounds=5")
EVERY = "checkpoints.optimizer_every_rounds=3"

Load = Callable[..., Config]


def at(run: Run, number: int) -> SlotRef:
    ref = committed(run, checkpoint_slot(number))
    assert ref is not None, f"checkpoint {number} is committed"
    return ref


def digests(run: Run) -> list[str]:
    return [identity_of(run, at(run, number)).parameters_digest for number in range(6)]


def state_bits(trainer: Trainer, checkpoint: SlotRef) -> list[bytes]:
    trainer.load(checkpoint)
    return [np.asarray(each).tobytes() for each in jax.tree.leaves(tree_of(trainer._loaded))]


def played(debug: Load, tokenizer: PreTrainedTokenizerBase, *settings: str) -> Run:
    run, trainer, first = begin(debug(*SETTINGS, *settings), tokenizer)
    play(run, trainer, first, range(5))
    return run


@pytest.fixture(scope="module")
def roots(debug_under, tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of whole checkpoints, and one of which every third is whole: `every` and `third`."""
    folder = tmp_path_factory.mktemp("optimizer-rounds")
    for name, settings in (("every", ()), ("third", (EVERY,))):
        load = partial(debug_under, folder / name)
        played(load, tokenizer, *settings)
    return {name: folder / name for name in ("every", "third")}


@pytest.fixture
def third(roots: dict[str, Path], debug: Load) -> Run:
    """A copy of the run of which every third checkpoint is whole, for a test that changes it."""
    return copy_of(roots["third"], debug(*SETTINGS, EVERY))


def copy_of(root: Path, config: Config) -> Run:
    shutil.copytree(root, config.root)
    return Run.create_or_open(config)


def test_every_third_checkpoint_and_the_last_are_whole(roots: dict[str, Path], tokenizer) -> None:
    every, third = (Run.open(str(roots[name]), "debug") for name in ("every", "third"))
    manifests = [manifest_of(third.store, at(third, number)) for number in range(6)]
    assert [optimizer_round(manifest) for manifest in manifests] == [None, 0, 0, None, 3, None]
    stored = [sum(part.bytes for part in array_parts(manifest)) for manifest in manifests]
    assert max(stored[1], stored[2], stored[4]) < 0.4 * min(stored[0], stored[3], stored[5])
    assert digests(third) == digests(every)
    # Whatever a process finds, it has the whole state: every moment of the optimizer too.
    reader = Trainer(every, tokenizer)
    for number in range(6):
        found = state_bits(Trainer(third, tokenizer), at(third, number))
        assert found == state_bits(reader, at(every, number))


def test_replay_and_a_fork_begin_at_one_without_a_state(third, roots, debug, tokenizer, tmp_path):
    run = third
    for round in (1, 2, 3):
        found = replay_round(Run.open(run.config.root, "debug"), round)
        assert (found.equal, dict(found.metrics)) == (True, {})
    # Every metric of a fork's first round is that of a fork from a run of whole checkpoints.
    other = copy_of(roots["every"], debug(*SETTINGS, f"root={tmp_path / 'every'}"))
    ends = []
    for parent in (run, other):
        fork = fork_without_metrics(parent, 2)
        last = play(fork, Trainer(fork, tokenizer), at(fork, 2), [2])
        ends.append(identity_of(fork, last).parameters_digest)
    assert ends[0] == ends[1]
    assert ends[0] != digests(run)[3]  # another learning rate


def fork_without_metrics(parent: Run, round: int) -> Run:
    """A fork, where only trainers played: rounds are closed by an object that nothing reads."""
    parent.store.put_part(f"metrics/round-{round - 1:05d}.parquet", b"")
    return fork_run(parent, round, "fork", ["training.learning_rate=0.5"])


def test_another_outcome_is_refused_and_names_round_and_digest(third: Run, tokenizer) -> None:
    run = third
    before = run.store.list()
    faster = run.config.training.model_copy(update={"learning_rate": 0.5})
    other = dataclasses.replace(run, config=run.config.model_copy(update={"training": faster}))
    with pytest.raises(InputError, match="training round 0 again gives") as error:
        Trainer(other, tokenizer).load(at(run, 2))
    assert digests(run)[1][:12] in str(error.value)
    assert "fork the run from round 0" in str(error.value)
    assert run.store.list() == before


def test_retention_keeps_what_a_kept_checkpoint_leaves_out(third: Run, tokenizer) -> None:
    run = third  # 0, 3 and 5 are whole, 4 goes on from 3
    rule = RetentionConfig(checkpoints_last=2)
    gone = {item.key.split("/")[1] for item in collect(run, rule).garbage}
    assert gone == {"round-00000", "round-00001", "round-00002"}
    last = Trainer(run, tokenizer)
    last.load(at(run, 4))
    assert last.identity is not None
    assert last.identity.parameters_digest == digests(run)[4]
    with pytest.raises(ObjectMissing, match="pruned"):
        Trainer(run, tokenizer).load(at(run, 2))
    with pytest.raises(ObjectMissing, match="round-00001 was pruned"):
        fork_run(run, 1, "fork")


def test_a_wrong_number_is_named(third: Run) -> None:
    found = read_manifest(third.store, checkpoint_slot(2))
    assert found is not None
    for wrong in (2, -1, "0"):
        extra = {**found[0].extra, OPTIMIZER_ROUND: wrong}
        with pytest.raises(CorruptObject, match=f"{OPTIMIZER_ROUND}, found {str(wrong)!r}"):
            optimizer_round(dataclasses.replace(found[0], extra=extra))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "retention"), [*product([1, 2, 3, 8], [{}, {"checkpoints_last": 2}])], ids=str
)
def test_the_plan_is_what_lies_there(debug: Load, tokenizer, every: int, retention) -> None:
    config = debug(
        *SETTINGS,
        "policy.model.hidden_size=64",  # large enough that arrays are most of the files
        "policy.model.intermediate_size=128",
        f"checkpoints.optimizer_every_rounds={every}",
        f"retention={json.dumps(retention)}",
    )
    run, trainer, checkpoint = begin(config, tokenizer)
    most = written = 0
    for round in range(6):
        # Without the scores, which are parts of the slot too.
        arrays = [path for path in arrays_of(run) if path.name != "manifest.json"]
        most = max(most, sum(path.stat().st_size for path in arrays))
        newest = [path for path in arrays if f"round-{round:05d}" in path.parts]
        written += sum(path.stat().st_size for path in newest)
        collect(run, config.retention)
        if round < 5:
            checkpoint = play(run, trainer, checkpoint, [round])
    planned = plan(config)
    # A file has a header too: sizes are compared by those of a whole checkpoint.
    assert planned.checkpoint_disk_bytes is not None
    assert planned.checkpoint_written_bytes is not None
    assert planned.checkpoint_bytes is not None
    whole = sum(p.stat().st_size for p in arrays_of(run) if "round-00005" in p.parts)
    scale = whole / planned.checkpoint_bytes
    assert written == pytest.approx(scale * planned.checkpoint_written_bytes, rel=0.2)
    assert most <= 1.2 * scale * planned.checkpoint_disk_bytes


def arrays_of(run: Run) -> list[Path]:
    folder = run.store.local_path("checkpoints")
    assert folder is not None
    return [p for p in folder.rglob("*") if p.is_file() and "scores" not in p.name]
