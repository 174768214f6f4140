"""Whole scripts of TRL and verl next to our YAML: each setting of theirs is that of its key here.

The script, the YAML, the rows and the rewards are those of docs/coming-from-trl-verl.md, and the
keys side by side those of peers.csv.
"""

import ast
import json
import re
import shlex
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from support.chat_folders import QWEN3, chat_folder
from support.hf_models import config_of
from test_doc_commands import blocks

from marin_rl.config import Config, load_config, value_at
from marin_rl.config.peers import PeerKey, peer_keys
from marin_rl.doctor.engines import STAGES
from marin_rl.doctor.stages import examine
from marin_rl.planning import plan

PAGE = "docs/coming-from-trl-verl.md"
MODEL = "/models/Qwen3-0.6B"
# Documented defaults of TRL 1.16 and verl 0.9 that a whole script relies on.
TRL_DEFAULTS = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "bf16": True,
    "delta": None,
    "epsilon": 0.2,
    "gradient_checkpointing": True,
    "importance_sampling_level": "token",
    "loss_type": "dapo",
    "lr_scheduler_type": "linear",
    "mask_truncated_completions": False,
    "max_grad_norm": 1.0,
    "num_iterations": 1,
    "scale_rewards": "group",
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "use_bias_correction_kl": True,
    "weight_decay": 0.0,
}
VERL_DEFAULTS = {
    "actor.clip_ratio_c": 3.0,
    "actor.clip_ratio_high": 0.2,
    "actor.clip_ratio_low": 0.2,
    "actor.entropy_coeff": 0,
    "actor.grad_clip": 1.0,
    "actor.loss_agg_mode": "token-mean",
    "actor.optim.betas": [0.9, 0.999],
    "actor.optim.lr_scheduler_type": "constant",
    "actor.optim.lr_warmup_steps": 0,
    "actor.optim.weight_decay": 0.01,
    "actor.policy_loss.loss_mode": "vanilla",
    "actor.ppo_epochs": 1,
    "model.enable_gradient_checkpointing": True,
    "rollout.temperature": 1.0,
    "rollout.top_k": -1,
    "rollout.top_p": 1,
}


def completions(config: Config) -> int:
    return config.rollouts.groups_per_round * config.rollouts.group_size


Rule = Callable[[Config, Any, Mapping[str, Any]], bool]


def reward_entries(config: Config) -> list[dict[str, Any]]:
    """Functions of `environment.options.reward` with their weights, without digests of files."""
    given = config.environment.options["reward"]
    listed = given if isinstance(given, list) else [given]
    entries = [each if isinstance(each, dict) else {"function": each} for each in listed]
    return [each | {"function": each["function"].partition("#")[0]} for each in entries]


# What is no equality of one value with one value.
TRL_RULES: dict[str, Rule] = {
    "gradient_accumulation_steps": lambda c, value, args: (
        completions(c) == value * args["per_device_train_batch_size"]
    ),
    "lr_scheduler_type": lambda c, value, args: (
        (c.training.schedule, c.training.schedule_steps) == (value, args["max_steps"])
    ),
    "output_dir": lambda c, value, _: value == f"{Path(c.root).name}/{c.run_id}",
    "peft_config.target_modules": lambda c, value, _: (
        c.policy.lora is not None and list(c.policy.lora.modules) == [value]
    ),
    "peft_config.lora_alpha": lambda c, value, _: (
        c.policy.lora is not None
        and (c.policy.lora.alpha, c.policy.lora.learning_rate_factor) == (value, 1)
    ),
    "reward_funcs": lambda c, value, _: (
        [each["function"] for each in reward_entries(c)] == [f"rewards.py:{name}" for name in value]
    ),
    "reward_weights": lambda c, value, _: (
        [each.get("weight", 1.0) for each in reward_entries(c)] == value
    ),
    "train_dataset": lambda c, value, _: Path(c.environment.options["path"]).name == value,
}
VERL_RULES: dict[str, Rule] = {
    "actor.kl_loss_type": lambda c, value, _: (
        c.objective.kl_estimator == {"low_var_kl": "k3"}[value]
    ),
    "actor.optim.lr_scheduler_type": lambda c, value, _: c.training.schedule == value,
    "actor.policy_loss.loss_mode": lambda c, value, _: (
        (value, c.objective.surrogate, c.objective.ratio_level) == ("vanilla", "ppo_clip", "token")
    ),
    "actor.ppo_mini_batch_size": lambda c, value, _: (
        c.batching.sequences_per_step == value * c.rollouts.group_size
    ),
    "custom_reward_function.name": lambda c, value, _: reward_entries(c)[0]["function"].endswith(
        f":{value}"
    ),
    "custom_reward_function.path": lambda c, value, _: reward_entries(c)[0]["function"].startswith(
        f"{value}:"
    ),
    "data.filter_overlong_prompts": lambda c, value, _: (
        (c.environment.long_prompts == "drop") == value
    ),
    "data.truncation": lambda _, value, __: value == "error",
    "data.max_prompt_length": lambda c, value, _: (
        c.policy.context_length == value + c.sampling.max_tokens
    ),
    "data.train_files": lambda c, value, _: Path(c.environment.options["path"]).name == value,
    "data.val_files": lambda c, value, _: (
        [Path(each.options["path"]).name for each in (c.evaluation.sets or {}).values()] == [value]
    ),
    "rollout.gpu_memory_utilization": lambda c, _, __: c.inference == Config().inference,
    "rollout.name": lambda c, _, __: c.inference == Config().inference,
    "rollout.top_k": lambda c, value, _: c.sampling.top_k == max(value, 0),
    "trainer.n_gpus_per_node": lambda c, value, args: (
        prod((c.mesh.data, c.mesh.fsdp, c.mesh.tensor)) == value * args["trainer.nnodes"]
    ),
    "trainer.nnodes": lambda c, value, _: value == 1,
}


def row_of(library: str, key: str, value: Any) -> PeerKey:
    """The entry of peers.csv for a key, by its value where the table tells values apart."""
    rows = [
        peer
        for peer in peer_keys()
        if peer.library == library
        and f".{key}".endswith(f".{peer.key}")
        and peer.value in {None, str(value)}
    ]
    assert rows, f"peers.csv has no row for {key} of {library}"
    return rows[0]


def agrees(config: Config, row: PeerKey, value: Any) -> bool:
    """Compare the value of a key of theirs with that of the key, or the keys, here."""
    pairs = re.findall(r"`([\w.]+)(?:: ([^`]+))?`", row.here)
    values = value if isinstance(value, list) else [value] * len(pairs)
    for (name, fixed), each in zip(pairs, values, strict=True):
        ours = value_at(config, name)
        if fixed and (ours == yaml.safe_load(fixed)) != (each is not False):
            return False
        if not fixed and (ours if each is not True else bool(ours)) != each:
            return False
    return True


def disagreements(
    config: Config, library: str, args: Mapping[str, Any], rules: Mapping[str, Rule]
) -> list[str]:
    """Keys of theirs whose values are not those of our YAML."""
    wrong = []
    for key, value in args.items():
        row = row_of(library, key, value)
        rule = rules.get(row.key)
        agree = rule(config, value, args) if rule else agrees(config, row, value)
        wrong += [] if agree else [f"{key}={value!r}: {row.here}"]
    return wrong


def literal(node: ast.expr) -> Any:
    """The value of an argument: a literal, names of functions, or a file of rows."""
    if isinstance(node, ast.List) and all(isinstance(each, ast.Name) for each in node.elts):
        return [each.id for each in node.elts if isinstance(each, ast.Name)]
    if isinstance(node, ast.Call):
        files = [each.value for each in node.keywords if each.arg == "data_files"]
        return ast.literal_eval(files[0])
    return ast.literal_eval(node)


def trl_arguments(script: str) -> dict[str, Any]:
    """Arguments of GRPOConfig, GRPOTrainer and LoraConfig in a script."""
    prefixes = {"GRPOConfig": "", "GRPOTrainer": "", "LoraConfig": "peft_config."}
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    return {
        f"{prefixes[call.func.id]}{each.arg}": literal(each.value)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in prefixes
        for each in call.keywords
        if each.arg not in {"args", "peft_config"}
    }


def verl_arguments(command: str) -> dict[str, Any]:
    """Overrides of a command of verl, as values of YAML."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    pairs = [word.partition("=") for word in words[3:]]
    return {key: number(value) for key, _, value in pairs}


def number(text: str) -> Any:
    """A value as YAML reads it; `1e-6` is a number, as it is in OmegaConf."""
    return float(text) if re.fullmatch(r"\d+e-\d+", text) else yaml.safe_load(text)


def block(language: str, part: str) -> str:
    """The code block of the page that has this text."""
    (found,) = [each for each in blocks(PAGE, language) if part in each]
    return found


def write_page(folder: Path) -> None:
    """Write the files of the page next to each other, with a small model's folder for theirs."""
    model = str(chat_folder(folder / "model", QWEN3))
    settings = config_of("qwen3") | {"vocab_size": 512, "max_position_embeddings": 2048}
    (folder / "model/config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name in ("sums.yaml", "gsm8k.yaml"):
        text = block("yaml", f"# {name}").replace(MODEL, model)
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("rewards.py", "reward.py"):
        (folder / name).write_text(block("python", f"# {name}"), encoding="utf-8")
    shown = [json.loads(line) for line in block("jsonl", '"solution"').splitlines()]
    (message,) = shown[0]["prompt"]
    texts = [[message | {"content": f"{n} + 2?"}] for n in range(400)]
    prompts = [shown[0] | {"prompt": each, "solution": str(n + 2)} for n, each in enumerate(texts)]
    assert {json.dumps(row) for row in shown[:1]} <= {json.dumps(row) for row in prompts}
    lines = "".join(f"{json.dumps(row)}\n" for row in prompts)
    (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")
    verl = [
        {
            "data_source": "sums",
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["solution"]},
        }
        for row in prompts
    ]
    for name in ("train.parquet", "test.parquet"):
        pl.DataFrame(verl).write_parquet(folder / name)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_page(folder)
    return folder


def test_the_yaml_has_the_settings_of_the_script_of_trl(page: Path):
    arguments = trl_arguments(block("python", "GRPOTrainer"))
    assert len(arguments) >= 18
    arguments["model"] = str(page / "model")
    config = load_config(page / "sums.yaml", [])
    assert disagreements(config, "TRL", TRL_DEFAULTS | arguments, TRL_RULES) == []


def test_the_yaml_has_the_settings_of_the_command_of_verl(page: Path):
    arguments = verl_arguments(block("sh", "main_ppo"))
    assert len(arguments) >= 25
    arguments["actor_rollout_ref.model.path"] = str(page / "model")
    config = load_config(page / "gsm8k.yaml", [])
    assert disagreements(config, "verl", VERL_DEFAULTS | arguments, VERL_RULES) == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("training.schedule=constant", "lr_scheduler_type"),
        ("rollouts.groups_per_round=4", "gradient_accumulation_steps"),
        ("objective.kl_estimator=k3", "use_bias_correction_kl"),
        ("policy.lora.learning_rate_factor=10", "peft_config.lora_alpha"),
        ("policy.chat_template_options={}", "chat_template_kwargs"),
    ],
)
def test_another_setting_is_a_disagreement(page: Path, change: str, key: str):
    arguments = TRL_DEFAULTS | trl_arguments(block("python", "GRPOTrainer"))
    arguments["model"] = str(page / "model")
    config = load_config(page / "sums.yaml", [change])
    wrong = disagreements(config, "TRL", arguments, TRL_RULES)
    assert [each.partition("=")[0] for each in wrong] == [key]


# Those that need no weights, no device and no server.
CHECKS = ("environment", "data", "tokenizer", "chat template", "prompts", "tools", "reward")


@pytest.mark.parametrize("name", ["sums.yaml", "gsm8k.yaml"])
def test_doctor_and_the_plan_take_the_yaml_with_the_users_files(page: Path, name: str):
    config = load_config(page / name, [])
    findings = list(examine(config, [stage for stage in STAGES if stage.name in CHECKS]))
    assert [each for each in findings if not each.passed] == []
    assert len(findings) == len(CHECKS)
    assert plan(config)
