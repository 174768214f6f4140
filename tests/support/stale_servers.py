"""Servers whose numbers are of old weights, or of no temperature, and what must be said of them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from levanter.models.lm_model import LmHeadModel
from support.fakes import FakePolicyServer

from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.checkpoint_loader import read_checkpoint
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.scoring import token_logprobs


class Deaf(PolicyServer):
    """A server that acknowledges new weights and goes on with the old ones."""

    first: LmHeadModel

    def swap(self, model: LmHeadModel, weight_version: int, parameters_digest: str) -> str:
        """The new id for the old arrays."""
        return super().swap(self.first, weight_version, parameters_digest)


def deaf_server(run: Run, round: int) -> Deaf:
    """A started one, of a round's checkpoint."""
    loaded = read_checkpoint(run, round)
    server = Deaf(
        loaded.model,
        character_tokenizer(),
        run.config.inference,
        context_length=run.config.policy.context_length,
        weight_version=round,
        parameters_digest=loaded.parameters_digest,
    )
    server.first = loaded.model
    server.start()
    return server


def check_told(message: str, run: Run, *, expected: int, found: int) -> None:
    """The message has both digests, the checkpoint, and what to do."""
    for round in (expected, found):
        assert read_checkpoint(run, round).parameters_digest[:16] in message
    assert f"load checkpoints/round-{expected:05d} at the endpoint" in message
    assert "Nothing was sampled for training" in message


class RawLogprobs(FakePolicyServer):
    """One that tells what the logits say of a token before temperature, as vLLM does by default."""

    def __init__(self, model_id: str, model: LmHeadModel) -> None:
        super().__init__(model_id)
        prompt, sampled = np.arange(10, 15), np.arange(20, 24)
        ids = np.concatenate([prompt, sampled])[None].astype(np.int32)
        places = np.arange(ids.size, dtype=np.int32)[None]
        rows = map(jnp.asarray, (ids, np.ones_like(ids), places, places >= prompt.size))
        logprobs = jax.jit(token_logprobs)(model, *rows).logprobs[0, prompt.size :]
        self._prompt, self._choice_said = (
            prompt.tolist(),
            {
                "token_ids": sampled.tolist(),
                "token_logprobs": np.asarray(logprobs).tolist(),
                "finish_reason": "length",
            },
        )

    def answer(self, body: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
        """The same tokens for every request."""
        answer = super().answer(body, fault) | {"prompt_token_ids": self._prompt}
        answer["choices"][0] |= self._choice_said
        return answer
