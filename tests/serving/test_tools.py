"""Tool calls: the template's format, parsing from any pieces of text, forced calls."""

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.cases import printed_seed
from support.templates import CALLING, CHATML, LLAMA3, MISTRAL, QWEN, TOOLS, trained_byte_tokenizer

from marin_rl.inference.client.protocol import call_body
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.text.constraints import Constraints, MakeWalker, forced_calls_grammar
from marin_rl.serving.text.templates import ChatPrompts
from marin_rl.tokenizers import CHAT_TEMPLATE
from marin_rl.tool_calls import (
    CALLS_MAX,
    ParsedAnswer,
    ToolCallStream,
    ToolFormat,
    malformed_call,
    parameters_of,
    parse_tool_calls,
    tool_format,
)
from marin_rl.types import ToolCall

STRING = {"type": "string"}

NAMES = parameters_of(
    [
        {"function": {"name": "time"}},
        {"function": {"name": "weather", "parameters": {"properties": {"city": STRING}}}},
    ]
)
TOKENIZER = trained_byte_tokenizer()
TOKENIZER.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
TOKENIZER.bos_token = "<|user|>"


def format_of(template: str) -> ToolFormat | None:
    TOKENIZER.chat_template = template
    return tool_format(TOKENIZER)


HERMES = ToolFormat(
    opening="<tool_call>",
    closing="</tool_call>",
    arguments="arguments",
    before="<tool_call>\n",
    after="\n</tool_call>",
)
LLAMA = ToolFormat(opening="", closing="", arguments="parameters", before="", after="")
LIST = ToolFormat(
    opening="[TOOL_CALLS]",
    closing="",
    arguments="arguments",
    before="[TOOL_CALLS] ",
    after="",
    kind="listed",
    special=True,
)
TAGS = replace(HERMES, kind="tagged")
PAIRS = replace(HERMES, before="<tool_call>", kind="pairs")
DEEPSEEK = replace(
    TAGS,
    opening="<\uff5ctool▁calls▁begin\uff5c>",
    closing="<\uff5ctool▁calls▁end\uff5c>",
    before="<\uff5ctool▁calls▁begin\uff5c>",
    after="<\uff5ctool▁calls▁end\uff5c>",
    kind="named",
)
LFM2 = replace(
    TAGS,
    opening="<|tool_call_start|>",
    closing="<|tool_call_end|>",
    before="<|tool_call_start|>",
    after="<|tool_call_end|>",
    kind="python",
)
GPT_OSS = replace(LIST, opening="to=functions.", before="to=functions.", kind="channels")
# As Qwen3-Coder's, without instructions.
TAGGED = """{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' }}
            {{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}"""
# The calls of other families, as their templates write them.
CALLS = """{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {{- '<|' ~ message.role ~ '|>' ~ message.content }}
    {%- for call in message.tool_calls or [] %}{% set f = call.function %}CALL{% endfor %}
    {{- '<|end|>' }}
{%- endfor %}"""
GLM4 = """
        {{- '\\n<tool_call>' + f.name }}
        {%- for key, value in f.arguments | items %}
            {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
            {{- (value if value is string else value | tojson) + '</arg_value>' }}
        {%- endfor %}
        {{- '\\n</tool_call>' }}"""
DEEPSEEK_V3 = """
        {{- '<|tool▁calls▁begin|>' if loop.first }}
        {{- '<|tool▁call▁begin|>function<|tool▁sep|>' + f.name + '\\n```json\\n' + f.arguments }}
        {{- '\\n```<|tool▁call▁end|>' }}
        {{- '<|tool▁calls▁end|>' if loop.last }}""".replace("<|tool", "<\uff5ctool").replace(
    "|>", "\uff5c>"
)
LFM2_5 = """
        {{- '<|tool_call_start|>[' + f.name + '(' }}
        {%- for key, value in f.arguments | items %}
            {{- (', ' if not loop.first else '') + key + '=' + value | tojson }}
        {%- endfor %}
        {{- ')]<|tool_call_end|>' }}"""
OSS = """
        {{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
        {{- f.arguments | tojson + '<|call|>' }}"""
TEMPLATES = {"hermes": QWEN, "llama": LLAMA3, "mistral": MISTRAL, "tagged": TAGGED} | {
    name: CALLS.replace("CALL", call)
    for name, call in {"glm": GLM4, "deepseek": DEEPSEEK_V3, "lfm2": LFM2_5, "oss": OSS}.items()
}
FORMATS = {
    "hermes": HERMES, "llama": LLAMA, "mistral": LIST, "tagged": TAGS, "glm": PAIRS,
    "deepseek": DEEPSEEK, "lfm2": LFM2, "oss": GPT_OSS,
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_formats_are_read_off_what_templates_write(name):
    assert format_of(TEMPLATES[name]) == FORMATS[name]


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        CHAT_TEMPLATE,
        "{# <tool_call>{json}</tool_call> [TOOL_CALLS] [{ #}" + CHATML,
        "{{ raise_exception('no tools') if tools }}",
        "{% for m in messages %}{{ m.content or '<tool_call>' }}{% endfor %}",
    ],
)
def test_a_template_that_writes_no_calls_has_no_format(template):
    assert format_of(template) is None


def told(parsed: ParsedAnswer) -> tuple[str | None, list[tuple[str, Any]]]:
    return parsed.content, [(call.name, json.loads(call.arguments)) for call in parsed.calls]


CITY = {"city": "Zürich", "note": 'a "quote" } ] <b>'}


def call_text(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


ONE = call_text("weather", CITY)
TWO = call_text("time", {})


def tagged_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as `TAGGED` writes it."""
    shown = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    tags = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in shown.items())
    return f"<function={name}>\n{tags}</function>"


VALUES = {"city": "12", "days": 2, "units": ["a"], "far": {"k": None}, "ok": True, "n": None}
FIVE = tagged_text("weather", VALUES)
MARKED = {"html": "</tool_call> and </tool_call>"}
THREE = call_text("weather", MARKED)
EACH = {"city": 'Zürich "x"', "days": 2, "l": ["a", {"b": None}], "ok": True}
BOTH = [("weather", EACH), ("time", {})]
OSLO = [("weather", {"city": "Oslo"})]
JSON_OF_EACH = json.dumps(EACH, ensure_ascii=False)


def deepseek(text: str) -> str:
    """Names of DeepSeek's marks in brackets, as they are in its texts."""
    return text.replace("[", "<\uff5ctool▁").replace("]", "\uff5c>")


# What the templates of these families write.
PUBLISHED = [
    (
        PAIRS,
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich "x"</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>l</arg_key>\n<arg_value>"
        '["a", {"b": null}]</arg_value>\n<arg_key>ok</arg_key>\n<arg_value>true</arg_value>\n'
        "</tool_call>\n<tool_call>time\n</tool_call>",
        None,
        BOTH,
    ),
    (
        PAIRS,
        "So. <tool_call>weather<arg_key>city</arg_key><arg_value>a</tool_call></arg_value>"
        "</tool_call>",
        "So.",
        [("weather", {"city": "a</tool_call>"})],
    ),
    (PAIRS, "<tool_call>time\n<arg_key>a</arg_key></tool_call>", ..., []),
    (
        DEEPSEEK,
        deepseek("[calls▁begin][call▁begin]function[sep]weather\n```json\n")
        + JSON_OF_EACH
        + deepseek("\n```[call▁end]\n[call▁begin]function[sep]time\n```json\n{}\n```")
        + deepseek("[call▁end][calls▁end]"),
        None,
        BOTH,
    ),
    (  # V3.1
        DEEPSEEK,
        deepseek('Yes.[calls▁begin][call▁begin]weather[sep]{"city": "Oslo"}[call▁end][calls▁end]'),
        "Yes.",
        OSLO,
    ),
    (DEEPSEEK, deepseek("[calls▁begin][call▁begin]time[sep]{x}[call▁end][calls▁end]"), ..., []),
    *(
        (
            LFM2,
            f"<|tool_call_start|>[weather(city='Zürich \"x\"', days=2, l={listed}, ok=True), "
            "time()]<|tool_call_end|>",
            None,
            BOTH,
        )
        for listed in ("['a', {'b': None}]", '["a", {"b": null}]')
    ),
    (LFM2, "<|tool_call_start|>[weather('Oslo')]<|tool_call_end|>", ..., []),
    (LFM2, "<|tool_call_start|>[weather(city=open('x'))]<|tool_call_end|>", ..., []),
    (LFM2, "<|tool_call_start|>" + "(" * 500 + ")]<|tool_call_end|>", ..., []),
    (
        GPT_OSS,
        "<|channel|>analysis<|message|>1 < 2.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        None,
        OSLO,
    ),
    (
        GPT_OSS,
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}',
        None,
        OSLO,
    ),
    (
        GPT_OSS,
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>"
        "1 < 2.",
        "1 < 2.",
        [],
    ),
    (GPT_OSS, "<|channel|>commentary to=functions.time<|message|>{", ..., []),
    (GPT_OSS, "no channel", ..., []),
]
READ = [
    *PUBLISHED,
    (HERMES, "Hello  there ", "Hello  there ", []),
    (HERMES, "", "", []),
    (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", None, [("weather", CITY)]),
    (
        HERMES,
        f"Let me see. \n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
        "Let me see.",
        [("weather", CITY), ("time", {})],
    ),
    (HERMES, f"a <tool_call>{ONE}</tool_call> b ", "a b", [("weather", CITY)]),
    (HERMES, "<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", []),
    (HERMES, f"x <tool_call>{ONE}", f"x <tool_call>{ONE}", []),
    (HERMES, "x <tool_", "x <tool_", []),
    (HERMES, "<<tool_call", "<<tool_call", []),
    (
        HERMES,
        f"<tool_call>{{}}</tool_call><tool_call>{TWO}</tool_call>",
        "<tool_call>{}</tool_call>",
        [("time", {})],
    ),
    (HERMES, '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>', ..., []),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', ..., []),
    (HERMES, f"<tool_call>{THREE}</tool_call> b", " b", [("weather", MARKED)]),
    (HERMES, f"<tool_call>{THREE};{TWO}</tool_call>", None, [("weather", MARKED), ("time", {})]),
    (
        HERMES,
        f'a <tool_call>{{"x</tool_call> <tool_call>{THREE}</tool_call>',
        'a <tool_call>{"x</tool_call>',
        [("weather", MARKED)],
    ),
    (HERMES, "<tool_call>" + "[" * 50_000 + "</tool_call>", ..., []),
    (TAGS, f"<tool_call>\n{FIVE}\n</tool_call>", None, [("weather", VALUES)]),
    (
        TAGS,
        f"Yes. <tool_call>{tagged_text('weather', MARKED)}</tool_call>\n<tool_call>\n"
        f"{tagged_text('time', {})}\n</tool_call>",
        "Yes.",
        [("weather", MARKED), ("time", {})],
    ),
    (
        TAGS,
        f"<tool_call>{FIVE.replace('true', 'True').replace('null', 'None')}</tool_call>",
        None,
        [("weather", {**VALUES, "far": '{"k": None}'})],
    ),
    (TAGS, f"<tool_call>{FIVE}", ..., []),
    (TAGS, "<tool_call><function=time><parameter=a>\n1\n</function></tool_call>", ..., []),
    (TAGS, "<tool_call><function=time>text</function></tool_call>", ..., []),
    (LLAMA, "It is sunny.", "It is sunny.", []),
    (LLAMA, call_text("weather", CITY, "parameters"), None, [("weather", CITY)]),
    (
        LLAMA,
        f"{call_text('weather', CITY, 'parameters')}; {call_text('time', {}, 'parameters')}",
        None,
        [("weather", CITY), ("time", {})],
    ),
    (LLAMA, '{"answer": 42}', ..., []),
    (LLAMA, call_text("unknown", {}, "parameters"), ..., []),
    (LLAMA, "Sure: " + call_text("weather", CITY, "parameters"), ..., []),
    (LIST, "Hello", "Hello", []),
    (LIST, f"[TOOL_CALLS] [{ONE}, {TWO}]", None, [("weather", CITY), ("time", {})]),
    (LIST, f"Yes: [TOOL_CALLS][{TWO}]\n", "Yes:", [("time", {})]),
    (LIST, f"[TOOL_CALLS] {ONE}", ..., []),
    (LIST, f"[TOOL_CALLS] [{ONE}, 3]", ..., []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_calls_are_read_and_the_malformed_stay_text(form, text, content, calls):
    expected = text if content is ... else content
    assert told(parse_tool_calls(form, text, NAMES)) == (expected, calls)


@pytest.mark.parametrize(
    ("form", "content", "malformed"),
    [
        (HERMES, "Let me see.", None),
        (HERMES, "x <tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>"),
        (HERMES, "x <tool_call>", "<tool_call>"),
        (LIST, f"[TOOL_CALLS] {ONE}", f"[TOOL_CALLS] {ONE}"),
        (LLAMA, '{"answer": 42}', None),
        (LLAMA, ' {"name": "weather", "parameters": {', '{"name": "weather", "parameters": {'),
        (LLAMA, 'Sure: {"name": "weather", "parameters": {', None),
    ],
)
def test_malformed_calls_differ_from_answers(form, content, malformed):
    assert parse_tool_calls(form, content, NAMES).calls == ()
    assert malformed_call(form, content) == malformed


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_a_stream_gives_the_same_however_the_text_is_cut(form, text, content, calls):
    chance = random.Random(printed_seed())
    whole = told(parse_tool_calls(form, text, NAMES))
    for most in (1, 3, 20):
        stream, pieces, at = ToolCallStream(form, NAMES), [], 0
        while at < len(text):
            length = chance.randint(1, most) if len(text) < 5000 else 5000
            pieces += stream.feed(text[at : at + length])
            at += length
        pieces += stream.finish()
        assert "" not in pieces
        shown = "".join(piece for piece in pieces if isinstance(piece, str))
        found = tuple(piece for piece in pieces if isinstance(piece, ToolCall))
        assert stream.calls == len(found)
        assert told(ParsedAnswer(content=shown or (None if found else ""), calls=found)) == whole


def test_a_stream_holds_back_no_more_than_it_must():
    stream = ToolCallStream(HERMES, NAMES)
    assert stream.feed("Hello ") == ["Hello"]
    assert stream.feed("you <to") == [" you"]
    assert stream.feed("night") == [" <tonight"]
    assert stream.feed(f"<tool_call>{TWO}</tool_cal") == []
    (call,) = stream.feed("l>")
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("time", "{}")
    assert stream.finish() == []
    bare = ToolCallStream(LLAMA, NAMES)
    assert bare.feed("It is {") == ["It is {"]
    assert bare.feed("x}") == ["x}"]


def test_half_a_character_in_a_calls_arguments_stays_as_it_was_spelled():
    text = '<tool_call>{"name": "x", "arguments": {"a": "é\\ud800\\\\"}}</tool_call>'
    (call,) = parse_tool_calls(HERMES, text, NAMES).calls
    assert call.arguments == '{"a": "é\\ud800\\\\"}'
    call.arguments.encode()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_was_read_can_be_sent_back(name):
    (call,) = parse_tool_calls(FORMATS[name], written(name), NAMES).calls
    answer = {"role": "assistant", "content": None, "tool_calls": [call_body(call)]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    TOKENIZER.chat_template = TEMPLATES[name]
    assert "Zürich" in ChatPrompts(TOKENIZER).text([*CALLING[:1], answer, result], tools=TOOLS)


def test_calls_beyond_the_limit_stay_text():
    text = f"<tool_call>{TWO}</tool_call>" * (CALLS_MAX + 1)
    parsed = parse_tool_calls(HERMES, text, NAMES)
    assert len(parsed.calls) == CALLS_MAX
    assert parsed.content == f"<tool_call>{TWO}</tool_call>"


MARKS = (
    "<|im_start|>assistant",
    "<think></think>",
    "<|assistant|>",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
)


def written(name: str) -> str:
    """A call as the template writes it, without its marks of a message."""
    TOKENIZER.chat_template = TEMPLATES[name]
    asked = ChatPrompts(TOKENIZER).text(CALLING[:1], opening=False)
    text = ChatPrompts(TOKENIZER).text(CALLING[:2], opening=False).removeprefix(asked)
    for mark in MARKS:
        text = text.replace(mark, "")
    return text.strip()


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_a_template_writes_are_read_back(name):
    content, calls = told(parse_tool_calls(FORMATS[name], written(name), NAMES))
    assert content is None
    assert calls == [("weather", {"city": "Zürich", "days": 2})]


BOUNDED: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 6},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "time",
            "parameters": {"type": "object", "additionalProperties": False},
        },
    },
]


def forced(form: ToolFormat, tools: list[Any], *, several: bool = False) -> MakeWalker:
    """Walkers through calls of these tools and nothing else."""
    grammar = forced_calls_grammar(form, tools, TOKENIZER, several=several)
    constraints = Constraints(TOKENIZER, vocabulary=400, stop_tokens=[TOKENIZER.eos_token_id])
    return constraints.grammar(grammar, param="tools")


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "tagged", "glm"])
@pytest.mark.parametrize("several", [True, False], ids=["several", "one"])
def test_a_forced_answer_is_nothing_but_calls_of_the_tools(name, several):
    chance = random.Random(printed_seed())
    form = FORMATS[name]
    make = forced(form, BOUNDED, several=several)
    seen: set[str] = set()
    for drawn_calls in range(200):
        content, calls = told(parse_tool_calls(form, drawn(make(), chance), NAMES))
        assert content is None
        assert len(calls) >= 1
        assert several or len(calls) == 1
        for called, arguments in calls:
            seen.add(called)
            assert set(arguments) <= {"city", "days"}
            assert called == "time" or "city" in arguments
        if drawn_calls >= 11 and len(seen) == 2:
            break
    assert seen == {"weather", "time"}


def drawn(walker, chance: random.Random) -> str:
    """A text drawn uniformly through the masks, but for the end, which is taken where it may be."""
    tokens: list[int] = []
    while len(tokens) < 4000:
        bits = np.unpackbits(walker.mask().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if TOKENIZER.eos_token_id in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return TOKENIZER.decode(tokens)
        tokens.append(chance.choice([t for t in allowed if t != TOKENIZER.eos_token_id]))
        walker.accept(tokens[-1])
    raise AssertionError("no end")


def test_a_named_tool_is_the_only_one_called():
    text = drawn(forced(HERMES, BOUNDED[1:])(), random.Random(2))
    assert told(parse_tool_calls(HERMES, text, NAMES)) == (None, [("time", {})])


def test_blank_space_in_a_forced_call_has_an_end():
    walker = forced(HERMES, BOUNDED[1:])()
    begun = TOKENIZER.encode("<tool_call>\n{", add_special_tokens=False)
    (space,) = TOKENIZER.encode(" ", add_special_tokens=False)
    for token in begun + [space] * 32:
        walker.accept(token)
    assert not walker.mask()[space // 32] >> np.uint32(space % 32) & 1


def test_tools_too_large_to_force_are_refused():
    wide = {"type": "object", "properties": {f"k{i}": {"const": "x" * 100} for i in range(3000)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": wide}}]
    with pytest.raises(ApiError, match="expected forms of at most 262144 characters"):
        forced(HERMES, tools)
