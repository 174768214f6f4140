"""A folder with which verl trains on an environment of ours (`marin-rl export CONFIG --verl`).

Owns the files: prompts in Parquet as verl's dataset reads them, the reward, the agent loop, and a
configuration for its PPO trainer. verl has other versions of our dependencies, so all that is of
marin-rl runs in a process with its own interpreter (`rollouts.relay`). Leaves out what a setting
means there (`fields`).
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import yaml

from marin_rl.config import Config
from marin_rl.environments.checks import environment_of
from marin_rl.environments.episode import HasEpisodes
from marin_rl.environments.finished import ReturnsRollouts
from marin_rl.environments.mixture import part_for, parts_of
from marin_rl.errors import InputError
from marin_rl.rollouts.verl.fields import ROLLOUT, Shape, Unmapped, VerlField, verl_fields
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlExport:
    """Rows that were written by split, and the settings that verl has no place for."""

    train: int
    val: int
    unmapped: tuple[Unmapped, ...]


def export_verl(config: Config, folder: Path) -> VerlExport:
    """Write the folder; nothing is there until it is whole.

    Raises InputError for a folder that exists, for groups that are pushed, and as environments do.
    """
    if folder.exists():
        raise InputError(f"{folder} exists, and is not overwritten: name another folder")
    if config.rollouts.source == "pushed":
        raise InputError(
            "rollouts.source: expected null, found pushed: verl samples the groups of its prompts"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        written = _write(config, partial, folder.absolute())
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _write(config: Config, partial: Path, folder: Path) -> VerlExport:
    environment = environment_of(config)
    for part in parts_of(environment, config.environment):
        if isinstance(part.environment, ReturnsRollouts):
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
        examples = [environment.example(seed, n, split) for n in range(counts[name])]
        played = [
            isinstance(part_for(environment, config.environment, each).environment, HasEpisodes)
            for each in examples
        ]
        write_plain(partial / f"{name}.parquet", rows(examples, played))
    _write_process(config, partial)
    one_shot = not any(
        isinstance(part.environment, HasEpisodes)
        for part in parts_of(environment, config.environment)
    )
    fields, unmapped = verl_fields(config, Shape(train_examples=count, one_shot=one_shot))
    _write_settings(
        [*fields, *_places(folder, one_shot=one_shot)], unmapped, partial, folder, config
    )
    return VerlExport(**counts, unmapped=tuple(unmapped))


def rows(examples: Sequence[Example], played: Sequence[bool]) -> pa.Table:
    """Examples as rows of verl's dataset; `played` ones have episodes.

    The whole example is in `extra_info.example` as JSON, from which it is scored and played.
    """
    return pa.Table.from_pylist(
        [
            _row(n, each, episodes)
            for n, (each, episodes) in enumerate(zip(examples, played, strict=True))
        ],
        schema=_SCHEMA,
    )


def _row(number: int, example: Example, episodes: bool) -> dict[str, Any]:  # noqa: FBT001
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
        text = (files("marin_rl.rollouts.verl") / "files" / name).read_text(encoding="utf-8")
        (partial / name).write_text(text, encoding="utf-8")
    loops = [{"name": EPISODES, "_target_": "marin_rl_agent_loop.EpisodeAgentLoop"}]
    (partial / "agent_loops.yaml").write_text(yaml.safe_dump(loops, sort_keys=False))


def _places(folder: Path, *, one_shot: bool) -> Iterator[VerlField]:
    yield VerlField(key="data.train_files", value=[str(folder / "train.parquet")])
    yield VerlField(key="data.val_files", value=[str(folder / "val.parquet")])
    reward = "reward.custom_reward_function"
    yield VerlField(key=f"{reward}.path", value=str(folder / "marin_rl_reward.py"))
    yield VerlField(key=f"{reward}.name", value="compute_score")
    agent = f"{ROLLOUT}.agent"
    yield VerlField(key=f"{agent}.default_agent_loop", value=ONE_TURN if one_shot else EPISODES)
    if not one_shot:
        loops = str(folder / "agent_loops.yaml")
        yield VerlField(key=f"{agent}.agent_loop_config_path", value=loops)
    variables = "ray_kwargs.ray_init.runtime_env.env_vars"
    yield VerlField(key=f"{variables}.PYTHONPATH", value=str(folder))


def _write_settings(
    fields: Sequence[VerlField],
    unmapped: Sequence[Unmapped],
    partial: Path,
    folder: Path,
    config: Config,
) -> None:
    tree: dict[str, Any] = {
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "defaults": ["ppo_trainer", "_self_"],
    }
    for field in fields:
        _set(tree, field.key, field.value)
    lines = [_HEAD.format(folder=folder, run_id=config.run_id, rollout=ROLLOUT)]
    if unmapped:
        lines += ["# Settings of marin-rl that verl does not have:\n"]
        lines += [f"#   {each}\n" for each in unmapped]
    text = "".join(lines) + yaml.safe_dump(tree, sort_keys=False)
    (partial / "verl.yaml").write_text(text, encoding="utf-8")


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *above, name = key.split(".")
    for part in above:
        tree = tree.setdefault(part, {})
    assert isinstance(tree, Mapping), key
    tree[name] = value
