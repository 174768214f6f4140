"""Files of preference pairs: what is accepted, what is refused and where, and a run's own copy."""

from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.run_factories import sampled_pair

from marin_rl.config import parse_config
from marin_rl.errors import CommitConflict, InputError
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.pairs import commit_pairs, committed_pairs, read_pairs, write_pairs
from marin_rl.types import Message, PreferencePair

TOKENS = {"tokenizer_digest": "t", "chat_template_digest": "c"}


def file_of(folder: Path, *rows: object) -> Path:
    path = folder / "pairs.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return path


def fields(pair: PreferencePair) -> dict[str, object]:
    found = {name: getattr(pair, name) for name in PreferencePair.__dataclass_fields__}
    tokens = ("chosen_token_ids", "rejected_token_ids")
    return found | {name: None if found[name] is None else found[name].tolist() for name in tokens}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_written_rows_are_read_back(tmp_path, suffix):
    plain = PreferencePair(id="b", messages=sampled_pair().messages, chosen="x", rejected="y")
    write_pairs(tmp_path / f"pairs.{suffix}", [sampled_pair(), plain])
    found = read_pairs(tmp_path / f"pairs.{suffix}").pairs
    assert [fields(pair) for pair in found] == [fields(sampled_pair()), fields(plain)]


def test_a_prompt_is_enough_and_a_name_is_made_from_the_words(tmp_path):
    row = {"prompt": "2+2", "chosen": "4", "rejected": "5", "margin": 1}
    pair, other = read_pairs(file_of(tmp_path, row, row | {"rejected": "6"})).pairs
    assert pair.messages == (Message(role="user", content="2+2"),)
    assert (pair.margin, pair.split, pair.chosen_token_ids) == (1.0, None, None)
    assert len(pair.id) == 16
    assert pair.id != other.id


def test_columns_of_other_libraries_parquet_are_read(tmp_path):
    path = tmp_path / "pairs.parquet"
    columns = {"prompt": ["a", "b"], "chosen": ["1", "2"], "rejected": ["2", "1"]}
    pq.write_table(pa.table(columns), path)
    assert [pair.chosen for pair in read_pairs(path).pairs] == ["1", "2"]


GOOD = {"prompt": "p", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"chosen": 3}, "line 2, field chosen: .* string, found 3"),
        ({"margn": 1.0}, r"line 2, field margn: Extra inputs .*known: id, prompt, .*margin"),
        ({"margin": -1.0}, "line 2, field margin: .*greater than or equal to 0, found -1.0"),
        ({"split": "test"}, "line 2, field split: .*'train' or 'eval'.*found 'test'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "line 2: .*exactly one of the fields"),
        ({"rejected": "a"}, "line 2: .*chosen and rejected hold the same answer"),
        ({"chosen_token_ids": [1], **TOKENS}, "line 2: .*all together, or none"),
        (
            {"chosen_token_ids": [1], "rejected_token_ids": [2], "chosen_loss_mask": [], **TOKENS},
            "line 2: .*chosen_loss_mask a number for each token id, 1, found 0",
        ),
        ({"id": "x"}, "line 2, field id: 'x' is there twice"),
        (
            {"prompt": None, "messages": [{"role": "tool", "content": "x"}]},
            "line 2: .*found the result of a tool without a call",
        ),
        (
            {"prompt": None, "messages": [{"role": "robot", "content": "x"}]},
            r"line 2, field messages\.0\.role: .*'robot'",
        ),
    ],
)
def test_a_wrong_row_is_named_with_its_field(tmp_path, wrong, told):
    path = file_of(tmp_path, GOOD | {"id": "x"}, GOOD | wrong)
    with pytest.raises(InputError, match=told):
        read_pairs(path)


def test_a_file_without_pairs_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"reward_model\.pairs: cannot read"):
        read_pairs(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="has no rows"):
        read_pairs(file_of(tmp_path))
    (tmp_path / "broken.jsonl").write_text("{\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        read_pairs(tmp_path / "broken.jsonl")
    (tmp_path / "broken.parquet").write_text("{\n")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        read_pairs(tmp_path / "broken.parquet")
    long = {"chosen_token_ids": [2**40], "rejected_token_ids": [1], **TOKENS}
    path = file_of(tmp_path, GOOD | long)
    with pytest.raises(InputError, match="does not fit in 32 bits"):
        read_pairs(path)


def test_a_run_keeps_its_pairs_and_refuses_others(tmp_path):
    run = Run.create_or_open(parse_config({"root": str(tmp_path), "run_id": "r"}))
    ref = commit_pairs(run, [sampled_pair()], decided="f" * 64, extra={"file": "x"})
    assert ref.slot == "pairs"
    assert ref.summary == {"pairs": 1.0, "held_out": 1.0}
    assert [fields(pair) for pair in committed_pairs(run, ref)] == [fields(sampled_pair())]
    assert commit_pairs(run, [sampled_pair()], decided="f" * 64, extra={}).reused
    with pytest.raises(CommitConflict):
        commit_pairs(run, [sampled_pair()], decided="e" * 64, extra={})


def said(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


PUBLISHED = {
    "TRL, explicit": {"prompt": said("2+2"), "chosen": answer("4"), "rejected": answer("5")},
    "TRL, with a text": {"prompt": "2+2", "chosen": answer("4"), "rejected": answer("5")},
    "messages with texts": {"prompt": said("2+2"), "chosen": "4", "rejected": "5"},
    "TRL, implicit": {"chosen": said("2+2", "4"), "rejected": said("2+2", "5")},
    "UltraFeedback": {
        "prompt": "2+2", "prompt_id": "f0e3", "messages": said("2+2", "4"),
        "chosen": said("2+2", "4"), "rejected": said("2+2", "5"),
        "score_chosen": 8.5, "score_rejected": 3.0,
    },
    "NeMo": {
        "context": said("2+2"),
        "completions": [
            {"rank": 1, "completion": answer("5")}, {"rank": 0, "completion": answer("4")},
        ],
    },
    "HH-RLHF": {
        "chosen": "\n\nHuman: 2+2\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2\n\nAssistant: 5",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_are_read_as_others_publish_them(tmp_path, name):
    (pair,) = read_pairs(file_of(tmp_path, PUBLISHED[name])).pairs
    assert pair.messages == (Message(role="user", content="2+2"),)
    assert (pair.chosen, pair.rejected) == ("4", "5")
    scores = (8.5, 3.0) if name == "UltraFeedback" else (None, None)
    assert (pair.chosen_reward, pair.rejected_reward) == scores


def test_a_developer_is_the_system(tmp_path):
    prompt = [{"role": "developer", "content": "Be brief."}, *said("2+2")]
    row = {"prompt": prompt, "chosen": answer("4"), "rejected": answer("5")}
    (pair,) = read_pairs(file_of(tmp_path, row)).pairs
    assert [message.role for message in pair.messages] == ["system", "user"]


def test_a_dialogue_keeps_all_of_its_turns_and_equal_answers_are_refused(tmp_path):
    turns = said("hi", "hello", "2+2")
    row = {"chosen": [*turns, *answer("4")], "rejected": [*turns, *answer("5")]}
    (pair,) = read_pairs(file_of(tmp_path, row)).pairs
    assert [message.content for message in pair.messages] == ["hi", "hello", "2+2"]
    with pytest.raises(InputError, match=r"line 1: .*hold the same answer"):
        read_pairs(file_of(tmp_path, row | {"rejected": row["chosen"]}))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"chosen": said("a", "b", "c", "d"), "rejected": said("a", "x", "y", "z")},
            r"line 1: field chosen: expected one message of the assistant.*\['assistant', 'user'",
        ),
        ({"chosen": [], "rejected": []}, "line 1: field chosen: expected one message"),
        (
            {"prompt": 3, "chosen": answer("b"), "rejected": answer("c")},
            "line 1: field prompt: expected a text or messages, found 3",
        ),
        (
            {"context": said("a"), "completions": [{"rank": 0, "completion": answer("x")}] * 2},
            "line 1: field completions: expected two of different rank",
        ),
        (
            {"chosen": "x\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
            "line 1: expected a dialogue that begins with Human, found 'x'",
        ),
        (
            {"prompt": "a", "chosen": [{"role": "assistant", "content": "b", "tool_calls": []}],
             "rejected": answer("c")},
            "line 1: field chosen: expected role and content in a message, found .*tool_calls",
        ),
    ],
)  # fmt: skip
def test_a_published_row_that_is_no_pair_is_named(tmp_path, row, told):
    with pytest.raises(InputError, match=told):
        read_pairs(file_of(tmp_path, row))


LABELLED = [
    {"prompt": "2+2", "completion": "4", "label": True},
    {"prompt": said("2+3"), "completion": answer("4"), "label": False},
]


def test_answers_with_labels_are_read_as_trl_has_them(tmp_path):
    file = read_pairs(file_of(tmp_path, *LABELLED))
    assert [(pair.chosen, pair.rejected, pair.label) for pair in file.pairs] == [
        ("4", "", True), ("4", "", False),
    ]  # fmt: skip
    assert file.learned_as(labelled=True) == file
    with pytest.raises(
        InputError, match=r"line 1: expected a pair, .*found an answer with a label"
    ):
        file.learned_as(labelled=False)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (LABELLED[:1] * 1, "line 1: expected answers of both labels, found label true in all 1"),
        ([LABELLED[1]], "line 1: expected answers of both labels, found label false in all 1"),
        ([LABELLED[0] | {"label": 1}], "line 1, field label: .*valid boolean, found 1"),
        ([{"prompt": "a", "completion": "b"}], "line 1: expected prompt, completion and label"),
        ([LABELLED[0] | {"chosen": "c"}], "line 1: expected prompt, completion and label"),
        ([LABELLED[0] | {"completion": said("a")}], "line 1: field completion: expected one"),
        ([LABELLED[0], GOOD], "line 2: expected a row of the kind 'labelled', .*'pair'"),
    ],
)
def test_a_wrong_answer_with_a_label_is_named(tmp_path, rows, told):
    with pytest.raises(InputError, match=told):
        read_pairs(file_of(tmp_path, *rows)).learned_as(labelled=True)


def test_a_pair_is_two_answers_with_labels(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", [sampled_pair()])
    file = read_pairs(tmp_path / "pairs.jsonl").learned_as(labelled=True)
    assert [(p.id, p.label, p.chosen, p.chosen_id, p.chosen_reward) for p in file.pairs] == [
        ("run/round-00000/group-00001/chosen", True, "yes", "r/1", 1.0),
        ("run/round-00000/group-00001/rejected", False, "", "r/2", -0.25),
    ]
    assert [p.chosen_token_ids.tolist() for p in file.pairs] == [[3, 4], [3]]
    assert len(file.places) == 2


def test_rows_of_two_kinds_in_one_file_are_refused(tmp_path):
    rows = PUBLISHED["TRL, explicit"], PUBLISHED["UltraFeedback"]
    told = "line 2: expected a row of the kind 'pair', as .*line 1, found 'conversations'"
    with pytest.raises(InputError, match=told):
        read_pairs(file_of(tmp_path, *rows))
