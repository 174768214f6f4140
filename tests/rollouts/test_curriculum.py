"""Curricula by hand: what they weigh, which examples they choose, and that they say so."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.run_factories import commit_round, configuration, group

from marin_rl.batching.build import build_round
from marin_rl.config import Config, load_config
from marin_rl.environments.checks import environment_of
from marin_rl.environments.registry import loaded_environment
from marin_rl.rollouts.curriculum import Curriculum, chosen_example, curriculum_metrics, decide
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import rollouts_manifest

DEBUG = Path(__file__).parents[2] / "configs" / "debug.yaml"
ANSWER = "marin_rl.environments.answers:exact_match"
PAIR: list[dict[str, Any]] = [
    {"name": "echo", "weight": 1},
    {"name": "echo", "label": "short", "weight": 1, "options": {"letters_max": 1}},
]
SOLVED: dict[str, list[float]] = {
    "never": [0.0] * 4, "hard": [0.0] * 8 + [1.0], "medium": [0.0, 1.0],
    "easy": [1.0] * 8 + [0.0], "always": [1.0, 1.0],
}  # fmt: skip


def configured(root: Path, *items: str) -> Config:
    return load_config(DEBUG, [f"root={root}", f"environment={json.dumps(PAIR)}", *items])


def trained(root: Path, **settings: Any) -> Run:
    """A run of two rounds with an example in each bucket; the second has but the medium one."""
    config = configuration(
        str(root),
        asynchrony={"curriculum": "solve_rate", **settings},
        objective={"success_threshold": 1.0},
    )
    run = Run.create_or_open(config)
    groups = [group(name, rewards) for name, rewards in SOLVED.items()]
    build_round(run, 0, commit_round(run, 0, [groups]))
    build_round(run, 1, commit_round(run, 1, [[group("medium", [0.0, 1.0])]]))
    return run


def test_a_round_is_decided_by_the_rounds_that_its_policy_was_trained_on(tmp_path: Path) -> None:
    run = trained(tmp_path)
    nothing, first, both = (decide(run, 2, version) for version in range(3))
    assert nothing is not None
    assert first is not None
    assert both is not None
    assert (nothing.rounds, nothing.buckets) == ((), {})
    assert {name: bucket for (_, name), bucket in first.buckets.items()} == {
        f"echo-{name}": name for name in SOLVED
    }
    # 4 p (1 - p): 0, 32/81, 1, 32/81, 0
    assert first.signal[""] == pytest.approx((1 + 64 / 81) / 5)
    assert first.solve_rates[""] == pytest.approx((1 + 1 + 8 + 2) / (4 + 9 + 2 + 9 + 2))
    assert both.signal[""] == pytest.approx((2 + 64 / 81) / 6)
    assert both.record["rounds"] == [0, 1]
    assert both.record["buckets"] == dict.fromkeys(sorted(SOLVED), 1)
    assert decide(run, 2, 2) == both


def test_a_window_forgets(tmp_path: Path) -> None:
    decision = decide(trained(tmp_path, curriculum=1), 2, 2)
    assert decision is not None
    assert (decision.rounds, set(decision.buckets)) == ((1,), {("", "echo-medium")})


def test_metrics_compare_what_is_sampled_with_what_is_known(tmp_path: Path) -> None:
    run = trained(tmp_path)
    decision = decide(run, 1, 1)
    assert decision is not None
    metrics = curriculum_metrics(run, rollouts_manifest(run, 1), decision)
    assert metrics["curriculum/sampled/medium"] == 1
    assert metrics["curriculum/sampled/never"] == 0
    assert metrics["curriculum/known/never"] == metrics["curriculum/known/always"] == 0.2


def test_an_environment_that_teaches_nothing_is_sampled_less_and_never_forgotten(tmp_path):
    config = configured(tmp_path, "asynchrony.curriculum=solve_rate")
    run, environment = Run.create_or_open(config), environment_of(config)
    decision = Curriculum(
        kind="solve_rate", policy_version=0, rounds=(), weights={"echo": 10, "short": 1}
    )
    seen = Counter(
        example.environment
        for round in range(11)
        for example in (chosen_example(run, round, n, environment, decision) for n in range(4))
    )
    assert seen == {"echo": 40, "short": 4}


@pytest.mark.slow
def test_an_example_that_was_always_solved_is_chosen_with_its_weight(tmp_path: Path) -> None:
    """Of four choices two are each example, so one of weight 0.1 has 0.1 / 1.1 of the groups."""
    prompts = tmp_path / "prompts.jsonl"
    rows = ({"prompt": name, "answer": "x"} for name in "ab")
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"path": str(prompts), "reward": ANSWER, "eval_fraction": 1e-6}
    config = load_config(
        DEBUG,
        [
            f"root={tmp_path}", "asynchrony.curriculum=solve_rate",
            f"environment={json.dumps({'name': 'chat', 'options': options})}",
        ],
    )  # fmt: skip
    run, environment = Run.create_or_open(config), loaded_environment(config.environment, "train")
    ids = sorted({environment.example(0, n, "train").example_id for n in range(2)})
    decision = Curriculum(
        kind="solve_rate", policy_version=1, rounds=(0,), weights={"": 1},
        buckets={("", ids[0]): "always", ("", ids[1]): "medium"},
    )  # fmt: skip
    chosen = [chosen_example(run, 1, n, environment, decision) for n in range(3000)]
    share = sum(example.example_id == ids[0] for example in chosen) / 3000
    assert share == pytest.approx(0.1 / 1.1, abs=0.02)
    again = [chosen_example(run, 1, n, environment, decision) for n in range(1500, 1504)]
    assert again == chosen[1500:1504], "whichever shard asks"
