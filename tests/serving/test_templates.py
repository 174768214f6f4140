"""Chat templates: rendered as transformers does, under limits, and with nothing let out."""

from typing import Any

import pytest
from support.templates import CALLING, CHATML, QWEN, TALK, TEMPLATES

from marin_rl.chat_templates import prove
from marin_rl.errors import InputError
from marin_rl.isolated.templates import CHARACTERS_MAX
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.text.templates import ChatPrompts, conversation_of
from marin_rl.tokenizers import character_tokenizer


def tokenizer_with(template: str) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    tokenizer.bos_token = "<|pad|>"
    return tokenizer


FEATURES = """{% macro shout(x) %}{{ x | upper }}{% endmacro %}
{%- set ns = namespace(seen=[], text='') -%}
{%- for m in messages if m.role != 'system' -%}
{%- if loop.index > 3 %}{% break %}{% endif -%}
{%- set ns.text = ns.text ~ '|' ~ m.content ~ loop.index -%}
{%- set ns.seen = ns.seen + [m.role] -%}
{%- endfor %}
{{ ns.text }} {{ ns.seen | join(', ') }} {{ shout('ab') }} {{ 'a-b-c'.split('-') | list }}
{% set block %}x{{ messages | length }}y{% endset %}{{ block * 3 }} {{ '=' * 5 }}
{% generation %}{% set inner = 1 %}{{ messages[-1].content }}{% endgeneration %}{{ inner }}
{{ {'b': 1, 'a': '<é>'} | tojson(indent=2, sort_keys=true) }} {{ "a\nb" | indent(3, true) }}
{{ messages | map(attribute='role') | unique | join('+') }} {{ 'aXa' | replace('a', 'bb') }}
{{ 7 % 4 }} {{ 2 ** 10 }} {{ 7 // 2 }} {{ 'x' in 'axb' }} {{ (1, 2) + (3,) }}
{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}
{% call twice() %}q{% endcall %} {{ '{:>4}|{}'.format('a', 2) }}
{{ range(3) | list }} {{ 'aXa'.replace('a', '') }}
{%- for key, value in {'k': [1, 2]} | dictsort %} {{ key }}={{ value | sum }}{% endfor %}
"""


def test_allowed_features_of_templates_render_as_in_transformers():
    tokenizer = tokenizer_with(FEATURES)
    expected = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert ChatPrompts(tokenizer).text(TALK, opening=False) == expected


def test_messages_are_put_into_the_templates_shape():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = conversation_of([{"role": "user", "content": parts, "name": None}, CALLING[1]])
    assert found[0] == {"role": "user", "content": "ab"}
    assert found[1]["content"] is None
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich", "days": 2}
    assert CALLING[1]["tool_calls"][0]["function"]["arguments"].startswith("{")


@pytest.mark.parametrize(
    "arguments", ["not json", "[1]", '"x"', '{"a": NaN}', '{"a": [-Infinity]}', "[" * 100_000]
)
def test_arguments_that_are_no_object_are_refused(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ApiError, match="expected a JSON object as text") as caught:
        conversation_of([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert caught.value.status == 400
    assert caught.value.body["error"]["param"] == "messages.0.tool_calls.0.function.arguments"


def test_half_a_character_in_arguments_is_refused():
    function = {"name": "f", "arguments": r'{"a": "\ud800"}'}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    error = failure(QWEN, [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert error.status == 400


def failure(template: str, messages: list[dict[str, Any]] | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ChatPrompts(tokenizer_with(template)).text(messages or TALK)
    return caught.value


def test_a_template_that_refuses_the_messages_is_quoted():
    error = failure("{{ raise_exception('roles must alternate') }}")
    assert (error.status, error.body["error"]["param"]) == (400, "messages")
    assert str(error) == "the chat template refuses these messages: roles must alternate"
    assert len(str(failure("{{ raise_exception('x' * 10000) }}"))) < 400


def test_messages_that_the_template_cannot_work_with_are_refused_without_their_text():
    secret = [{"role": "assistant", "content": None}, {"role": "user", "content": "secret"}]
    error = failure(CHATML, secret)
    assert error.status == 400
    assert str(error).endswith("it cannot work with them (TypeError)")
    assert failure("{{ messages[0].nothing.more }}").status == 400


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 'x' | nonesuch }}", "No filter named"),
        ("{{ 'x' | os.system }}", "No filter named"),
        ("{% for x in %}", ""),
    ],
)
def test_a_template_that_is_no_jinja_is_named_at_the_start(template, told):
    with pytest.raises(
        InputError, match=f"the chat template of the model folder is wrong: .*{told}"
    ):
        prove(tokenizer_with(template))
    error = failure(template)
    assert (error.status, error.body["error"]["code"]) == (500, "chat_template")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_templates_of_known_families_pass_the_probes(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    prove(tokenizer)
    prompts = ChatPrompts(tokenizer)
    assert "two words" in prompts.text([{"role": "user", "content": "two words"}])


def test_a_template_may_refuse_all_but_one_message_of_a_user():
    strict = "{% if messages|length > 1 or tools %}{{ raise_exception('one only') }}{% endif %}x"
    prove(tokenizer_with(strict))
    with pytest.raises(InputError, match="refuses one message of a user: no users"):
        prove(tokenizer_with("{{ raise_exception('no users') }}"))


@pytest.mark.parametrize(
    ("condition", "probe"),
    [
        ("messages|length == 1", "one message of a user"),
        ("messages[0].role == 'system'", "a system message"),
        ("messages|length > 3", "several turns"),
        ("tools", "a call of a tool"),
        ("messages[0].content|length > 9999", "a long message"),
    ],
)
def test_a_probe_that_a_template_does_not_survive_is_named(condition, probe):
    hostile = "{% if " + condition + " %}{{ 'x' * 10**10 }}{% endif %}x"
    with pytest.raises(InputError, match=f"with {probe} it .*over 512 MiB of memory"):
        prove(tokenizer_with(hostile))


def test_a_long_conversation_may_be_as_long_as_the_caller_sends_it():
    content = "x" * (3 * CHARACTERS_MAX)
    prompts = ChatPrompts(tokenizer_with(CHATML))
    assert content in prompts.text([{"role": "user", "content": content}])
    with pytest.raises(ApiError, match="a text over"):
        ChatPrompts(tokenizer_with("{{ 'x' * 3000000 }}")).text(TALK)


def test_the_built_in_template_is_rendered_in_this_process():
    assert not ChatPrompts(character_tokenizer()).waits
    assert ChatPrompts(tokenizer_with(CHATML)).waits
