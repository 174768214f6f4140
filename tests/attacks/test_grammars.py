"""A form that takes long to compile is refused, and delays no other request.

A schema is tried in a process with limits before the server compiles it itself.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.cases import others_slow
from support.servers import CHAT, chat_body, serving, talk
from support.templates import trained_byte_tokenizer

from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.text.constraints import LIMITS, Constraints

ENDS_S = 120
PRIMES = (99_991, 99_989, 99_971, 99_961, 99_929, 99_923, 99_907, 99_901)
HARD: dict[str, dict[str, Any]] = {
    "large multiple": {"type": "integer", "multipleOf": 999_983},
    "several multiples": {
        "type": "array", "prefixItems": [{"type": "integer", "multipleOf": p} for p in PRIMES]
    },
}  # fmt: skip


def constraints() -> Constraints:
    tokenizer: Any = trained_byte_tokenizer()
    return Constraints(tokenizer, vocabulary=400, stop_tokens=[tokenizer.eos_token_id])


@pytest.mark.parametrize("name", others_slow(HARD, "large multiple"))
def test_a_form_that_compiles_for_seconds_is_refused_and_holds_up_no_other(name):
    """Others are compiled while it is tried; the same one is waited for, not tried again."""
    forms, param = constraints(), "response_format.json_schema.schema"
    with ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(forms.json_schema, HARD[name], param=param) for _ in "ab"]
        done = [forms.json_schema({"const": number}, param="s") for number in range(20)]
        assert len(done) == 20
        error, again = (future.exception(ENDS_S) for future in slow)
    assert isinstance(error, ApiError)
    assert str(error) == str(again)
    assert (error.status, error.body["error"]["param"]) == (400, param)
    assert f"compiled within {LIMITS.cpu_s:g} s and 512 MiB" in str(error)
    assert "over 1 seconds of CPU time" in str(error)


def test_a_form_in_tools_is_tried_as_well():
    schema = json.dumps(HARD["large multiple"])
    with pytest.raises(ApiError, match=r"^tools: expected a form that is compiled within 1 s"):
        constraints().grammar(f"start: %json {schema}", param="tools")


@pytest.mark.slow
def test_a_server_answers_bodies_with_tools_and_forms_during_slow_schemas(compiled_quickly):
    """As many slow ones as are tried at once, each another; then ordinary ones."""

    def form(schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}

    answers = list[tuple[int, str]]()

    def ask_slow(prime: int) -> None:
        schema = {"type": "array", "items": {"type": "integer", "multipleOf": 10 * prime + 1}}
        status, _, answer = talk(server, "POST", CHAT, chat_body(response_format=form(schema)))
        answers.append((status, answer["error"]["param"]))

    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with serving() as server:
        ordinary = [
            chat_body(response_format=form({"type": "object", "properties": {"a": {}}})),
            chat_body(tools=[tool]),
            chat_body(messages=[{"role": "user", "content": "say a" * 4}]),
        ]
        threads = [threading.Thread(target=ask_slow, args=(p,)) for p in PRIMES[:2]]
        for thread in threads:
            thread.start()
        rounds = 0
        while any(thread.is_alive() for thread in threads):
            assert talk(server, "GET", "/healthz")[0] == 200
            assert [talk(server, "POST", CHAT, body)[0] for body in ordinary] == [200] * 3
            rounds += 1
        for thread in threads:
            thread.join(ENDS_S)
        assert rounds > 0
    where = "response_format.json_schema.schema"
    assert answers == [(400, where)] * 2
