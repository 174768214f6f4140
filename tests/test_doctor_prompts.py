"""Prompts are measured before a run starts: every row of a file, not those of a first round."""

import json

import pytest
from support.chat_folders import CHATML, chat_folder

from marin_rl.config import parse_config
from marin_rl.doctor.data import learned_pairs, learned_rows
from marin_rl.doctor.policy import prompts, tools
from marin_rl.errors import InputError
from marin_rl.rollouts.data_warnings import data_warnings
from marin_rl.storage.tables.pairs import read_pairs


def configured(folder, rows, eval_fraction=0.1):
    """A run on a file of prompts; its first round takes one of them."""
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tree = {
        "root": str(folder / "runs"),
        "policy": {"context_length": 64},
        "environment": {
            "name": "chat",
            "options": {"path": str(file), "eval_fraction": eval_fraction},
        },
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
    first = f"rows.jsonl, line {long[0] + 1}: the prompt of row-{long[0]} has "
    assert first in str(refused.value)


@pytest.mark.parametrize("held_out", [False, True])
def test_prompts_that_call_tools_are_refused_before_a_run_samples_for_them(tmp_path, held_out):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    plain = [{"prompt": f"{n}?", "answer": "1"} for n in range(9)]
    calling = [*plain, {"messages": messages, "answer": "2"}]
    config = configured(tmp_path, plain if held_out else calling, eval_fraction=0.5)
    if held_out:
        (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, calling)))
        options = {"path": str(tmp_path / "held.jsonl"), "eval_fraction": 1}
        sets = {"held": {"name": "chat", "options": options}}
        config = parse_config(
            {**config.model_dump(exclude_unset=True), "evaluation": {"sets": sets}}
        )
    place = "held.jsonl" if held_out else "rows.jsonl"
    with pytest.raises(InputError, match=rf"{place}, line 10: its messages call tools"):
        tools(config)


@pytest.mark.parametrize("long", [[30], [3, 17, 29]])
def test_demonstrations_and_pairs_without_room_are_refused_in_the_same_way(tmp_path, long):
    rows = [{"prompt": f"p{n}", "completion": "y" * (60 if n in long else 8)} for n in range(31)]
    config = configured(tmp_path, rows, eval_fraction=1e-9)
    pairs = tmp_path / "pairs.jsonl"
    lines = [
        json.dumps({"prompt": row["prompt"], "chosen": row["completion"], "rejected": "n"})
        for row in rows
    ]
    pairs.write_text("\n".join(lines))
    for check, name, count in (
        (lambda: learned_rows(config), f"rows.jsonl, line {long[0] + 1}", 31),
        (lambda: learned_pairs(config, read_pairs(pairs)), f"line {long[0] + 1}, field chosen", 62),
    ):
        with pytest.raises(InputError, match=f"{name}: prompt and answer have") as refused:
            check()
        assert f"raise it, or remove {len(long)} of {count} rows" in str(refused.value)


def test_prompts_that_spell_control_tokens_are_named(tmp_path):
    texts = ["one", "<|im_end|>\n<|im_start|>system", "two", "a <|endoftext|>"]
    folder = chat_folder(tmp_path / "folder", CHATML)
    rows = [{"id": f"row-{n}", "prompt": text, "answer": "y"} for n, text in enumerate(texts * 5)]
    config = configured(tmp_path, rows)
    policy = config.policy.model_copy(update={"tokenizer": str(folder)})
    config = config.model_copy(update={"policy": policy})
    (warning,) = [text for text in data_warnings(config) if "control token" in text]
    assert "rows.jsonl, line 2: the prompt has '<|im_end|>'" in warning
    assert "10 of 20 rows" in warning


def test_all_rows_that_fit_are_counted(tmp_path):
    rows = [{"id": f"row-{n}", "prompt": "x" * (n % 9 + 1), "answer": "y"} for n in range(31)]
    assert prompts(configured(tmp_path, rows)).startswith("longest of 31 prompts: ")
