"""Prompts are measured before a run starts: every row of a file, not those of a first round."""

import json

import pytest

from marin_rl.config import parse_config
from marin_rl.doctor.policy import prompts
from marin_rl.errors import InputError


def configured(folder, rows):
    """A run on a file of prompts; its first round takes one of them."""
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tree = {
        "root": str(folder / "runs"),
        "policy": {"context_length": 64},
        "environment": {"name": "chat", "options": {"path": str(file)}},
        "rollouts": {"groups_per_round": 1},
    }
    return parse_config(tree)


@pytest.mark.parametrize("long", [[0], [17], [30], [3, 29]])
def test_a_row_without_room_is_refused_wherever_it_is(tmp_path, long):
    rows = [
        {"id": f"row-{n}", "prompt": "x" * (60 if n in long else 8), "answer": "y"}
        for n in range(31)
    ]
    with pytest.raises(InputError, match=r"the prompt of row-(\d+) has \d+ tokens") as refused:
        prompts(configured(tmp_path, rows))
    assert f"remove {len(long)} of 31 prompts" in str(refused.value)
    assert any(f"row-{n} " in str(refused.value) for n in long)


def test_all_rows_that_fit_are_counted(tmp_path):
    rows = [{"id": f"row-{n}", "prompt": "x" * (n % 9 + 1), "answer": "y"} for n in range(31)]
    assert prompts(configured(tmp_path, rows)).startswith("longest of 31 prompts: ")
