"""Sizes of a decoder, and the bytes that training and serving it take.

Formulas follow the programs that XLA makes of a step: what it keeps between the forward and the
backward pass, gradients, copies of weights. Factors are fitted to XLA's own memory analysis on CPUs
(tests/training/test_step_memory.py), within a tenth of a step, in bfloat16 a seventh. Leaves out
which settings a run has (`planning`).

Axes: N tokens of a microbatch, T positions of a row, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from marin_rl.models.spec import STACKED, Spec

Base = Literal["whole", "quantized"]
Recomputed = bool | Literal["offload"]

FLOAT32 = 4  # bytes
# Tokens whose logits are computed at once on a CPU: `TOKENS_PER_CHUNK` of the trainer.
LOGITS_CHUNK = 256
# More layers than this are scanned, and with gradient checkpointing all: `UNROLLED_LAYERS_MAX`.
UNROLLED_LAYERS_MAX = 8
# Bytes of an update by trained parameter, besides old parameters and moments, which are donated:
# new parameters and gradients, and 7.5 where moments of 8 bits become float32.
UPDATE_BYTES, UPDATE_BYTES_8BIT = 8.0, 15.5
# 8-bit moments: values that share a scale, and the size of arrays that keep float32.
BLOCK_MIN, BLOCK_MAX = 64, 256
SIZE_MIN = 4096


def block_of(shape: Sequence[int]) -> tuple[int, int] | None:
    """Values of a block of 8-bit moments, and the last axes that blocks lie in; None: float32.

    A power of two that divides these axes: a device has whole blocks where it has whole last axes.
    """
    inner = 1
    for axes, size in enumerate(reversed(shape), 1):
        inner *= size
        if (block := min(inner & -inner, BLOCK_MAX)) >= BLOCK_MIN:
            return (block, axes) if math.prod(shape) >= SIZE_MIN else None
    return None


def moment_bytes(shape: Sequence[int]) -> int:
    """Bytes of both 8-bit moments of an array."""
    size, blocks = math.prod(shape), block_of(shape)
    return 8 * size if blocks is None else 2 * size + 8 * size // blocks[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A microbatch: `rows` of `length` tokens, each of which `context` devices share.

    `in_blocks`: attention takes blocks of keys one after the other, without a table of scores, as
    in packed rows, in shared ones, and on a GPU in bfloat16.
    """

    rows: int
    length: int
    in_blocks: bool = False
    context: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one device."""
        return -(-self.rows * self.length // self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes that decide parameters, activations and cache of a decoder."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    tie_embeddings: bool
    gated: bool = True
    adapted_mlp: bool = True

    @classmethod
    def of(cls, spec: Spec) -> "Architecture":
        return cls(
            vocab_size=spec.vocabulary,
            hidden_size=spec.width,
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_size=spec.head_size,
            intermediate_size=spec.mlp_width * max(1, spec.experts),
            tie_embeddings=spec.tied,
            gated=spec.gated,
            adapted_mlp=not spec.experts,
        )

    @property
    def parameters(self) -> int:
        """Number of weights of a Llama-style decoder (norms included, biases not)."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.layer_parameters + self.hidden_size

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden_size * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.intermediate_size
        return self.layers * (attention + mlp + 2 * self.hidden_size)

    @property
    def linear_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights that an adapter may change, by path in the model."""
        groups = self.heads // self.kv_heads
        heads = (self.layers, self.kv_heads, self.head_size, self.hidden_size)
        shapes = {
            "self_attn/q_proj": (*heads[:2], groups, *heads[2:]),
            "self_attn/k_proj": heads,
            "self_attn/v_proj": heads,
            "self_attn/o_proj": (self.layers, self.hidden_size, self.heads, self.head_size),
            "mlp/gate_proj": (self.layers, self.intermediate_size, self.hidden_size),
            "mlp/up_proj": (self.layers, self.intermediate_size, self.hidden_size),
            "mlp/down_proj": (self.layers, self.hidden_size, self.intermediate_size),
        }
        if not self.gated:
            del shapes["mlp/gate_proj"]
        if not self.adapted_mlp:
            shapes = {name: shape for name, shape in shapes.items() if "mlp" not in name}
        return {f"{STACKED}{n}/weight": shape for n, shape in shapes.items()}

    def cache_bytes(self, tokens: int, bytes_per_value: int) -> int:
        """Bytes of keys and values for `tokens` positions."""
        return 2 * self.layers * self.kv_heads * self.head_size * tokens * bytes_per_value

    def activation_bytes(
        self, microbatch: Rows, bytes_per_value: int, *, recomputed: Recomputed, shards: int = 1
    ) -> int:
        """Bytes that the backward pass of a microbatch keeps of all layers.

        With gradient checkpointing (`recomputed`) the inputs of all layers, which "offload" keeps
        in the host's memory, and the rest of one.
        `shards` divide heads and MLPs over devices.
        """
        inside = self._inside(shards)
        scores = 0 if microbatch.in_blocks else self.heads * microbatch.length // shards
        others = self.layers - 1  # the last layer's MLP is computed by chunks of tokens
        if recomputed:
            inputs = 0 if recomputed == "offload" else others * self.hidden_size
            values = inputs + inside + 2 * scores
        elif self.layers <= UNROLLED_LAYERS_MAX:
            # XLA sees all layers at once, and computes a fifth again where that is cheap.
            values = 0.8 * others * inside + 3 * self.layers * scores
        else:
            # Results of products; of one layer all.
            values = others * (self._products(shards) + scores) + 1.2 * (inside + 2 * scores)
        return round(values * microbatch.tokens * bytes_per_value)

    def _inside(self, shards: int) -> int:
        """Values of a token in a layer, without its table of attention scores."""
        of_heads = 2 * (self.heads + self.kv_heads) * self.head_size
        return 10 * self.hidden_size + (of_heads + 6 * self.intermediate_size) // shards

    def _products(self, shards: int) -> int:
        """Those of them that are its input, or results of products and of attention."""
        of_heads = 2 * (self.heads + self.kv_heads) * self.head_size
        return 2 * self.hidden_size + (of_heads + 2 * self.intermediate_size) // shards

    def forward_bytes(self, rows: Rows, bytes_per_value: int, *, shards: int = 1) -> int:
        """Bytes of a forward pass besides its arguments: of a layer, and of a chunk of logits."""
        scores = 0 if rows.in_blocks else 2 * self.heads * rows.length // shards
        logits = min(LOGITS_CHUNK, rows.tokens) * self.vocab_size * FLOAT32
        return (self._inside(shards) + scores) * rows.tokens * bytes_per_value + logits

    def backward_bytes(
        self,
        microbatch: Rows,
        bytes_per_value: int,
        *,
        recomputed: Recomputed,
        base: Base | None = None,
        fsdp: int = 1,
        shards: int = 1,
    ) -> int:
        """Bytes that a forward and backward pass takes besides its arguments and the gradients.

        `base` is that of an adapter; None where all weights are trained. A device has one part in
        `fsdp` times `shards` of the weights, and one in `shards` of heads and MLPs.
        """
        unrolled = self.layers <= UNROLLED_LAYERS_MAX and not recomputed
        # Of unrolled layers, but for a quantised base: a copy, and gradients of a microbatch, which
        # a scan of layers adds to their sums.
        layers = 2 if unrolled and base != "quantized" else 0
        ends = 2 if (layers or base is None) and not recomputed else 1  # the same of the embedding
        chunks = 1 if recomputed or not (unrolled or base) else 2  # of logits and their gradients
        logits = min(LOGITS_CHUNK, microbatch.tokens) * self.vocab_size // shards
        copied = layers * self.layer_parameters + ends * self.vocab_size * self.hidden_size
        kept = self.activation_bytes(
            microbatch, bytes_per_value, recomputed=recomputed, shards=shards
        )
        of_copies = FLOAT32 if base is None else bytes_per_value
        # What others of fsdp hold is gathered: of a layer, embedding and head, with gradients.
        whole = self.layer_parameters / self.layers + self.vocab_size * self.hidden_size
        gathered = 3.2 * (1 - 1 / fsdp) * whole * FLOAT32 / shards
        weights = copied * of_copies / (fsdp * shards) + gathered
        if microbatch.context > 1:  # keys and values of whole rows, and their gradients
            of_rows = self.kv_heads * self.head_size * microbatch.rows * microbatch.length
            kept += 4 * FLOAT32 * of_rows // shards
        return round(weights) + chunks * logits * FLOAT32 + kept
