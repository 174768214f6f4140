"""Held-out sets that are smaller than configured, and facts about rows, are said before a run."""

import json
from pathlib import Path

from marin_rl.config import Config, load_config, parse_config
from marin_rl.rollouts.pinned import data_warnings, has_more_examples


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
    assert [has_more_examples(configured(tmp_path, n)) for n in (40, 25, 20)] == [
        False,
        False,
        True,
    ]


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


def test_rows_that_are_only_shown_have_no_sentence_on_rewards(tmp_path: Path) -> None:
    """A file of demonstrations for a warm start, then the same file for a flow of its own."""
    shown = tmp_path / "shown.jsonl"
    shown.write_text("".join(f'{{"prompt": "{n}", "completion": "{n}"}}\n' for n in range(9)))
    options = {"path": str(shown)}
    tree = configured(tmp_path, 25).model_dump(mode="json")
    tree["policy"]["init"] = "sft"
    tree["sft"]["environment"] = {"name": "chat", "train_seed": 4000000000, "options": options}
    assert data_warnings(parse_config(tree)) == []
    tree["environment"]["options"] = options
    del tree["sft"]["environment"]
    config = parse_config(tree)
    assert f"{shown}: 9 of 9 rows have no answer: exact_match gives them 0" in data_warnings(config)
    assert data_warnings(config, scored=False) == []
