"""Scoring with a reward model: any sequences of tokens in batches of few fixed shapes.

Each sequence is padded to its own power of two, in batches of a fixed number of rows; so its reward
depends on nothing but itself, not on its neighbours in the batch. Owns reading a committed
reward model for use (`LearnedReward`).
"""

import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int32
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import padded
from marin_rl.batching.plan import bucket
from marin_rl.config import BatchingConfig, PolicyConfig
from marin_rl.errors import CorruptObject
from marin_rl.rollouts.rewards import RewardIdentity, RewardModelSlot
from marin_rl.storage.checkpoints import restore_checkpoint
from marin_rl.training.heads import ScalarModel
from marin_rl.training.model import digest_of, parameter_shapes
from marin_rl.training.preference import rewards_of
from marin_rl.training.state import template_of
from marin_rl.training.step import Parameters

ROWS_MAX = 64
TOKENS_MAX = 16_384
BUCKETS = BatchingConfig()  # the default's

# What a checkpoint of a reward model holds besides its parameters.
BESIDE_PARAMETERS = ("optimizer", "step", "rng", "refused")


def reward_template(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> ScalarModel:
    """The architecture of a reward model, with shapes in place of arrays: see `template_of`."""
    import equinox as eqx

    return eqx.filter_eval_shape(ScalarModel.of, template_of(policy, tokenizer))


class SequenceScorer:
    """The compiled programs of one architecture, a fixed number of rows per padded length."""

    def __init__(self, template: ScalarModel, policy: PolicyConfig) -> None:
        self._rewards = jax.jit(rewards_of(template, policy.compute_dtype))
        self._longest = policy.context_length

    def score(
        self, parameters: Parameters, sequences: Sequence[Int32[np.ndarray, " _"]]
    ) -> Float64[np.ndarray, " N"]:
        """The reward of each sequence, in order."""
        found = np.zeros(len(sequences), np.float64)
        lengths = np.array([padded_length(len(ids), self._longest) for ids in sequences], np.int64)
        for length in np.unique(lengths).tolist():
            rows = max(1, min(ROWS_MAX, TOKENS_MAX // length))
            indices = np.flatnonzero(lengths == length)
            for start in range(0, len(indices), rows):
                chunk = indices[start : start + rows]
                token_ids, inside = padded([sequences[index] for index in chunk], rows, length)
                rewards = self._rewards(parameters, token_ids, inside.astype(np.int32))
                found[chunk] = np.asarray(rewards, np.float64)[: len(chunk)]
        return found


def padded_length(tokens: int, longest: int) -> int:
    """The bucket that a sequence is padded to; never more than the context."""
    assert tokens <= longest, f"a sequence has {tokens} tokens, the context {longest}"
    return min(bucket(tokens, BUCKETS), longest)


class LearnedReward:
    """A committed reward model in memory: a `RewardScorer`. Thread safe."""

    def __init__(self, slot: RewardModelSlot, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read and verify it. Raises InputError, CorruptObject, and what the store raises."""
        policy = slot.run.config.policy
        template = reward_template(policy, tokenizer)
        shapes = parameter_shapes(template)
        like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        tree = restore_checkpoint(
            slot.run, slot.ref, {"parameters": like}, unasked=BESIDE_PARAMETERS
        )
        digest, expected = digest_of(tree["parameters"]), slot.identity.parameters_digest
        if digest != expected:
            raise CorruptObject(
                f"{slot.run.store.url_of(slot.ref.slot)}: expected parameters with digest "
                f"{expected}, found {digest}: its manifest speaks of other weights"
            )
        self.identity: RewardIdentity = slot.identity
        self._parameters = {name: jnp.asarray(array) for name, array in tree["parameters"].items()}
        self._scorer = SequenceScorer(template, policy)
        self._lock = threading.Lock()

    def score(self, sequences: Sequence[Int32[np.ndarray, " _"]]) -> Float64[np.ndarray, " N"]:
        """The raw reward of each sequence of token ids, read at its last token."""
        with self._lock:
            return self._scorer.score(self._parameters, sequences)
