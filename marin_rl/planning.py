"""Plan of a run, computed from its configuration before anything starts.

Used by `marin-rl run --dry-run`, and where a folder is served without a configured context length.
Token counts are upper bounds (every prompt and completion at its limit); bytes per token are those
measured on committed shards and batches (docs/on-disk-format.md).
Reads a Hugging Face `config.json` for the parameter count when the folder is here; loads no model.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from marin_rl.config import Config, ModelConfig, ModelFamily
from marin_rl.errors import InputError
from marin_rl.model_folders import check_family
from marin_rl.plain_files import read_object

ROLLOUT_BYTES_PER_TOKEN = 4.4
BATCH_BYTES_PER_TOKEN = 3.0
SCORE_BYTES_PER_TOKEN = 17.0
PARAMETER_BYTES = 4
OPTIMIZER_BYTES = 8
CHARACTER_VOCABULARY = 128

# Context of a model that is served or evaluated without a configured length.
CONTEXT_TOKENS_MAX = 4096
CACHE_BYTES_MAX = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes that decide parameters and cache of a decoder."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    tie_embeddings: bool

    @property
    def parameters(self) -> int:
        """Number of weights of a Llama-style decoder (norms included, biases not)."""
        attention = self.hidden_size * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        blocks = self.layers * (attention + mlp + 2 * self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + blocks + self.hidden_size

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
        return {f"transformer/layers/stacked/{n}/weight": shape for n, shape in shapes.items()}

    def cache_bytes(self, tokens: int, bytes_per_value: int) -> int:
        """Bytes of keys and values for `tokens` positions."""
        return 2 * self.layers * self.kv_heads * self.head_size * tokens * bytes_per_value

    def activation_bytes(self, tokens: int, bytes_per_value: int, *, recomputed: bool) -> int:
        """Bytes that the backward pass of `tokens` positions keeps, an estimate.

        Of each layer its input and what its matrices read and wrote; with gradient checkpointing
        (`recomputed`) the inputs of all layers, and the rest of one. Attention is counted without
        its table of scores, which only the plain attention of a CPU holds.
        """
        heads = 2 * (self.heads + self.kv_heads) * self.head_size  # queries, keys, values, output
        inside = 5 * self.hidden_size + heads + 3 * self.intermediate_size
        layers_kept = 1 if recomputed else self.layers
        values = self.layers * self.hidden_size + layers_kept * inside
        return values * tokens * bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Upper bounds of what a run does and needs; None where the model is not at hand.

    `trained_parameters` are an adapter's where there is one.
    """

    rounds: int
    shards: int
    rollouts: int
    rollouts_max: int
    tokens_sampled_max: int
    tokens_trained_max: int
    parameters: int | None = None
    trained_parameters: int | None = None
    training_bytes: int | None = None
    activation_bytes: int | None = None
    engine_cache_bytes: int | None = None
    engine_weight_bytes: int | None = None
    rollout_disk_bytes: int
    batch_disk_bytes: int
    score_disk_bytes: int
    checkpoint_disk_bytes: int | None = None

    @property
    def overlap_saves(self) -> float:
        """Share of a round that sampling during training saves at most, by operations alone.

        Two operations a parameter and sampled token, six a trained one (Kaplan et al. 2020), where
        each side has a device like the one that they share otherwise.
        """
        sides = 2 * self.tokens_sampled_max, 6 * self.tokens_trained_max
        return min(sides) / sum(sides)

    @property
    def memory_bytes(self) -> int | None:
        """Training, activations, and the engine that samples, together; None where unknown."""
        if self.training_bytes is None or self.activation_bytes is None:
            return None
        engine = (self.engine_cache_bytes or 0) + (self.engine_weight_bytes or 0)
        return self.training_bytes + self.activation_bytes + engine

    @property
    def disk_bytes(self) -> int:
        """Everything the run leaves under its root."""
        tables = self.rollout_disk_bytes + self.batch_disk_bytes + self.score_disk_bytes
        return tables + (self.checkpoint_disk_bytes or 0)


def architecture_of(config: Config) -> Architecture | None:
    """Sizes from the configuration, or from the model folder; None when that is not here.

    Raises InputError when the folder is here but its config.json cannot be read, or describes a
    family that is not supported.
    """
    if config.policy.hf_path is None:
        return _built(config.policy.model)
    file = Path(config.policy.hf_path) / "config.json"
    if not file.exists():
        return None
    try:
        tree = read_object(file)
        check_family(tree, get_args(ModelFamily), Path(config.policy.hf_path))
        return Architecture(
            vocab_size=tree["vocab_size"],
            hidden_size=tree["hidden_size"],
            layers=tree["num_hidden_layers"],
            heads=tree["num_attention_heads"],
            kv_heads=tree.get("num_key_value_heads") or tree["num_attention_heads"],
            head_size=tree.get("head_dim") or tree["hidden_size"] // tree["num_attention_heads"],
            intermediate_size=tree["intermediate_size"],
            tie_embeddings=bool(tree.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"{file}: expected a decoder's config.json, found {error!r}") from error


def within_memory(config: Config) -> Config:
    """Limit the slots to what fits CACHE_BYTES_MAX, where no context length is configured.

    The configuration names a model whose sizes are known: one of ours, or a folder that is here.
    """
    architecture, engine = architecture_of(config), config.inference.engine
    assert architecture is not None, "a folder says what its model is"
    of_slot = architecture.cache_bytes(config.policy.context_length, 4)
    slots = max(1, min(engine.slots, CACHE_BYTES_MAX // of_slot))
    fewer = {"slots": slots, "prefill_rows": min(engine.prefill_rows, slots)}
    inference = {"engine": engine.model_copy(update=fewer)}
    return config.model_copy(update={"inference": config.inference.model_copy(update=inference)})


def plan(config: Config) -> Plan:
    """Multiply a configuration out."""
    architecture = architecture_of(config)
    size = config.rounds * config.rollouts.group_size
    rollouts_max = size * config.examples_per_round
    of_turns = config.sampling.max_tokens * (config.environment.turns_max or 1)
    sampled = rollouts_max * min(of_turns, config.policy.context_length)
    groups = config.rollouts.groups_per_round
    if config.replay is not None:
        groups += config.replay.groups or groups
    trained = size * groups * config.policy.context_length
    return Plan(
        rounds=config.rounds,
        shards=config.rounds * config.rollouts.shards_per_round,
        rollouts=size * config.candidates_per_batch,
        rollouts_max=rollouts_max,
        tokens_sampled_max=sampled,
        tokens_trained_max=trained * config.training.epochs,
        rollout_disk_bytes=int(
            rollouts_max * config.policy.context_length * ROLLOUT_BYTES_PER_TOKEN
        ),
        batch_disk_bytes=int(trained * BATCH_BYTES_PER_TOKEN),
        score_disk_bytes=int(sampled * SCORE_BYTES_PER_TOKEN),
        **({} if architecture is None else _of_model(config, architecture)),
    )


def _of_model(config: Config, architecture: Architecture) -> dict[str, int]:
    """The fields of a plan that need a model's sizes."""
    trained = _trained(config, architecture)
    critic = config.training.critic
    learners = 2 if critic is not None and critic.trunk == "own" else 1
    value_bytes = 4 if config.policy.compute_dtype == "float32" else 2
    context = config.policy.context_length
    # Gradient and Adam; and the base of an adapter, in the dtype that is computed in.
    training = learners * trained * (2 * PARAMETER_BYTES + OPTIMIZER_BYTES)
    training += _base_bytes(config, architecture, value_bytes)
    # Checkpoint 0 as well as one for each round.
    checkpoints = (config.rounds + 1) * learners * trained * (PARAMETER_BYTES + OPTIMIZER_BYTES)
    fields = {
        "parameters": architecture.parameters,
        "trained_parameters": trained,
        "training_bytes": training,
        "activation_bytes": architecture.activation_bytes(
            config.training.microbatch_sequences * context,
            value_bytes,
            recomputed=config.training.gradient_checkpointing,
        ),
        "checkpoint_disk_bytes": checkpoints + _base_disk_bytes(config, architecture.parameters),
    }
    if not config.inference.endpoints:
        tokens = config.inference.engine.slots * context
        fields["engine_cache_bytes"] = architecture.cache_bytes(tokens, value_bytes)
        fields["engine_weight_bytes"] = _engine_weight_bytes(config, architecture, value_bytes)
    return fields


def _trained(config: Config, architecture: Architecture) -> int:
    """Number of parameters that are trained: A and B of an adapter, else all."""
    if config.policy.lora is None:
        return architecture.parameters
    # Readers of runs import this module for its names alone: NumPy takes a tenth of a second.
    from marin_rl.lora import configured_modules, linear_shapes

    modules = configured_modules(config.policy.lora, architecture.linear_shapes)
    layers = linear_shapes(architecture.linear_shapes)
    return sum(
        math.prod(layers[path].a_shape(module.rank)) + math.prod(layers[path].b_shape(module.rank))
        for path, module in modules.items()
    )


def _base_bytes(config: Config, architecture: Architecture, value_bytes: int) -> int:
    """Bytes of an adapter's base in training: quantised, or in the dtype that is computed in."""
    policy, shapes = config.policy, architecture.linear_shapes.values()
    if policy.lora is None:
        return 0
    if policy.quantize_base is None:
        return architecture.parameters * value_bytes
    from marin_rl.lora.quantization import quantized_bytes

    others = architecture.parameters - sum(map(math.prod, shapes))
    quantized = sum(quantized_bytes(shape, policy.quantize_base) for shape in shapes)
    # One matrix at a time is there dequantised.
    largest = max(math.prod(shape[1:]) for shape in shapes)
    return quantized + (others + largest) * value_bytes


def _engine_weight_bytes(config: Config, architecture: Architecture, value_bytes: int) -> int:
    """Bytes of the engine's own weights: what it joins or merges of the trainer's arrays."""
    linear = sum(map(math.prod, architecture.linear_shapes.values()))
    if config.policy.quantize_base is not None:
        return _trained(config, architecture) * value_bytes  # it reads the base where it lies
    return linear * (value_bytes + (PARAMETER_BYTES if config.policy.lora else 0))


def _base_disk_bytes(config: Config, parameters: int) -> int:
    """Bytes of an adapter's base, which is written once unless a model folder has it."""
    if config.policy.lora is None or config.policy.init == "hf":
        return 0
    return parameters * PARAMETER_BYTES


def _built(model: ModelConfig) -> Architecture:
    return Architecture(
        vocab_size=model.vocab_size or CHARACTER_VOCABULARY,
        hidden_size=model.hidden_size,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_size=model.head_size or model.hidden_size // model.heads,
        intermediate_size=model.intermediate_size,
        tie_embeddings=model.tie_embeddings,
    )
