"""Held-out sets that are smaller than configured, and facts about rows, are said before a run."""

import json
from pathlib import Path

import pytest

from marin_rl.config import Config, load_config, parse_config
from marin_rl.rollouts.data_warnings import data_warnings


def configured(folder: Path, examples: int) -> Config:
    rows = [{"id": f"p{number}", "prompt": f"{number}?", "answer": "1"} for number in range(200)]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = load_config("configs/debug.yaml").model_dump(mode="json")
    tree["environment"] |= {"name": "chat", "options": {"path": str(folder / "p.jsonl")}}
    tree["evaluation"]["examples"] = examples
    return parse_config(tree)


def test_a_small_held_out_set_is_a_warning(tmp_path: Path) -> None:
    (warning,) = data_warnings(configured(tmp_path, 40))
    assert "evaluation.examples is 40, but environment holds out 25 of its 200 rows" in warning
    assert "raise environment.options.eval_fraction" in warning
    assert data_warnings(configured(tmp_path, 25)) == []


def test_an_environment_without_an_end_has_no_warning() -> None:
    assert data_warnings(load_config("configs/debug.yaml")) == []


def test_an_environment_without_rows_is_not_advised_to_hold_out_more() -> None:
    game = "environment={name: game, eval_seed: 2000000000}"
    (warning,) = data_warnings(load_config("configs/debug.yaml", [game, "evaluation.examples=9"]))
    assert warning == (
        "evaluation.examples is 9, but environment has 8 different ones, so every evaluation has 8 "
        "examples"
    )


def test_one_example_is_one(tmp_path: Path) -> None:
    tree = configured(tmp_path, 40).model_dump(mode="json")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    tree["environment"]["options"]["eval_fraction"] = 1.0
    (warning,) = data_warnings(parse_config(tree))
    assert "holds out 1 of its 1 rows, so every evaluation has 1 example;" in warning


def test_evaluation_sets_are_named(tmp_path: Path) -> None:
    tree = configured(tmp_path, 40).model_dump(mode="json")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a", "tools": [1]}\n{"prompt": "b", "answer": "2"}\n')
    options = {"path": str(other), "eval_fraction": 1.0}
    tree["evaluation"]["sets"] = {"hard": {"name": "chat", "options": options}}
    warnings = "\n".join(data_warnings(parse_config(tree)))
    assert "evaluation.sets.hard holds out 2 of its 2 rows" in warnings
    assert "1 of 2 rows have a column tools" in warnings
    assert "1 of 2 rows have no answer" in warnings


@pytest.mark.parametrize(
    ("override", "count"),
    [
        ("policy.context_length=512", 1),
        ("policy.context_length=511", 0),
        ("inference.engine.prefix_cache=false", 0),
        ("inference.engine.prefix_cache=true", 0),
        ("environment.turns_max=1", 0),
        ("environment.name=echo", 0),
        ("inference.endpoints=[http://127.0.0.1:1/v1]", 0),
    ],
)
def test_long_dialogues_are_advised_to_keep_their_cache(override: str, count: int) -> None:
    long = ["policy.context_length=4096", "batching.length_buckets=[4096]"]
    game = "environment={name: game, eval_seed: 2000000000}"
    warnings = data_warnings(load_config("configs/debug.yaml", [*long, game, override]))
    assert [w for w in warnings if "inference.engine.prefix_cache: true" in w] == warnings
    assert len(warnings) == count
