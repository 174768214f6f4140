"""Plan of a run, computed from its configuration before anything starts.

Used by `marin-rl run --dry-run`, by the checks before a run, and where a folder is served without a
configured context length. Token counts are upper bounds (every prompt and completion at its limit);
bytes per token are those measured on committed shards and batches. Bytes of memory are those of one
device.
Reads a Hugging Face `config.json` for the parameter count when the folder is here; loads no model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from marin_rl.architecture import (
    UPDATE_BYTES,
    UPDATE_BYTES_8BIT,
    Architecture,
    Base,
    Rows,
    moment_bytes,
)
from marin_rl.config import Config, parse_config
from marin_rl.config.training import MICROBATCH_PAIRS
from marin_rl.errors import InputError
from marin_rl.lora.adapter import linear_shapes
from marin_rl.lora.peft import configured_modules
from marin_rl.lora.quantization import quantized_bytes
from marin_rl.machine import (
    LANE_WEIGHTS_BYTES_MAX,
    STEP_LANES,
    computes_on_host,
    started_device,
)
from marin_rl.models.families import described, described_model
from marin_rl.plain_files import read_object
from marin_rl.processes import process_number
from marin_rl.types import PairSection

ROLLOUT_BYTES_PER_TOKEN = 4.4
BATCH_BYTES_PER_TOKEN = 3.0
SCORE_BYTES_PER_TOKEN = 17.0
# Of a committed table besides its tokens: Parquet's footers, and the manifest.
TABLE_BYTES = 50_000
PARAMETER_BYTES = 4
OPTIMIZER_BYTES = 8
CHARACTER_VOCABULARY = 128
# Python, JAX and Prefect in memory, and programs while they are compiled.
PROCESS_BYTES = 1_200_000_000
LOADED_SHARES = 1.3  # of a checkpoint's bytes in a process, while it reads its part
ACTIVATION_BYTES_MIN = 2**28  # of a microbatch that is chosen here, even of a small model

# Context of a model that is served or evaluated without a configured length.
CONTEXT_TOKENS_MAX = 4096
CACHE_BYTES_MAX = 4 * 2**30


# Memory of one device, as its maker says; of the MI250X one of its two dies, of TPUs by generation.
DEVICE_GB = {
    "A100-40GB": 40, "A100-80GB": 80, "B200": 180, "H100": 80, "H200": 141, "L4": 24, "L40S": 48,
    "MI250X": 64, "MI300X": 192, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices that are not here, which a plan is made for."""

    kind: str
    count: int

    @staticmethod
    def named(text: str) -> "Devices":
        """Parse KIND:COUNT. Raises InputError."""
        kind, _, count = text.partition(":")
        known = {name.lower(): name for name in DEVICE_GB}
        if kind.lower() not in known or not count.isdecimal() or not int(count):
            raise InputError(
                f"--on {text!r}: expected KIND:COUNT, such as H100:8, with one of "
                f"{', '.join(DEVICE_GB)}"
            )
        return Devices(known[kind.lower()], int(count))

    @property
    def bytes(self) -> int:
        return DEVICE_GB[self.kind] * 10**9

    def shared_by(self, config: Config) -> Config:
        """The configuration with sizes of its mesh in place of -1. Raises InputError."""
        filled = _filled(config, self.count)
        if (taken := math.prod(filled.mesh.model_dump().values())) != self.count:
            raise InputError(
                f"mesh {config.mesh.model_dump()} takes {taken} devices, and --on has "
                f"{self.count}: set mesh.fsdp or mesh.data to -1, which takes all"
            )
        return filled


def _filled(config: Config, count: int) -> Config:
    """The configuration with sizes of its mesh in place of -1, on so many devices."""
    sizes = config.mesh.model_dump()
    rest = max(count // math.prod(size for size in sizes.values() if size > 0), 1)
    given = {axis: rest if size < 0 else size for axis, size in sizes.items()}
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=given)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Upper bounds of what a run does and needs; None where the model is not at hand.

    `trained_parameters` are an adapter's where there is one. Of one device: `training_bytes` lie
    there between steps, `step_bytes` at the most within one, of which `activation_bytes` are the
    activations of a microbatch, and `peak_bytes` with all else of the process. `host_bytes` lie in
    each process while a checkpoint is read. Of disk:
    `checkpoint_disk_bytes` is the most that lies there at once, of `checkpoints_kept` checkpoints,
    `checkpoint_written_bytes` what all rounds write.
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
    step_bytes: int | None = None
    engine_cache_bytes: int | None = None
    engine_weight_bytes: int | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None
    devices: int = 1
    rollout_disk_bytes: int
    batch_disk_bytes: int
    score_disk_bytes: int
    checkpoint_disk_bytes: int | None = None
    checkpoint_written_bytes: int | None = None
    checkpoints_kept: int = 1
    checkpoint_bytes: int | None = None

    @property
    def overlap_saves(self) -> float:
        """Share of a round that sampling during training saves at most, by operations alone.

        Two operations a parameter and sampled token, six a trained one (Kaplan et al. 2020), on two
        devices like the one that both share otherwise.
        """
        sides = 2 * self.tokens_sampled_max, 6 * self.tokens_trained_max
        return min(sides) / sum(sides)

    @property
    def engine_bytes(self) -> int:
        return (self.engine_cache_bytes or 0) + (self.engine_weight_bytes or 0)


def architecture_of(config: Config) -> Architecture | None:
    """Sizes from the configuration, or from the model folder; None when that is not here.

    Raises InputError when the folder is here but its config.json cannot be read, or describes a
    family that is not supported.
    """
    policy = config.policy
    if policy.hf_path is None:
        spec = described_model(policy.model, policy.context_length)
        spec = replace(spec, vocabulary=policy.model.vocab_size or CHARACTER_VOCABULARY)
        return Architecture.of(spec)
    return _in_folder(policy.hf_path)


def _in_folder(folder: str) -> Architecture | None:
    file = Path(folder) / "config.json"
    return Architecture.of(described(read_object(file), file)) if file.exists() else None


def _teacher_of(config: Config) -> Architecture | None:
    """Sizes of a teacher in this process; None without one, and where it is not at hand."""
    settings = config.distillation
    if settings is None or settings.is_self:
        return settings and architecture_of(config)
    if settings.folder is not None:
        return _in_folder(settings.folder)
    record = Path(settings.checkpoint or "").parent.parent / "run.json"
    return architecture_of(parse_config(read_object(record)["config"])) if record.exists() else None


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


def plan(config: Config, devices: Devices | None = None) -> Plan:
    """Multiply a configuration out, for this machine's devices or others. Raises InputError."""
    on_host = devices is None and computes_on_host()
    if devices is not None:
        config = devices.shared_by(config)
    elif not on_host and (device := started_device()) is not None:
        config = _filled(config, device.client.device_count())
    architecture = architecture_of(config)
    size = config.rounds * config.rollouts.group_size
    rollouts_max = size * config.examples_per_round
    of_turns = config.sampling.max_tokens * (config.environment.turns_max or 1)
    sampled = rollouts_max * min(of_turns, config.policy.context_length)
    groups = config.rollouts.groups_per_round
    if (replay := config.ahead.replay) is not None:
        groups += replay.groups or groups
    trained = size * groups * config.policy.context_length
    shards = config.rounds * config.rollouts.shards_per_round
    return Plan(
        rounds=config.rounds,
        shards=shards,
        rollouts=size * config.candidates_per_batch,
        rollouts_max=rollouts_max,
        tokens_sampled_max=sampled,
        tokens_trained_max=trained * config.training.epochs,
        rollout_disk_bytes=shards * TABLE_BYTES
        + int(rollouts_max * config.policy.context_length * ROLLOUT_BYTES_PER_TOKEN),
        batch_disk_bytes=config.rounds * TABLE_BYTES + int(trained * BATCH_BYTES_PER_TOKEN),
        score_disk_bytes=config.rounds * TABLE_BYTES + int(sampled * SCORE_BYTES_PER_TOKEN),
        **({} if architecture is None else _of_model(config, architecture, on_host=on_host)),
    )


def _of_model(config: Config, architecture: Architecture, *, on_host: bool) -> dict[str, int]:
    """The fields of a plan that need a model's sizes."""
    steps = [StepMemory.of(one, architecture, on_host=on_host) for one in _stages(config)]
    memory = steps[0]
    # An adapter's base is written once, unless a model folder has it.
    has_base = config.policy.lora is not None and config.policy.init != "hf"
    base = architecture.parameters * PARAMETER_BYTES if has_base else 0
    fields = {
        "parameters": architecture.parameters,
        "trained_parameters": memory.trained,
        "training_bytes": memory.resident,
        "activation_bytes": memory.activations,
        "step_bytes": max(step.peak for step in steps),
        "devices": memory.devices,
        **_of_checkpoints(config, memory, base),
    }
    sampling = merged = 0
    processes = (config.distributed and config.distributed.processes) or process_number()[1]
    if not config.inference.endpoints:
        # Each process has an engine, whose slots are spread over its own devices.
        spread = max(memory.devices // processes, 1)
        if processes == 1:
            spread //= config.mesh.context or 1  # these have the same slots
        slots = -(-config.inference.engine.slots * config.mesh.tensor // spread)
        tokens = slots * config.policy.context_length // config.mesh.tensor
        value_bytes = _value_bytes(config)
        cache = architecture.cache_bytes(tokens, value_bytes)
        joined = sum(map(math.prod, architecture.linear_shapes.values()))
        if config.policy.quantize_base is not None:
            joined = memory.trained  # the engine reads the base where it lies
        else:
            if config.policy.lora is not None and config.inference.serve_merged is not False:
                merged = PARAMETER_BYTES * joined  # with the adapter, and stays while steps run
            large = PARAMETER_BYTES * architecture.parameters > LANE_WEIGHTS_BYTES_MAX
            if on_host and large and memory.devices == 1 and value_bytes == PARAMETER_BYTES:
                joined = 0  # the engine reads all where it lies
        weights = joined * value_bytes // config.mesh.tensor + merged
        fields |= {"engine_cache_bytes": cache, "engine_weight_bytes": weights}
        sampling = cache + weights
    sampling += memory.scoring  # the engine's memory is still there
    # Where sampling and training alternate, the engine gives its memory back to the step.
    if config.max_staleness:
        peak = sampling + memory.peak
    else:
        peak = max(memory.resident + sampling, memory.peak + merged)
    peak = max(peak, *(step.peak for step in steps))
    fields["peak_bytes"] = peak + (PROCESS_BYTES if memory.on_host else 0)
    share = fields["checkpoint_bytes"] // processes
    fields["host_bytes"] = PROCESS_BYTES + round(LOADED_SHARES * share)
    return fields


def _stages(config: Config) -> Iterator[Config]:
    """The configuration of the rounds' training, and of the warm start as if it were theirs."""
    yield config
    if config.policy.init != "sft":
        return
    lora = config.policy.lora
    whole = lora is not None and lora.begins != "sft"
    without = {"lora": None, "quantize_base": None} if whole else {}
    warm = _with_rows(config, config.sft.microbatch_sequences, config.sft.sequences_per_step)
    yield warm.model_copy(update={"policy": config.policy.model_copy(update=without)})


def _with_rows(config: Config, rows: int, of: int, packing: str = "none") -> Config:
    """The configuration with a microbatch of `rows`, of a step's `of`, and no critic."""
    training = {"microbatch_sequences": rows, "critic": None}
    batching = {"sequences_per_step": of, "packing": packing}
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=training),
            "batching": config.batching.model_copy(update=batching),
        }
    )


def pairs_at_once(config: Config, stage: PairSection) -> int | None:
    """The largest doubling of pairs whose activations are small next to what training keeps, or 1.

    On a CPU, where more at once are no faster. None on accelerators, where that has not been
    measured, and where the model is not at hand.
    """
    architecture = architecture_of(config)
    if architecture is None or not computes_on_host():
        return None
    # Both answers of a pair share a row behind their prompt, but a reward model's have one each.
    rows, packing = (1, "shared_prompt") if stage == "preference" else (2, "none")
    of = config.pair_training(stage).pairs_per_step

    def fits(pairs: int) -> bool:
        step = _with_rows(config, rows * pairs, rows * of, packing)
        memory = StepMemory.of(step, architecture, on_host=True)
        return memory.activations <= max(memory.resident // 4, ACTIVATION_BYTES_MIN)

    pairs = 1 << min(of, MICROBATCH_PAIRS).bit_length() - 1
    while pairs > 1 and not fits(pairs):
        pairs //= 2
    return pairs


def _of_checkpoints(config: Config, memory: "StepMemory", base: int) -> dict[str, int]:
    """Fields of checkpoint 0 and one of each round; retention is applied after each round."""
    one = memory.learners * memory.trained * PARAMETER_BYTES + memory.moments
    without = memory.trained * PARAMETER_BYTES
    every = config.checkpoints.optimizer_every(one, on_host=memory.on_host)
    kept = number = config.rounds + 1
    # The first, every n-th after it, and the last.
    whole = min(number, 2 + (config.rounds - 1) // every)
    lie = written = whole * one + (number - whole) * without
    rule = config.retention
    if rule.checkpoints_last is not None:
        last = min(rule.checkpoints_last + 1, number)  # the newest is written before one is pruned
        others = number - last
        spread = 0 if rule.checkpoints_every is None else -(-others // rule.checkpoints_every)
        spread += rule.best is not None
        kept = min(number, last + spread)
        # The oldest of the last, and each of the others, may need an earlier one that is whole.
        bases = 0 if every == 1 else min(1 + spread, others)
        whole = min(whole, kept if every == 1 else -(-last // every) + bases)
        lie = whole * one + (min(kept + bases, number) - whole) * without
    return {
        "checkpoint_bytes": one,
        "checkpoints_kept": kept,
        "checkpoint_disk_bytes": lie + base,
        "checkpoint_written_bytes": written + base,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes of training on one device: `resident` between steps, `peak` within one.

    `trained` parameters of each of the `learners`: the policy, and a critic of its own trunk.
    `moments` are bytes of all of them, on all devices. A teacher's weights are in both; its forward
    pass is in the step's, or is `scoring` where it scores rollouts before.
    """

    trained: int
    moments: int
    learners: int
    devices: int
    on_host: bool
    resident: int
    activations: int
    peak: int
    scoring: int = 0

    @classmethod
    def of(cls, config: Config, architecture: Architecture, *, on_host: bool) -> "StepMemory":
        """Multiply out: rows by data and fsdp, their tokens by context, parameters by all but data.

        Moments are spread as their parameters.
        """
        mesh, critic = config.mesh, config.training.critic
        data, fsdp, context = max(mesh.data, 1), max(mesh.fsdp, 1), mesh.context or 1
        held = fsdp * context * mesh.tensor
        learners = 2 if critic is not None and critic.trunk == "own" else 1
        shapes = list(_trained_shapes(config, architecture))
        trained = sum(map(math.prod, shapes))
        own, moments = learners * trained // held, learners * trained * OPTIMIZER_BYTES
        of_update = UPDATE_BYTES
        if config.training.optimizer == "adamw_8bit":
            of_update = UPDATE_BYTES_8BIT
            moments += sum(map(moment_bytes, shapes)) - trained * OPTIMIZER_BYTES
        base = _base_bytes(config, architecture, _value_bytes(config)) // held
        # XLA's CPU compiler keeps what is computed in bfloat16 as float32.
        value_bytes = 4 if on_host else _value_bytes(config)
        rows = microbatch_of(config, data * fsdp, on_host=on_host)
        how = {"recomputed": config.training.gradient_checkpointing, "shards": mesh.tensor}
        copied: Base | None = None if config.policy.lora is None else "whole"
        if config.policy.quantize_base is not None:
            copied = "quantized"
        backward = architecture.backward_bytes(
            rows, value_bytes, base=copied, fsdp=fsdp * context, **how
        )
        # A small model's microbatches are computed side by side on one CPU device.
        small = PARAMETER_BYTES * architecture.parameters <= LANE_WEIGHTS_BYTES_MAX
        offloaded = config.training.optimizer == "adamw_offload"
        alone = mesh.data == mesh.fsdp == mesh.tensor == context == 1 and not offloaded
        several = config.training.microbatch_sequences < _step_sequences(config)
        lanes = STEP_LANES if on_host and small and alone and several else 1
        # Each lane has gradients of its own; an update has old and new parameters at once.
        resident, passing = PARAMETER_BYTES * own + moments // held, 0
        if offloaded and not on_host:  # moments that are no layers' pass in an update, all of them
            resident -= moments // held
            passing = OPTIMIZER_BYTES * sum(math.prod(s) for s in shapes if len(s) < 3) // held
        passes = resident + lanes * (4 * own + learners * backward)
        update = resident + passing + round(of_update * own) + 4 * own * (lanes - 1)
        scoring = 0
        if (teacher := _teacher_of(config)) is not None:
            beside, length = config.rollout_teacher is None, config.policy.context_length
            scored = rows if beside else Rows(rows=max(1, min(64, 2**14 // length)), length=length)
            base += teacher.parameters * _value_bytes(config) // (held if beside else 1)
            scoring = teacher.forward_bytes(scored, value_bytes, shards=mesh.tensor)
            if beside:
                passes, scoring = passes + lanes * scoring, 0
        return cls(
            trained=trained,
            moments=moments,
            learners=learners,
            devices=data * held,
            on_host=on_host,
            resident=resident + base,
            activations=lanes * architecture.activation_bytes(rows, value_bytes, **how),
            peak=base + max(passes, update),
            scoring=scoring,
        )


def microbatch_of(config: Config, parts: int, *, on_host: bool) -> Rows:
    """The largest microbatch of a run, of which each of `parts` devices has its share of rows."""
    batching = config.batching
    rows = min(config.training.microbatch_sequences, _step_sequences(config))
    packed = batching.layout != "none"
    if batching.layout == "auto":  # rows as long as all of a microbatch, at the most
        parts = 1
    length = batching.row_tokens if packed and batching.row_tokens else config.policy.context_length
    fused = not on_host and config.policy.compute_dtype == "bfloat16"
    context = config.mesh.context or 1
    in_blocks = packed or fused or context > 1
    return Rows(rows=-(-rows // parts), length=length, in_blocks=in_blocks, context=context)


def _step_sequences(config: Config) -> int:
    """Sequences of one optimizer step."""
    of_round = config.rollouts.groups_per_round * config.rollouts.group_size
    return config.batching.sequences_per_step or of_round


def memory_keys(config: Config) -> Iterator[str]:
    """Settings that lower the memory of a training step, the mildest first, with their values."""
    training, policy = config.training, config.policy
    if training.microbatch_sequences > 1:
        yield f"a smaller training.microbatch_sequences (now {training.microbatch_sequences})"
    if not training.gradient_checkpointing:
        yield "training.gradient_checkpointing: true"
    if config.batching.row_tokens is not None:
        yield f"a smaller batching.row_tokens (now {config.batching.row_tokens})"
    else:
        yield f"a smaller policy.context_length (now {policy.context_length})"
    if policy.lora is None:
        yield "an adapter (policy.lora.rank)"
    elif policy.quantize_base is None:
        yield "policy.quantize_base: nf4"
    yield f"a larger mesh.fsdp on more devices (now {config.mesh.fsdp})"


def keys_that_lower(config: Config, planned: Plan) -> list[str]:
    """Settings that lower the larger of training step and engine."""
    slots = f"fewer inference.engine.slots (now {config.inference.engine.slots})"
    sampling = (planned.training_bytes or 0) + planned.engine_bytes
    if sampling > (planned.step_bytes or 0):
        return [slots, f"a smaller policy.context_length (now {config.policy.context_length})"]
    return list(memory_keys(config))


def _value_bytes(config: Config) -> int:
    return 4 if config.policy.compute_dtype == "float32" else 2


def _trained_shapes(config: Config, architecture: Architecture) -> Iterator[tuple[int, ...]]:
    """Shapes of what is trained: A and B of an adapter, else all, of which one stands for the rest.

    The rest are embeddings, norms and what no adapter changes.
    """
    linears = architecture.linear_shapes
    if config.policy.lora is None:
        yield from linears.values()
        others = architecture.parameters - sum(map(math.prod, linears.values()))
        yield others // architecture.hidden_size, architecture.hidden_size
        return
    layers = linear_shapes(linears)
    for path, module in configured_modules(config.policy.lora, linears).items():
        yield layers[path].a_shape(module.rank)
        yield layers[path].b_shape(module.rank)


def _base_bytes(config: Config, architecture: Architecture, value_bytes: int) -> int:
    """Bytes of an adapter's base in training: quantised, or in the dtype that is computed in."""
    policy, shapes = config.policy, architecture.linear_shapes.values()
    if policy.lora is None:
        return 0
    if policy.quantize_base is None:
        return architecture.parameters * value_bytes
    others = architecture.parameters - sum(map(math.prod, shapes))
    quantized = sum(quantized_bytes(shape, policy.quantize_base) for shape in shapes)
    # One matrix at a time is there dequantised.
    largest = max(math.prod(shape[1:]) for shape in shapes)
    return quantized + (others + largest) * value_bytes
