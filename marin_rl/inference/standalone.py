"""A server in a process of its own: which model to load, then serve until a signal.

Behind `marin-rl serve`. Inside a run the server lives in the flow's process instead and takes the
trainer's arrays (see `marin_rl.resident`).
"""

import sys
from pathlib import Path

import jax.numpy as jnp

from marin_rl.compilation import enable_compilation_cache
from marin_rl.config import Config
from marin_rl.errors import ObjectMissing
from marin_rl.inference.server import PolicyServer, serve_forever
from marin_rl.storage.runs import Run, committed_checkpoint, latest_checkpoint, round_of
from marin_rl.tokenizers import load_tokenizer, tokenizer_for
from marin_rl.training.loop import Trainer
from marin_rl.training.model import load_hf, parameters_digest


def serve_checkpoint(root: str, run_id: str, round: int | None, host: str, port: int) -> int:
    """Serve a committed checkpoint of a run (default: the latest); the process's exit code.

    Raises ObjectMissing where it is not committed, CorruptObject, ConfigError for the address.
    """
    enable_compilation_cache()
    run = Run.open(root, run_id)
    found = latest_checkpoint(run) if round is None else committed_checkpoint(run, round)
    if found is None:
        wanted = "no checkpoint" if round is None else f"no checkpoint of round {round}"
        raise ObjectMissing(f"{wanted} is committed in {run.store.url}: see `marin-rl status`")
    policy = run.config.policy
    tokenizer = tokenizer_for(policy)
    trainer = Trainer(run, tokenizer)
    trainer.load(found)
    server = PolicyServer(
        trainer.model,
        tokenizer,
        run.config.inference,
        context_length=policy.context_length,
        weight_version=round_of(found.slot.rpartition("/")[2]) or 0,
        parameters_digest=parameters_digest(trainer.model),
        dtype=jnp.dtype(policy.compute_dtype),
    )
    return serve_forever(server, host, port, announce=_announce)


def serve_folder(folder: Path, config: Config, host: str, port: int) -> int:
    """Serve a Hugging Face folder with a configuration's engine and context length.

    Raises InputError for a folder that cannot be served exactly, ConfigError for the address.
    """
    enable_compilation_cache()
    tokenizer = load_tokenizer(folder)
    model = load_hf(str(folder))
    server = PolicyServer(
        model,
        tokenizer,
        config.inference,
        context_length=config.policy.context_length,
        parameters_digest=parameters_digest(model),
        dtype=jnp.dtype(config.policy.compute_dtype),
    )
    return serve_forever(server, host, port, announce=_announce)


def _announce(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
