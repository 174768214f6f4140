"""The `openai` package against a server on loopback: what its users see."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from support.models import full_logits, tiny_model
from support.servers import CONTEXT, ENGINE
from support.templates import byte_level_tokenizer
from transformers import PreTrainedTokenizerBase

from marin_rl.config import InferenceConfig, ServerConfig
from marin_rl.serving.server import PolicyServer
from marin_rl.tokenizers import character_tokenizer

TOKENIZER = byte_level_tokenizer()
ASK: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "a中"}],
    "max_tokens": 24,
    "seed": 7,
}
CLOSED = {"type": "object", "additionalProperties": False}
SCHEMA = CLOSED | {"properties": {"ab": {"enum": ["a", "b"]}}, "required": ["ab"]}
ARGUMENTS = CLOSED | {"properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}}
JSON_ASK = ASK | {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 120}
CALLING_TEMPLATE = """{% for message in messages %}{{ '<|' + message.role + '|>' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def started(
    *, tokenizer: PreTrainedTokenizerBase = TOKENIZER, context_length: int = CONTEXT, **limits: Any
) -> PolicyServer:
    """A running server with these limits."""
    config = InferenceConfig(engine=ENGINE, server=ServerConfig(**limits))
    given = {"context_length": context_length, "parameters_digest": "ab" * 32}
    server = PolicyServer(tiny_model(), tokenizer, config, **given)
    server.start()
    return server


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    server = started()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: PolicyServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI, server: PolicyServer) -> None:
    answer = client.chat.completions.create(**ASK, n=3)
    again = client.chat.completions.create(**ASK, n=3)
    assert answer.id != again.id
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == server.model_id
    assert answer.system_fingerprint == again.system_fingerprint
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices == again.choices
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    assert answer.usage
    total = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.total_tokens == total


def test_logprobs_and_the_likeliest_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **ASK | {"temperature": 0, "max_tokens": 6},
        logprobs=True,
        top_logprobs=3,
        extra_body={"return_token_ids": True, "logprobs_mode": "raw_logprobs"},
    )
    (choice,) = answer.choices
    ids = (choice.model_extra or {})["token_ids"]
    prompt = (answer.model_extra or {})["prompt_token_ids"]
    logits = full_logits(tiny_model(), np.array(prompt + ids)).astype(np.float64)
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert choice.logprobs
    content = choice.logprobs.content or []
    assert len(content) == len(ids)
    for place, (token, entry) in enumerate(zip(ids, content, strict=True)):
        truth = every[len(prompt) - 1 + place]
        assert entry.logprob == pytest.approx(truth[token], abs=1e-4)
        assert entry.token == entry.top_logprobs[0].token
        assert len(entry.top_logprobs) == 3
        likeliest = [likely.logprob for likely in entry.top_logprobs]
        assert likeliest == pytest.approx(np.sort(truth)[::-1][:3].tolist(), abs=1e-4)
        assert entry.bytes is not None
    shown = [entry for entry in content if not entry.token.startswith("<|")]
    text = b"".join(bytes(entry.bytes or ()) for entry in shown)
    assert text.decode("utf-8", "replace") == choice.message.content


def test_plain_completions_of_lists_with_echo_and_scores(client: openai.OpenAI) -> None:
    prompts = ["ab c", "d中"]
    answer = client.completions.create(
        model="policy", prompt=prompts, max_tokens=5, n=2, echo=True, logprobs=2, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        prompt = prompts[choice.index // 2]
        assert choice.text.startswith(prompt)
        scores = choice.logprobs
        assert scores
        assert scores.token_logprobs
        assert scores.token_logprobs[0] is None
        assert scores.top_logprobs
        assert scores.top_logprobs[0] is None
        assert all(logprob < 0 for logprob in scores.token_logprobs[1:])
        assert scores.text_offset
        assert len(scores.text_offset) == len(scores.tokens or ())
        assert len(prompt) in scores.text_offset
    alone = client.completions.create(
        model="policy", prompt="ab c", max_tokens=0, echo=True, logprobs=0
    )
    assert alone.choices[0].text == "ab c"
    assert alone.usage
    assert alone.usage.completion_tokens == 0
    first = answer.choices[0].logprobs
    only = alone.choices[0].logprobs
    assert first
    assert only
    count = len(only.token_logprobs or ())
    assert (first.token_logprobs or [])[1:count] == pytest.approx((only.token_logprobs or [])[1:])


def test_tools_without_a_format_are_plain_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, tools=[TOOL])
    assert answer.choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="defines no form of calls"):
        client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="required")
    other: Any = {"type": "function", "function": {"name": "sub"}}
    with pytest.raises(openai.BadRequestError, match="expected one of the tools, add"):
        client.chat.completions.create(**ASK, tools=[TOOL], tool_choice=other)


@pytest.fixture(scope="module")
def able() -> Iterator[openai.OpenAI]:
    """A client of a server whose tokenizer can write JSON and whose template knows calls."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CALLING_TEMPLATE
    server = started(tokenizer=tokenizer, context_length=256)
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client
    server.stop()


@pytest.mark.slow
def test_json_of_a_schema(able: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    asked = JSON_ASK | {"response_format": form, "n": 4}
    for choice in able.chat.completions.create(**asked).choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content or "")["ab"] in ("a", "b")
    free = JSON_ASK | {"response_format": {"type": "json_object"}}
    answer = able.chat.completions.create(**free).choices[0]
    assert (answer.message.content or "").lstrip().startswith("{")


@pytest.mark.slow
def test_calls_that_must_be_made_and_their_results(able: openai.OpenAI) -> None:
    asked = JSON_ASK | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = able.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)["x"] in (1, 2)) == ("add", True)
    chunks = list(able.chat.completions.create(**asked, stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    (streamed,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert streamed.function
    assert streamed.function.name == "add"
    assert streamed.function.arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    talk = [*JSON_ASK["messages"], choice.message, result]
    later = able.chat.completions.create(**JSON_ASK | {"messages": talk}, tools=[TOOL])
    assert later.usage
    assert answer.usage
    assert later.usage.prompt_tokens > answer.usage.prompt_tokens


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**ASK | {"model": "gpt-9"})
    assert unknown.value.code == "model_not_found"
    assert unknown.value.response.headers["x-request-id"]
    with pytest.raises(openai.BadRequestError, match="unknown field 'audio'") as refused:
        client.chat.completions.create(**ASK, audio={"format": "wav", "voice": "x"})
    assert refused.value.param == "audio"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 96") as long:
        client.chat.completions.create(**ASK | {"max_tokens": 95})
    assert long.value.code == "context_length_exceeded"
