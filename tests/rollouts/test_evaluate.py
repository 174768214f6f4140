"""Evaluation of several samples: by hand, per environment, with intervals."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from support.fakes import FakePolicyServer, served_policy
from support.run_factories import group_of, rollout

from marin_rl.analysis.verify import evaluation_of
from marin_rl.config import (
    Config,
    EnvironmentConfig,
    EvaluationConfig,
    fingerprint_fields,
    load_config,
)
from marin_rl.environments.base import answer_in
from marin_rl.environments.registry import EnvironmentPart, construct
from marin_rl.errors import ConfigError
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.metrics import is_defined
from marin_rl.rollouts.estimates import estimate
from marin_rl.rollouts.evaluate import Extractors, evaluate_round, evaluation_metrics, held_out_sets
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run
from marin_rl.types import ServedPolicy

CONFIG = EnvironmentConfig(name="echo")
ECHO = construct(CONFIG)
EXTRACTORS: Extractors = {None: EnvironmentPart(label="", config=CONFIG, environment=ECHO)}


def samples(name, rewards, words):
    """A group whose sample i says `words[i]` and earns `rewards[i]`; None failed."""
    rollouts = [
        rollout(
            f"{name}/{index}",
            index=index,
            reward=reward,
            status="complete" if reward is not None else "error",
            completion=[ord(letter) - 64 for letter in word],
        )
        for index, (reward, word) in enumerate(zip(rewards, words, strict=True))
    ]
    return group_of(name, rollouts)


GROUPS = [
    samples("one", [1.0, 0.0, 0.0, 1.0], ["A", "B", "B", "A"]),
    samples("two", [0.0, 0.0, 0.5, None], ["A", "B", "C", "D"]),
]
EVALUATION = EvaluationConfig(samples=4, k=(1, 2, 4))


def test_several_samples_by_hand():
    found = evaluation_metrics(GROUPS, EVALUATION, EXTRACTORS)
    assert all(is_defined(name) for name in found)
    assert found["eval/accuracy"] == 2 / 8
    assert found["eval/errors"] == 1 / 8
    assert found["eval/examples"] == 2
    assert found["eval/reward_mean"] == pytest.approx(2.5 / 7)
    assert found["eval/pass@1"] == pytest.approx(0.5 / 2)
    assert found["eval/pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert found["eval/pass@4"] == 0.5
    assert found["eval/mean@4"] == found["eval/mean@2"] == pytest.approx(0.25)
    assert found["eval/majority@1"] == pytest.approx(0.25)
    # AB is a tie that A, the first, wins; BA one that B wins; ABBA is A's.
    assert found["eval/majority@2"] == pytest.approx((1 + 0) / 2 / 2)
    assert found["eval/majority@4"] == 0.5
    of = estimate(np.array([1.0, 0.0]))
    assert (found["eval/pass@4/low"], found["eval/pass@4/high"]) == (of.low, of.high)
    assert found["eval/echo/pass@4"] == found["eval/pass@4"]


def test_sampled_turns_are_counted_where_there_are_several():
    of_two = GROUPS[0].rollouts[0]
    assert "eval/mean_turns" not in evaluation_metrics(GROUPS, EVALUATION, EXTRACTORS)
    said = next(turn for turn in of_two.turns if turn.inference_metadata is not None)
    answer = replace(
        of_two, turns=(*of_two.turns, replace(said, role="user", inference_metadata=None), said)
    )
    groups = [replace(GROUPS[0], rollouts=(answer, *GROUPS[0].rollouts[1:]))]
    found = evaluation_metrics(groups, EVALUATION, EXTRACTORS)
    assert is_defined("eval/mean_turns")
    # of four rollouts, one has two turns; the user's turn between them is not counted
    assert found["eval/mean_turns"] == 5 / 4


def test_a_k_beyond_the_samples_is_refused():
    with pytest.raises(ValueError, match="k reaches 8, but samples is 4"):
        EvaluationConfig(samples=4, k=(1, 8))


def test_an_environment_says_what_the_answer_is():
    options = {"dataset": "spell_backward", "answer_tag": "answer"}
    tagged = construct(EnvironmentConfig(name="reasoning_gym", options=options))
    assert answer_in(tagged, "<answer>x</answer> so <answer> dog </answer>") == "dog"
    assert answer_in(tagged, "no tag") is None
    assert answer_in(ECHO, " dog ") == "dog"
    assert answer_in(ECHO, "  ") is None


DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
MODEL = served_model_id("policy", 0, "ab" * 32)


@pytest.fixture
def server() -> Iterator[FakePolicyServer]:
    with FakePolicyServer(MODEL) as fake:
        yield fake


@pytest.fixture
def words(tmp_path: Path) -> dict[str, Any]:
    """A fixed set of three prompts, all of them for evaluation."""
    path = tmp_path / "words.jsonl"
    rows = [{"prompt": f"repeat {word}", "answer": word} for word in ("dog", "cat", "bird")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "chat", "options": {"path": str(path), "eval_fraction": 1.0}}


def configured(root: Path, **evaluation: Any) -> Config:
    settings = {"examples": 5, "samples": 3, "k": [1, 3], **evaluation}
    items = (f"evaluation.{name}={json.dumps(value)}" for name, value in settings.items())
    return load_config(DEBUG, [f"root={root}", *items])


def policy_of(server: FakePolicyServer) -> ServedPolicy:
    return served_policy(server.url, MODEL)


def test_named_sets_are_separate_and_count_no_example_twice(tmp_path, words, server):
    sets = {"words": words, "letters": {"name": "echo"}}
    run = Run.create_or_open(configured(tmp_path / "runs", sets=sets))
    ref = asyncio.run(evaluate_round(run, 0, policy_of(server)))
    (path,) = (tmp_path / "runs").rglob("evals-*.parquet")
    rows = pl.read_parquet(path)
    right = (pl.col("reward") >= 1).mean()
    by_set = rows.group_by("environment").agg(pl.len(), right).sort("environment")
    assert by_set["environment"].to_list() == ["letters", "words"]
    assert by_set["len"].to_list() == [5 * 3, 3 * 3]
    assert rows["example_id"].n_unique() == rows["group_id"].n_unique() == 8
    assert ref.summary["eval/examples"] == 8
    for name, share in zip(("letters", "words"), by_set["reward"], strict=True):
        assert ref.summary[f"eval/{name}/mean@1"] == pytest.approx(share)
    # of any three seeds the fake gets one wrong
    assert ref.summary["eval/words/pass@3"] == ref.summary["eval/words/majority@3"] == 1.0
    assert evaluation_of(run, manifest_of(run.store, ref)) == pytest.approx(dict(ref.summary))
    assert asyncio.run(evaluate_round(run, 0, policy_of(server))).reused


def test_a_runs_own_fixed_set_has_an_end_too(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"repeat {i}"}) + "\n" for i in range(40)))
    options = {"path": str(path), "eval_fraction": 0.5}
    own = f"environment={json.dumps({'name': 'chat', 'options': options})}"
    (held_out,) = held_out_sets(load_config(DEBUG, [own, "evaluation.examples=40"]))
    assert 5 < held_out.examples < 35
    asked = {held_out.example(index).example_id for index in range(held_out.examples)}
    assert len(asked) == held_out.examples
    assert held_out.example(held_out.examples).example_id in asked


def test_sets_are_part_of_what_an_evaluation_is(tmp_path: Path, words: dict[str, Any]) -> None:
    assert "sets" not in fingerprint_fields(configured(tmp_path).evaluation)
    found = fingerprint_fields(configured(tmp_path, sets={"words": words}).evaluation)["sets"]
    assert found["words"]["options"] == words["options"]


@pytest.mark.parametrize(
    ("sets", "found"),
    [
        ({}, "at least 1 item"),
        ({"a/b": {"name": "echo"}}, "should match pattern"),
        ({"a": {"name": "echo", "reward_model": {"checkpoint": "x/y"}}}, "never asks a reward"),
        ({"a": {"name": "echo", "optoins": {}}}, "evaluation.sets.a.optoins: unknown key"),
    ],
)
def test_sets_that_cannot_be_are_refused(tmp_path: Path, sets: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        configured(tmp_path, sets=sets)


def test_a_set_whose_seeds_meet_those_of_training_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, sets={"near": {"name": "echo", "eval_seed": 7}})
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.near\.eval_seed 7 reaches 11"):
        held_out_sets(config)
