"""Settings of a run as verl 0.9 names them, and a list of those that have no counterpart there.

Owns the meaning of each key. Leaves out the files that the settings name (`export`). Every key of
the configuration is mapped, or has another place (the parent's process plays with it), or is listed
with its reason where it differs from its default: nothing is dropped silently.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from marin_rl.config import Config, ObjectiveConfig
from marin_rl.config.section import Section

MISSING = "???"  # of OmegaConf: verl names the key and stops until it has a value
NEVER = 1e9  # for a bound that verl cannot switch off

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

_ESTIMATORS = {
    "rloo": "rloo",
    "grpo": "grpo",
    "dr_grpo": "grpo",
    "opo": "opo",
    "remax": "remax",
    "gae": "gae",
    "optimal_token_baseline": "optimal_token_baseline",
}
_LOSSES = {  # surrogate and ratio_level
    ("ppo_clip", "token"): "vanilla",
    ("gspo", "sequence_mean"): "gspo",
    ("gmpo", "sequence_mean"): "geo_mean",
    ("cispo", "token"): "cispo",
    ("sapo", "token"): "sapo",
    ("dppo", "token"): "dppo_tv",
    ("dppo_kl", "token"): "dppo_kl",
    ("dro", "token"): "dro",
}
_AGGREGATIONS = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k3_k2_gradient": "low_var_kl+"}

FOLDER = "name a folder of Hugging Face, which `marin-rl export RUN --hf FOLDER` writes"

# Keys that hold under verl as they do here: the process of marin-rl plays and scores with them.
ELSEWHERE = (
    "environment.",
    "evaluation.examples",
    "policy.context_length",
    "policy.tokenizer",
    "rollouts.shards_per_round",
    "run_id",
    "root",
)
REASONS: Mapping[str, str] = {
    "asynchrony": "verl's trainer decides what is sampled ahead (trainer.v1)",
    "batching.length_buckets": "verl pads to data.max_prompt_length and data.max_response_length",
    "batching.packing": "see actor.use_remove_padding and actor.use_dynamic_bsz of verl",
    "batching.row_tokens": "see actor.ppo_max_token_len_per_gpu of verl",
    "batching.staleness_rounds_max": "rounds of verl are on the policy, unless trainer.v1 says so",
    "environment.on_broken_prefix": "an agent loop has one sequence: the episode ends there",
    "environment.reward_model": "verl has reward models of its own (reward.reward_model)",
    "evaluation.sets": "val_files has the run's own environment alone",
    "filters.zero_signal": "such groups stay, with advantages of 0",
    "filters.truncated": "completions that were cut are trained on",
    "flow": "verl's trainer has no flow",
    "inference": "verl starts its own servers",
    "mesh": "see trainer.n_gpus_per_node and actor.fsdp_config of verl",
    "policy.checkpoint": FOLDER,
    "policy.hf_path": FOLDER,
    "policy.init": FOLDER,
    "policy.model": "the architecture is that of the folder in actor_rollout_ref.model.path",
    "reward_model": "reward models are trained here",
    "rollouts.source": "groups are sampled by verl",
    "sampling.stop": "verl samples token ids, without stop strings",
    "sft": f"train the warm start here; {FOLDER}",
    "storage_options": "verl writes to its own folders",
}
NO_COUNTERPART = "verl 0.9 has no counterpart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Facts of an export: examples by split, and whether episodes have one turn."""

    train_examples: int
    one_shot: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlField:
    """Value of a key of verl, and the keys of ours that it says."""

    key: str
    value: Any
    ours: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmapped:
    """Key or section without a counterpart in verl, its values here, and what becomes of it."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        if isinstance(self.value, Mapping):
            return f"{self.key} ({', '.join(self.value)}): {self.reason}"
        return f"{self.key} = {self.value!r}: {self.reason}"


def verl_fields(config: Config, shape: Shape) -> tuple[list[VerlField], list[Unmapped]]:
    """Fields of verl's configuration, and the settings that it cannot have."""
    parts = (_data, _model, _sampled, _optimizer, _objective, _correction, _trainer, _critic)
    fields = [field for part in parts for field in part(config, shape)]
    missing = {key for field in fields if field.value == MISSING for key in field.ours}
    said = {key for field in fields for key in field.ours} - missing
    return fields, [*_unmapped(config, said, missing)]


def _unmapped(config: Config, said: set[str], missing: set[str]) -> Iterator[Unmapped]:
    defaults = dict(leaves(Config(run_id=config.run_id)))
    # Groups without signal stay by default there, and are dropped by default here.
    listed = missing | ({"filters.zero_signal"} if config.filters.zero_signal else set())
    sections: dict[str, dict[str, Any]] = {}
    for key, value in leaves(config):
        name = next((name for name in _names(key) if name in REASONS), None)
        if key in said or (name is None and key.startswith(ELSEWHERE)):
            continue
        if value == defaults.get(key) and key not in listed:
            continue
        if name is None or name == key:
            yield Unmapped(key=key, value=value, reason=REASONS.get(key, NO_COUNTERPART))
        else:
            sections.setdefault(name, {})[key.removeprefix(f"{name}.")] = value
    for name, values in sections.items():
        yield Unmapped(key=name, value=values, reason=REASONS[name])


def _names(key: str) -> Iterator[str]:
    """Yield a dotted key and those above it."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a configuration with their values."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _field(key: str, value: Any, *ours: str) -> VerlField:
    return VerlField(key=key, value=value, ours=ours)


def _data(config: Config, shape: Shape) -> Iterator[VerlField]:
    context, new = config.policy.context_length, config.sampling.max_tokens
    yield _field(
        "data.train_batch_size", config.rollouts.groups_per_round, "rollouts.groups_per_round"
    )
    yield _field("data.max_prompt_length", context - new, "policy.context_length")
    # An episode's response has all its turns, and what the environment says between them.
    response = new if shape.one_shot else context - 1
    yield _field("data.max_response_length", response, "sampling.max_tokens")
    yield _field("data.shuffle", False)  # rows are in the order of the run
    yield _field("data.seed", config.seed, "seed")
    yield _field("data.filter_overlong_prompts", False)
    yield _field("data.truncation", "error")
    yield _field("data.return_raw_chat", True)
    yield _field(f"{ROLLOUT}.max_model_len", context)


def _model(config: Config, shape: Shape) -> Iterator[VerlField]:
    policy, model = config.policy, "actor_rollout_ref.model"
    path = policy.hf_path if policy.init == "hf" else None
    yield _field(f"{model}.path", path or MISSING, "policy.init", "policy.hf_path")
    if policy.tokenizer not in ("characters", policy.hf_path):
        yield _field(f"{model}.tokenizer_path", policy.tokenizer)
    checkpointing = config.training.gradient_checkpointing
    key = f"{model}.enable_gradient_checkpointing"
    yield _field(key, checkpointing, "training.gradient_checkpointing")
    yield _field(f"{ROLLOUT}.dtype", policy.compute_dtype)
    yield _field(f"{ACTOR}.fsdp_config.dtype", policy.compute_dtype, "policy.compute_dtype")


def _sampled(config: Config, shape: Shape) -> Iterator[VerlField]:
    sampling, evaluation = config.sampling, config.evaluation
    yield _field(f"{ROLLOUT}.name", "vllm")
    yield _field(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    yield _field(f"{ROLLOUT}.n", config.rollouts.group_size, "rollouts.group_size")
    yield _field(f"{ROLLOUT}.temperature", sampling.temperature, "sampling.temperature")
    yield _field(f"{ROLLOUT}.top_p", sampling.top_p, "sampling.top_p")
    yield _field(f"{ROLLOUT}.top_k", sampling.top_k or -1, "sampling.top_k")
    yield _field(f"{ROLLOUT}.calculate_log_probs", True)
    yield _field(f"{ROLLOUT}.seed", config.seed)
    held_out = f"{ROLLOUT}.val_kwargs"
    yield _field(f"{held_out}.temperature", evaluation.temperature, "evaluation.temperature")
    yield _field(f"{held_out}.do_sample", evaluation.temperature > 0)
    yield _field(f"{held_out}.n", evaluation.samples, "evaluation.samples")


def _optimizer(config: Config, shape: Shape) -> Iterator[VerlField]:
    training, rows = config.training, config.training.microbatch_sequences
    yield from _steps(config)
    for part, name in (
        (ACTOR, "ppo"),
        (ROLLOUT, "log_prob"),
        ("actor_rollout_ref.ref", "log_prob"),
    ):
        key = f"{part}.{name}_micro_batch_size_per_gpu"
        yield _field(key, rows, "training.microbatch_sequences")
    optimizer = f"{ACTOR}.optim"
    yield _field(f"{ACTOR}.ppo_epochs", training.epochs, "training.epochs")
    yield _field(f"{optimizer}.lr", training.learning_rate, "training.learning_rate")
    yield _field(f"{optimizer}.lr_warmup_steps", training.warmup_steps, "training.warmup_steps")
    yield _field(f"{optimizer}.weight_decay", training.weight_decay, "training.weight_decay")
    betas = [training.beta1, training.beta2]
    yield _field(f"{optimizer}.betas", betas, "training.beta1", "training.beta2")
    override = {"eps": training.epsilon}
    yield _field(f"{optimizer}.override_optimizer_config", override, "training.epsilon")
    for key in (f"{ACTOR}.grad_clip", f"{optimizer}.clip_grad"):
        yield _field(key, training.gradient_clip_norm, "training.gradient_clip_norm")
    schedule = training.schedule if training.schedule != "linear" else MISSING
    yield _field(f"{optimizer}.lr_scheduler_type", schedule, "training.schedule")
    if training.schedule_steps is not None:
        key = f"{optimizer}.total_training_steps"
        yield _field(key, training.schedule_steps, "training.schedule_steps")


def _steps(config: Config) -> Iterator[VerlField]:
    """Yield the prompts of an optimizer step: rollouts here, prompts there."""
    size, wanted = config.rollouts.group_size, config.batching.sequences_per_step
    key = f"{ACTOR}.ppo_mini_batch_size"
    if wanted is None:
        yield _field(key, config.rollouts.groups_per_round)
    else:
        whole = wanted % size == 0
        yield _field(key, wanted // size if whole else MISSING, "batching.sequences_per_step")


def _objective(config: Config, shape: Shape) -> Iterator[VerlField]:
    objective = config.objective
    yield from _advantage(objective)
    loss = _LOSSES.get((objective.surrogate, objective.ratio_level))
    one_step = config.training.epochs == 1 and config.batching.sequences_per_step is None
    if one_step and objective.surrogate in ("reinforce", "ppo_clip"):
        # Ratios are 1 in the only step of a round: their level makes no difference.
        loss = "vanilla"
    keys = ("objective.surrogate", "objective.ratio_level")
    yield _field(f"{ACTOR}.policy_loss.loss_mode", loss or MISSING, *keys)
    yield _field(f"{ACTOR}.policy_loss.dro_beta", objective.dro_beta, "objective.dro_beta")
    yield _field(f"{ACTOR}.clip_ratio", objective.clip_high)
    yield _field(f"{ACTOR}.clip_ratio_low", objective.clip_low, "objective.clip_low")
    yield _field(f"{ACTOR}.clip_ratio_high", objective.clip_high, "objective.clip_high")
    yield _field(f"{ACTOR}.clip_ratio_c", objective.clip_dual or NEVER, "objective.clip_dual")
    for sign, name in (("positive", "tau_pos"), ("negative", "tau_neg")):
        key = f"sapo_temperature_{sign}"
        yield _field(f"{ACTOR}.{name}", getattr(objective, key), f"objective.{key}")
    aggregation = _AGGREGATIONS[objective.aggregation]
    yield _field(f"{ACTOR}.loss_agg_mode", aggregation, "objective.aggregation")
    entropy = objective.entropy_coefficient
    yield _field(f"{ACTOR}.entropy_coeff", entropy, "objective.entropy_coefficient")
    yield from _kl(objective)


def _advantage(objective: ObjectiveConfig) -> Iterator[VerlField]:
    estimator, scale = _ESTIMATORS.get(objective.advantage), objective.advantage_scale
    grouped = objective.advantage in ("grpo", "dr_grpo") and scale in (
        "default",
        "none",
        "group_std",
    )
    if scale not in ("default", "none") and not grouped:
        estimator = None
    keys = ("objective.advantage", "objective.advantage_scale")
    if objective.advantage == "remax":  # verl samples the baseline by itself
        keys = (*keys, "rollouts.greedy_baseline")
    yield _field("algorithm.adv_estimator", estimator or MISSING, *keys)
    divided = scale == "group_std" or (scale == "default" and objective.advantage == "grpo")
    yield _field("algorithm.norm_adv_by_std_in_grpo", divided)


def _kl(objective: ObjectiveConfig) -> Iterator[VerlField]:
    weight, estimator = objective.kl_coefficient, _KL[objective.kl_estimator]
    rewarded = objective.kl_placement == "reward"
    keys = ("objective.kl_coefficient", "objective.kl_placement", "objective.kl_estimator")
    yield _field(f"{ACTOR}.use_kl_loss", weight > 0 and not rewarded, *keys)
    yield _field(f"{ACTOR}.kl_loss_coef", weight)
    yield _field(f"{ACTOR}.kl_loss_type", estimator)
    yield _field("algorithm.use_kl_in_reward", weight > 0 and rewarded)
    yield _field("algorithm.kl_penalty", estimator)
    yield _field("algorithm.kl_ctrl.kl_coef", weight)


def _correction(config: Config, shape: Shape) -> Iterator[VerlField]:
    objective, section = config.objective, "algorithm.rollout_correction"
    kind, low, high = (
        objective.importance_correction,
        objective.correction_low,
        objective.correction_high,
    )
    # Weights between 1/n and n, or 0 where they are outside (IcePop); verl truncates from above.
    level = None if kind in ("none", "rejected") else objective.correction_level
    threshold: float | str = high if kind == "truncated" else f"{low:g}_{high:g}"
    expressible = level is None or (low == 0 if kind == "truncated" else low > 0)
    keys = [f"objective.{n}" for n in ("importance_correction", "correction_level")]
    bounds = [f"objective.{n}" for n in ("correction_low", "correction_high")]
    yield _field(f"{section}.rollout_is", level if expressible else MISSING, *keys, *bounds)
    if level is not None and expressible:
        yield _field(f"{section}.rollout_is_threshold", threshold)
    if objective.rejection is not None:
        yield from _rejection(objective, section)


def _rejection(objective: ObjectiveConfig, section: str) -> Iterator[VerlField]:
    level = str(objective.rejection_level).replace("sequence", "seq")
    name, bound = f"{level}_{objective.rejection}", objective.rejection_high
    assert bound is not None, "they go together"
    # Bounds of k1 are those of the ratio, on both sides.
    both = objective.rejection == "k1"
    known = name != "seq_max_k1"
    keys = [f"objective.{n}" for n in ("rejection", "rejection_level", "rejection_high")]
    yield _field(f"{section}.rollout_rs", name if known else MISSING, *keys)
    ratio = 2.718281828459045**bound if both else bound
    yield _field(f"{section}.rollout_rs_threshold", f"{1 / ratio:g}_{ratio:g}" if both else bound)


def _trainer(config: Config, shape: Shape) -> Iterator[VerlField]:
    per_round = config.rollouts.groups_per_round
    passes = -(-config.rounds * per_round // max(shape.train_examples, 1))
    yield _field("trainer.total_training_steps", config.rounds, "rounds")
    yield _field("trainer.total_epochs", max(1, passes))
    yield _field("trainer.test_freq", config.evaluation.every_rounds, "evaluation.every_rounds")
    yield _field("trainer.save_freq", 1)
    kept = config.retention.checkpoints_last
    yield _field("trainer.max_actor_ckpt_to_keep", kept, "retention.checkpoints_last")
    yield _field("trainer.experiment_name", config.run_id)
    yield _field("trainer.project_name", config.trackers.wandb_project or "marin-rl")
    loggers = {"wandb": config.trackers.wandb_project, "tensorboard": config.trackers.tensorboard}
    chosen = ["console", *(name for name, used in loggers.items() if used)]
    keys = ("trackers.wandb_project", "trackers.tensorboard")
    yield _field("trainer.logger", chosen, *keys)
    yield _field("trainer.n_gpus_per_node", 1)


def _critic(config: Config, shape: Shape) -> Iterator[VerlField]:
    critic = config.training.critic
    if critic is None:
        return
    under = "training.critic"
    # verl's critic is a model of its own.
    path = config.policy.hf_path if critic.trunk == "own" else None
    yield _field("critic.model.path", path or MISSING, f"{under}.trunk")
    yield _field("critic.ppo_micro_batch_size_per_gpu", config.training.microbatch_sequences)
    yield _field("critic.optim.lr", critic.learning_rate, f"{under}.learning_rate")
    clip = critic.value_clip
    yield _field("critic.cliprange_value", NEVER if clip is None else clip, f"{under}.value_clip")
    yield _field("trainer.critic_warmup", critic.warmup_rounds, f"{under}.warmup_rounds")
    yield _field("algorithm.gamma", critic.gamma, f"{under}.gamma")
    yield _field("algorithm.lam", critic.gae_lambda, f"{under}.gae_lambda")
