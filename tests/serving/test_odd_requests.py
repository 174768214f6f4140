"""Combined options: for every combination, a stream has the content of the whole answer."""

import json
import random
from typing import Any

import pytest
from support.servers import CHAT, CONTEXT, chat_body, talk

from marin_rl.serving.server import PolicyServer

PLAIN = "/v1/completions"
CHAT_FIELDS: dict[str, list[Any]] = {
    "n": [2, 3, 9, 20],
    "max_tokens": [1, 2, 5, 17],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "stop": ["a", ["ab", "b"], ["x" * 256], list("abcdefghijklmnop")],
    "stop_token_ids": [[], [5, 5], list(range(15))],
    "logit_bias": [{"7": 100}, {str(i): -100 for i in range(100)}, {"102": 0.5}],
    "temperature": [0, 1e-3, 10],
    "top_p": [1e-9, 0.5],
    "top_k": [-1, 1, 2**31 - 1],
    "min_p": [1, 0.5],
    "repetition_penalty": [0.01, 10],
    "presence_penalty": [2],
    "frequency_penalty": [-2],
    "logprobs_mode": ["raw_logprobs"],
    "return_token_ids": [True],
}
PLAIN_FIELDS: dict[str, list[Any]] = {
    "prompt": ["abc", ["a", "bcd"], [5, 6, 7], [[5], [6, 7, 8]], ["x" * 80, "y"]],
    "echo": [True, False],
    "logprobs": [0, 1, 20],
    "n": [2, 5],
    "stop": ["a", ["bc", "d"]],
    "logprobs_mode": ["raw_logprobs"],
    "return_token_ids": [True],
}


def drawn(chance: random.Random, fields: dict[str, list[Any]]) -> dict[str, Any]:
    """Some of the fields, each with one of its values."""
    return {name: chance.choice(of) for name, of in fields.items() if chance.random() < 0.4}


def both(server: PolicyServer, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The whole answer, and the events of the stream of the same request."""
    status, _, whole = talk(server, "POST", path, body)
    assert status == 200, whole
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    status, headers, text = talk(server, "POST", path, streamed)
    assert status == 200, text
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return whole, [json.loads(event.removeprefix("data: ")) for event in events]


def put_together(events: list[Any], name: str) -> dict[int, Any]:
    """By choice, what its chunks say of `name`, one after another."""
    found: dict[int, Any] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        said = choice[name] if name in choice else (choice.get("delta") or {}).get(name)
        if said is not None:
            index = choice["index"]
            found[index] = said if index not in found else found[index] + said
    return found


def scores(choice: Any) -> list[Any]:
    """Logprobs of a choice's or a chunk's tokens, in either shape."""
    told = choice["logprobs"] or {"content": []}
    if "content" in told:
        return told["content"]
    return [list(row) for row in zip(*told.values(), strict=True)]


def assert_alike(whole: Any, events: list[Any], text: str) -> None:
    """Text, reasons, ids, logprobs and usage are those of the whole answer."""
    texts, reasons = put_together(events, text), put_together(events, "finish_reason")
    ids, prompts = put_together(events, "token_ids"), put_together(events, "prompt_token_ids")
    told: dict[int, list[Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        told.setdefault(choice["index"], []).extend(scores(choice))
    for choice in whole["choices"]:
        index = choice["index"]
        expected = choice["message"]["content"] if "message" in choice else choice["text"]
        assert texts.get(index, "") == expected
        assert reasons[index] == choice["finish_reason"]
        assert ids.get(index) == choice.get("token_ids")
        assert prompts.get(index) == choice.get("prompt_token_ids")
        assert told[index] == scores(choice)
    sent = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    assert sent == ([whole["prompt_token_ids"]] if "prompt_token_ids" in whole else [])
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("seed", range(6))
def test_a_chat(server: PolicyServer, seed: int) -> None:
    chance = random.Random(seed)
    fields = drawn(chance, CHAT_FIELDS)
    if chance.random() < 0.6:
        fields |= {"logprobs": True, "top_logprobs": chance.choice([0, 1, 20])}
    whole, events = both(server, CHAT, chat_body(**fields))
    assert len(whole["choices"]) == fields.get("n", 1)
    assert_alike(whole, events, "content")


@pytest.mark.parametrize("seed", range(6))
def test_a_plain_completion(server: PolicyServer, seed: int) -> None:
    chance = random.Random(seed)
    fields = {"model": "policy", "seed": 3, "prompt": "abc"} | drawn(chance, PLAIN_FIELDS)
    fields["max_tokens"] = chance.choice([0, 1, 7] if fields.get("echo") else [1, 7])
    whole, events = both(server, PLAIN, fields)
    prompts = fields["prompt"]
    batch = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    assert [choice["index"] for choice in whole["choices"]] == list(
        range(batch * fields.get("n", 1))
    )
    assert_alike(whole, events, "text")


@pytest.mark.parametrize(
    ("prompt", "asked", "status"),
    [(95, 1, 200), (95, None, 200), (95, 2, 400), (96, 1, 400), (96, None, 400), (1, 95, 200)],
)
def test_at_the_contexts_edge(server, prompt, asked, status):
    assert CONTEXT == 96
    limit = {} if asked is None else {"max_tokens": asked}
    given = {"model": "policy", "token_ids": [5] * prompt, "sampling_params": limit}
    found, _, answer = talk(server, "POST", "/inference/v1/generate", given)
    assert found == status, answer
    if status == 200:
        assert 1 <= len(answer["choices"][0]["token_ids"]) <= CONTEXT - prompt


@pytest.mark.parametrize(("prompt", "status"), [(96, 200), (97, 400)])
def test_a_prompt_that_fills_the_context_can_be_scored(server, prompt, status):
    asked = {"prompt": [5] * prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
    found, _, answer = talk(server, "POST", PLAIN, {"model": "policy", **asked})
    assert found == status, answer
    if status == 200:
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == prompt
