"""Every route of the API: what it takes, what it gives, what it refuses and how it says so."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.models import full_logprobs, tiny_model
from support.servers import CONTEXT, MESSAGES, serving, talk

from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.serving.api.generate import version_spans
from marin_rl.serving.server import PolicyServer
from marin_rl.tokenizers import character_tokenizer
from marin_rl.types import Message, Sampling

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
CHAT_TOKENS, GENERATE = "/v1/chat/completions/tokens", "/inference/v1/generate"
SGLANG = "/generate"
RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"
POSTS = (CHAT, CHAT_TOKENS, PLAIN, RESPONSES, ANTHROPIC, GENERATE, "/tokenize", "/detokenize")
TOKENIZER = character_tokenizer()
PROMPT = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True)
Ask = Callable[..., tuple[int, dict[str, str], Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving(parameters_digest="0123456789abcdef") as server:
        yield server


@pytest.fixture
def asked(server: PolicyServer) -> Ask:
    """Send one request; returns status, headers and the JSON of the answer."""

    def ask(method: str, path: str, body: object = None, headers: dict[str, str] | None = None):
        return talk(server, method, path, body, headers)

    return ask


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": MESSAGES, "max_tokens": 8, "seed": 1, **fields}


def chat(server: PolicyServer, n: int = 2, **sampling: Any) -> ChatAnswer:
    async def ask() -> ChatAnswer:
        async with PolicyClient(endpoints=[server.base_url], model=server.model_id) as client:
            return await client.chat(
                [Message(role="user", content="abc")], n, Sampling(**{"seed": 1, **sampling})
            )

    return asyncio.run(ask())


def test_our_client_gets_tokens_and_the_logprobs_of_the_models_own_forward(server):
    answer = chat(server, n=4, max_tokens=30, temperature=0.9)
    assert answer.prompt_token_ids.tolist() == PROMPT
    assert answer.model == server.model_id == "policy@00003-01234567"
    assert (answer.weight_version, answer.parameters_digest) == (3, "0123456789abcdef")
    assert answer.timings.decode_s > 0
    model = tiny_model()
    for completion in answer.completions:
        truth = full_logprobs(model, answer.prompt_token_ids, completion.token_ids, 0.9)
        assert np.abs(completion.logprobs - truth).max() < 1e-4
        ended = completion.finish_reason == "stop"
        assert ended == (completion.token_ids[-1] == TOKENIZER.eos_token_id)
        shown = completion.token_ids[:-1] if ended else completion.token_ids
        assert completion.text == TOKENIZER.decode(shown, skip_special_tokens=True)
        assert completion.policy_versions is None


def test_token_ids_and_the_compact_form_come_only_when_asked_for(asked: Ask) -> None:
    _, _, answer = asked("POST", CHAT, chat_body(logprobs=True))
    (choice,) = answer["choices"]
    assert "prompt_token_ids" not in answer
    assert not {"token_ids", "token_logprobs"} & set(choice)
    _, _, answer = asked("POST", CHAT, chat_body(logprobs=True, compact_logprobs=True))
    (compact,) = answer["choices"]
    given = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert compact["logprobs"] is None
    np.testing.assert_allclose(compact["token_logprobs"], given, rtol=1e-6)


def test_plain_completions_take_text_ids_and_batches(asked: Ask) -> None:
    ids = [TOKENIZER.encode("abc"), TOKENIZER.encode("xy")]
    fields = {"model": "policy", "max_tokens": 5, "n": 2, "seed": 3, "logprobs": 0}
    extra = {"return_token_ids": True}
    _, _, by_text = asked("POST", PLAIN, {"prompt": ["abc", "xy"], **fields, **extra})
    _, _, by_ids = asked("POST", PLAIN, {"prompt": ids, **fields, **extra})
    assert [choice["index"] for choice in by_text["choices"]] == [0, 1, 2, 3]
    assert by_text["choices"] == by_ids["choices"]
    assert by_text["choices"][3]["prompt_token_ids"] == ids[1]
    assert by_text["usage"]["prompt_tokens"] == 5
    choice = by_text["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    _, _, single = asked("POST", PLAIN, {"prompt": ids[0], **fields, **extra})
    assert single["choices"] == by_text["choices"][:2]


def test_prompts_with_seeds_of_their_own_are_sampled_as_alone(asked: Ask) -> None:
    ids = [TOKENIZER.encode("abc"), TOKENIZER.encode("xy"), TOKENIZER.encode("abc")]
    seeds = [7, 2**48 - 1, 90]
    fields = {
        "model": "policy",
        "max_tokens": 5,
        "return_token_ids": True,
        "compact_logprobs": True,
    }
    _, _, together = asked("POST", PLAIN, {"prompt": ids, "seeds": seeds, **fields})
    for prompt, seed, choice in zip(ids, seeds, together["choices"], strict=True):
        _, _, alone = asked("POST", PLAIN, {"prompt": prompt, "seed": seed, **fields})
        times = choice.pop("timings"), alone["choices"][0].pop("timings")
        assert all(time["decode_s"] > 0 for time in times)
        assert alone["choices"][0] | {"index": choice["index"]} == choice
        assert len(choice["token_logprobs"]) == len(choice["token_ids"])
        assert choice["logprobs"] is None


def test_a_probe_is_one_short_sample(asked: Ask) -> None:
    short = chat_body(probe=True, max_tokens=16)
    assert asked("POST", CHAT, short)[0] == 200
    for more in ({"n": 2}, {"max_tokens": 17}, {"max_tokens": None}):
        status, _, answer = asked("POST", CHAT, short | more)
        assert status == 400
        assert "expected n 1 and max_tokens of at most 16" in answer["error"]["message"]


def test_tokenize_and_back(asked: Ask) -> None:
    _, _, answer = asked("POST", "/tokenize", {"messages": MESSAGES})
    assert answer["tokens"] == PROMPT
    assert (answer["count"], answer["max_model_len"]) == (len(PROMPT), CONTEXT)
    _, _, answer = asked("POST", "/tokenize", {"prompt": "abc", "return_token_strs": True})
    assert answer["tokens"] == TOKENIZER.encode("abc")
    assert answer["token_strs"] == ["a", "b", "c"]
    assert asked("POST", "/detokenize", {"tokens": answer["tokens"]})[2] == {"prompt": "abc"}
    _, _, answer = asked("POST", "/detokenize", {"tokens": [*answer["tokens"], 1]})
    assert answer == {"prompt": "abc<|end|>"}


def test_the_tokenizer_is_described_as_vllm_does(asked: Ask) -> None:
    status, _, answer = asked("GET", "/tokenizer_info", None)
    assert status == 200
    assert answer["eos_token"] == TOKENIZER.eos_token
    assert answer["pad_token"] == TOKENIZER.pad_token
    assert answer["bos_token"] is None
    assert answer["chat_template"] == TOKENIZER.chat_template


def test_requests_of_verifiers_in_first_and_later_turns(asked: Ask) -> None:
    first = {"model": "policy", "messages": MESSAGES, "n": 1, "logprobs": True}
    first |= {"max_completion_tokens": 6, "return_token_ids": True, "temperature": 1.0}
    status, _, answer = asked("POST", CHAT, first)
    assert status == 200
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    so_far = answer["prompt_token_ids"] + choice["token_ids"]
    said = {"role": "assistant", "content": choice["message"]["content"]}
    said |= {"tool_calls": None, "reasoning_content": None}
    more = [said, {"role": "user", "content": "x"}]
    bridge = {"model": "policy", "messages": [{**said, "reasoning_content": ""}], "tools": None}
    bridge |= {"add_generation_prompt": False}
    assert asked("POST", "/tokenize", bridge)[0] == 200
    tokens = [*so_far, *TOKENIZER.encode("x")]
    later = first | {"messages": [*MESSAGES, *more], "tools": None, "tokens": tokens}
    status, _, answer = asked("POST", CHAT_TOKENS, later)
    assert (status, answer["prompt_token_ids"]) == (200, tokens)


def test_versions_of_tokens_are_spans_too() -> None:
    assert version_spans([]) == []
    assert version_spans([3, 3, 4]) == [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
    ]


def test_generation_from_ids_to_ids(asked: Ask) -> None:
    parameters = {"temperature": 1.0, "max_tokens": 6, "stop_token_ids": [5], "logprobs": 1}
    parameters |= {"skip_special_tokens": False, "seed": 1}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": parameters}
    status, _, answer = asked("POST", GENERATE, body)
    assert status == 200
    assert answer["model"] == "policy@00003-01234567"
    assert (answer["weight_version"], answer["parameters_digest"]) == (3, "0123456789abcdef")
    sampled = len(answer["choices"][0]["token_ids"])
    assert answer["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": sampled,
        "total_tokens": len(PROMPT) + sampled,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "token_ids", "logprobs", "finish_reason", "weight_versions"}
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": sampled}]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert {tuple(e) for e in content} == {("token", "token_id", "logprob", "top_logprobs")}
    truth = full_logprobs(tiny_model(), np.array(PROMPT), np.array(choice["token_ids"]))
    assert [entry["logprob"] for entry in content] == pytest.approx(truth.tolist(), abs=1e-4)
    bridged = body | {"sampling_params": parameters | {"routed_experts_prompt_start": 3}}
    assert asked("POST", GENERATE, bridged)[2]["choices"] == answer["choices"]
    labels = {"cache_salt": "policy-3", "priority": 7}
    inside = {**body, **labels, "sampling_params": {**parameters, **labels}}
    assert asked("POST", GENERATE, inside)[2]["choices"] == answer["choices"]
    _, _, whole = asked("POST", GENERATE, {"model": "policy", "token_ids": PROMPT})
    assert whole["choices"][0]["logprobs"] is None


def test_generation_as_sglang_has_it(asked: Ask) -> None:
    """The tokens and logprobs are those of the route from ids to ids."""
    common = {"temperature": 1.0, "seed": 1}
    parameters = {**common, "max_tokens": 6, "logprobs": 1, "n": 2}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": parameters}
    expected = asked("POST", GENERATE, body)[2]["choices"]
    parameters = {**common, "max_new_tokens": 6, "n": 2}
    body = {"input_ids": PROMPT, "sampling_params": parameters, "return_logprob": True}
    status, _, answers = asked("POST", SGLANG, {**body, "return_text_in_logprobs": False})
    assert status == 200
    for answer, choice in zip(answers, expected, strict=True):
        meta = answer["meta_info"]
        assert answer["output_ids"] == choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        pairs = zip(logprobs, choice["token_ids"], strict=True)
        assert meta["output_token_logprobs"] == [[lp, token, None] for lp, token in pairs]
        assert meta["finish_reason"]["type"] == choice["finish_reason"]
        assert (meta["prompt_tokens"], meta["weight_version"]) == (len(PROMPT), "3")
        assert meta["completion_tokens"] == len(answer["output_ids"])
    told = {"input_ids": PROMPT, "sampling_params": {**common, "max_new_tokens": 6}}
    alone = asked("POST", SGLANG, told)[2]
    assert alone["output_ids"] == answers[0]["output_ids"]
    assert "output_token_logprobs" not in alone["meta_info"]
    assert asked("GET", "/health")[0] == 200


def test_a_prompt_is_scored_for_those_who_ask_a_teacher(asked: Ask) -> None:
    """As prime-rl and TRL ask on vLLM's routes and slime on SGLang's."""
    truth = full_logprobs(
        tiny_model(), np.array(PROMPT[:1], np.int32), np.array(PROMPT[1:], np.int32)
    )
    parameters = {"max_tokens": 0, "prompt_logprobs": 2, "temperature": 0.5}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": parameters}
    status, _, answer = asked("POST", GENERATE, body)
    assert status == 200
    first, *places = answer["prompt_logprobs"]
    assert first is None
    assert [next(iter(place)) for place in places] == [str(token) for token in PROMPT[1:]]
    own = [place[str(token)]["logprob"] for place, token in zip(places, PROMPT[1:], strict=True)]
    assert own == pytest.approx(truth.tolist(), abs=1e-4)
    for place in places:
        ranked = sorted(place.values(), key=lambda entry: -entry["logprob"])
        assert [entry["rank"] for entry in ranked[:2]] == [1, 2]
        assert [entry["rank"] for entry in ranked[2:]] == [3] * (len(place) - 2)
    assert answer["choices"][0]["token_ids"] == []
    listed = {"model": "policy", "prompt": [PROMPT, PROMPT[:4]], "prompt_logprobs": 2}
    for more in ({"max_tokens": 1, "logprobs": 1}, {"max_tokens": 0}):
        status, _, plain = asked("POST", PLAIN, listed | more)
        assert status == 200
        whole, part = (choice["prompt_logprobs"] for choice in plain["choices"])
        assert (whole, part) == (answer["prompt_logprobs"], answer["prompt_logprobs"][:4])
        for choice in plain["choices"] if "logprobs" in more else ():
            (top,) = choice["logprobs"]["top_logprobs"]
            assert len(top) <= 2  # the likeliest, and the one that was sampled
    status, _, error = asked("POST", PLAIN, listed | {"stream": True})
    assert (status, error["error"]["message"][:16]) == (400, "prompt_logprobs:")
    parameters = {"max_new_tokens": 0, "temperature": 0.5}
    body = {"input_ids": PROMPT, "sampling_params": parameters, "return_logprob": True}
    for start in (0, 2):
        status, _, scored = asked("POST", SGLANG, body | {"logprob_start_len": start})
        assert (status, scored["output_ids"]) == (200, [])
        pairs = scored["meta_info"]["input_token_logprobs"]
        expected = [[lp, token, None] for lp, token in zip([None, *own], PROMPT, strict=True)]
        assert pairs == expected[start:]
    for refused in ({}, {"logprob_start_len": -1}):
        status, _, error = asked("POST", SGLANG, body | refused)
        assert status == 400
        assert "max_new_tokens: expected at least 1 without" in error["error"]["message"]
    nothing = {"model": "policy", "token_ids": PROMPT, "sampling_params": {"max_tokens": 0}}
    assert asked("POST", GENERATE, nothing)[0] == 400


def test_samples_of_sglangs_route_end_as_its_clients_expect(asked: Ask) -> None:
    forced = {"logit_bias": {"4": 100}, "max_new_tokens": 3}
    body = {"text": "ab", "sampling_params": forced}
    cut = asked("POST", SGLANG, body)[2]
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert cut["output_ids"] == [4, 4, 4]
    body["sampling_params"] = {**forced, "stop_token_ids": [4]}
    stopped = asked("POST", SGLANG, body)[2]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": 4}
    assert (stopped["output_ids"], stopped["text"]) == ([4], "")


def test_a_stop_string_that_is_a_special_token_stops_there(asked: Ask) -> None:
    forced = {"stop": ["<|user|>", "zz"], "logit_bias": {"4": 100}, "max_tokens": 5}
    told = {"return_token_ids": True, **forced}
    chatted = asked("POST", CHAT, chat_body(**told))[2]["choices"][0]
    assert (chatted["finish_reason"], chatted["token_ids"]) == ("stop", [4])
    assert chatted["message"]["content"] == ""
    plain = asked("POST", PLAIN, {"model": "policy", "prompt": "ab", **told})[2]
    assert (plain["choices"][0]["text"], plain["choices"][0]["token_ids"]) == ("", [4])
    body = {"model": "policy", "token_ids": [40, 41], "sampling_params": forced}
    assert asked("POST", GENERATE, body)[2]["choices"][0]["token_ids"] == [4]
    ended = asked("POST", CHAT, chat_body(stop="<|end|>", stop_token_ids=[5] * 15))
    assert ended[0] == 200


def test_null_means_the_default(asked: Ask) -> None:
    names = ("temperature", "top_p", "n", "stop", "stream", "tools", "logit_bias", "user", "seed")
    body = chat_body(temperature=0)
    plain = asked("POST", CHAT, body)[2]["choices"]
    status, _, answer = asked("POST", CHAT, dict.fromkeys(names) | body | {"n": None})
    assert (status, answer["choices"]) == (200, plain)


def test_labels_are_taken(asked: Ask) -> None:
    labels = {"user": "me", "safety_identifier": "me", "metadata": {"a": "b"}}
    labels |= {"service_tier": "auto", "store": False, "prompt_cache_key": "k"}
    labels |= {"response_format": {"type": "text"}, "tool_choice": "none"}
    assert asked("POST", CHAT, chat_body(**labels))[0] == 200


INFINITE = {"type": "function", "function": {"name": "f", "parameters": {"x": float("inf")}}}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"n_samples": 4}, "n_samples", "unknown field 'n_samples'"),
        ({"temprature": 1.0}, "temprature", "did you mean 'temperature'?"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"temperature": float("inf")}, "temperature", "finite"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0, found -0.1"),
        ({"n": 5000}, "n", "at most 4096"),
        ({"max_completion_tokens": 3}, "max_tokens", "either"),
        ({"stop": ["x"] * 10_000}, "stop", "at most 16"),
        ({"stop_token_ids": [103]}, "stop_token_ids", "below 103, found 103"),
        ({"stop_token_ids": [5] * 16}, "stop_token_ids", "at most 15 in addition to"),
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logit_bias": {"103": 1}}, "logit_bias", "below 103, found 103"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"temperature": 1e-30}, "temperature", "0 (greedy) or at least 0.001"),
        ({"stream_options": {}}, "stream_options", "stream: true only"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "user", "content": "x", "a": 1}]}, "messages.0.a", "unknown field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "'text'",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, None, "pattern"),
        ({"tools": [INFINITE]}, "tools.0.function.parameters", "found NaN or an infinity"),
        ({"tool_choice": "auto"}, "tool_choice", "with tools only"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "model folder"),
        ({"store": True}, "store", "False"),
        ({"messages": [{"role": "user", "content": "x" * 95}]}, "messages", "context length is 96"),
        ({"max_tokens": 92}, "messages", "maximum context length is 96 tokens"),
    ],
)
def test_the_wrong_field_is_named(asked, fields, param, told):
    status, _, answer = asked("POST", CHAT, chat_body(**fields))
    error = answer["error"]
    assert status == 400
    assert told in error["message"]
    assert error["param"] == param or param is None
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 600
    if "context" in told:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PLAIN, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (PLAIN, {"prompt": "a", "best_of": 2}, "best_of"),
        (PLAIN, {"prompt": ["a", ""]}, "prompt.1"),
        (PLAIN, {"prompt": [5, 103]}, "prompt"),
        (PLAIN, {"prompt": ["a", "b"], "seeds": [1]}, "seeds"),
        (PLAIN, {"prompt": ["a", "b"], "seeds": [1, 2], "seed": 3}, "seeds"),
        (PLAIN, {"prompt": "a", "compact_logprobs": True, "logprobs": 2}, "compact_logprobs"),
        (PLAIN, {"prompt": "a", "compact_logprobs": True, "stream": True}, "compact_logprobs"),
        (CHAT_TOKENS, {"messages": MESSAGES}, "tokens"),
        (GENERATE, {"token_ids": [103]}, "token_ids"),
        (GENERATE, {"token_ids": [5], "sampling_params": {"x": 1}}, "sampling_params.x"),
        (GENERATE, {"token_ids": [5], "priority": "high"}, "priority"),
        (SGLANG, {"input_ids": [5], "text": "a"}, "input_ids"),
        (SGLANG, {"text": "a", "stream": True}, "stream"),
        ("/tokenize", {}, "messages"),
        ("/detokenize", {"tokens": [103]}, "tokens"),
    ],
)
def test_errors_in_other_sections_are_named(asked, path, fields, param):
    model = {} if path == SGLANG else {"model": "policy"}
    status, _, answer = asked("POST", path, model | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"model": "policy", "messages": NaN}', b"[" * 100_000],
)
def test_a_body_that_is_no_object_is_a_400(asked: Ask, data: bytes) -> None:
    for path in POSTS:
        status, _, answer = asked("POST", path, data)
        assert status == 400, answer
        assert "Traceback" not in answer["error"]["message"]


def test_an_unknown_model_is_a_404_with_the_known_ids(asked: Ask) -> None:
    for path, fields in (
        (CHAT, {"messages": MESSAGES}),
        (PLAIN, {"prompt": "a"}),
        (GENERATE, {"token_ids": [5]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        status, _, answer = asked("POST", path, {"model": "x" * 900, **fields})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert answer["error"]["message"].endswith("known: policy@00003-01234567, policy")


def test_limits_of_the_configuration() -> None:
    from marin_rl.config import ServerConfig

    limits = ServerConfig(prompt_tokens_max=8, new_tokens_max=4, samples_max=2, prompts_max=2)
    with serving(limits) as server:
        for path, fields, param in (
            (CHAT, {"messages": [{"role": "user", "content": "x" * 9}]}, "messages"),
            (CHAT, {"messages": MESSAGES, "max_tokens": 5}, "max_tokens"),
            (CHAT, {"messages": MESSAGES, "n": 3}, "n"),
            (PLAIN, {"prompt": ["a", "b", "c"], "max_tokens": 1}, "prompt"),
        ):
            status, _, answer = talk(server, "POST", path, {"model": "policy", **fields})
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert answer["error"]["code"] == "limit_exceeded"
        for path, fields in ((CHAT, {"messages": MESSAGES}), (PLAIN, {"prompt": "ab"})):
            _, _, answer = talk(server, "POST", path, {"model": "policy", **fields})
            assert 1 <= answer["usage"]["completion_tokens"] <= 4


def test_unknown_routes_and_methods_are_errors_of_the_same_shape(asked: Ask) -> None:
    status, _, answer = asked("GET", "/v1/nothing")
    assert (status, answer["error"]["message"]) == (404, "GET /v1/nothing: Not Found")
    assert asked("GET", CHAT)[0] == 405
    assert asked("GET", "/v1/models/policy")[2]["id"] == "policy"
    assert asked("GET", "/v1/models/other")[0] == 404
