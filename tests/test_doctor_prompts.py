"""Prompts are measured before a run starts: every row of a file, not those of a first round."""

import json
from contextlib import nullcontext
from dataclasses import asdict

import pytest
from support.chat_folders import CHATML, QWEN3, chat_folder

from marin_rl.batching.sequences import demonstrated
from marin_rl.config import parse_config
from marin_rl.doctor.data import demonstrations, learned_pairs, learned_rows
from marin_rl.doctor.policy import prompts, tools
from marin_rl.environments.registry import demonstrated_by, loaded_environment, part_for
from marin_rl.errors import InputError
from marin_rl.rollouts.data_warnings import data_warnings
from marin_rl.storage.tables.pairs import read_pairs
from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for


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
        (
            lambda: learned_pairs(config, read_pairs(pairs), "preference"),
            f"line {long[0] + 1}, field chosen",
            62,
        ),
    ):
        with pytest.raises(InputError, match=f"{name}: prompt and answer have") as refused:
            check()
        assert f"raise it, or remove {len(long)} of {count} rows" in str(refused.value)


SHOWN = {"prompt": "2+2?", "completion": "4"}


def learning(folder, rows, *, train_on=None):
    """A warm start on rows, by a template that reads `enable_thinking`."""
    config = configured(folder, rows, eval_fraction=1e-9)
    tokenizer = str(chat_folder(folder / "folder", QWEN3))
    tree = config.model_dump(exclude_unset=True) | {"sft": {"steps": 99, "train_on": train_on}}
    return parse_config(tree | {"policy": {"context_length": 200, "tokenizer": tokenizer}})


def said(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": said("a", "b")},
            r": expected a row of prompt \(a text\) and a completion, as .*line 1, found messages "
            "that end with the assistant's",
        ),
        (
            {"prompt": said("a"), "completion": "b"},
            r": expected a row of prompt \(a text\) and .*found prompt \(messages\) and a comp",
        ),
        ({"prompt": "a", "answer": "b"}, ": expected a row .*found .* and an answer"),
        (SHOWN | {"completion": " \n"}, ": its answer is empty"),
        (
            SHOWN | {"chat_template_kwargs": {"enable_thought": False}},
            r", chat_template_kwargs\.enable_thought: .* such variable; it reads enable_thinking",
        ),
        (SHOWN | {"chat_template_kwargs": "{"}, ": .*: chat_template_kwargs: '{' is not JSON"),
        (SHOWN | {"chat_template_kwargs": [1]}, ": .*: chat_template_kwargs: expected an object"),
        (
            SHOWN | {"chat_template_kwargs": {"date": "2026-01-01"}},
            r", chat_template_kwargs\.date: the day is that of the whole",
        ),
    ],
)
def test_rows_that_a_warm_start_cannot_learn_are_named(tmp_path, row, words):
    config = learning(tmp_path, [SHOWN, row])
    with pytest.raises(InputError, match=rf"^(the file )?.*rows\.jsonl, line 2{words}"):
        demonstrations(config)


def test_an_earlier_empty_answer_counts_where_it_is_learned(tmp_path):
    rows = [{"messages": said("a", "b")}, {"messages": said("a", "", "b", "c")}]
    demonstrations(learning(tmp_path, rows))
    with pytest.raises(InputError, match="line 2, answer 1 of 2: its answer is empty"):
        demonstrations(learning(tmp_path, rows, train_on="all"))
    flagged = said("a", "", "b", "c")
    flagged[1]["train"] = False
    (tmp_path / "other").mkdir()
    demonstrations(learning(tmp_path / "other", [{"messages": flagged}], train_on="flagged"))


def test_a_row_has_options_of_the_template_of_its_own(tmp_path):
    rows = [
        SHOWN,
        {"prompt": "b", "completion": "c", "chat_template_kwargs": '{"enable_thinking": false}'},
    ]
    config = learning(tmp_path, rows)
    assert demonstrations(config).endswith("have demonstrations")
    environment = loaded_environment(config.environment, "train")
    learned = [
        demonstrated_by(part_for(environment, config.environment, example), example)
        for example in (environment.example(0, index, "train") for index in range(2))
    ]
    shown = demonstrated(tokenizer_for(config.policy), learned, [2])
    assert {chat.prompt.count("<think>") for chat in shown if "2+2?" in chat.prompt} == {0}
    assert {chat.prompt.count("<think>") for chat in shown if "2+2?" not in chat.prompt} == {1}
    notice = "1 of 2 rows have a column chat_template_kwargs, which a warm start reads"
    assert notice in "".join(environment.notices())


def test_tokens_of_pairs_are_checked_by_line_before_a_run_begins(tmp_path):
    config = learning(tmp_path, [SHOWN])
    names = asdict(TokenizerIdentity.of(tokenizer_for(config.policy)))
    masks = {"chosen_loss_mask": [0, 0, 1], "rejected_loss_mask": [0, 0, 1]}
    ids = {"chosen_token_ids": [5, 6, 7], "rejected_token_ids": [5, 6, 8]}
    row = {"prompt": "a", "chosen": "b", "rejected": "c"} | ids | masks | names
    pairs = tmp_path / "pairs.jsonl"
    for changed, words in (
        ({}, None),
        ({"rejected_token_ids": [5, 9, 8]}, "expected two answers to one prompt"),
        ({"tokenizer_digest": "0" * 64}, "its token ids are another tokenizer's"),
    ):
        rows = row | {"id": "x"}, row | {"id": "y"} | changed
        pairs.write_text("\n".join(map(json.dumps, rows)))
        with (
            nullcontext()
            if words is None
            else pytest.raises(InputError, match=rf"pairs\.jsonl, line 2: pair y.*{words}")
        ):
            learned_pairs(config, read_pairs(pairs), "preference")


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
