"""A folder with which verl trains on an environment of ours (`marin-rl export CONFIG --verl`).

Owns the files: prompts in Parquet as verl's dataset reads them, the reward, the agent loop, and a
configuration for its PPO trainer. verl has other versions of our dependencies, so all that is of
marin-rl runs in a process with its own interpreter (`rollouts.relay`).

Settings that decide what is sampled, trained on and optimised are mapped to keys of verl 0.9. Any
other has another place (the process of marin-rl plays with it), or is listed with its reason where
it differs from its default: nothing is dropped silently.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import yaml

from marin_rl.config import Config, value_at
from marin_rl.config.section import Section
from marin_rl.environments.checks import environment_of
from marin_rl.environments.registry import part_for, parts_of
from marin_rl.errors import InputError
from marin_rl.plain_files import whole_or_absent
from marin_rl.storage.tables.parquet import write_plain
from marin_rl.types import Example, Split
from marin_rl.user_code import files_in, source_of

EXAMPLES_MAX = 200_000  # rows of a file; verl begins again where a run takes more
FILES = ("marin_rl_relay.py", "marin_rl_reward.py", "marin_rl_agent_loop.py")
EPISODES, ONE_TURN = "marin_rl_episode", "single_turn_agent"

_HEAD = """# {folder}: {run_id} of marin-rl for the PPO trainer of verl 0.9.
#
#   PYTHONPATH={folder} python -m verl.trainer.main_ppo --config-path {folder} --config-name verl
#
# Set trainer.n_gpus_per_node, {rollout}.tensor_model_parallel_size and what else
# depends on your machines. Keys without a line here have verl's defaults.
"""
_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct([("split", pa.string()), ("index", pa.int64()), ("example", pa.string())]),
        ),
        ("agent_name", pa.string()),
    ]
)
MISSING = "???"  # of OmegaConf: verl names the key and stops until it has a value
NEVER = 1e9  # for a bound that verl cannot switch off

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

_ESTIMATORS = {"rloo": "rloo", "grpo": "grpo", "dr_grpo": "grpo", "opo": "opo"}
_LOSSES = {  # surrogate and ratio_level
    ("ppo_clip", "token"): "vanilla",
    ("gspo", "sequence_mean"): "gspo",
    ("gmpo", "sequence_mean"): "geo_mean",
    ("cispo", "token"): "cispo",
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

# Keys of verl with the values of ours.
_EQUAL = (
    ("data.train_batch_size", "rollouts.groups_per_round"),
    ("actor_rollout_ref.model.enable_gradient_checkpointing", "training.gradient_checkpointing"),
    (f"{ACTOR}.clip_ratio_high", "objective.clip_high"),
    (f"{ACTOR}.clip_ratio_low", "objective.clip_low"),
    (f"{ACTOR}.entropy_coeff", "objective.entropy_coefficient"),
    (f"{ACTOR}.fsdp_config.dtype", "policy.compute_dtype"),
    (f"{ACTOR}.grad_clip", "training.gradient_clip_norm"),
    (f"{ACTOR}.optim.clip_grad", "training.gradient_clip_norm"),
    (f"{ACTOR}.optim.lr", "training.learning_rate"),
    (f"{ACTOR}.optim.lr_warmup_steps", "training.warmup_steps"),
    (f"{ACTOR}.optim.weight_decay", "training.weight_decay"),
    (f"{ACTOR}.ppo_epochs", "training.epochs"),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu", "training.microbatch_sequences"),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "training.microbatch_sequences"),
    (f"{ROLLOUT}.dtype", "policy.compute_dtype"),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "training.microbatch_sequences"),
    (f"{ROLLOUT}.max_model_len", "policy.context_length"),
    (f"{ROLLOUT}.n", "rollouts.group_size"),
    (f"{ROLLOUT}.temperature", "sampling.temperature"),
    (f"{ROLLOUT}.top_p", "sampling.top_p"),
    (f"{ROLLOUT}.val_kwargs.n", "evaluation.samples"),
    (f"{ROLLOUT}.val_kwargs.temperature", "evaluation.temperature"),
    ("trainer.test_freq", "evaluation.every_rounds"),
    ("trainer.total_training_steps", "rounds"),
)

# Keys that hold under verl as they do here: the process of marin-rl plays and scores with them.
ELSEWHERE = (
    "environment.", "evaluation.examples", "policy.context_length", "policy.tokenizer",
    "rollouts.shards_per_round", "run_id", "root",
)  # fmt: skip
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
    "preference": f"train on pairs here; {FOLDER}",
    "rollouts.source": "groups are sampled by verl",
    "sampling.stop": "verl samples token ids, without stop strings",
    "retention": "see trainer.max_actor_ckpt_to_keep of verl",
    "sft": f"train the warm start here; {FOLDER}",
    "seed": "prompts are in the order of the run; see data.seed of verl",
    "storage_options": "verl writes to its own folders",
    "trackers": "see trainer.logger of verl",
    "training.critic": "see critic of verl, and its algorithm.adv_estimator gae",
    "training.schedule": "see actor_rollout_ref.actor.optim of verl",
    "training.schedule_steps": "see actor_rollout_ref.actor.optim of verl",
}
NO_COUNTERPART = "not exported: set the key of verl 0.9 by hand, where it has one"


class VerlField(NamedTuple):
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


def verl_fields(
    config: Config, *, train_examples: int, one_shot: bool
) -> tuple[list[VerlField], list[Unmapped]]:
    """Fields of verl's configuration, and the settings that it cannot have.

    With `one_shot` no episode has more than one turn.
    """
    fields = [VerlField(key, value_at(config, own), (own,)) for key, own in _EQUAL]
    fields += _sampled(config, one_shot=one_shot)
    fields += _trained(config, train_examples)
    fields += _objective(config)
    missing = {key for field in fields if field.value == MISSING for key in field.ours}
    said = {key for field in fields for key in field.ours} - missing
    return fields, [*_unmapped(config, said, missing)]


def _unmapped(config: Config, said: set[str], missing: set[str]) -> Iterator[Unmapped]:
    defaults = dict(leaves(Config(run_id=config.run_id)))
    # Groups without signal stay by default there, and are dropped by default here.
    listed = missing | ({"filters.zero_signal"} if config.filters.zero_signal else set())
    sections: dict[str, dict[str, Any]] = {}
    for key, value in leaves(config):
        parts = key.split(".")
        above = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        name = next((name for name in above if name in REASONS), None)
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


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a configuration with their values."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _sampled(config: Config, *, one_shot: bool) -> Iterator[VerlField]:
    context, new, policy = config.policy.context_length, config.sampling.max_tokens, config.policy
    yield VerlField("data.max_prompt_length", context - new)
    # An episode's response has all its turns, and what the environment says between them.
    response = new if one_shot else context - 1
    yield VerlField("data.max_response_length", response, ("sampling.max_tokens",))
    yield VerlField("data.shuffle", False)  # rows are in the order of the run
    yield VerlField("data.truncation", "error")
    yield VerlField("data.return_raw_chat", True)
    path, model = policy.hf_path if policy.init == "hf" else None, "actor_rollout_ref.model"
    yield VerlField(f"{model}.path", path or MISSING, ("policy.init", "policy.hf_path"))
    if policy.tokenizer not in ("characters", policy.hf_path):
        yield VerlField(f"{model}.tokenizer_path", policy.tokenizer)
    yield VerlField(f"{ROLLOUT}.name", "vllm")
    yield VerlField(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    yield VerlField(f"{ROLLOUT}.top_k", config.sampling.top_k or -1, ("sampling.top_k",))
    yield VerlField(f"{ROLLOUT}.calculate_log_probs", True)
    yield VerlField(f"{ROLLOUT}.val_kwargs.do_sample", config.evaluation.temperature > 0)


def _trained(config: Config, train_examples: int) -> Iterator[VerlField]:
    training, per_round = config.training, config.rollouts.groups_per_round
    betas = [training.beta1, training.beta2]
    yield VerlField(f"{ACTOR}.optim.betas", betas, ("training.beta1", "training.beta2"))
    # Prompts of an optimizer step: rollouts here, prompts there.
    size, wanted = config.rollouts.group_size, config.batching.sequences_per_step
    key = f"{ACTOR}.ppo_mini_batch_size"
    if wanted is None:
        yield VerlField(key, per_round)
    else:
        prompts = wanted // size if wanted % size == 0 else MISSING
        yield VerlField(key, prompts, ("batching.sequences_per_step",))
    passes = -(-config.rounds * per_round // max(train_examples, 1))
    yield VerlField("trainer.total_epochs", max(1, passes))
    yield VerlField("trainer.save_freq", 1)
    yield VerlField("trainer.experiment_name", config.run_id)
    yield VerlField("trainer.logger", ["console"])
    yield VerlField("trainer.n_gpus_per_node", 1)


def _objective(config: Config) -> Iterator[VerlField]:
    objective = config.objective
    estimator, scale = _ESTIMATORS.get(objective.advantage), objective.advantage_scale
    grouped = objective.advantage in ("grpo", "dr_grpo") and scale == "group_std"
    if scale not in ("default", "none") and not grouped:
        estimator = None
    keys = ("objective.advantage", "objective.advantage_scale")
    yield VerlField("algorithm.adv_estimator", estimator or MISSING, keys)
    divided = scale == "group_std" or (scale == "default" and objective.advantage == "grpo")
    yield VerlField("algorithm.norm_adv_by_std_in_grpo", divided)
    loss = _LOSSES.get((objective.surrogate, objective.ratio_level))
    one_step = config.training.epochs == 1 and config.batching.sequences_per_step is None
    if one_step and objective.surrogate in ("reinforce", "ppo_clip"):
        # Ratios are 1 in the only step of a round: their level makes no difference.
        loss = "vanilla"
    keys = ("objective.surrogate", "objective.ratio_level")
    yield VerlField(f"{ACTOR}.policy_loss.loss_mode", loss or MISSING, keys)
    yield VerlField(f"{ACTOR}.clip_ratio", objective.clip_high)
    yield VerlField(f"{ACTOR}.clip_ratio_c", objective.clip_dual or NEVER, ("objective.clip_dual",))
    aggregation = _AGGREGATIONS[objective.aggregation]
    yield VerlField(f"{ACTOR}.loss_agg_mode", aggregation, ("objective.aggregation",))
    weight, estimator = objective.kl_coefficient, _KL[objective.kl_estimator]
    rewarded = objective.kl_placement == "reward"
    keys = ("objective.kl_coefficient", "objective.kl_placement", "objective.kl_estimator")
    yield VerlField(f"{ACTOR}.use_kl_loss", weight > 0 and not rewarded, keys)
    yield VerlField(f"{ACTOR}.kl_loss_coef", weight)
    yield VerlField(f"{ACTOR}.kl_loss_type", estimator)
    if rewarded:
        yield VerlField("algorithm.use_kl_in_reward", weight > 0)
        yield VerlField("algorithm.kl_penalty", estimator)
        yield VerlField("algorithm.kl_ctrl.kl_coef", weight)
    kind, section = objective.importance_correction, "algorithm.rollout_correction"
    low, high = objective.correction_low, objective.correction_high
    # Weights between 1/n and n, or 0 where they are outside (IcePop); verl truncates from above.
    level = None if kind in ("none", "rejected") else objective.correction_level
    threshold: float | str = high if kind == "truncated" else f"{low:g}_{high:g}"
    expressible = level is None or (low == 0 if kind == "truncated" else low > 0)
    names = ("importance_correction", "correction_level", "correction_low", "correction_high")
    keys = tuple(f"objective.{name}" for name in names)
    yield VerlField(f"{section}.rollout_is", level if expressible else MISSING, keys)
    if level is not None and expressible:
        yield VerlField(f"{section}.rollout_is_threshold", threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlExport:
    """Rows that were written by split, and the settings that verl has no place for."""

    train: int
    val: int
    unmapped: tuple[Unmapped, ...]


def export_verl(config: Config, folder: Path) -> VerlExport:
    """Write the whole folder or none. InputError where it exists or groups are pushed."""
    if folder.exists():
        raise InputError(f"{folder} exists, and is not overwritten: name another folder")
    if config.rollouts.source == "pushed":
        raise InputError(
            "rollouts.source: expected null, found pushed: verl samples the groups of its prompts"
        )
    with whole_or_absent(folder) as partial:
        partial.mkdir(parents=True)
        return _write(config, partial, folder.absolute())


def _write(config: Config, partial: Path, folder: Path) -> VerlExport:
    environment = environment_of(config)
    parts = parts_of(environment, config.environment)
    for part in parts:
        if part.environment.returns_rollouts:
            raise InputError(
                f"environment {part.environment.name!r} samples its rollouts by itself: expected "
                "one whose turns verl can sample"
            )
    count = min(config.rounds * config.rollouts.groups_per_round, EXAMPLES_MAX)
    counts = {"train": count, "val": min(config.evaluation.examples, EXAMPLES_MAX)}
    splits: dict[str, tuple[Split, int]] = {
        "train": ("train", config.environment.train_seed),
        "val": ("eval", config.environment.eval_seed),
    }
    for name, (split, seed) in splits.items():
        rows = []
        for number in range(counts[name]):
            example = environment.example(seed, number, split)
            part = part_for(environment, config.environment, example)
            rows.append(_row(number, example, episodes=part.environment.has_episodes))
        write_plain(partial / f"{name}.parquet", pa.Table.from_pylist(rows, schema=_SCHEMA))
    _write_process(config, partial)
    one_shot = not any(part.environment.has_episodes for part in parts)
    fields, unmapped = verl_fields(config, train_examples=count, one_shot=one_shot)
    tree: dict[str, Any] = {
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "defaults": ["ppo_trainer", "_self_"],
    }
    for field in [*fields, *_places(folder, one_shot=one_shot)]:
        *above, name = field.key.split(".")
        section = tree
        for key in above:
            section = section.setdefault(key, {})
        section[name] = field.value
    lines = [_HEAD.format(folder=folder, run_id=config.run_id, rollout=ROLLOUT)]
    if unmapped:
        lines += ["# Settings of marin-rl that verl does not have:\n"]
        lines += [f"#   {each}\n" for each in unmapped]
    text = "".join(lines) + yaml.safe_dump(tree, sort_keys=False)
    (partial / "verl.yaml").write_text(text, encoding="utf-8")
    return VerlExport(**counts, unmapped=tuple(unmapped))


def _row(number: int, example: Example, *, episodes: bool) -> dict[str, Any]:
    """An example as a row of verl's dataset.

    The whole example is in `extra_info.example` as JSON, from which it is scored and played.
    """
    try:
        encoded = orjson.dumps(example).decode()
    except TypeError as error:
        raise InputError(f"example {example.example_id} is not JSON: {error}") from None
    return {
        "data_source": example.environment,
        "prompt": [{"role": m.role, "content": m.content} for m in example.messages],
        "ability": example.environment,
        "reward_model": {"style": "rule", "ground_truth": example.answer or ""},
        "extra_info": {"split": example.split, "index": number, "example": encoded},
        "agent_name": EPISODES if episodes else ONE_TURN,
    }


def _write_process(config: Config, partial: Path) -> None:
    """Write what the process of marin-rl needs, and what starts it."""
    tree = config.model_dump(mode="json")
    (partial / "marin_rl.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    for digest, spec in files_in(tree).items():
        copy = partial / spec.module
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source_of(digest))
    settings = {"python": sys.executable, "folder": str(Path.cwd())}
    (partial / "marin_rl_relay.json").write_text(json.dumps(settings) + "\n")
    for name in FILES:
        text = (files("marin_rl.integrations") / "verl_files" / name).read_text(encoding="utf-8")
        (partial / name).write_text(text, encoding="utf-8")
    loops = [{"name": EPISODES, "_target_": "marin_rl_agent_loop.EpisodeAgentLoop"}]
    (partial / "agent_loops.yaml").write_text(yaml.safe_dump(loops, sort_keys=False))


def _places(folder: Path, *, one_shot: bool) -> Iterator[VerlField]:
    yield VerlField("data.train_files", [str(folder / "train.parquet")])
    yield VerlField("data.val_files", [str(folder / "val.parquet")])
    reward = "reward.custom_reward_function"
    yield VerlField(f"{reward}.path", str(folder / "marin_rl_reward.py"))
    yield VerlField(f"{reward}.name", "compute_score")
    agent = f"{ROLLOUT}.agent"
    yield VerlField(f"{agent}.default_agent_loop", ONE_TURN if one_shot else EPISODES)
    if not one_shot:
        yield VerlField(f"{agent}.agent_loop_config_path", str(folder / "agent_loops.yaml"))
    yield VerlField("ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH", str(folder))
