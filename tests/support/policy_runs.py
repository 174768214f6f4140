"""Runs with real policies: committed random weights by seed, and rounds run without a flow."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support.models import tiny_model
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.build import build_round
from marin_rl.config import Config, load_config
from marin_rl.models.module import LanguageModel
from marin_rl.rollouts.evaluate import evaluate_round
from marin_rl.rollouts.generate import generate_shard
from marin_rl.rounds import Stopwatch, close_round, transfer_metrics
from marin_rl.runtime import RunRuntime
from marin_rl.serving.server import PolicyServer
from marin_rl.storage.checkpoints import commit_checkpoint
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.rollouts import seal_round
from marin_rl.tokenizers import TokenizerIdentity, character_tokenizer
from marin_rl.training.model import build_model, matrix_mask, named_parameters, with_parameters
from marin_rl.training.optimizer import make_optimizer, policy_adamw
from marin_rl.training.state import Identity, fresh_state, tree_of
from marin_rl.types import SlotRef
from marin_rl.weight_sync import InMemory, Weights

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"


def small_config(root: Path | str, *overrides: str) -> Config:
    """configs/debug.yaml below `root`."""
    return load_config(DEBUG, [f"root={root}", *overrides])


def small_run(root: Path | str, *overrides: str) -> Run:
    """A run of the debug configuration without a checkpoint."""
    return Run.create_or_open(small_config(root, *overrides))


def weights(run: Run, seed: int) -> LanguageModel:
    """The model of a run with weights of its own, large enough to make every token count."""
    model = build_model(run.config.policy, len(character_tokenizer()), seed)
    scaled = {name: np.asarray(array) * 8 for name, array in named_parameters(model).items()}
    norms = {name: array / 8 for name, array in scaled.items() if "norm" in name}
    return with_parameters(model, scaled | norms)


def weights_of(version: int, digest: str) -> Weights:
    """Weights of a small model under any digest, for transports."""
    identity = Identity(
        parameters_digest=digest, tokenizer_digest="t" * 64, chat_template_digest="c" * 64, step=0
    )
    model = tiny_model()
    return Weights(version=version, model=model, trained=model, identity=identity)


def in_memory(runtime: RunRuntime) -> InMemory:
    """The transport of a run that samples in its own process."""
    assert isinstance(runtime.transport, InMemory)
    return runtime.transport


def embedded_server(runtime: RunRuntime) -> PolicyServer:
    """The server that a run has started."""
    server = in_memory(runtime).server
    assert server is not None
    return server


def commit(
    run: Run,
    round: int,
    model: LanguageModel | None = None,
    extra: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> SlotRef:
    """Commit a model (default: that of seed `round`) as the checkpoint of a round."""
    model = model or weights(run, round)
    optimizer = make_optimizer(policy_adamw(run.config.training), matrix_mask(model))
    state = fresh_state(named_parameters(model), optimizer, seed=round)
    identity = Identity.of(state, TokenizerIdentity.of(tokenizer or character_tokenizer()))
    return commit_checkpoint(
        run,
        checkpoint_slot(round),
        tree_of(state),
        content={"round": round},
        parents=(),
        totals={},
        extra=identity.as_dict() | dict(extra or {}),
    )


def parts(run: Run, round: int) -> list[Path]:
    """The files of a committed checkpoint but its manifest, the largest first."""
    folder = run.store.local_path(checkpoint_slot(round))
    assert folder is not None
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


def play_round(
    runtime: RunRuntime, run: Run, round: int, checkpoint: SlotRef, *, evaluated: bool = False
) -> SlotRef:
    """One round from its first checkpoint, which is evaluated if that is asked; the next one."""
    watch, policy = Stopwatch(), runtime.serve(checkpoint)
    if evaluated:
        asyncio.run(evaluate_round(run, round, policy))
    shards, judges = range(run.config.rollouts.shards_per_round), (None, runtime.teacher())

    async def generate() -> list[SlotRef]:
        sampled = (generate_shard(run, round, n, policy, *judges) for n in shards)
        return await asyncio.gather(*sampled)

    parts = asyncio.run(generate())
    watch.lap("generate")
    batches = build_round(run, round, seal_round(run, round, parts, (checkpoint,)))
    trained = runtime.train_round(round, batches, checkpoint)
    steps = int(batches.summary["steps"])
    close_round(run, round, watch.metrics() | transfer_metrics(policy.transfer, steps))
    return trained


def play_two_rounds(run: Run, *, evaluated: bool = False) -> None:
    """A run's first two rounds; `evaluated` says whether that comes before them."""
    runtime = RunRuntime(run)
    try:
        checkpoint = runtime.init_policy()
        for round in range(2):
            first = evaluated and round == 0
            checkpoint = play_round(runtime, run, round, checkpoint, evaluated=first)
    finally:
        runtime.close()
