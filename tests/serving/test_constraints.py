"""Constrained answers: every sample under a schema's masks validates against the schema."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from support.cases import printed_seed
from support.templates import trained_byte_tokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from marin_rl.errors import InferenceError
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.text.constraints import (
    GRAMMARS_KEPT_MAX,
    SCHEMA_DEPTH_MAX,
    Constraints,
    Walker,
)
from marin_rl.tokenizers import character_tokenizer

STEPS_MAX = 4000
BYTE_LEVEL = trained_byte_tokenizer()
CHARACTERS = character_tokenizer()


def constraints_of(tokenizer: PreTrainedTokenizerFast, rows: int = 400) -> Constraints:
    return Constraints(tokenizer, vocabulary=rows, stop_tokens=[tokenizer.eos_token_id])


@pytest.fixture(scope="module", params=[BYTE_LEVEL, CHARACTERS], ids=["byte-level", "characters"])
def tokenizer(request) -> PreTrainedTokenizerFast:
    return request.param


@pytest.fixture(scope="module")
def constraints(tokenizer) -> Constraints:
    return constraints_of(tokenizer)


def allowed(walker: Walker) -> np.ndarray:
    bits = np.unpackbits(walker.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def sampled(walker: Walker, tokenizer: PreTrainedTokenizerFast, chance: random.Random) -> str:
    """A text drawn through the masks, uniformly at every step."""
    tokens: list[int] = []
    for _ in range(STEPS_MAX):
        token = int(chance.choice(allowed(walker)))
        walker.accept(token)
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        tokens.append(token)
    raise AssertionError(f"no end after {STEPS_MAX} tokens: {tokenizer.decode(tokens)[:200]!r}")


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose texts are short, however they are drawn."""
    if depth < 2 and chance.random() < 0.5:
        return random_container(chance, depth)
    least = chance.randrange(-50, 50)
    return chance.choice(
        [
            {"type": "string", "minLength": least % 4, "maxLength": least % 4 + 6},
            {"type": "integer", "minimum": least, "maximum": least + chance.randrange(1, 500)},
            {"type": "number", "minimum": least, "maximum": least + chance.randrange(1, 500)},
            {"enum": chance.sample(["a", 'q"uote', "two words", 1, -2.5, None, True], 3)},
            {"const": chance.choice(["x y", 17, False])},
            {"type": "string", "pattern": chance.choice([r"^[a-f]{1,5}$", r"^\d\d-[xyz]$"])},
            {"type": ["boolean", "null"]},
        ]
    )


def random_container(chance: random.Random, depth: int) -> dict[str, Any]:
    inner = lambda: random_schema(chance, depth + 1)
    names = chance.sample(["name", "age", "a b", "_", 'say "x"'], chance.randrange(1, 4))
    return chance.choice(
        [
            {
                "type": "object",
                "properties": {name: inner() for name in names},
                "required": [name for name in names if chance.random() < 0.6],
                "additionalProperties": False,
            },
            {"type": "array", "items": inner(), "maxItems": chance.randrange(1, 4)},
            {"anyOf": [inner(), inner()]},
        ]
    )


def test_every_sample_under_a_schema_validates(constraints, tokenizer):
    chance = random.Random(printed_seed())
    texts = set()
    for _ in range(60):
        schema = random_schema(chance)
        make = constraints.json_schema(schema, param="schema")
        for _ in range(3):
            text = sampled(make(), tokenizer, chance)
            jsonschema.validate(json.loads(text), schema)
            texts.add(text)
    assert len(texts) > 60


def test_integers_of_any_size_may_be_asked_for(constraints, tokenizer):
    make = constraints.json_schema({"const": 10**25}, param="x")
    assert int(sampled(make(), tokenizer, random.Random(1))) == 10**25


def test_a_json_object_is_one(constraints, tokenizer):
    make = constraints.response_format({"type": "json_object"})
    walker = make()
    first = {tokenizer.decode([token])[0] for token in allowed(walker).tolist()}
    assert first == {"{"}
    for token in tokenizer.encode('{"a": [1, {"b": "c"}]}', add_special_tokens=False):
        assert tokenizer.eos_token_id not in allowed(walker)
        assert token in allowed(walker)
        walker.accept(token)
    assert tokenizer.eos_token_id in allowed(walker)


def test_the_end_is_allowed_exactly_where_the_text_may_end(constraints, tokenizer):
    make = constraints.json_schema({"type": "integer", "minimum": 5, "maximum": 55}, param="s")
    ends = []
    for text in ("", "4", "44", "5"):
        walker = make()
        for token in tokenizer.encode(text, add_special_tokens=False):
            walker.accept(token)
        ends.append(tokenizer.eos_token_id in allowed(walker))
    assert ends == [False, False, True, True]
    walker = make()
    for token in tokenizer.encode("55", add_special_tokens=False):
        walker.accept(token)
    assert allowed(walker).tolist() == [tokenizer.eos_token_id]


def test_several_stop_tokens_are_all_allowed_at_the_end():
    user = BYTE_LEVEL.get_vocab()["<|user|>"]
    stops = sorted([BYTE_LEVEL.eos_token_id, user])
    both = Constraints(BYTE_LEVEL, vocabulary=400, stop_tokens=stops)
    walker = both.json_schema({"const": 1}, param="s")()
    walker.accept(BYTE_LEVEL.get_vocab()["1"])
    assert sorted(allowed(walker).tolist()) == stops


@pytest.mark.parametrize("rows", [336, 400, 512, 1024])
def test_the_mask_covers_the_models_rows_and_none_beyond_the_tokenizer(rows):
    walker = constraints_of(BYTE_LEVEL, rows).json_schema({"type": "string"}, param="s")()
    assert walker.mask().shape == (-(-rows // 32),)
    walker.accept(BYTE_LEVEL.get_vocab()['"'])
    found = allowed(walker)
    assert len(found) > 100
    assert found.max() < len(BYTE_LEVEL)


def test_a_token_that_was_not_allowed_is_an_error(constraints, tokenizer):
    walker = constraints.json_schema({"const": 1}, param="s")()
    with pytest.raises(InferenceError, match="cannot go on"):
        walker.accept(tokenizer.get_vocab()["x"])


def refused(schema: dict[str, Any]) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(ApiError) as caught:
        constraints_of(BYTE_LEVEL).response_format(form)
    assert caught.value.status == 400
    assert caught.value.body["error"]["param"] == "response_format.json_schema.schema"
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "https://example.com/schema.json"}, "does not fetch"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "a form that no text has"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_a_400_that_says_why(schema, told):
    assert told in refused(schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_a_schema_too_large_is_refused_before_it_is_compiled():
    wide = {"enum": ["x" * 100 for _ in range(1000)]}
    many = {"type": "object", "properties": {str(index): {} for index in range(5000)}}
    assert "at most 65536 bytes" in refused(wide)
    assert "at most 4000 values" in refused(many)
    assert f"at most {SCHEMA_DEPTH_MAX} levels" in refused(nested(20_000))
    assert constraints_of(CHARACTERS).json_schema(nested(SCHEMA_DEPTH_MAX - 3), param="s")


def test_characters_that_the_tokenizer_cannot_write_are_refused():
    with pytest.raises(ApiError, match="a form that no text has"):
        constraints_of(CHARACTERS).json_schema({"const": "x☃"}, param="s")
    walker = constraints_of(BYTE_LEVEL).json_schema({"const": "x☃é"}, param="s")()
    assert json.loads(sampled(walker, BYTE_LEVEL, random.Random(1))) == "x☃é"


def test_a_tokenizer_without_bytes_is_refused():
    backend = tokenizers.Tokenizer(models.WordLevel({"[end]": 0, "hello": 1}, unk_token="[end]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[end]")
    with pytest.raises(ApiError, match="this model's tokenizer cannot be constrained") as caught:
        constraints_of(tokenizer).response_format({"type": "json_object"})
    assert caught.value.status == 400


def test_a_grammar_is_compiled_once():
    constraints = constraints_of(CHARACTERS)
    schema = {"type": "object", "properties": {f"k{index}": {} for index in range(1500)}}
    counted = count_compilations(constraints)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: constraints.json_schema(schema, param="s"), range(6)))
    assert len(counted) == 1


def test_a_refusal_is_kept():
    constraints = constraints_of(CHARACTERS)
    counted = count_compilations(constraints)
    for _ in range(3):
        with pytest.raises(ApiError, match="Invalid type"):
            constraints.json_schema({"type": "foo"}, param="s")
    assert len(counted) == 1


def test_grammars_beyond_those_that_are_kept_are_compiled_again():
    constraints = constraints_of(CHARACTERS)
    counted = count_compilations(constraints)
    for number in range(GRAMMARS_KEPT_MAX + 1):
        constraints.json_schema({"const": number}, param="s")
    constraints.json_schema({"const": GRAMMARS_KEPT_MAX}, param="s")
    assert len(counted) == GRAMMARS_KEPT_MAX + 1
    constraints.json_schema({"const": 0}, param="s")
    assert len(counted) == GRAMMARS_KEPT_MAX + 2


def count_compilations(constraints: Constraints) -> list[str]:
    """The forms that are compiled from now on."""
    compiled, compile_form = list[str](), constraints._compile

    def counting(kind: bytes, text: str) -> Any:
        compiled.append(text)
        return compile_form(kind, text)

    constraints._compile = counting  # type: ignore[method-assign]
    return compiled
