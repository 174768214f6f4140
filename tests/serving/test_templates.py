"""Chat templates: rendered as transformers does, under limits, and with nothing let out."""

import json
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from chat_templates import CALLING, CHATML, QWEN, TALK, TEMPLATES, TOOLS

from marin_rl.errors import InputError
from marin_rl.serving import sandbox
from marin_rl.serving.bodies import ApiError
from marin_rl.serving.templates import ChatPrompts, check_template, conversation_of
from marin_rl.tokenizers import character_tokenizer


def tokenizer_with(template: str) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    tokenizer.bos_token = "<|pad|>"
    return tokenizer


def as_transformers_expects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls' arguments as objects: what transformers' documentation asks for."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


TALKS = [(name, TALK) for name in TEMPLATES]
TALKS += [(name, CALLING) for name in ("llama3", "qwen", "mistral")]


@pytest.mark.parametrize("opening", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize(("name", "messages"), TALKS)
def test_rendering_equals_that_of_transformers(name, messages, tools, opening):
    tokenizer = tokenizer_with(TEMPLATES[name])
    expected = tokenizer.apply_chat_template(
        as_transformers_expects(messages),
        tools=tools,
        add_generation_prompt=opening,
        tokenize=False,
    )
    assert ChatPrompts(tokenizer).text(messages, tools=tools, opening=opening) == expected
    ids = tokenizer.apply_chat_template(
        as_transformers_expects(messages), tools=tools, add_generation_prompt=opening
    )
    rendered = ChatPrompts(tokenizer).ids(messages, tools=tools, opening=opening)
    assert rendered.dtype == np.int32
    assert rendered.tolist() == ids


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


def test_what_templates_may_use_renders_as_transformers_has_it():
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
    started = time.thread_time()
    with pytest.raises(ApiError) as caught:
        ChatPrompts(tokenizer_with(template)).text(messages or TALK)
    assert time.thread_time() - started < sandbox.CPU_SECONDS_MAX + 2
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


def told(template: str) -> str:
    return ChatPrompts(tokenizer_with(template)).text(TALK)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages|attr('__class__')|attr('__init__') ~ messages.__class__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ '{0.__class__}'.format(cycler) }}",
    "{{ '%s' % messages }}",
    "{{ strftime_now('%1000000Y') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ environment.pay.__globals__ }}",
    "{{ ('x' | map('attr', '__class__') | list)[0].mro() }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_nothing_leads_out_of_the_sandbox(template):
    """What is unsafe is undefined: printed it is empty, used it is an error."""
    with suppress(ApiError):
        assert told(template).strip() == ""
        return
    text = str(failure(template))
    for leak in ("root:", "uid=", "<class", "<function", "<built-in", "module", "TALK", "brief"):
        assert leak not in text


LOOP = "{% for a in range(99999) %}"
NESTED = "{% set ns = namespace(x=['x' * 1000]) %}"
NESTED += "{% for i in range(26) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
LOOPS = {
    "endless loop": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "endless output": LOOP + LOOP + "x{% endfor %}{% endfor %}",
    "formatted": "{{ '{:1000000000}'.format('x') }}",
    "formatted by value": "{{ '{:{}}'.format('x', 10**9) }}",
    "formatted often": "{{ ('{0}' * 10**5).format('x' * 10**5) }}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "bushy recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "long range": "{{ range(10**9) | list }}",
    "repeated": "{{ 'x' * 10**10 }}",
    "repeated list": "{{ [0] * 10**10 }}",
    "powers": "{{ 10**(10**10) }}",
    "products": "{% set ns = namespace(x=3) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled by ~": "{% set x = 'xxxxxxxx' %}" + "{% set x = x ~ x %}" * 40,
    "doubled by +": "{% set x = 'xxxxxxxx' %}" + "{% set x = x + x %}" * 40,
    "doubled list": "{% set x = [1] %}" + "{% set x = x + x %}" * 40,
    "doubled in blocks": "{% set x = 'xxxxxxxx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "replaced": "{% set x = 'x' * 1000 %}" + "{% set x = x.replace('x', x) %}" * 4,
    "replaced by filter": "{% set x = 'x' * 1000 %}" + "{% set x = x | replace('x', x) %}" * 4,
    "joined": "{% set x = 'x' * 1000 %}" + "{% set x = x.join(x) %}" * 4,
    "joined by filter": "{% set x = 'x' * 1000 %}" + "{% set x = x | list | join(x) %}" * 4,
    "indented": "{{ '\n\n' | indent(10**9) }}",
    "indented json": "{{ [1] | tojson(indent=10**9) }}",
    "json of json": "{% set ns = namespace(x='\"') %}"
    "{% for i in range(24) %}{% set ns.x = ns.x | tojson %}{% endfor %}{{ ns.x | length }}",
    "json of lists": "{% set x = ['x' * 1000] * 1000 %}{{ ([x] * 1000) | tojson | length }}",
    "sliced": "{{ ([1] | slice(8000000) | list) | length }}",
    "in batches": "{{ ([1] | batch(20000000, 'x') | list | first) | length }}",
    "rounded": "{{ 3 | round(10**9, 'ceil') }}",
    "lists in lists printed": NESTED + "{{ ns.x }}",
    "lists in lists as string": NESTED + "{{ (ns.x | string) | length }}",
    "lists in lists by ~": NESTED + "{{ (ns.x ~ '') | length }}",
    "lists in lists joined": NESTED + "{{ ([ns.x] | join('')) | length }}",
    "separated json": "{{ [1, 2] | tojson(separators=('x' * 99999, ':')) }}",
}


@pytest.mark.parametrize("template", LOOPS.values(), ids=LOOPS)
def test_a_template_without_end_or_measure_is_stopped(template):
    error = failure(template)
    assert error.status in (400, 500)
    if error.status == 500:
        assert error.body["error"]["code"] == "chat_template"
        assert str(error).startswith("the model's chat template ")


@pytest.mark.parametrize(
    "filter_", ["center(10**9)", "random", "wordwrap(1)", "pprint", "nonesuch"]
)
def test_filters_that_no_chat_needs_are_not_there(filter_):
    tokenizer = tokenizer_with("{{ 'x' | " + filter_ + " }}")
    with pytest.raises(
        InputError, match=r"the chat template of the model folder is wrong: No filter"
    ):
        check_template(tokenizer)
    assert failure(tokenizer.chat_template).status == 500


def test_a_template_that_is_no_jinja_is_found_at_the_start():
    with pytest.raises(InputError, match="the chat template of the model folder is wrong"):
        check_template(tokenizer_with("{% for x in %}"))
    check_template(tokenizer_with(QWEN))


def test_the_limit_grows_with_what_the_caller_sends():
    long = [{"role": "user", "content": "x" * (3 * sandbox.CHARACTERS_MAX)}]
    tokenizer = tokenizer_with(CHATML)
    assert len(ChatPrompts(tokenizer).text(long)) > 3 * sandbox.CHARACTERS_MAX


def test_a_template_is_compiled_once():
    ChatPrompts(tokenizer_with(QWEN)).text(TALK)
    assert sandbox.compile_template(QWEN) is sandbox.compile_template(QWEN)
