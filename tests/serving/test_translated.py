"""OpenAI's Responses and Anthropic's Messages at the server: answers, streams, tools, errors."""

import http.client
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from support.cases import printed_seed
from support.models import tiny_model
from support.servers import CONTEXT, MESSAGES, serving, talk
from support.templates import CHATML, byte_level_tokenizer

from marin_rl.inference.client.protocol import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE
from marin_rl.model_apis.call import Reasoning
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.text.templates import ReasoningFormat, ReasoningStream, reasoning_format
from marin_rl.tokenizers import character_tokenizer

TOKENIZER = character_tokenizer()
TOKENIZER.chat_template = """{% for message in messages %}{{ '<|' + message.role + '|>' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
ARGUMENTS = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {"model": "policy", "seed": 1}
TEXT = {
    CHAT_ROUTE: {"messages": MESSAGES, "max_tokens": 8},
    RESPONSES_ROUTE: {"input": "abc", "max_output_tokens": 8},
    MESSAGES_ROUTE: {"messages": MESSAGES, "max_tokens": 8},
}
CALL = {
    RESPONSES_ROUTE: {
        "input": "abc",
        "tools": [{"type": "function", "name": "add", "parameters": ARGUMENTS}],
        "tool_choice": {"type": "function", "name": "add"},
    },
    MESSAGES_ROUTE: {
        "messages": MESSAGES,
        "max_tokens": 32_000,
        "tools": [{"name": "add", "input_schema": ARGUMENTS}],
        "tool_choice": {"type": "tool", "name": "add"},
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving(tokenizer=TOKENIZER, context_length=160) as server:
        yield server


def ask(server: PolicyServer, route: str, **fields: Any) -> Any:
    status, _, answer = talk(server, "POST", route, ASKED | fields)
    assert status == 200, answer
    return answer


def refused(server: PolicyServer, route: str, **fields: Any) -> Any:
    status, _, answer = talk(server, "POST", route, {"model": "policy"} | fields)
    assert status == 400, answer
    return answer["error"]


def read(route: str, data: Any) -> list[dict[str, Any]]:
    """Events of a stream."""
    events = []
    for event in filter(None, data.split("\n\n")):
        head, told = event.splitlines()
        events.append(json.loads(told.removeprefix("data: ")))
        assert head == f"event: {events[-1]['type']}"
    return events


def test_all_apis_give_the_same_sample(server: PolicyServer) -> None:
    chat = ask(server, CHAT_ROUTE, **TEXT[CHAT_ROUTE])
    text = chat["choices"][0]["message"]["content"]
    response = ask(server, RESPONSES_ROUTE, **TEXT[RESPONSES_ROUTE])
    (item,) = response["output"]
    assert [part["text"] for part in item["content"]] == [text]
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    message = ask(server, MESSAGES_ROUTE, **TEXT[MESSAGES_ROUTE])
    assert message["content"] == [{"type": "text", "text": text}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    used = chat["usage"]
    for answer in (response, message):
        assert answer["model"] == chat["model"] == server.model_id
        assert answer["usage"]["output_tokens"] == used["completion_tokens"] == 8
    counted = ask(server, f"{MESSAGES_ROUTE}/count_tokens", messages=MESSAGES)
    assert counted == {"input_tokens": used["prompt_tokens"]}
    # a stop string ends the text before it
    stop = text[3]
    ended = ask(server, MESSAGES_ROUTE, **TEXT[MESSAGES_ROUTE], stop_sequences=[stop])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)
    assert ended["content"][0]["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("asked", [TEXT, CALL], ids=["text", "call"])
def test_openais_client_reads_responses_whole_and_streamed(server, asked):
    body = {"model": "policy", **asked[RESPONSES_ROUTE], "extra_body": {"seed": 1}}
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        whole = client.responses.create(**body)
        with client.responses.stream(**body) as events:
            streamed = list(events)
            final = events.get_final_response() if asked is CALL else streamed[-1].response
    strip = lambda response: [
        item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) | {"content": None}
        for item in response.output
    ]
    assert strip(final) == strip(whole)
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in streamed] == [*range(len(streamed))]
    if asked is CALL:
        (item,) = whole.output
        assert (item.type, item.name) == ("function_call", "add")
        assert json.loads(item.arguments)["x"] in (1, 2)
        assert whole.status == "completed"


@pytest.mark.parametrize("asked", [TEXT, CALL], ids=["text", "call"])
def test_a_stream_of_messages_adds_up_to_the_whole(server, asked):
    whole = ask(server, MESSAGES_ROUTE, **asked[MESSAGES_ROUTE])
    events = read(MESSAGES_ROUTE, ask(server, MESSAGES_ROUTE, **asked[MESSAGES_ROUTE], stream=True))
    assert [event["type"] for event in (events[0], events[-1])] == ["message_start", "message_stop"]
    text = "".join(
        event["delta"].get("text", "") + event["delta"].get("partial_json", "")
        for event in events
        if event["type"] == "content_block_delta"
    )
    (block,) = whole["content"]
    if asked is CALL:
        assert whole["stop_reason"] == "tool_use"
        assert (block["name"], block["input"]) == ("add", json.loads(text))
    else:
        assert block["text"] == text
        assert len([e for e in events if e["type"] == "content_block_delta"]) > 1
    ended = events[-2]
    assert ended["delta"]["stop_reason"] == whole["stop_reason"]
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_errors_have_the_shape_and_the_words_of_their_api(server: PolicyServer) -> None:
    long = "abc" * CONTEXT
    error = refused(server, RESPONSES_ROUTE, input=long)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    error = refused(
        server, MESSAGES_ROUTE, messages=[{"role": "user", "content": long}], max_tokens=4
    )
    counted = ask(server, f"{MESSAGES_ROUTE}/count_tokens", messages=MESSAGES)["input_tokens"]
    tokens = counted - len("abc") + len(long)
    assert error["message"] == f"prompt is too long: {tokens} tokens > 160 maximum"
    assert error["type"] == "invalid_request_error"
    error = refused(server, RESPONSES_ROUTE, input="abc", previous_response_id="resp_1")
    assert "previous_response_id: nothing is stored here" in error["message"]
    error = refused(server, RESPONSES_ROUTE, input="abc", inputs=1)
    assert (error["code"], error["param"]) == ("unknown_field", "inputs")
    image = [{"role": "user", "content": [{"type": "image"}]}]
    error = refused(server, MESSAGES_ROUTE, messages=image, max_tokens=4)
    assert "the policy reads text alone" in error["message"]
    for arguments in ("[" * 100_000, '{"a": NaN}', '{"a": 1e999}', "[1]"):
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        error = refused(server, RESPONSES_ROUTE, input=[{"role": "user", "content": "a"}, call])
        assert "input[1]: expected arguments as an object" in error["message"]
    items = [{"role": "user", "content": "a"}, {"type": "reasoning", "content": ["thought"]}]
    error = refused(server, RESPONSES_ROUTE, input=items)
    assert "an entry of a list, is missing or of another type" in error["message"]
    body = TEXT[MESSAGES_ROUTE] | {"model": "x"}
    status, _, answer = talk(server, "POST", MESSAGES_ROUTE, body)
    assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
    assert talk(server, "HEAD", "/")[0] == 200


def test_a_stream_that_fails_ends_as_its_api_ends_it() -> None:
    """The engine ends in mid-answer."""
    kinds, streams = {RESPONSES_ROUTE: "failed", MESSAGES_ROUTE: "error"}, {}
    with serving(model=tiny_model(context_length=8192), context_length=8192) as server:
        for route in kinds:
            body = ASKED | TEXT[route] | {"stream": True, "temperature": 10}
            body |= {name: 8000 for name in body if "max" in name}
            connection = http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=60)
            connection.request("POST", route, json.dumps(body))
            streams[route] = connection, connection.getresponse()
            assert streams[route][1].readline().startswith(b"event: ")
        server.engine.close()
        for route, (connection, response) in streams.items():
            last = response.read().decode().strip().split("\n\n")[-1]
            connection.close()
            data = json.loads(last.splitlines()[1].removeprefix("data: "))
            assert data["type"].endswith(kinds[route])
            error = data.get("error") or data["response"]["error"]
            assert error["message"]


def test_reasoning_is_an_item_of_its_own_where_the_template_marks_it() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    )
    with serving(tokenizer=tokenizer) as server:
        said = ask(server, CHAT_ROUTE, **TEXT[CHAT_ROUTE])["choices"][0]["message"]["content"]
        response = ask(server, RESPONSES_ROUTE, **TEXT[RESPONSES_ROUTE])
        (item,) = response["output"]
        assert (item["type"], item["content"][0]["text"]) == ("reasoning", said.strip())
        message = ask(server, MESSAGES_ROUTE, **TEXT[MESSAGES_ROUTE])
        (block,) = message["content"]
        assert (block["type"], block["thinking"]) == ("thinking", said.strip())
        # and comes back as the template has it
        blocks = [block | {"thinking": "hm"}, {"type": "text", "text": "b"}]
        back = [{"role": "user", "content": "a"}, {"role": "assistant", "content": blocks}]
        counted = ask(server, f"{MESSAGES_ROUTE}/count_tokens", messages=back)["input_tokens"]
        text = "<|user|>a<|assistant|><think>hm</think>b<|assistant|><think>\n"
        assert counted == len(tokenizer.encode(text, add_special_tokens=False))


FORM = ReasoningFormat(opening="<think>", closing="</think>")


def test_the_format_of_reasoning_is_read_off_what_templates_write() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = CHATML
    assert reasoning_format(tokenizer) is None
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}"
        "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% endfor %}"
    )
    assert reasoning_format(tokenizer) == FORM


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "said"),
    [
        (False, "<think>\nso <b>\n</think>\n\nfive </think>", "so <b>", "five </think>"),
        (True, "\nso\n</think>\n\n five", "so", "five"),
        (True, "so it never ends </thi", "so it never ends </thi", ""),
        (False, " five <think>x</think>", "", " five <think>x</think>"),
        (False, "<thin", "", "<thin"),
        (False, "<think></think>", "", ""),
        (False, "", "", ""),
    ],
)
def test_reasoning_is_read_the_same_from_any_pieces(*, inside, text, reasoning, said):
    chooser = random.Random(printed_seed())
    for _ in range(50):
        stream = ReasoningStream(FORM, inside=inside)
        cuts = sorted(chooser.choices(range(len(text) + 1), k=chooser.randrange(6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        fed = [stream.feed(part, last=n == len(cuts)) for n, part in enumerate(parts)]
        pieces = [piece for each in fed for piece in each]
        assert "".join(piece for piece in pieces if isinstance(piece, Reasoning)) == reasoning
        assert "".join(piece for piece in pieces if not isinstance(piece, Reasoning)) == said
