"""A reward model as a component: what it adds, what it refuses, and that the files name it."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes import FakePolicyServer, served_policy
from support.run_factories import group, rollout

from marin_rl.config import (
    Config,
    LearnedRewardConfig,
    fingerprint_fields,
    load_config,
    override,
    parse_config,
)
from marin_rl.errors import CommitConflict, ConfigError, RewardFault
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.rollouts.generate import generate_shard
from marin_rl.rollouts.rewards import RewardIdentity, add_model_reward, component_values
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.parquet import TableReader
from marin_rl.storage.tables.rollouts import decode_shard, groups_of, seal_round
from marin_rl.types import RewardComponent, ServedPolicy, SlotRef
from schemas.migrations import ROLLOUTS

DIGEST = "ab" * 32
SETTINGS = LearnedRewardConfig(checkpoint="runs/r/reward_model/step-00001", normalise=False)


class Lengths:
    """Judges by length: the raw reward is the number of tokens."""

    def __init__(self, digest: str = DIGEST) -> None:
        self.identity = RewardIdentity(parameters_digest=digest, mean=4.0, std=2.0)
        self.asked: list[int] = []

    def score(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        self.asked.append(len(sequences))
        return np.array([len(ids) for ids in sequences], np.float64)


def test_values_are_normalised_then_moved_then_clipped():
    raw = np.array([0.0, 4.0, 10.0])
    plain = component_values(raw, SETTINGS, Lengths().identity)
    assert plain.tolist() == [0.0, 4.0, 10.0]
    chosen = SETTINGS.model_copy(update={"normalise": True, "offset": 0.5, "clip": 2.0})
    assert component_values(raw, chosen, Lengths().identity).tolist() == [-1.5, 0.5, 2.0]


def test_only_rollouts_with_a_reward_and_tokens_are_judged_and_all_at_once():
    scorer = Lengths()
    failed = rollout("a/1", index=1, status="error")
    first = group("a", [1.0])
    groups = [replace(first, rollouts=(*first.rollouts, failed)), group("b", [0.0, None])]
    found = add_model_reward(groups, SETTINGS, scorer)
    assert scorer.asked == [2]
    (judged, left), (other, without) = (g.rollouts for g in found)
    assert left is failed
    assert without.reward is None
    assert [c.name for c in judged.reward_components] == ["correct", "reward_model"]
    assert (judged.reward, judged.turns[-1].reward) == (6.0, 6.0)
    assert other.reward == 5.0
    assert add_model_reward([group("c", [None])], SETTINGS, scorer)[0].rollouts[0].reward is None
    assert scorer.asked == [2]


def test_with_no_weight_left_the_environment_is_recorded_but_does_not_count():
    alone = SETTINGS.model_copy(update={"environment_weight": 0.0, "weight": 3.0})
    (found,) = add_model_reward([group("a", [1.0, 0.0])], alone, Lengths())
    assert [r.reward for r in found.rollouts] == [15.0, 15.0]
    assert [r.reward_components[0].value for r in found.rollouts] == [1.0, 0.0]
    assert {r.reward_components[0].weight for r in found.rollouts} == {0.0}


def test_invalid_numbers_and_taken_names_are_refused():
    class Broken(Lengths):
        def score(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
            return np.full(len(sequences), np.nan)

    with pytest.raises(RewardFault, match="gave 2 of 2 rollouts no finite reward"):
        add_model_reward([group("a", [1.0, 0.0])], SETTINGS, Broken())
    taken = SETTINGS.model_copy(update={"name": "correct"})
    with pytest.raises(RewardFault, match="named 'correct' already"):
        add_model_reward([group("a", [1.0])], taken, Lengths())


@pytest.fixture
def server() -> Iterator[FakePolicyServer]:
    with FakePolicyServer(served_model_id("policy", 0, DIGEST)) as fake:
        yield fake


def configured(root: Path, *items: str) -> Config:
    tree = load_config("configs/debug.yaml").model_dump(mode="json")
    return parse_config(override(tree, (f"root={root}", *items)))


def policy_of(server: FakePolicyServer) -> ServedPolicy:
    model = served_model_id("policy", 0, DIGEST)
    return served_policy(server.url, model, parameters_digest=DIGEST)


JUDGED = f"environment.reward_model.checkpoint={SETTINGS.checkpoint}"


def test_the_files_of_a_round_name_who_judged_it(tmp_path, server):
    policy = policy_of(server)
    run = Run.create_or_open(configured(tmp_path, JUDGED, "rollouts.shards_per_round=1"))

    def generate(scorer: Lengths) -> SlotRef:
        return asyncio.run(generate_shard(run, 0, 0, policy, scorer))

    ref = generate(Lengths())
    data = run.store.read(ref.slot)
    groups = groups_of(decode_shard(data))
    for member in (r for g in groups for r in g.rollouts):
        own, learned = member.reward_components
        assert learned == RewardComponent(
            name="reward_model", value=(len(member.token_ids) - 4) / 2, weight=1.0
        )
        assert member.reward == own.value + learned.value
    assert TableReader(data, "shard", ROLLOUTS).stamp["reward_model"] == DIGEST
    sealed = seal_round(run, 0, [ref], [policy.checkpoint])
    assert manifest_of(run.store, sealed).extra == {"reward_model": [DIGEST]}
    assert generate(Lengths()).reused
    with pytest.raises(CommitConflict):
        generate(Lengths("cd" * 32))


def test_without_one_no_file_speaks_of_it(tmp_path, server):
    config = configured(tmp_path)
    assert "reward_model" not in json.dumps(
        [config.model_dump(mode="json"), fingerprint_fields(config)]
    )
    assert "reward_model" in fingerprint_fields(configured(tmp_path, JUDGED).environment)
    run = Run.create_or_open(config)
    assert b"reward_model" not in run.store.read("run.json")
    policy = policy_of(server)
    refs = [asyncio.run(generate_shard(run, 0, shard, policy)) for shard in range(2)]
    assert b"reward_model" not in run.store.read(refs[0].slot)
    sealed = seal_round(run, 0, refs, [policy.checkpoint])
    assert b"reward_model" not in run.store.read(f"{sealed.slot}/manifest.json")


def test_a_warm_start_is_not_judged(tmp_path):
    judged = "sft.environment={name: echo, reward_model: {checkpoint: x}}"
    with pytest.raises(ConfigError, match="a warm start scores nothing"):
        configured(tmp_path, judged)
