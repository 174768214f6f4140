"""Several environments in one run: their order, their own seeds, limits and scores."""

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakePolicyServer, served_policy

from marin_rl.config import Config, fingerprint_fields, load_config
from marin_rl.environments.checks import environment_of
from marin_rl.environments.registry import Mixture, order_in, order_of
from marin_rl.errors import ConfigError
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.rollouts.evaluate import evaluate_round, held_out_sets
from marin_rl.rollouts.generate import examples_of, generate_shard, shard_requests
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import decode_shard, groups_of
from marin_rl.types import ServedPolicy

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "configs/debug.yaml"
PAGE = (ROOT / "docs/your-environment.md").read_text(encoding="utf-8")
MODEL = served_model_id("policy", 0, "ab" * 32)
ECHO: dict[str, Any] = {"name": "echo", "weight": 1}
SHORT: dict[str, Any] = {"name": "echo", "label": "short", "options": {"letters_max": 1}}
PAIR = [ECHO, SHORT | {"weight": 3, "sampling": {"max_tokens": 3, "stop": ["!"]}}]


def configured(root: Path, entries: list[dict[str, Any]] = PAIR, *items: str) -> Config:
    return load_config(DEBUG, [f"root={root}", f"environment={json.dumps(entries)}", *items])


def policy_of(server: FakePolicyServer) -> ServedPolicy:
    return served_policy(server.url, MODEL)


@pytest.mark.parametrize("seed", range(20))
def test_counts_stay_within_one_of_their_share_and_no_index_is_skipped(seed: int) -> None:
    draw = random.Random(seed)
    weights = tuple(draw.randint(1, 30) for _ in range(draw.randint(2, 9)))
    order, seen, cycle = order_of(weights), [0] * len(weights), sum(weights)
    for index in range(2 * cycle + 3):
        place, own = order.at(index)
        assert own == seen[place], (seed, index)
        seen[place] += 1
        for k, weight in enumerate(weights):
            assert abs(seen[k] * cycle - (index + 1) * weight) < cycle, (seed, index, k)
            assert order.count(k, index + 1) == seen[k]
    assert [order.count(k, cycle) for k in range(len(weights))] == list(weights)


def test_every_round_has_exact_proportions_and_fresh_examples_with_ids_of_their_own(tmp_path):
    config = configured(tmp_path)  # 4 groups a round, weights 1 and 3
    rounds = [
        [example for shard in range(2) for example in examples_of(config, round, shard)]
        for round in range(3)
    ]
    for examples in rounds:
        assert Counter(e.environment for e in examples) == {"echo": 1, "short": 3}
    every = [example for examples in rounds for example in examples]
    assert len({example.example_id for example in every}) == len(every)
    # seeds count from the environment's own train_seed
    assert [e.seed for e in every if e.environment == "echo"] == [0, 1, 2]
    assert [e.seed for e in every if e.environment == "short"] == list(range(9))


def test_weights_are_read_as_a_ratio(tmp_path: Path) -> None:
    entries = [ECHO | {"weight": 0.1}, SHORT | {"weight": 0.3}]
    mixture = configured(tmp_path, entries).environment.mixture
    assert mixture is not None
    assert order_in(mixture).weights == (1, 3)


def test_one_environment_is_what_it_was_before_there_were_lists(tmp_path: Path) -> None:
    config = load_config(DEBUG, [f"root={tmp_path}"])
    assert "mixture" not in fingerprint_fields(config.environment)
    assert "mixture" not in config.model_dump(mode="json")["environment"]
    assert not isinstance(environment_of(config), Mixture)
    assert examples_of(config, 0, 0)[0].example_id == "train-0-0"


def test_a_list_is_read_back_from_what_the_run_recorded(tmp_path: Path) -> None:
    run = Run.create_or_open(configured(tmp_path, PAIR, "environment.pass_environment=[JUDGE]"))
    again = Run.open(str(tmp_path), run.run_id)
    assert fingerprint_fields(again.config) == fingerprint_fields(run.config)
    assert run.config.environment.pass_environment == ("JUDGE",)
    assert again.config.environment.pass_environment == ()  # its user's alone
    built = environment_of(run.config)
    assert isinstance(built, Mixture)
    assert {part.config.pass_environment for part in built.parts} == {("JUDGE",)}


def test_each_environment_samples_with_its_own_limits(tmp_path: Path) -> None:
    run = Run.create_or_open(configured(tmp_path))
    built = environment_of(run.config)
    requests = [*shard_requests(run, 0, 0, built), *shard_requests(run, 0, 1, built)]
    limits = {(r.example.environment, r.sampling.max_tokens, r.sampling.stop) for r in requests}
    assert limits == {("echo", 8, ()), ("short", 3, ("!",))}


def test_a_shard_and_an_evaluation_are_scored_and_counted_by_environment(tmp_path: Path) -> None:
    run = Run.create_or_open(configured(tmp_path))
    with FakePolicyServer(MODEL) as server:
        ref = asyncio.run(generate_shard(run, 0, 1, policy_of(server)))
        evaluated = asyncio.run(evaluate_round(run, 0, policy_of(server)))
    groups = groups_of(decode_shard(run.store.read(ref.slot)))
    assert [group.example.environment for group in groups] == ["echo", "short"]
    for group in groups:
        assert all(rollout.reward is not None for rollout in group.rollouts)
    manifest = manifest_of(run.store, evaluated)
    held_out = groups_of(decode_shard(run.store.read(f"{manifest.slot}/{manifest.parts[0].name}")))
    assert len({group.example.example_id for group in held_out}) == 8
    metrics = manifest.totals
    assert metrics["eval/examples"] == 8  # 4 of each
    for label in ("echo", "short"):
        assert f"eval/{label}/pass@1" in metrics
    assert [held_out.name for held_out in held_out_sets(run.config)] == ["echo", "short"]


@pytest.mark.parametrize(
    ("entries", "items", "words"),
    [
        ([ECHO], (), "at least two, found 1"),
        ([ECHO, ECHO], (), "environments 0 and 1 are both called 'echo': give each a `label`"),
        ([ECHO | {"weight": 0}, SHORT], (), "greater than 0"),
        ([ECHO | {"weight": 0.12345}, SHORT], (), "expected a ratio of whole numbers"),
        ([ECHO, SHORT | {"weigth": 2}], (), "unknown key"),
        ([ECHO, [ECHO, SHORT]], (), "cannot be a list itself"),
        ([ECHO, SHORT | {"sampling": {"temperature": 0.5}}], (), "at one temperature"),
        ([ECHO, SHORT | {"sampling": {"max_tokens": 9}}], (), "above sampling.max_tokens (8)"),
        ([ECHO, SHORT | {"pass_environment": ["KEY"]}], (), "holds for all environments together"),
        (PAIR, (f"sft.environment={json.dumps(PAIR)}",), "expected one environment, found a list"),
        (PAIR, ("environment.train_seed=3",), "every environment of a list has its own"),
    ],
)
def test_lists_that_no_run_can_have_are_refused(tmp_path, entries, items, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        configured(tmp_path, entries, *items)


def test_seeds_of_one_name_lie_apart(tmp_path: Path) -> None:
    same = ECHO | {"label": "again"}
    with pytest.raises(ConfigError, match=r"environment\.0\.train_seed 0 with 6 .* share examples"):
        environment_of(configured(tmp_path, [ECHO, same]))
    environment_of(configured(tmp_path, [ECHO, same | {"train_seed": 1000}]))
    held_out = SHORT | {"eval_seed": 2}
    with pytest.raises(ConfigError, match=r"environment\.1\.eval_seed 2 reaches 5"):
        environment_of(configured(tmp_path, [ECHO, held_out]))


def test_the_list_of_the_docs_is_valid(tmp_path: Path) -> None:
    for name, text in re.findall(
        r"```\w+\n# (envs\.py|guess\.py|mixed\.yaml)\n(.*?)```", PAGE, re.DOTALL
    ):
        (tmp_path / name).write_text(text)
    config = load_config(tmp_path / "mixed.yaml", [f"root={tmp_path}"])
    counts = Counter(example.environment for example in examples_of(config, 0, 0))
    assert counts == {"echo": 4, "Counting": 8, "Guess": 4}
    built = environment_of(config)
    assert isinstance(built, Mixture)
    assert [part.config.turns_max for part in built.parts] == [None, None, 3]
