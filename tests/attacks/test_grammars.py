"""A form that takes long to compile is refused, and delays no other request.

A schema is tried in a process with limits before the server compiles it itself.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
# What has a limit of its own, or takes less than a trial may take: compiled or refused, but soon.
BOUNDED: dict[str, dict[str, Any]] = {
    "multiple": {"type": "integer", "multipleOf": 99_991},
    "long constant": {"const": "x" * 60_000},
    "nested repeats": {"type": "string", "pattern": "^((a{50}){50}){50}$"},
    "optional properties": {
        "type": "object", "properties": {f"k{n}": {"type": "integer"} for n in range(1900)}
    },
    "small decimal": {"type": "number", "multipleOf": 0.000_000_1},
    "large counts": {"type": "string", "minLength": 60_000, "maxLength": 65_000},
    "stars": {"type": "string", "pattern": "^(.*a.*b.*c.*d.*){50}$"},
    "classes": {"type": "string", "pattern": "^([^a]{0,300}[^b]{0,300}){30}$"},
    "alternatives": {"anyOf": [{"type": "string", "pattern": f"^.*{n}.*$"} for n in range(900)]},
    "multiples of both": {"allOf": [{"type": "integer", "multipleOf": p} for p in PRIMES[:3]]},
    "overlaps": {"allOf": [{"type": "string", "pattern": f"^.*{n}.*$"} for n in range(60)]},
    "definitions": {
        "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(300)}
        | {"d300": {"type": "null"}},
        "$ref": "#/$defs/d0",
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


@pytest.mark.parametrize("name", others_slow(BOUNDED, "long constant", "nested repeats"))
def test_a_hard_form_costs_this_process_about_what_its_trial_may_cost(name):
    """Twice the limit of the trial, since nothing interrupts the compilation that follows."""
    forms = constraints()
    forms.json_schema({"type": "null"}, param="s")  # the vocabulary is taken in
    started = time.thread_time()
    with suppress(ApiError):  # a limit of the compiler's own
        forms.json_schema(BOUNDED[name], param="s")
    assert time.thread_time() - started < 2 * LIMITS.cpu_s + 1


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
