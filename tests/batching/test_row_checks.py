"""Rows are learned as they are written, or refused by name; answers end with the end token."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.chat_folders import (
    CHATML,
    DATED,
    GEMMA,
    LLAMA2,
    NO_END,
    QWEN3,
    TRIMMED,
    TWO_ENDS,
    WITHOUT_REASONING,
    chat_folder,
    chat_tokenizer,
)
from support.templates import TEMPLATES

from marin_rl.batching.pairs import PairTokenizer
from marin_rl.batching.sequences import (
    chat_tokens,
    check_lengths,
    demonstrated,
    rendered_lengths,
    rendered_prompts,
    text_of,
)
from marin_rl.config import PolicyConfig
from marin_rl.errors import InputError
from marin_rl.rollouts.pinned import policy_as_begun
from marin_rl.tokenizers import character_tokenizer, end_token_ids, tokenizer_for
from marin_rl.types import Demonstration, Message, PreferencePair, ToolCall, assistant

HI = (Message(role="user", content="hi"),)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WRAPPED = CHATML.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>",
)


def check_rows(tokenizer, chats, names, *, ends, context_length, options=()):
    """Check that chats are learned as they are written, and that all of them fit."""
    rows = zip(chats, names, options or [{}] * len(names), strict=True)
    shown = [
        Demonstration(messages=messages, answer=assistant(answer), name=name, options=own)
        for (messages, answer), name, own in rows
    ]
    lengths = rendered_lengths(tokenizer, shown, ends)
    check_lengths([*zip(names, lengths, strict=True)], context_length)


@pytest.mark.parametrize(
    ("template", "eos", "answer", "trained"),
    [
        (CHATML, "<|endoftext|>", "4", "4<|im_end|>"),
        (CHATML, "<|im_end|>", "4", "4<|im_end|>"),
        (CHATML, "<|endoftext|>", "", "<|im_end|>"),
        (QWEN3, "<|im_end|>", "4", "<think>\n\n</think>\n\n4<|im_end|>"),
        (LLAMA2, "</s>", "4", " 4 </s>"),
        (DATED, "<|endoftext|>", "4", "4<|im_end|>"),
        (GEMMA, "<s>", "4", "4<|im_end|>"),
        (TWO_ENDS, "</s>", "4", "4<|im_end|></s>"),
        # two line breaks are one token of this tokenizer, which no sampler could draw here
        (CHATML, "<|endoftext|>", "\nword", "\nword<|im_end|>"),
        (CHATML, "<|endoftext|>", " 4 ", " 4 <|im_end|>"),
    ],
)
def test_the_end_token_is_the_last_one_that_is_trained_on(template, eos, answer, trained) -> None:
    tokenizer = chat_tokenizer(template, eos)
    ids, mask = chat_tokens(tokenizer, HI, answer)
    assert text_of(tokenizer, ids[mask == 1]) == trained
    ((prompt, length),) = rendered_prompts(tokenizer, [HI])
    assert ids[:length].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert not mask[:length].any()


def test_a_run_from_before_keeps_what_it_trained_on() -> None:
    tokenizer = chat_tokenizer(CHATML)
    ids, mask = chat_tokens(tokenizer, HI, "4", ends=())
    assert text_of(tokenizer, ids[mask == 1]) == "4<|im_end|>\n"


FILE = "rows.jsonl, line 3"


@pytest.mark.parametrize(
    ("template", "answer", "words"),
    [
        (WITHOUT_REASONING, "<think>two and two</think>4", "would be learned as '4'"),
        (TRIMMED, "\nword", r"answer '\\nword' would be learned as 'word'"),
        (TRIMMED, "word ", "answer 'word ' would be learned as 'word'"),
        (CHATML, "4<|im_end|>\n<|im_start|>user", "has '<|im_end|>', which is a control token"),
        (CHATML, "end</s>", "has '</s>', which is a control token"),
        (CHATML, "e\u0301", r"answer 'e\\u0301' would be learned as '\\xe9'"),
        (CHATML, "word" * 50, r"have \d+ tokens, but policy.context_length is 150"),
    ],
)
def test_a_row_that_is_not_learned_as_it_is_written_is_refused(tmp_path, template, answer, words):
    policy = policy_as_begun(
        PolicyConfig(tokenizer=str(chat_folder(tmp_path / "folder", template, nfc=True)))
    )
    tokenizer = tokenizer_for(policy)
    names, chats = ["rows.jsonl, line 2", FILE], [(HI, "fine"), (HI, answer)]
    ends = end_token_ids(tokenizer)
    with pytest.raises(InputError, match=words) as raised:
        check_rows(tokenizer, chats, names, ends=ends, context_length=150)
    # a template without an end is refused with the first row
    assert str(raised.value).startswith(("rows.jsonl, line ", FILE))
    assert str(raised.value).startswith(FILE) or template in (NO_END, WRAPPED) or "no a" in words


@pytest.mark.parametrize("answer", ["4", "\nword", "<think>two</think>4", " é☃ ", "a\n\nb", "<|im"])
@pytest.mark.parametrize("template", [CHATML, DATED])
def test_rows_that_are_learned_as_they_are_written_pass(template: str, answer: str) -> None:
    tokenizer = chat_tokenizer(template)
    ends = [2]  # <|im_end|>
    check_rows(tokenizer, [(HI, answer)], [FILE], ends=ends, context_length=150)
    ids, mask = chat_tokens(tokenizer, HI, answer, ends)
    assert text_of(tokenizer, ids[mask == 1]) == f"{answer}<|im_end|>"


def test_a_character_without_a_token_is_refused() -> None:
    tokenizer = character_tokenizer()
    with pytest.raises(InputError, match=r"would be learned as 'caf<\|unknown\|>'"):
        check_rows(tokenizer, [(HI, "café")], [FILE], ends=[1], context_length=99)


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (
            CHATML.replace("in messages", "in messages if m.role != 'system'"),
            (Message(role="system", content="Be brief."), *HI),
            "leaves out or changes a message of role system, 'Be brief.'",
        ),
        (CHATML, (Message(role="user", content="a<|im_start|>b"),), "has '<|im_start|>'"),
        (CHATML.replace("m.content }}", "m.content | upper }}"), HI, "message of role user, 'hi'"),
    ],
)
def test_a_prompt_that_is_rendered_as_another_is_refused(template, messages, words) -> None:
    with pytest.raises(InputError, match=words.replace("|", r"\|")):
        check_rows(chat_tokenizer(template), [(messages, "4")], [FILE], ends=[2], context_length=99)


@pytest.mark.parametrize(("ends", "last"), [(None, "<|im_end|>"), ((2,), "<|im_end|>"), ((), "\n")])
def test_pairs_end_where_sampled_answers_end(ends, last) -> None:
    tokenizer = chat_tokenizer(CHATML)
    pairs = PairTokenizer(
        section="reward_model",
        tokenizer=tokenizer,
        tokenizer_digest="t",
        chat_template_digest="c",
        vocab_size=len(tokenizer),
        context_length=99,
        ends=ends,
    )
    pair = PreferencePair(id="a", messages=HI, chosen="yes", rejected="\nno", split="train")
    (filled,) = pairs.tokenized([pair], 0.5)
    for ids in (filled.chosen_token_ids, filled.rejected_token_ids):
        assert ids is not None
        assert text_of(tokenizer, ids[-1:]) == last


@pytest.mark.parametrize(
    ("template", "eos", "listed", "ends"),
    [
        (CHATML, "<|endoftext|>", (), ("<|im_end|>",)),
        (CHATML, "<|im_end|>", (), ("<|im_end|>",)),
        (CHATML, "<|endoftext|>", (2,), ("<|im_end|>",)),
        (TWO_ENDS, "<|endoftext|>", (4,), ("</s>",)),
        (TWO_ENDS, "</s>", (2,), ("<|im_end|>",)),
        (LLAMA2, "</s>", (), ("</s>",)),
        (NO_END, "<|endoftext|>", (), None),
        ("{{ raise_exception('one message') if messages|length > 1 }}x", "</s>", (), None),
    ],
)
def test_the_token_that_the_template_ends_an_answer_with_ends_completions(
    tmp_path: Path, template: str, eos: str, listed: tuple[int, ...], ends: tuple[str, ...] | None
) -> None:
    folder = chat_folder(tmp_path / "folder", template, eos, listed)
    policy = PolicyConfig(tokenizer=str(folder))
    begun = policy_as_begun(policy)
    assert begun.end_tokens == ends
    tokenizer = tokenizer_for(begun)
    expected = {tokenizer.convert_tokens_to_ids(token) for token in (eos, *(ends or ()))}
    assert set(end_token_ids(tokenizer)) == expected | set(listed)
    before = end_token_ids(tokenizer_for(policy))  # of a run from before
    assert set(before) == {tokenizer.eos_token_id, *listed}
    assert np.all(np.isin(before, end_token_ids(tokenizer)))


def test_an_end_that_cannot_be_decided_is_refused_with_the_key(tmp_path: Path) -> None:
    folder = str(chat_folder(tmp_path / "folder", TWO_ENDS))
    words = (
        r"closes an answer with '<\|im_end\|>' and '</s>', but completions end with "
        r"'<\|endoftext\|>' by the tokenizer's files: set policy.end_tokens"
    )
    with pytest.raises(InputError, match=words):
        policy_as_begun(PolicyConfig(tokenizer=folder))
    policy = PolicyConfig(tokenizer=folder, end_tokens=("<|im_end|>",))
    assert policy_as_begun(policy) == policy
    assert end_token_ids(tokenizer_for(policy)) == (0, 2)
    wrong = PolicyConfig(tokenizer=folder, end_tokens=("<|eot|>",))
    with pytest.raises(InputError, match=r"policy.end_tokens: '<\|eot\|>' is no token"):
        tokenizer_for(wrong)


def test_an_answer_may_call_tools_by_the_tokens_of_its_template() -> None:
    tokenizer = chat_tokenizer(TEMPLATES["mistral"], "</s>", more=("[TOOL_CALLS]",))
    ends = [4]  # </s>
    call = '[TOOL_CALLS] [{"name": "weather", "arguments": {}}]'
    check_rows(tokenizer, [(HI, call)], [FILE], ends=ends, context_length=150)
    for chat in [(HI, "[INST] a"), ((Message(role="user", content=call),), "4")]:
        with pytest.raises(InputError, match="is a control token of the policy's tokenizer"):
            check_rows(tokenizer, [chat], [FILE], ends=ends, context_length=150)


DIALOGUE = (
    Message(role="system", content="Answer briefly."),
    Message(role="user", content="2+2?"),
    Message(role="assistant", content="4"),
    Message(role="user", content="3+3?"),
    Message(role="assistant", content="6"),
    Message(role="user", content="4+4?"),
)


def trained_runs(tokenizer, chat) -> list[str]:
    """Texts of the runs of tokens that a conversation is trained on."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chat.mask, [0]])))
    return [
        text_of(tokenizer, chat.ids[start:end])
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [
        (CHATML, "<|im_end|>", "<|im_end|>"),
        (DATED, "<|im_end|>", "<|im_end|>"),
        (TWO_ENDS, "</s>", "<|im_end|></s>"),
    ],
)
def test_every_answer_of_a_conversation_is_trained_to_its_end(template, eos, end) -> None:
    tokenizer = chat_tokenizer(template, eos)
    ends = end_token_ids(tokenizer)
    shown = Demonstration(messages=DIALOGUE, answer=assistant("8"), name="row")
    (last,) = demonstrated(tokenizer, [shown], ends)
    (every,) = demonstrated(tokenizer, [shown], ends, "all")
    np.testing.assert_array_equal(every.ids, last.ids)
    assert [text.strip() for text in trained_runs(tokenizer, last)] == [f"8{end}"]
    texts = [text.strip() for text in trained_runs(tokenizer, every)]
    assert texts == [f"4{end}", f"6{end}", f"8{end}"]
    assert rendered_lengths(tokenizer, [shown], ends, "all") == [len(every.ids)]


def test_answers_that_change_once_the_conversation_goes_on_are_refused() -> None:
    """Qwen3's template writes empty reasoning before the last answer, and drops it after it."""
    tokenizer = chat_tokenizer(QWEN3, "<|im_end|>")
    ends = end_token_ids(tokenizer)
    shown = Demonstration(messages=DIALOGUE, answer=assistant("8"), name="rows.jsonl, line 2")
    with pytest.raises(InputError, match="otherwise once the conversation goes on") as error:
        rendered_lengths(tokenizer, [shown], ends, "all")
    assert str(error.value).startswith("rows.jsonl, line 2, answer 1 of 3: ")
    assert "sft.train_on: last" in str(error.value)
    assert rendered_lengths(tokenizer, [shown], ends) > [0]
    chats = demonstrated(tokenizer, [replace(shown, segments=True)], ends, "all")
    thought = "<think>\n\n</think>\n\n"
    assert [trained_runs(tokenizer, chat) for chat in chats] == [
        [f"{thought}{answer}<|im_end|>"] for answer in ("8", "4", "6")
    ]
    assert [chat.prompt.count("<|im_start|>user") for chat in chats] == [3, 1, 2]
    flagged = replace(shown, segments=True, trained=[True, False, False])
    (only,) = demonstrated(tokenizer, [flagged], ends, "flagged")
    np.testing.assert_array_equal(only.ids, chats[1].ids)
    assert rendered_lengths(tokenizer, [flagged], ends, "flagged") == [len(chats[0].ids)]


def test_an_earlier_answer_that_is_not_learned_as_written_is_named() -> None:
    tokenizer = chat_tokenizer(TRIMMED, "<|im_end|>")
    blank = (*DIALOGUE[:2], Message(role="assistant", content=" 4 "), *DIALOGUE[3:])
    shown = [
        Demonstration(messages=messages, answer=assistant("8"), name=f"line {line}")
        for line, messages in enumerate([DIALOGUE, blank], 1)
    ]
    ends = end_token_ids(tokenizer)
    rendered_lengths(tokenizer, shown, ends)
    with pytest.raises(InputError, match="line 2, answer 1 of 3: the answer ' 4 ' would be"):
        rendered_lengths(tokenizer, shown, ends, "all")


CALL = ToolCall(id="call00000", name="get_weather", arguments='{"city":"Rome"}')
CALLS = Message(role="assistant", content="", tool_calls=(CALL,))
RESULT = Message(role="tool", content="sunny", tool_call_id="call00000", name="get_weather")


def tool_row(*messages: Message, answer: Message = CALLS) -> Demonstration:
    return Demonstration(
        messages=(*HI, *messages), answer=answer, name="rows.jsonl, line 2", tools=[WEATHER]
    )


def test_calls_of_tools_are_learned_as_the_template_writes_them() -> None:
    tokenizer = chat_tokenizer(TEMPLATES["qwen"], "<|im_end|>")
    ends = end_token_ids(tokenizer)
    called = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    call = f"<think></think><tool_call>\n{called}\n</tool_call>"
    row = tool_row(CALLS, RESULT, answer=assistant("sunny"))
    (last,) = demonstrated(tokenizer, [tool_row()], ends)
    (every,) = demonstrated(tokenizer, [row], ends, "all")
    assert trained_runs(tokenizer, last) == [f"{call}<|im_end|>"]
    assert trained_runs(tokenizer, every) == [f"{call}<|im_end|>", "<think></think>sunny<|im_end|>"]
    assert '"name": "get_weather", "description"' in every.prompt, "the tools are offered"
    assert rendered_lengths(tokenizer, [tool_row(), row], ends, "all") == [
        len(last.ids), len(every.ids),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML, "writes tool calls in no known format"),
        (
            TEMPLATES["qwen"].replace(
                "ments | tojson }}", "ments | tojson | replace('Ro', 'Ho') }}"
            ),
            r"its tool calls \[\('get_weather', {'city': 'Rome'}\)\] would be learned as .*Home",
        ),
    ],
)
def test_calls_that_a_template_does_not_write_are_refused(template: str, words: str) -> None:
    tokenizer = chat_tokenizer(template, "<|im_end|>")
    with pytest.raises(InputError, match=rf"^rows\.jsonl, line 2: .*{words}"):
        rendered_lengths(tokenizer, [tool_row()], end_token_ids(tokenizer))


@pytest.mark.parametrize("written", ["content", "content | tojson"])
def test_results_of_tools_are_written_as_they_are_or_as_json(written: str) -> None:
    """Llama 3's template writes them as JSON."""
    template = TEMPLATES["qwen"].replace("{{- content }}", f"{{{{- {written} }}}}")
    tokenizer = chat_tokenizer(template, "<|im_end|>")
    row = tool_row(CALLS, replace(RESULT, content='"hot"'), answer=assistant("hot"))
    assert rendered_lengths(tokenizer, [row], end_token_ids(tokenizer)) > [0]


def test_a_result_of_a_tool_that_a_template_drops_is_refused() -> None:
    template = TEMPLATES["qwen"].replace("{{- content }}", "{{- 'a result' }}")
    tokenizer = chat_tokenizer(template, "<|im_end|>")
    row = tool_row(CALLS, RESULT, answer=assistant("sunny"))
    with pytest.raises(InputError, match="leaves out or changes a message of role tool, 'sunny'"):
        rendered_lengths(tokenizer, [row], end_token_ids(tokenizer))


def test_answers_say_themselves_whether_they_are_learned() -> None:
    tokenizer = chat_tokenizer(CHATML, "<|im_end|>")
    ends = end_token_ids(tokenizer)
    row = Demonstration(messages=DIALOGUE, answer=assistant("8"), name="row")
    for trained, expected in (
        ((True, False, True), ["4<|im_end|>", "8<|im_end|>"]),
        ((False, True, False), ["6<|im_end|>"]),
        (None, ["4<|im_end|>", "6<|im_end|>", "8<|im_end|>"]),
    ):
        flagged = replace(row, trained=trained)
        rendered_lengths(tokenizer, [flagged], ends, "flagged")
        (chat,) = demonstrated(tokenizer, [flagged], ends, "flagged")
        assert trained_runs(tokenizer, chat) == expected
    with pytest.raises(InputError, match=r"^row: none of its answers is learned"):
        rendered_lengths(tokenizer, [replace(row, trained=[False] * 3)], ends, "flagged")
    with pytest.raises(InputError, match=r"^row: .*set sft\.train_on: flagged, or remove them"):
        rendered_lengths(tokenizer, [replace(row, trained=[True] * 3)], ends, "all")
