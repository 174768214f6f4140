"""Rows of TRL, verl, verifiers, OpenRLHF and open-instruct give the same example as our own."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marin_rl.config import EnvironmentConfig, load_config, parse_config
from marin_rl.environments.chat import Chat
from marin_rl.environments.checks import environment_of
from marin_rl.environments.prompt_files import Columns, metadata_of, read_row
from marin_rl.environments.registry import construct
from marin_rl.environments.row_files import ArrowRows, Rows, TextRows, open_rows
from marin_rl.errors import InputError
from marin_rl.types import Example, Message, ToolCall

USER = {"role": "user", "content": "2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "4"}

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4"}
ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}

FORMATS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "own": ({"messages": [USER], "answer": "4"}, {}),
    "own, text": ({"prompt": "2 + 2?", "answer": "4"}, {}),
    "TRL": ({"prompt": "2 + 2?", "solution": "4"}, {}),
    "TRL, conversational": ({"prompt": [USER], "ground_truth": "4"}, {}),
    "verl": (
        {
            "data_source": "sums",
            "prompt": [USER],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": 3},
        },
        {},
    ),
    "verifiers": ({"question": "2 + 2?", "answer": "4", "info": {"level": 1}}, {}),
    "OpenRLHF": ({"input": "2 + 2?", "label": "4"}, {}),
    "open-instruct": ({"messages": [USER], "ground_truth": "4", "dataset": "sums"}, {}),
    "open-instruct, lists": ({"messages": [USER], "ground_truth": ["4"], "dataset": ["sums"]}, {}),
    "MATH": ({"problem": "2 + 2?", "solution": "because", "answer": "4"}, {"answer_key": "answer"}),
    "keys": ({"q": {"text": "2 + 2?"}, "gold": 4}, {"prompt_key": "q.text", "answer_key": "gold"}),
}


def chat(path: Path, rows: list[Any], **options: Any) -> Chat:
    """The environment over a file of `rows`: JSON lines, or Parquet by the suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return loaded(str(path), **options)


def loaded(path: str, **options: Any) -> Chat:
    environment = construct(EnvironmentConfig(name="chat", options={"path": path, **options}))
    assert isinstance(environment, Chat)
    environment.load_examples()
    return environment


def only_example(environment: Chat) -> Example:
    split = "train" if environment.size else "eval"
    return environment.example(0, 0, split)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_as_others_publish_them(tmp_path: Path, name: str, suffix: str) -> None:
    row, options = FORMATS[name]
    example = only_example(chat(tmp_path / f"rows.{suffix}", [row], **options))
    assert example.messages == (Message(role="user", content="2 + 2?"),)
    assert example.answer == "4"


def test_every_other_column_is_metadata_with_its_type(tmp_path: Path) -> None:
    row, _ = FORMATS["verl"]
    for suffix in ("jsonl", "parquet"):
        metadata = only_example(chat(tmp_path / f"rows.{suffix}", [row])).metadata
        expected = {key: row[key] for key in row if key != "prompt"}
        assert metadata == {**expected, "conversational": True}


# Written by the release before rows of others were read: ids decide the split and the order.
OLD_ROWS = [
    {"prompt": "1 + 1?", "answer": 2, "level": 3},
    {
        "messages": [{"role": "system", "content": "Sé brief."}, USER],
        "answer": "4",
        "solution": "long",
    },
    {"id": 7, "prompt": "three", "tags": ["a", None]},
    {"id": "x", "prompt": "\u2028four\n", "question": "raw", "completion": "done"},
]
OLD_EXAMPLES = [
    ("train", "9cf4fa7627bab817", "2"),
    ("train", "cbe13105cdc14a65", "4"),
    ("eval", "7", None),
    ("eval", "x", None),
]


def test_datasets_keep_the_ids_that_decide_their_seeds(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in OLD_ROWS) + "\n")
    environment = loaded(str(path), eval_fraction=0.5)
    assert environment.version == "1+5a5f9f45af3b"
    examples = [environment.example(0, index, "train") for index in range(2)]
    examples += [environment.example(0, index, "eval") for index in range(2)]
    assert [(e.split, e.example_id, e.answer) for e in examples] == OLD_EXAMPLES
    assert [m.content for m in examples[1].messages] == ["Sé brief.", "2 + 2?"]
    assert examples[3].metadata == {"question": "raw", "completion": "done"}
    assert examples[0].metadata == {"level": 3, "answer": 2}  # with its type, for functions
    parquet = tmp_path / "rows.parquet"
    rows = [{"prompt": row["prompt"]} for row in OLD_ROWS if "prompt" in row]
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    environment = loaded(str(parquet), eval_fraction=0.5)
    ids = {environment.example(0, index, "train").example_id for index in range(2)}
    assert ids == {"9cf4fa7627bab817", "c6269653ec0de079"}
    assert environment.example(0, 0, "eval").example_id == "c5320add184f4eb1"


def test_a_system_prompt_is_for_rows_without_one(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "hi"}, {"id": "b", "messages": [SYSTEM, USER]}]
    plain = chat(tmp_path / "p.jsonl", rows, eval_fraction=1.0)
    asked = loaded(str(tmp_path / "p.jsonl"), eval_fraction=1.0, system_prompt="You are kind.")
    systems = {
        example.example_id: example.messages[0].content
        for example in (asked.example(0, index, "eval") for index in range(2))
    }
    assert systems == {"a": "You are kind.", "b": "Be brief."}
    assert plain.example(0, 0, "eval").example_id == asked.example(0, 0, "eval").example_id


def test_a_developer_is_the_system(tmp_path: Path) -> None:
    rows = [{"messages": [SYSTEM | {"role": "developer"}, USER]}]
    example = only_example(chat(tmp_path / "p.jsonl", rows))
    assert [message.role for message in example.messages] == ["system", "user"]


def test_a_repeated_prompt_is_two_examples_of_one_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number % 20}"} for number in range(60)]
    environment = chat(tmp_path / "p.jsonl", rows, eval_fraction=0.4)
    assert environment.size is not None
    train = {environment.example(0, i, "train").example_id for i in range(environment.size)}
    held_out = {environment.example(0, i, "eval").example_id for i in range(environment.eval_size)}
    assert len(train) + len(held_out) == 60
    assert not {i.partition("-")[0] for i in train} & {i.partition("-")[0] for i in held_out}
    assert "40 of 60 rows repeat the prompt" in "".join(environment.notices())


# ---- demonstrations


def test_the_assistants_last_message_is_the_demonstration(tmp_path: Path) -> None:
    turns = [USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": "No."}, REPLY]
    environment = chat(tmp_path / "p.jsonl", [{"messages": turns, "answer": "four"}])
    example = only_example(environment)
    assert [m.role for m in example.messages] == ["user", "assistant", "user"]
    assert (environment.demonstration(example), example.answer) == ("4", "four")
    assert environment.version.startswith("2+")
    (notice,) = environment.notices()
    assert "1 of 1 rows end with an assistant's message: it is the demonstration" in notice


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [USER], "completion": [REPLY]},
        {"prompt": "2 + 2?", "answer": "4"},
    ],
)
def test_pairs_of_prompt_and_completion(tmp_path: Path, row: dict[str, Any]) -> None:
    environment = chat(tmp_path / "p.jsonl", [row])
    assert environment.demonstration(only_example(environment)) == "4"
    environment.check_demonstrations(0, 10)


def test_a_named_column_of_demonstrations(tmp_path: Path) -> None:
    rows = [{"instruction": "2 + 2?", "output": {"text": "4"}}]
    environment = chat(tmp_path / "p.jsonl", rows, completion_key="output.text")
    assert environment.demonstration(only_example(environment)) == "4"


def test_a_training_row_without_a_demonstration_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "hint": "d"}]
    environment = chat(tmp_path / "p.jsonl", rows, eval_fraction=1e-9)
    with pytest.raises(InputError, match=r"p\.jsonl, line 2: .*column completion.*prompt, hint"):
        environment.check_demonstrations(0, 10)
    first = environment.example(0, 0, "train")
    if first.answer == "b":  # a warm start that ends before it comes to the row may run
        environment.check_demonstrations(0, 1)


def test_a_run_with_a_warm_start_is_refused_before_it_starts(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{number}?"}) for number in range(20)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    tree = load_config("configs/debug.yaml").model_dump(mode="json")
    options = {"path": str(tmp_path / "p.jsonl"), "eval_fraction": 0.5}
    tree["environment"] = {"name": "chat", "options": options}
    assert environment_of(parse_config(tree)).size is not None
    tree["policy"]["init"] = "sft"
    with pytest.raises(InputError, match="a warm start needs a demonstration"):
        environment_of(parse_config(tree))


def test_tools_are_said_to_be_no_part_of_the_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "tools": [{"name": "add"}], "answer": "1"}, {"prompt": "b"}]
    tools, unanswered = chat(tmp_path / "p.jsonl", rows).notices()
    assert (
        "1 of 2 rows have a column tools, which a warm start reads; sampling offers none" in tools
    )
    assert "1 of 2 rows have no answer: exact_match gives them 0" in unanswered


# ---- rows that are refused


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"text": "a"}, {}, "expected a prompt in one of the columns messages.*columns are text"),
        ({"messages": [USER], "prompt": "a"}, {}, "both messages and prompt.*prompt_key"),
        ({"question": "a", "input": "b"}, {}, "both question and input.*prompt_key"),
        ({"prompt": "a", "label": "1", "target": "2"}, {}, "both label and target.*answer_key"),
        (
            {"prompt": [USER], "answer": "1", "reward_model": {"ground_truth": "2"}},
            {},
            "both answer and reward_model.ground_truth may be the answer",
        ),
        ({"prompt": "a"}, {"prompt_key": "ask"}, "no column 'ask'.*columns are prompt"),
        ({"prompt": "a"}, {"answer_key": "gold"}, "no row has a column 'gold'.*answer_key"),
        ({"messages": [REPLY]}, {}, "only message is the assistant's"),
        ({"messages": [USER, REPLY], "completion": "5"}, {}, "expected one demonstration"),
        ({"prompt": "a", "completion": [USER, REPLY]}, {}, "one message of the assistant"),
        ({"messages": "a"}, {}, "expected a list"),
        ({"messages": []}, {}, "list of messages that is not empty"),
        (
            {"messages": [{**REPLY, "tool_calls": [{}]}, USER]},
            {},
            "message 0, call 0: expected a call",
        ),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, {}, "message 0: expected a message"),
        (
            {"messages": [USER, {**REPLY, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            {},
            "message 1, call 0: '{' is not JSON",
        ),
        (
            {"messages": [USER, CALLS, {**RESULT, "tool_call_id": "other"}, REPLY]},
            {},
            "message 2 is the result of a tool without a call",
        ),
        (
            {"messages": [USER, {**REPLY, "reasoning_content": "so"}]},
            {},
            "message 1 has reasoning_content",
        ),
        ({"messages": [USER, {**REPLY, "weight": -0.5}]}, {}, "message 1: expected train true or"),
        (
            {"messages": [USER, {**REPLY, "weight": "1"}]},
            {},
            "or a weight from 0 to 100, found '1'",
        ),
        ({"messages": [{**REPLY, "train": True}, USER]}, {}, "expected the last answer among them"),
        (
            {"conversations": [{"from": "robot", "value": "hi"}]},
            {},
            "message 0: expected a message",
        ),
        ({"messages": [{"role": "user", "content": [{}]}]}, {}, "a text as content"),
    ],
)
def test_rows_that_are_refused(tmp_path, row, options, words):
    rows = [row, {**row, "prompt": "b"}] if "gold" in words else [row]
    with pytest.raises(InputError, match=rf"p\.jsonl, line 1: .*{words}"):
        chat(tmp_path / "p.jsonl", rows, **options)


def test_an_error_of_parquet_lists_all_columns(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"p\.parquet, row 0: .*columns are text, number"):
        chat(tmp_path / "p.parquet", [{"text": "a", "number": 1}])


SHAREGPT = [
    {"from": "human", "value": "2 + 2?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
    {"from": "observation", "value": "4"},
    {"from": "gpt", "value": "4"},
]


def test_results_may_follow_calls_that_are_text(tmp_path: Path) -> None:
    calls = {"role": "assistant", "content": "<tool_call>add</tool_call><tool_call>add</tool_call>"}
    results = [{"role": "tool", "content": number} for number in "45"]
    row = {"messages": [USER, calls, *results, REPLY]}
    environment = chat(tmp_path / "rows.jsonl", [row], eval_fraction=0.0001)
    learned = environment.demonstrated(environment.example(0, 0, "train"))
    assert learned is not None
    assert [message.role for message in learned.messages] == ["user", "assistant", "tool", "tool"]
    assert [message.content for message in learned.messages[2:]] == ["4", "5"]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"messages": [USER, CALLS, RESULT, REPLY], "tools": [ADD]}, id="TRL"),
        pytest.param(
            {"messages": [USER, CALLS, RESULT, REPLY], "tools": json.dumps([{"function": ADD}])},
            id="tools as JSON",
        ),
        pytest.param({"conversations": SHAREGPT, "tools": json.dumps([ADD])}, id="ShareGPT"),
        pytest.param(
            {"prompt": [USER, CALLS, RESULT], "completion": [REPLY], "tools": [ADD]},
            id="completion",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_dialogues_with_tools_are_demonstrations(tmp_path: Path, row: Any, suffix: str) -> None:
    environment = chat(tmp_path / f"rows{suffix}", [row], eval_fraction=0.0001)
    learned = environment.demonstrated(environment.example(0, 0, "train"))
    assert learned is not None
    call = ToolCall(id="call00000", name="add", arguments='{"a":2,"b":2}')
    user, calls, result = learned.messages
    assert (user.content, calls.tool_calls, calls.content) == ("2 + 2?", (call,), "")
    assert (result.role, result.content, result.tool_call_id) == ("tool", "4", call.id)
    assert learned.answer == Message(role="assistant", content="4")
    expected = {name: value for name, value in ADD.items() if name != "parameters"}
    (tool,) = learned.tools
    assert tool["function"].items() >= expected.items()
    assert tool["type"] == "function"
    assert learned.trained is None


def test_the_last_message_may_be_a_call(tmp_path: Path) -> None:
    environment = chat(tmp_path / "rows.jsonl", [{"messages": [USER, CALLS]}], eval_fraction=0.0001)
    learned = environment.demonstrated(environment.example(0, 0, "train"))
    assert learned is not None
    assert [call.name for call in learned.answer.tool_calls] == ["add"]


def test_messages_say_which_answers_are_learned(tmp_path: Path) -> None:
    flags = [{"train": False}, {"weight": 1}, {"weight": 0}, {"train": True, "weight": 0.5}, {}]
    answers = [{**REPLY, **each} for each in flags]
    messages = [message for answer in answers for message in (USER, answer)]
    environment = chat(tmp_path / "rows.jsonl", [{"messages": messages}], eval_fraction=0.0001)
    learned = environment.demonstrated(environment.example(0, 0, "train"))
    assert learned is not None
    assert learned.trained == [False, True, False, 0.5, True]


@pytest.mark.parametrize("tools", ["[", "1", '["name"]', '[{"function": {}}]'])
def test_tools_without_schemas_are_refused(tmp_path: Path, tools: str) -> None:
    row = {"messages": [USER, REPLY], "tools": tools}
    environment = chat(tmp_path / "rows.jsonl", [row], eval_fraction=0.0001)
    with pytest.raises(InputError, match=r"^example .* of chat: tools"):
        environment.demonstrated(environment.example(0, 0, "train"))


def test_metadata_keeps_what_is_not_read() -> None:
    raw = {"id": 3, "key": "u", "ask": "a", "answer": "kept", "gold": 4}
    columns = Columns(prompt="ask", answer="gold", id="key")
    row = read_row(raw, columns)
    assert (row.row_id, row.answer) == ("u", 4)
    assert metadata_of(raw, row, columns, "") == {"id": 3, "key": "u", "answer": "kept", "gold": 4}


ROWS = [{"prompt": f"{number}?", "info": {"n": number}} for number in range(10)]


def write_arrow(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the layout of `datasets.save_to_disk`: Arrow streams and a state.json."""
    folder.mkdir(parents=True)
    names = [f"data-0000{part}-of-00002.arrow" for part in range(2)]
    for part, name in enumerate(names):
        table = pa.Table.from_pylist(rows[part * 5 : part * 5 + 5])
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as s,
        ):
            s.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )


def write_parquet(folder: Path, rows: list[dict[str, Any]], stem: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(2):
        table = pa.Table.from_pylist(rows[part * 5 : part * 5 + 5])
        pq.write_table(table, folder / f"{stem}-0000{part}-of-00002.parquet")


def opened(tmp_path: Path, kind: str) -> Rows:
    if kind == "lines":
        (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)))
        return open_rows(str(tmp_path / "rows.jsonl"))
    if kind == "saved":
        write_arrow(tmp_path / "saved", ROWS)
        return open_rows(str(tmp_path / "saved"))
    write_parquet(tmp_path / "folder", ROWS)
    if kind == "pattern":
        write_parquet(tmp_path / "folder", ROWS, "test")
        return open_rows(str(tmp_path / "folder" / "train-*.parquet"))
    return open_rows(str(tmp_path / "folder"))


@pytest.mark.parametrize("kind", ["lines", "saved", "folder", "pattern"])
def test_the_same_rows_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    rows = opened(tmp_path, kind)
    assert isinstance(rows, TextRows if kind == "lines" else ArrowRows)
    assert len(rows) == 10
    assert [rows.row(index) for index in range(10)] == ROWS
    scanned = list(rows.scan({"prompt", "absent"}))
    assert [row["prompt"] for row in scanned] == [row["prompt"] for row in ROWS]
    assert len(list(rows.scan({"absent"}))) == 10


def test_places_name_the_file_and_the_row_in_it(tmp_path: Path) -> None:
    assert opened(tmp_path, "lines").place(2).endswith("rows.jsonl, line 5")
    assert opened(tmp_path, "folder").place(7).endswith("train-00001-of-00002.parquet, row 2")


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"), num_shards=2)
    assert [open_rows(str(tmp_path / "one")).row(index) for index in (0, 9)] == [ROWS[0], ROWS[9]]
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(InputError, match=r"holds the splits train, test.*two/train"):
        open_rows(str(tmp_path / "two"))
    assert len(open_rows(str(tmp_path / "two" / "test"))) == 10


def test_a_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a", ROWS)
    write_parquet(tmp_path / "b", [*ROWS[:9], {**ROWS[9], "prompt": "another"}])
    digests = [open_rows(str(tmp_path / name)).digest for name in ("a", "b", "a")]
    assert digests[0] == digests[2] != digests[1]


def test_folders_that_leave_a_choice_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "both", ROWS)
    write_parquet(tmp_path / "both", ROWS, "test")
    with pytest.raises(InputError, match=r"splits test, train: .*both/train\*\.parquet"):
        open_rows(str(tmp_path / "both"))
    write_parquet(tmp_path / "outer" / "data", ROWS)
    with pytest.raises(InputError, match=r"has no \*\.parquet.*outer/data has some"):
        open_rows(str(tmp_path / "outer"))
    with pytest.raises(InputError, match=r"no file fits .*\*\.parquet"):
        open_rows(str(tmp_path / "outer" / "*.parquet"))


def test_a_missing_file_is_named_with_its_folder_and_a_close_name(tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    relative = f"no file promts.jsonl in {tmp_path}; a relative path begins next to the YAML"
    with pytest.raises(InputError, match=f"{relative}.*did you mean prompts.jsonl"):
        open_rows("promts.jsonl")
    with pytest.raises(InputError, match=f"no file x.parquet in {tmp_path}/nowhere$"):
        open_rows(f"{tmp_path}/nowhere/x.parquet")


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(InputError, match="as Parquet"):
        open_rows(str(tmp_path / "p.parquet"))


def test_files_whose_columns_do_not_fit_are_refused(tmp_path: Path) -> None:
    for number, value in enumerate([["a"], "a"]):
        table = pa.Table.from_pylist([{"prompt": value}])
        pq.write_table(table, tmp_path / f"part-{number}.parquet")
    with pytest.raises(InputError, match=r"columns of part-0\.parquet, part-1\.parquet do not"):
        open_rows(str(tmp_path))


def test_an_array_csv_and_packed_lines_are_read_alike(tmp_path: Path) -> None:
    rows = [{"prompt": "a, b", "answer": "c\nd"}, {"prompt": "e", "answer": '"f"'}]
    (tmp_path / "rows.json").write_text("\n" + json.dumps(rows, indent=1))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "rows.csv").write_text('prompt,answer\n"a, b","c\nd"\ne,"""f"""\n')
    places = ("element 2 of its array", "line 2", "line 4")
    for name, place in zip(("rows.json", "rows.jsonl.gz", "rows.csv"), places, strict=True):
        read = open_rows(str(tmp_path / name))
        assert list(read.scan({"prompt"})) == rows
        assert read.place(1) == f"{tmp_path / name}, {place}"
    (tmp_path / "rows.json").write_text("[1, 2")
    with pytest.raises(InputError, match=r"rows.json begins with '\[' and is no JSON array"):
        open_rows(str(tmp_path / "rows.json"))
