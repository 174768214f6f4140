"""vLLM's route from ids to ids: what is sent, what is taken, and what each refusal says."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from support.cases import others_slow
from support.models import tiny_model
from support.servers import CONTEXT, ENGINE, character_tokenizer, serving
from support.vllm_stand_in import VllmStandIn

from marin_rl.config import InferenceConfig, PolicyConfig
from marin_rl.errors import BadResponse, FleetEmpty, RequestRejected, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.dialects import VllmDialect, spans_of
from marin_rl.inference.client.fleet import FleetOptions
from marin_rl.inference.client.fleet_sources import EndpointSource
from marin_rl.inference.client.policy_client import PolicyClient, client_of
from marin_rl.inference.client.proofs import CANARY, CANARY_PROMPT, CANARY_SEED, VersionsProof
from marin_rl.inference.client.protocol import ChatRequest, label_of, parse_label
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.serving.server import PolicyServer
from marin_rl.types import Canary, Message, Sampling

MESSAGES = (Message(role="user", content="ab"),)
SAMPLING = Sampling(max_tokens=8, seed=5)
BRIDGE = TemplateBridge(PolicyConfig())
ROUTE = InferenceConfig(route="vllm_generate")
FIRST = 2
DIGESTS = {version: f"{version}" * 64 for version in (1, 2)}


def span(label: object = "a", start: object = 0, end: object = 2) -> dict[str, object]:
    return {"version": label, "start": start, "end": end}


@contextmanager
def stand_in(**options: Any) -> Iterator[VllmStandIn]:
    """A vLLM with random weights."""
    server = PolicyServer(
        tiny_model(), character_tokenizer(), InferenceConfig(engine=ENGINE), context_length=CONTEXT
    )
    with VllmStandIn(server, **options) as vllm:
        yield vllm


def ask(url: str, model: str = "policy", n: int = 1, sampling: Sampling = SAMPLING) -> ChatAnswer:
    async def run() -> ChatAnswer:
        async with client_of(ROUTE, BRIDGE)(endpoints=[url], model=model) as client:
            return await client.chat(MESSAGES, n, sampling)

    return asyncio.run(run())


def test_samples_of_vllm_are_those_of_the_chat_route() -> None:
    with stand_in() as vllm:
        answer = ask(vllm.url, n=3)
        server = vllm.server

        async def by_chat() -> list[ChatAnswer]:
            async with client_of(InferenceConfig(), BRIDGE)(
                endpoints=[server.base_url], model=server.model_id
            ) as client:
                samplings = [Sampling(max_tokens=8, seed=5 + index) for index in range(3)]
                return [await client.chat(MESSAGES, 1, sampling) for sampling in samplings]

        for completion, other in zip(answer.completions, asyncio.run(by_chat()), strict=True):
            expected = other.completions[0]
            assert answer.prompt_token_ids.tolist() == other.prompt_token_ids.tolist()
            assert completion.token_ids.tolist() == expected.token_ids.tolist()
            assert (completion.text, completion.finish_reason) == (
                expected.text, expected.finish_reason,
            )  # fmt: skip
            np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)
            assert completion.policy_versions is None
    assert len({tuple(c.token_ids.tolist()) for c in answer.completions}) == 3


def test_a_vllm_without_the_option_is_refused_by_its_name() -> None:
    refused = pytest.raises(RequestRejected, match=r"started with --enable-scale-out")
    with stand_in(scale_out=False) as vllm, refused:
        ask(vllm.url)


def test_tokens_of_other_weights_than_the_model_or_of_several_are_refused() -> None:
    with serving(parameters_digest="ab" * 32, weight_version=3) as server:
        assert len(ask(server.base_url, server.model_id).completions[0].token_ids) > 0
        other = f"policy@00002-{'cd' * 4}"
        with pytest.raises(StalePolicy, match=r"policy@00002"):
            ask(server.base_url, other)
    with stand_in() as vllm:

        def mixed(choice: dict[str, Any]) -> None:
            whole = choice["weight_versions"][0]["end"]
            choice["weight_versions"] = [span("a", 0, 1), span("b", 1, whole)]

        vllm.spoil = mixed
        with pytest.raises(StalePolicy, match=r"weights 'a', 'b': new weights came in between"):
            ask(vllm.url)


def test_a_stop_string_ends_a_text_and_stays_in_its_ids() -> None:
    stops = tuple("aeiouAEIOU!?.,;:")
    with stand_in() as vllm:
        sampling = Sampling(max_tokens=40, seed=3, stop=stops)
        completion = ask(vllm.url, sampling=sampling).completions[0]
    assert completion.finish_reason == "stop"
    assert not set(completion.text) & set(stops)
    assert BRIDGE.text(completion.token_ids.tolist())[: len(completion.text)] == completion.text
    assert len(BRIDGE.text(completion.token_ids.tolist())) > len(completion.text)


async def digest_of(version: int) -> str:
    return DIGESTS[version]


def in_flight(vllm: VllmStandIn, fleet_timeout_s: float) -> PolicyClient:
    """A client that takes tokens of version 2 and later, proven by the canary of its weights."""
    sampling = Sampling(max_tokens=CANARY.tokens, seed=CANARY_SEED)

    async def canary_of(_version: int) -> Canary:
        async with client_of(ROUTE, BRIDGE)(endpoints=[vllm.url], model="policy") as client:
            sampled = (await client.chat(CANARY_PROMPT, 1, sampling)).completions[0]
        tokens, logprobs = sampled.token_ids.tolist(), sampled.logprobs.tolist()
        return Canary(
            temperature=1.0, token_ids=tuple(tokens), logprobs=tuple(logprobs), tolerance=1e-4
        )

    return client_of(ROUTE, BRIDGE)(
        model="policy",
        source=EndpointSource([vllm.url]),
        fleet=FleetOptions(probe_s=0.02, timeout_s=fleet_timeout_s),
        proof=VersionsProof(version=FIRST, digest_of=digest_of, canary_of=canary_of),
    )


def label(vllm: VllmStandIn, version: int, digest: str) -> None:
    vllm.post("/update_weight_version", "", {"new_version": label_of(version, digest)})


def test_tokens_have_the_version_and_digest_of_the_label() -> None:
    async def run(vllm: VllmStandIn) -> ChatAnswer:
        async with in_flight(vllm, fleet_timeout_s=60.0) as client:
            return await client.chat(MESSAGES, 1, SAMPLING)

    with stand_in() as vllm:
        label(vllm, FIRST, DIGESTS[FIRST])
        (completion,) = asyncio.run(run(vllm)).completions
    assert completion.policy_versions is None  # all are of the version that it began with
    assert completion.parameters_digest == DIGESTS[FIRST]


def paused(vllm: VllmStandIn) -> None:
    label(vllm, FIRST, DIGESTS[FIRST])
    vllm.post("/pause", "mode=keep", {})


@pytest.mark.parametrize(
    ("make", "reason"),
    others_slow(
        [
            (lambda _vllm: None, "names its weights 'default'.* it was restarted"),
            (lambda vllm: label(vllm, 2, "f" * 64), "serves other weights than this run's"),
            (lambda vllm: label(vllm, 1, DIGESTS[1]), "serves version 1, before 2"),
            (paused, "is paused: new weights are being loaded, or could not be"),
        ],
        first=1,
        several=True,
    ),
)
def test_a_vllm_with_other_weights_or_none_is_lost_with_the_reason(make, reason):
    async def run(vllm: VllmStandIn) -> None:
        async with in_flight(vllm, fleet_timeout_s=1.0) as client:
            await client.chat(MESSAGES, 1, SAMPLING)

    with stand_in() as vllm:
        make(vllm)
        with pytest.raises(FleetEmpty, match=reason):
            asyncio.run(run(vllm))
        vllm.post("/resume", "", {})


@pytest.mark.parametrize(
    ("label", "version", "digest"),
    [("00012-1a2b3c4d", 12, "1a2b3c4d"), ("7", 7, ""), ("100000-1a2b3c4d", 100000, "1a2b3c4d")],
)
def test_labels_say_version_and_digest(label: str, version: int, digest: str) -> None:
    model = parse_label(label)
    assert model is not None
    assert (model.weight_version, model.digest) == (version, digest)
    if digest:
        assert label_of(version, digest + "0" * 56) == label


@pytest.mark.parametrize("label", ["default", "", "00012", "x@00012-1a2b3c4d", "-1", "1.0", "٣"])
def test_labels_of_another_make_say_nothing(label: str) -> None:
    model = parse_label(label)
    assert model is None or (model.weight_version, model.digest) == (12, "")


def test_spans_cover_all_tokens_in_order() -> None:
    spans = spans_of({"weight_versions": [span("a", 0, 2), span("b", 2, 3)]}, 3)
    assert [(each.label, each.start, each.end) for each in spans] == [("a", 0, 2), ("b", 2, 3)]
    assert spans_of({"weight_versions": []}, 0) == ()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (None, "gave no weight_versions"),
        ({"0": 1}, "gave no weight_versions"),
        ([], "of all 3 tokens, found 0 in them"),
        ([span("a", 0, 2)], "of all 3 tokens, found 2 in them"),
        ([span("a", 0, 4)], "of all 3 tokens, found 4 in them"),
        ([span("a", 1, 3)], "begins at 0"),
        ([span("a", 0, 2), span("b", 1, 3)], "begins at 2"),
        ([span("b", 2, 3), span("a", 0, 2)], "begins at 0"),
        ([span("a", 0, 0), span("b", 0, 3)], "begins at 0"),
        ([span(3, 0, 3)], "a text and a span"),
        ([span("a", 0, 3.0)], "a text and a span"),
        ([span("a", False, 3)], "a text and a span"),
        ([{"version": "a", "start": 0}], "with version, start and end"),
        (["a"], "with version, start and end"),
    ],
)
def test_spans_that_do_not_cover_all_tokens_exactly_are_refused(spans, message):
    with pytest.raises(BadResponse, match=message):
        spans_of({"weight_versions": spans}, 3)


def request(sampling: Sampling = SAMPLING) -> ChatRequest:
    return ChatRequest(model="policy", messages=MESSAGES, n=1, sampling=sampling)


def spoiled(change: Callable[[dict[str, Any]], object]) -> bytes:
    """An answer of three tokens that has been changed."""
    content = [{"token_id": token, "logprob": -1.0} for token in (5, 6, 7)]
    choice = {
        "index": 0,
        "token_ids": [5, 6, 7],
        "logprobs": {"content": content},
        "finish_reason": "length",
        "weight_versions": [span("default", 0, 3)],
    }
    answer = {"request_id": "r", "choices": [choice]}
    change(answer)
    return orjson.dumps(answer)


def choice_in(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a["choices"].append(choice_in(a)), "expected one choice, found 2"),
        (lambda a: choice_in(a).update(logprobs=None), "gave no logprobs"),
        (lambda a: choice_in(a)["logprobs"]["content"].pop(), "one logprob per token id"),
        (lambda a: choice_in(a).update(token_ids=None), "gave no token_ids"),
        (lambda a: choice_in(a).update(token_ids=[5, 6, -7]), "token_ids from 0"),
        (lambda a: choice_in(a).update(token_ids=[5, 6]), "one logprob per token id"),
        (
            lambda a: choice_in(a)["logprobs"]["content"][1].update(token_id=9),
            "logprobs of the tokens 5, 6, 7, found those of 5, 9, 7",
        ),
    ],
)
def test_answers_that_are_not_whole_are_refused(change, message):
    prompt, asked = np.array([1, 2], np.int32), request()
    VllmDialect(BRIDGE).read(spoiled(lambda _: None), asked, prompt)
    with pytest.raises(BadResponse, match=message):
        VllmDialect(BRIDGE).read(spoiled(change), asked, prompt)


def test_a_body_has_what_vllm_reads() -> None:
    filters: dict[str, Any] = {"top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2}
    sampling = Sampling(max_tokens=8, temperature=0.5, seed=7, stop=("x",), **filters)
    assert VllmDialect(BRIDGE).body(request(sampling), np.array([1, 2], np.int32)) == {
        "model": "policy",
        "token_ids": [1, 2],
        "sampling_params": {
            "max_tokens": 8,
            "temperature": 0.5,
            **filters,
            "stop": ["x"],
            "logprobs": 0,
            "seed": 7,
        },
    }
