"""Requests made from the server's own OpenAPI description: none breaks it, all answers match it.

Schemathesis sends what the description allows and what it does not, to every route, over loopback,
with a token. The admin's token opens the admin routes in the thorough run alone.
"""

import os
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.cases import others_slow
from support.servers import serving, talk

from marin_rl.config import InferenceConfig, ServerConfig

# Schemathesis shuffles by `random` where Hypothesis asks for its own.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
LIMITS = ServerConfig(samples_max=4, prompts_max=4, new_tokens_max=4, request_timeout_s=60.0)
TOKENS = {InferenceConfig().api_key_variable: "api", LIMITS.admin_key_variable: "admin"}
BEARER = {"Authorization": "Bearer api"}
ADMIN_BEARER = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    """Address of a server that asks for tokens."""
    with pytest.MonkeyPatch.context() as patch:
        for name, token in TOKENS.items():
            patch.setitem(os.environ, name, token)
        with serving(LIMITS) as server:
            yield server.base_url.removesuffix("/v1")


@pytest.fixture(scope="module")
def described(root) -> Any:
    return schemathesis.openapi.from_url(f"{root}/openapi.json", headers=BEARER)


OPEN = ("HEAD /", "GET /healthz", "GET /health", "GET /readyz")
OPERATIONS = (
    *OPEN,
    "GET /metrics",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "POST /v1/chat/completions",
    "POST /v1/chat/completions/tokens",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /inference/v1/generate",
    "POST /generate",
    "POST /tokenize",
    "POST /detokenize",
    "GET /tokenizer_info",
)
ADMIN = (
    "POST /admin/update_weights_from_disk",
    "POST /update_weights_from_disk",
    "POST /admin/pause",
    "POST /admin/resume",
    "POST /admin/drain",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
    "POST /load_lora_adapter",
    "POST /unload_lora_adapter",
)
# Of each kind one in the default suite.
TRIED = ("GET /v1/models/{model}", "POST /v1/chat/completions", "POST /admin/pause")
MOST = {"n": 2, "best_of": 2, "max_tokens": 4, "max_completion_tokens": 4, "min_tokens": 0}
MOST |= {"max_new_tokens": 4, "min_new_tokens": 0}
MOST |= {"max_output_tokens": 4}
IDS = ("stop_token_ids", "tokens", "token_ids", "prompt", "input_ids")

# What fits only with some other field, which a description does not say.
DEPENDENT = (
    "tool_choice", "stream_options", "max_completion_tokens", "top_logprobs", "compact_logprobs",
    "seeds",
    "chat_template_kwargs", "response_format", "best_of", "echo", "tools", "add_special_tokens",
)  # fmt: skip


def simple(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what depends on other fields."""
    body = {key: value for key, value in body.items() if key not in DEPENDENT}
    if isinstance(body.get("messages"), list):
        body["messages"] = [{"role": "user", "content": str(m)[:9]} for m in body["messages"][:2]]
        body.pop("prompt", None)
    if "input" in body:
        body["input"] = str(body["input"])[:9]
    if "prompt" in body:
        body["prompt"] = str(body["prompt"])[:9]
    return body


def fitted(body: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """The body within what a description cannot say: the model's name, vocabulary and limits.

    `alone` leaves out what depends on other fields.
    """
    body = simple(body) if alone else dict(body)
    if isinstance(body.get("model"), str):
        body["model"] = "policy"
    for name in MOST.keys() & body.keys():
        if isinstance(body[name], int):
            body[name] = min(body[name], MOST[name])
    for name in IDS:
        if isinstance(body.get(name), list):
            body[name] = [t % 103 if isinstance(t, int) else t for t in body[name]]
    if isinstance(body.get("sampling_params"), dict):
        body["sampling_params"] = fitted(body["sampling_params"], alone=alone)
    return body


def ask(
    described: Any, operation: str, mode: GenerationMode, examples: int, headers: dict[str, str]
) -> Counter[int]:
    """Send requests that the description allows, or forbids; counts the answers' statuses."""
    method, path = operation.split()
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],  # a failing example is shown as generated
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            alone = statuses.total() % 2 == 0
            case.body = fitted(case.body, alone=alone)
            if alone and path == "/tokenize" and not isinstance(case.body.get("messages"), list):
                case.body.setdefault("prompt", "a")  # a description does not say: one of the two
            if alone and path == "/generate":
                case.body = {**case.body, "input_ids": None, "text": "a"}
        response = case.call_and_validate(headers=headers, checks=CHECKS, timeout=60)
        statuses[response.status_code] += 1

    send()
    print(operation, mode.name, dict(statuses))
    return statuses


@pytest.mark.parametrize("operation", others_slow([*OPERATIONS, *ADMIN], *TRIED))
def test_no_request_breaks_the_server_and_answers_are_as_described(described, operation):
    statuses = ask(described, operation, GenerationMode.POSITIVE, 15, BEARER)
    assert (set(statuses) == {403}) == (operation in ADMIN)
    if operation.startswith(("GET", "HEAD")) and "{" not in operation:
        assert set(statuses) == {200}
    if operation.startswith("POST") and operation not in ADMIN:
        assert statuses[200] > 0


@pytest.mark.parametrize(
    "operation",
    others_slow([o for o in OPERATIONS if o.startswith("POST")], "POST /v1/chat/completions"),
)
def test_no_wrong_request_breaks_it_either(described, operation):
    assert ask(described, operation, GenerationMode.NEGATIVE, 15, BEARER).total() > 1


@pytest.mark.parametrize("operation", others_slow(ADMIN[:2], first=1))
def test_the_admins_updates_stand_it_too(described, operation):
    assert ask(described, operation, GenerationMode.POSITIVE, 12, ADMIN_BEARER)[400] >= 1


@pytest.mark.parametrize(
    ("operation", "mode"), others_slow(product(ADMIN[5:], GenerationMode), first=1, several=True)
)
def test_the_admins_adapters_stand_it_too(described, operation, mode):
    statuses = ask(described, operation, mode, 12, ADMIN_BEARER)
    # No such folder, or no such name: nothing is loaded, and what is served goes on.
    assert statuses[400] + statuses[404] + statuses[422] >= 1
    assert statuses[200] == 0


def test_every_route_is_described(root):
    status, _, document = talk(root, "GET", "/openapi.json", headers=BEARER)
    assert status == 200
    found = [
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    ]
    assert set(OPERATIONS) | set(ADMIN) <= set(found)
    assert document["paths"]["/v1/chat/completions"]["post"]["security"] == [{"bearer": []}]
    assert document["paths"]["/healthz"]["get"]["security"] == []
