"""Proof that an endpoint samples from the parameters it claims: a canary, scored by the trainer.

Each endpoint samples a few tokens; the trainer's own model computes the log-probabilities of those
very tokens. Stale or damaged weights, another tokenizer, template or attention show at once, and
end the round before anything is sampled for training.
"""

import asyncio
import os
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from equinox import filter_jit
from jaxtyping import Array, Float, Int
from levanter.models.lm_model import LmHeadModel

from marin_rl.config import InferenceConfig
from marin_rl.errors import StalePolicy
from marin_rl.inference.client import PolicyClient
from marin_rl.inference.protocol import ChatAnswer
from marin_rl.training.scoring import token_logprobs
from marin_rl.types import Message, Sampling, ServedPolicy

PROMPT = (Message(role="user", content="Which policy are you?"),)
SAMPLING = Sampling(temperature=1.0, max_tokens=4, seed=20_240_229)
LENGTH_STEP = 64


def prove(policy: ServedPolicy, model: LmHeadModel, config: InferenceConfig) -> float:
    """The largest |endpoint - trainer| log-probability of a canary token, in nats.

    Raises StalePolicy, naming the endpoint and both numbers, above `canary_tolerance`; and what
    the client raises.
    """
    worst = 0.0
    for endpoint, answer in zip(policy.endpoints, _sampled(policy, config), strict=True):
        completion = answer.completions[0]
        ours = _scores(model, answer)
        gap = np.abs(completion.logprobs - ours)
        worst = max(worst, float(gap.max(initial=0.0)))
        if not gap.max(initial=0.0) <= config.canary_tolerance:
            place = int(gap.argmax())
            raise StalePolicy(
                f"{endpoint} does not sample from {policy.model} (parameters "
                f"{policy.parameters_digest[:16]}): expected a log-probability of "
                f"{ours[place]:.6f} for token {int(completion.token_ids[place])} of the canary, "
                f"found {completion.logprobs[place]:.6f}; above inference.canary_tolerance "
                f"({config.canary_tolerance:g}). Reload the endpoint, or serve this run's weights"
            )
    return worst


def _sampled(policy: ServedPolicy, config: InferenceConfig) -> list[ChatAnswer]:
    """The canary's answer from every endpoint, in order."""

    async def ask(endpoint: str) -> ChatAnswer:
        async with PolicyClient(
            endpoints=(endpoint,),
            model=policy.model,
            api_key=os.environ.get(config.api_key_variable),
            timeout_s=config.request_timeout_s,
            attempts_max=config.request_attempts_max,
            in_flight_max=1,
        ) as client:
            return await client.chat(PROMPT, 1, SAMPLING)

    async def ask_all() -> list[ChatAnswer]:
        return await asyncio.gather(*(ask(endpoint) for endpoint in policy.endpoints))

    return asyncio.run(ask_all())


def _scores(model: LmHeadModel, answer: ChatAnswer) -> np.ndarray:
    """The trainer's log-probability of each token of the answer's one completion."""
    prompt, sampled = answer.prompt_token_ids, answer.completions[0].token_ids
    used = len(prompt) + len(sampled)
    token_ids = np.zeros((1, -(-used // LENGTH_STEP) * LENGTH_STEP), np.int32)
    token_ids[0, :used] = np.concatenate([prompt, sampled])
    mask = np.zeros_like(token_ids)
    mask[0, len(prompt) : used] = 1
    segments = np.zeros_like(token_ids)
    segments[0, :used] = 1
    scores = _scorer()(model, token_ids, segments, mask)
    return np.asarray(scores)[0, len(prompt) : used]


@lru_cache(maxsize=1)
def _scorer() -> Any:
    @filter_jit
    def score(
        model: LmHeadModel,
        token_ids_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        mask_BT: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        positions = jnp.arange(token_ids_BT.shape[1], dtype=jnp.int32)
        positions_BT = jnp.broadcast_to(positions, token_ids_BT.shape)
        scores = token_logprobs(model, token_ids_BT, segment_ids_BT, positions_BT, mask_BT > 0)
        return scores.logprobs

    return score
