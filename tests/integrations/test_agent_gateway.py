"""The session of an agent, as OpenAI's own client and plain requests meet it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from marin_rl.integrations import agent_gateway
from marin_rl.integrations.agent_gateway import Session
from marin_rl.model_apis.call import ModelAnswer, comparable
from marin_rl.model_apis.chat import ChatCompletions
from marin_rl.model_apis.messages import AnthropicMessages
from marin_rl.model_apis.responses import Responses
from marin_rl.types import Message, ToolCall

CALL = ToolCall(id="c1", name="add", arguments='{"a": 2}')
ANSWERS = {
    "text": ModelAnswer(text="five", tool_calls=(), prompt_tokens=7, completion_tokens=2),
    "call": ModelAnswer(text="so", tool_calls=(CALL,), prompt_tokens=7, completion_tokens=2),
}
QUESTION: Any = [{"role": "user", "content": "2 + 3"}]


@asynccontextmanager
async def session(folder: Path, answer: ModelAnswer | None) -> AsyncIterator[tuple[Session, Any]]:
    """A session, and a client of it; every call gets `answer`, or waits where that is None."""
    opened = Session("policy")
    await opened.open(folder / "model", folder / "control")

    async def serve() -> None:
        while answer is not None:
            waiting = await opened.calls.get()
            waiting.answered.set_result(answer)

    serving = asyncio.ensure_future(serve())
    transport = httpx.AsyncHTTPTransport(uds=str(folder / "model"))
    headers = {"Authorization": f"Bearer {opened.key}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://agent", headers=headers
    ) as client:
        try:
            yield opened, client
        finally:
            serving.cancel()
            await opened.close()


def run(folder: Path, answer: ModelAnswer | None, body: Callable[..., Awaitable[None]]) -> None:
    async def main() -> None:
        async with session(folder, answer) as (opened, client):
            await body(opened, client)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ANSWERS)
def test_openais_client_reads_both_apis_whole_and_streamed(tmp_path: Path, kind: str) -> None:
    answer = ANSWERS[kind]

    async def body(opened: Session, client: httpx.AsyncClient) -> None:
        openai = AsyncOpenAI(
            base_url="http://agent/v1", api_key=opened.key, http_client=client, max_retries=0
        )
        whole = await openai.chat.completions.create(model="any", messages=QUESTION)
        message = whole.choices[0].message
        assert message.content == answer.text
        stream = openai.chat.completions.stream(
            model="any", messages=QUESTION, stream_options={"include_usage": True}
        )
        async with stream as events:
            told = await events.get_final_completion()
        assert told.choices[0].message.content == answer.text
        assert told.usage is not None
        assert told.usage.total_tokens == 9
        for calls in (message.tool_calls, told.choices[0].message.tool_calls):
            found = [(c.id, c.function.name, c.function.arguments) for c in calls or ()]
            assert found == [(c.id, c.name, c.arguments) for c in answer.tool_calls]

        response = await openai.responses.create(model="any", input="2 + 3")
        async with openai.responses.stream(model="any", input="2 + 3") as events:
            streamed = await events.get_final_response()
        for each in (response, streamed):
            assert each.output_text == answer.text
            calls = [item for item in each.output if item.type == "function_call"]
            found = [(c.call_id, c.name, c.arguments) for c in calls]
            assert found == [(c.id, c.name, c.arguments) for c in answer.tool_calls]

    run(tmp_path, answer, body)


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
        ("messages", []),
    ],
)
def test_an_unreadable_request_is_an_error_in_the_shape_of_its_api(tmp_path, path, request_body):
    async def body(opened: Session, client: httpx.AsyncClient) -> None:
        refused = await client.post(f"/v1/{path}", json=request_body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "cannot be read" in error["message"]
        headers = {"Authorization": "Bearer " + "0" * len(opened.key)}
        other = await client.post(f"/v1/{path}", json=request_body, headers=headers)
        assert other.status_code == 401
        opened.refusal = "no more calls"
        asked = {"messages": QUESTION, "input": "x"}
        assert (await client.post(f"/v1/{path}", json=asked)).status_code == 400

    run(tmp_path, None, body)


def test_a_body_without_an_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1024):
            yield bytes(1 << 20)
            sent += 1

    async def body(_: Session, client: httpx.AsyncClient) -> None:
        with suppress(httpx.WriteError):  # the session has closed the connection
            assert (await client.post("/v1/responses", content=pieces())).status_code == 413
        with suppress(httpx.WriteError):
            counted = await client.post("/v1/messages/count_tokens", content=pieces())
            assert counted.status_code == 413
        other = await client.post("/v1/messages/count_tokens", headers={"x-api-key": "x"})
        assert other.status_code == 401
        asked = await client.post("/v1/responses", json={"input": "x"})
        assert asked.status_code == 200

    run(tmp_path, ANSWERS["text"], body)
    assert sent < 256


def test_a_client_that_gave_up_and_asks_again_joins_its_first_call(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_gateway, "KEEP_ALIVE_S", 0.05)

    async def body(opened: Session, client: httpx.AsyncClient) -> None:
        for attempt in (1, 2):
            asked = {"messages": QUESTION, "metadata": {"attempt": attempt}, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
                lines = response.aiter_lines()
                assert await anext(lines) == ": waiting"  # the call has arrived
                if attempt == 2:
                    opened.calls.get_nowait().answered.set_result(ANSWERS["text"])
                    told = [line async for line in lines]
        assert told[-2] == "data: [DONE]"
        assert opened.calls.empty()
        # once it was answered, the same question is another call
        again = asyncio.ensure_future(client.post("/v1/chat/completions", json=asked))
        (await opened.calls.get()).answered.set_result(ANSWERS["text"])
        assert (await again).status_code == 200

    run(tmp_path, None, body)


def test_an_answer_that_its_client_did_not_take_is_given_to_the_next_attempt(tmp_path):
    async def body(opened: Session, client: httpx.AsyncClient) -> None:
        asked = {"messages": QUESTION}
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=asked, timeout=0.2)
        waiting = opened.calls.get_nowait()
        await asyncio.sleep(0.1)  # until the server has seen the client go
        waiting.answered.set_result(ANSWERS["text"])
        for calls in (0, 1):
            again = asyncio.ensure_future(client.post("/v1/chat/completions", json=asked))
            await asyncio.sleep(0.1)
            assert opened.calls.qsize() == calls
            if calls:
                opened.calls.get_nowait().answered.set_result(ANSWERS["call"])
            content = (await again).json()["choices"][0]["message"]["content"]
            assert content == ANSWERS["call" if calls else "text"].text

    run(tmp_path, None, body)


def test_a_stream_is_kept_alive_and_ends_with_its_session(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_gateway, "KEEP_ALIVE_S", 0.05)

    async def body(opened: Session, client: httpx.AsyncClient) -> None:
        asked = {"messages": QUESTION, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == [": waiting"] * 3
            await opened.close()
            assert not [line async for line in lines if not line.startswith(":")]

    run(tmp_path, None, body)


@pytest.mark.parametrize(
    ("path", "begins", "ends"),
    [
        (
            "chat/completions",
            'data: {"error":{"message":"prompt is too long',
            '"context_length_exc',
        ),
        ("responses", "event: response.failed", '"code":"context_length_exceeded"'),
        ("messages", "event: error", '"message":"prompt is too long: 9 tokens > 8 maximum"'),
    ],
)
def test_a_stream_that_began_ends_with_the_refusal_of_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, begins: str, ends: str
) -> None:
    monkeypatch.setattr(agent_gateway, "KEEP_ALIVE_S", 0.05)

    async def body(opened: Session, client: httpx.AsyncClient) -> None:
        asked = {"messages": QUESTION, "input": "x", "stream": True}
        async with client.stream("POST", f"/v1/{path}", json=asked) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": waiting"
            refused = opened.calls.get_nowait()
            opened.refuse(refused, "prompt is too long: 9 tokens > 8 maximum")
            told = [line async for line in lines if line and not line.startswith(":")]
        assert told[0].startswith(begins)
        assert ends in told[-1]
        # asked again, it is another call
        again = asyncio.ensure_future(client.post(f"/v1/{path}", json={**asked, "stream": False}))
        (await opened.calls.get()).answered.set_result(ANSWERS["text"])
        assert (await again).status_code == 200

    run(tmp_path, None, body)


def test_a_conversation_is_the_same_however_its_client_writes_it() -> None:
    chat = ChatCompletions.parse(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
                *QUESTION,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "function": {"name": "add", "arguments": '{"b":3, "a":2}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "5"},
            ]
        }
    )
    responses = Responses.parse(
        {
            "instructions": "be brief",
            "input": [
                *QUESTION,
                {"type": "reasoning", "id": "r", "summary": []},
                {
                    "type": "function_call",
                    "call_id": "x",
                    "name": "add",
                    "arguments": '{"a": 2, "b": 3}',
                },
                {"type": "function_call_output", "call_id": "x", "output": "5"},
            ],
        }
    )
    messages = AnthropicMessages.parse(
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
                {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2 + 3"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "add", "input": {"b": 3, "a": 2}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "5"}],
                },
            ],
        }
    )
    read = [[*map(comparable, call.messages)] for call in (chat, responses, messages)]
    assert read[0] == read[1] == read[2]
    assert read[0][0] == Message(role="system", content="be brief")
    assert [message.role for message in read[0]] == ["system", "user", "assistant", "tool"]


def test_calls_that_nobody_waits_for_any_more_are_bounded(tmp_path: Path) -> None:
    async def body(opened: Session, client: httpx.AsyncClient) -> None:
        async def leave(number: int) -> None:
            asked = {"messages": [{"role": "user", "content": f"{number}"}]}
            with suppress(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=asked, timeout=0.5)

        await asyncio.gather(*map(leave, range(agent_gateway.WAITING_MAX)))
        refused = await client.post("/v1/chat/completions", json={"messages": QUESTION})
        assert refused.status_code == 400
        assert "at most 32 calls" in refused.json()["error"]["message"]
        assert opened.calls.qsize() == agent_gateway.WAITING_MAX

    run(tmp_path, None, body)
