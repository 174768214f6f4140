"""Folders for verl: what is in them, and the process that plays and scores for verl."""

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from support.scripted_policies import play, write_tokenizer
from support.templates import QWEN

from marin_rl.config import Config, load_config
from marin_rl.errors import InputError
from marin_rl.integrations.verl import FILES, MISSING, VerlExport, export_verl, leaves, verl_fields
from marin_rl.tokenizers import tokenizer_for
from marin_rl.types import Message, RolloutGroup

Exported = tuple[Config, Path, VerlExport]

GUESS = '''
import random

from marin_rl.environments.base_environment import BaseEnvironment
from marin_rl.environments.episode import StepResult
from marin_rl.types import Message, RewardComponent


class Guess(BaseEnvironment):
    """A number from 0 to 9."""

    def example(self, seed, index, split):
        number = str(random.Random(seed + index).randint(0, 9))
        return self.make_example(f"0-9, game {index}", number, seed=seed, index=index, split=split)

    def episode(self, example):
        return Game(example)

    def score(self, example, completion):
        return (RewardComponent(name="near", value=1 / (1 + len(completion))),)


class Game:
    def __init__(self, example):
        self.example = example

    def start(self):
        return self.example.messages, ()

    async def step(self, turn):
        print("nothing that the other side reads")
        if turn.content == "raise":
            raise KeyError("out of order")
        if turn.content == self.example.answer:
            return StepResult(reward=0.75, done=True)
        return StepResult(messages=(Message(role="user", content=f"not {turn.content}"),))

    async def close(self):
        pass
'''
# First words differ; a turn that no end token ends is cut.
WAYS = (("1", "2", "3"), ("raise",), ("0", "1", "2"), ("4", "5", "6"))


def configuration(folder: Path, **sections: Any) -> Config:
    """A run of an environment in a file, or of `sections`, with a chat template."""
    write_tokenizer(folder / "tokenizer", QWEN, "<|im_end|>")
    (folder / "guess.py").write_text(GUESS)
    values: dict[str, Any] = {
        "run_id": "guess",
        "rounds": 3,
        "root": str(folder / "runs"),
        "policy": {
            "init": "hf",
            "hf_path": str(folder / "tokenizer"),
            "tokenizer": str(folder / "tokenizer"),
            "context_length": 256,
        },
        "environment": {"name": "guess.py:Guess", "turns_max": 3},
        "sampling": {"max_tokens": 16},
        "rollouts": {"groups_per_round": 2, "group_size": 4, "shards_per_round": 1},
        "evaluation": {"examples": 3},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values | sections))
    return load_config(folder / "config.yaml")


def scripted(messages: Sequence[Message], member: int) -> str:
    """The turn of a way that begins as the dialogue did."""
    said = [message.content for message in messages if message.role == "assistant"]
    way = next(way for way in WAYS if list(way[: len(said)]) == said) if said else WAYS[member]
    return way[len(said)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path, VerlExport]:
    """An environment of episodes, in a folder for verl."""
    folder = tmp_path_factory.mktemp("guess")
    config = configuration(folder)
    written = export_verl(config, folder / "verl")
    (folder / "guess.py").unlink()  # the folder has a copy
    return config, folder / "verl", written


@pytest.fixture(scope="module")
def relay(exported: Exported) -> Iterator[ModuleType]:
    """The module that verl's process imports from the folder, with its process of marin-rl."""
    _, folder, _ = exported
    sys.path.insert(0, str(folder))
    module = _loaded(folder / "marin_rl_relay.py")
    yield module
    sys.path.remove(str(folder))
    module.relay()._process.kill()


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def test_rows_have_the_columns_of_verl_in_the_order_of_the_run(exported):
    _, folder, written = exported
    train, held_out = rows_of(folder, "train"), rows_of(folder, "val")
    assert (written.train, written.val) == (len(train), len(held_out)) == (6, 3)
    groups = [json.loads(row["extra_info"]["example"]) for row in train]
    assert [row["reward_model"]["ground_truth"] for row in train] == [g["answer"] for g in groups]
    assert train[0]["prompt"] == [{"role": "user", "content": "0-9, game 0"}]
    assert {row["agent_name"] for row in train} == {"marin_rl_episode"}
    assert [g["seed"] for g in groups] == list(range(6))
    assert held_out[0]["extra_info"]["split"] == "eval"
    assert {path.name for path in folder.glob("*.py")} == {"guess.py", *FILES}
    settings = yaml.safe_load((folder / "verl.yaml").read_text())
    assert settings["data"]["train_batch_size"] == 2
    assert settings["actor_rollout_ref"]["rollout"]["n"] == 4
    assert settings["trainer"]["total_training_steps"] == 3
    agent = settings["actor_rollout_ref"]["rollout"]["agent"]
    assert agent["agent_loop_config_path"] == str(folder / "agent_loops.yaml")


@pytest.mark.slow
def test_episodes_have_the_tokens_and_rewards_of_a_run(exported, relay):
    config, folder, _ = exported
    tokenizer = tokenizer_for(config.policy)
    ours = play(config, scripted)

    async def played(row: dict[str, Any], member: int) -> dict[str, Any]:
        turns = iter(WAYS[member])

        async def sample(prompt_ids: list[int], tokens_max: int) -> dict[str, Any]:
            ids = tokenizer.encode(next(turns), add_special_tokens=False)
            ids = [*ids, tokenizer.eos_token_id][:tokens_max]
            return {"token_ids": ids, "logprobs": [-1.0] * len(ids)}

        return await relay.relay().play(json.loads(row["extra_info"]["example"]), sample)

    async def both() -> list[list[dict[str, Any]]]:
        rows = rows_of(folder, "train")[: len(ours)]
        members = [[played(row, member) for member in range(4)] for row in rows]
        return [list(await asyncio.gather(*group)) for group in members]

    scored = [[rollout.reward is not None for rollout in group.rollouts] for group in ours]
    assert scored == [[True, False, True, True]] * 2  # the second way raises
    for group, others in zip(ours, asyncio.run(both()), strict=True):
        _compare(group, others)


def _compare(group: RolloutGroup, others: list[dict[str, Any]]) -> None:
    """A group of ours, and what verl has of the same turns."""
    for rollout, other in zip(group.rollouts, others, strict=True):
        if rollout.reward is None:  # never trained on, here or there
            assert other["response_mask"] == [0]
            assert "out of order" in other["fault"]
            continue
        prompt = other["prompt_ids"]
        assert prompt + other["response_ids"] == rollout.token_ids.tolist()
        assert [0] * len(prompt) + other["response_mask"] == rollout.loss_mask.tolist()
        logprobs = [0.0] * len(prompt) + other["response_logprobs"]
        assert np.array_equal(np.array(logprobs, np.float32), rollout.logprobs)
        assert other["reward"] == pytest.approx(rollout.reward)
        assert other["finish_reason"] == rollout.finish_reason


@pytest.mark.slow
def test_the_reward_file_scores_a_completion(exported: Exported, relay: ModuleType) -> None:
    _, folder, _ = exported
    reward = _loaded(folder / "marin_rl_reward.py")
    (row, *_) = rows_of(folder, "train")
    scored = reward.compute_score("guess", "123", "1", row["extra_info"])
    assert scored == {"score": 0.25, "fault": 0.0}


@pytest.mark.slow
def test_a_call_that_marin_rl_refuses_raises_its_words(relay: ModuleType) -> None:
    with pytest.raises(relay.RelayError, match="messages"):
        relay.relay().score({"environment": "guess"}, "1")


@pytest.mark.slow
def test_a_turn_that_verl_cannot_sample_ends_the_episode_with_its_error(exported, relay):
    _, folder, _ = exported
    (row, *_) = rows_of(folder, "train")

    async def sample(prompt_ids: list[int], tokens_max: int) -> dict[str, Any]:
        raise ConnectionError("the server is away")

    with pytest.raises(ConnectionError, match="away"):
        asyncio.run(relay.relay().play(json.loads(row["extra_info"]["example"]), sample))


@pytest.mark.slow
def test_the_end_of_the_process_fails_its_calls(exported: Exported, relay: ModuleType) -> None:
    _, folder, _ = exported
    process = relay.Relay()
    example = json.loads(rows_of(folder, "train")[0]["extra_info"]["example"])

    async def sample(prompt_ids: list[int], tokens_max: int) -> dict[str, Any]:
        process._process.kill()
        await asyncio.sleep(60)
        return {}

    with pytest.raises(relay.RelayError, match="marin-rl ended with status -9"):
        asyncio.run(process.play(example, sample))
    with pytest.raises(relay.RelayError, match="ended"):
        process.score(example, "1")


def test_an_interpreter_without_marin_rl_says_so(exported, monkeypatch):
    _, folder, _ = exported
    monkeypatch.setenv("MARIN_RL_PYTHON", "/bin/false")
    with pytest.raises(RuntimeError, match="/bin/false cannot start"):
        _loaded(folder / "marin_rl_relay.py").Relay()


def test_folders_and_pushed_groups_are_refused(exported):
    config, folder, _ = exported
    with pytest.raises(InputError, match="is not overwritten"):
        export_verl(config, folder)
    rollouts = config.rollouts.model_copy(update={"source": "pushed"})
    with pytest.raises(InputError, match="expected null, found pushed"):
        export_verl(config.model_copy(update={"rollouts": rollouts}), folder / "other")
    assert not (folder / "other").exists()


def listed(**sections: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Values by verl's keys, and the reasons of what has none, of a configuration."""
    fields, unmapped = verl_fields(
        Config(run_id="r", **sections), train_examples=160, one_shot=True
    )
    return {f.key: f.value for f in fields}, {each.key: str(each) for each in unmapped}


def test_settings_without_a_counterpart_are_listed_with_a_reason() -> None:
    values, reasons = listed(
        objective={
            "advantage": "maxrl",
            "advantage_scale": "batch_std",
            "surrogate": "gspo",
            "ratio_level": "sequence_mean",
            "importance_correction": "truncated",
        },
        batching={"sequences_per_step": 12},
        sampling={"stop": ["\n"], "top_k": 20},
        training={"schedule": "linear", "schedule_steps": 30},
        flow={"retries": 5},
    )
    assert values["algorithm.adv_estimator"] == MISSING
    assert values["actor_rollout_ref.actor.ppo_mini_batch_size"] == MISSING  # 1.5 prompts
    assert values["actor_rollout_ref.model.path"] == MISSING
    assert values["actor_rollout_ref.actor.policy_loss.loss_mode"] == "gspo"
    assert values["actor_rollout_ref.rollout.top_k"] == 20
    assert values["algorithm.rollout_correction.rollout_is"] == "token"
    assert values["algorithm.rollout_correction.rollout_is_threshold"] == 2.0
    assert reasons.keys() >= {
        "objective.advantage",
        "objective.advantage_scale",
        "training.schedule",
        "batching.sequences_per_step",
        "policy.init",
        "sampling.stop",
        "flow",
    }
    assert reasons["flow"] == "flow (retries): verl's trainer has no flow"
    assert "without stop strings" in reasons["sampling.stop"]


def test_ratios_of_a_single_step_need_no_level() -> None:
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    values, reasons = listed(objective={"surrogate": "reinforce"})
    assert values[loss] == "vanilla"
    assert not {"objective.surrogate", "objective.ratio_level"} & reasons.keys()
    values, reasons = listed(training={"epochs": 2})  # ppo_clip by sequence
    assert values[loss] == MISSING
    assert {"objective.surrogate", "objective.ratio_level"} <= reasons.keys()


def test_no_setting_is_dropped_silently() -> None:
    config = Config(run_id="r")
    fields, _ = verl_fields(config, train_examples=160, one_shot=True)
    said = {key for field in fields for key in field.ours}
    assert len(said) <= 40
    known = dict(leaves(config))
    optional = {key for key in said if key not in known}
    assert not optional, "fields name keys that are none"
    for key, value in known.items():
        if key in said or key.startswith(("environment.", "policy.tokenizer", "run_id", "root")):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        section, _, name = key.rpartition(".")
        changed: Any = {name: value + 1}
        for part in reversed(section.split(".") if section else []):
            changed = {part: changed}
        try:
            _, reasons = listed(**changed)
        except ValueError:  # needs another key to change too
            continue
        places = {key, *(key[:at] for at, letter in enumerate(key) if letter == ".")}
        free = {"evaluation.examples", "rollouts.shards_per_round", "policy.context_length"}
        assert places & (reasons.keys() | free), key
