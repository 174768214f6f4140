"""A model served in this process for the length of one task, from a folder or a slot.

For work outside a run's rounds: no trainer has the weights, so there is no canary; what
was read is verified by `checkpoint_loader`. Rounds are served by `runtime_for`, people by `launch`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from marin_rl.compilation import enable_compilation_cache
from marin_rl.config import Config
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.checkpoint_loader import read_slot
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import TokenizerIdentity, load_tokenizer, tokenizer_for
from marin_rl.training.model import LmHeadModel, load_hf, parameters_digest
from marin_rl.types import ServedPolicy, SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model in memory with its tokenizer, and where they are from."""

    model: LmHeadModel
    tokenizer: PreTrainedTokenizerBase
    parameters_digest: str
    source: SlotRef


def weights_in_folder(folder: Path) -> Weights:
    """A Hugging Face folder. Raises InputError for one that is unfit."""
    model = load_hf(folder)
    return Weights(
        model=model,
        tokenizer=load_tokenizer(folder),
        parameters_digest=parameters_digest(model),
        source=SlotRef(slot=str(folder), sha256=""),
    )


def weights_of_slot(run: Run, ref: SlotRef) -> Weights:
    """A committed checkpoint, a warm start's too. Raises as `loading.read_slot` does."""
    loaded = read_slot(run, ref)
    return Weights(
        model=loaded.model,
        tokenizer=tokenizer_for(run.config.policy),
        parameters_digest=loaded.parameters_digest,
        source=ref,
    )


@contextmanager
def serving(weights: Weights, config: Config) -> Iterator[ServedPolicy]:
    """The model behind the OpenAI protocol, on loopback, until the context ends."""
    enable_compilation_cache()
    names = TokenizerIdentity.of(weights.tokenizer)
    server = PolicyServer(
        weights.model,
        weights.tokenizer,
        config.inference,
        context_length=config.policy.context_length,
        parameters_digest=weights.parameters_digest,
        dtype=jnp.dtype(config.policy.compute_dtype),
    )
    try:
        server.start()
        yield ServedPolicy(
            endpoints=(server.base_url,),
            model=server.model_id,
            weight_version=0,
            parameters_digest=weights.parameters_digest,
            tokenizer_digest=names.tokenizer_digest,
            chat_template_digest=names.chat_template_digest,
            checkpoint=weights.source,
        )
    finally:
        server.stop()
