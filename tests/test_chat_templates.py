"""One renderer for training and serving: text and loss masks are those of transformers."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.templates import CALLING, CHATML, TALK, TEMPLATES, TOOLS, trained_byte_tokenizer

from marin_rl.batching.sequences import chat_tokens, demonstrated, rendered_prompts
from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.errors import InputError, TemplateRefusal
from marin_rl.tokenizers import character_tokenizer
from marin_rl.types import Demonstration, Message, assistant

MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "A:{% generation %}{{ m.content }};{% endgeneration %}|"
    "{% else %}{{ m.role }}:{{ m.content|trim }}|{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
TWICE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% generation %}[end]{% endgeneration %}{% else %}<{{ m.content }}>"
    "{% endif %}{% endfor %}"
)
FAMILIES = TEMPLATES | {"marked": MARKED, "twice": TWICE}

texts = st.text(max_size=30)
roles = st.sampled_from(["system", "user", "assistant", "tool"])
messages_of = st.lists(st.builds(lambda r, c: {"role": r, "content": c}, roles, texts), min_size=1)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
tools_of = st.none() | st.lists(
    st.builds(
        lambda name, parameters: {
            "type": "function",
            "function": {"name": name, "parameters": parameters},
        },
        texts,
        st.dictionaries(texts, values, max_size=3),
    ),
    min_size=1,
    max_size=2,
)


def tokenizer_with(template: str) -> Any:
    tokenizer = trained_byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.bos_token = "<|user|>"
    return tokenizer


TOKENIZERS = {name: tokenizer_with(template) for name, template in FAMILIES.items()}


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25)
@given(messages=messages_of, tools=tools_of, opening=st.booleans())
def test_texts_are_those_of_transformers(name, messages, tools, opening):
    tokenizer = TOKENIZERS[name]
    try:
        expected = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=opening, tokenize=False
        )
    except Exception:  # noqa: BLE001 - what it refuses, this refuses
        expected = None
    conversation = Conversation(messages=messages, tools=tools, opening=opening)
    template = ChatTemplate.of(tokenizer, tools=tools is not None)
    if expected is None:
        with pytest.raises(InputError):
            template.render(conversation)
    else:
        assert template.render(conversation).text == expected


def masks_of_transformers(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    return tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", "marked", "twice"])
@settings(max_examples=40)
@given(messages=messages_of, answer=st.text(min_size=1, max_size=30))
def test_loss_masks_are_those_of_transformers(name, messages, answer):
    tokenizer = TOKENIZERS[name]
    prompt = [Message(role=m["role"], content=m["content"]) for m in messages]
    expected = masks_of_transformers(
        tokenizer, [*messages, {"role": "assistant", "content": answer}]
    )
    opened = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    mask = np.array(expected["assistant_masks"])
    mask[: len(opened)] = 0
    is_prefix = expected["input_ids"][: len(opened)] == opened
    if not (is_prefix and mask.any()):
        with pytest.raises(InputError):
            chat_tokens(tokenizer, prompt, answer)
        return
    ids, loss_mask = chat_tokens(tokenizer, prompt, answer)
    assert ids.tolist() == expected["input_ids"]
    assert loss_mask.tolist() == mask.tolist()
    ((text, length),) = rendered_prompts(tokenizer, [prompt])
    assert tokenizer.encode(text, add_special_tokens=False) == opened
    assert length == len(opened)


def test_a_batch_equals_single_conversations():
    tokenizer = TOKENIZERS["marked"]
    chats = [((Message(role="user", content="2+" * n),), f"answer {n}") for n in range(1, 40)]
    shown = [Demonstration(messages=m, answer=assistant(answer), name="") for m, answer in chats]
    for rendered, chat in zip(demonstrated(tokenizer, shown), chats, strict=True):
        one_ids, one_mask = chat_tokens(tokenizer, *chat)
        assert rendered.ids.tolist() == one_ids.tolist()
        assert rendered.mask.tolist() == one_mask.tolist()
    prompts = [messages for messages, _ in chats]
    alone = [prompt for each in prompts for prompt in rendered_prompts(tokenizer, [each])]
    assert rendered_prompts(tokenizer, prompts) == alone


def test_the_tools_template_of_a_tokenizer_with_several_is_used():
    tokenizer = trained_byte_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    for tools, expected in ((None, "plain"), (TOOLS, "with tools")):
        conversation = Conversation(messages=TALK, tools=tools)
        assert ChatTemplate.of(tokenizer, tools=bool(tools)).render(conversation).text == expected


def test_integers_of_any_size_reach_a_template():
    template = ChatTemplate("{{ messages[0].n }} {{ messages[0] | tojson }}", {})
    text = template.render(Conversation(messages=[{"n": 10**30}])).text
    assert text == f"{10**30} " + json.dumps({"n": 10**30})


def test_half_a_character_is_refused():
    with pytest.raises(TemplateRefusal, match="UnicodeEncodeError"):
        ChatTemplate(CHATML, {}).render(Conversation(messages=[{"role": "x", "content": "\ud800"}]))


def test_threads_render_at_the_same_time():
    """Both kinds, with spans, so that neither pipes nor trackers are mixed up."""
    ours, theirs = (ChatTemplate(FAMILIES[name], {"eos_token": ";"}) for name in ("ours", "marked"))
    started = threading.Barrier(8)

    def spans(number: int) -> list[int]:
        started.wait(60)
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a" * number},
        ]
        both = [
            template.render_all([Conversation(messages=messages)] * 20, spans=True)
            for template in (ours, theirs)
        ]
        return [end - start for batch in both for one in batch for start, end in one.spans]

    with ThreadPoolExecutor(8) as pool:
        for number, lengths in enumerate(pool.map(spans, range(8))):
            assert lengths == [number + 1] * 40


FORKS = """
import os
from marin_rl.chat_templates import ChatTemplate, Conversation
template = ChatTemplate("{{ messages[0].content }}", {})
for number in range(3):
    assert template.render(Conversation(messages=[{"content": "x"}])).text == "x"
child = os.fork()
for number in range(99):
    text = f"{child == 0} {number}"
    assert template.render(Conversation(messages=[{"content": text}])).text == text
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("done")
"""


def test_a_forked_process_starts_a_worker_of_its_own():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_calls_of_tools_are_rendered_with_arguments_as_objects():
    tokenizer, messages = TOKENIZERS["qwen"], json.loads(json.dumps(CALLING))
    call = messages[1]["tool_calls"][0]["function"]
    call["arguments"] = json.loads(call["arguments"])
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    conversation = Conversation(messages=messages, tools=TOOLS)
    assert ChatTemplate.of(tokenizer, tools=True).render(conversation).text == expected


def test_the_built_in_template_renders_alike_here_and_in_a_worker():
    """A space more makes it another's; both ways are the same environment."""
    tokenizer = character_tokenizer()
    here = ChatTemplate.of(tokenizer)
    there = ChatTemplate(tokenizer.get_chat_template() + "{# #}", tokenizer.special_tokens_map)
    assert (here.is_built_in, there.is_built_in) == (True, False)
    conversations = [Conversation(messages=TALK), Conversation(messages=TALK, opening=True)]
    assert here.render_all(conversations, spans=True) == there.render_all(conversations, spans=True)


def test_a_template_with_half_a_character_is_refused():
    with pytest.raises(InputError, match="UnicodeEncodeError"):
        ChatTemplate("x\ud800", {}).render(Conversation(messages=TALK))


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
]
EACH_CALL = "{% for call in m.tool_calls or [] %}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        # As DeepSeek's templates: arguments are a text, and no content is none.
        (
            "{% if m.content is none %}" + EACH_CALL + "{{ call.function.name + ' ' + "
            "call.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}",
            'weather {"city": "Zürich"}',
        ),
        # As those of GPT-OSS and of Qwen3 as first published: words are looked for in the content.
        (
            "{% if '</think>' in m.content %}thought{% endif %}{{ m.content }}"
            + EACH_CALL
            + "{{ call.function | tojson }}{% endfor %}",
            '{"name": "weather", "arguments": {"city": "Zürich"}}',
        ),
        # As GLM 4's, which writes what no content is as a text; arguments are given as ever.
        (
            "{{ m.content }}" + EACH_CALL + "{{ call.function.arguments | items | list }}"
            "{{ call.function.name }}{% endfor %}",
            "[('city', 'Zürich')]weather",
        ),
    ],
)
def test_calls_have_the_form_that_the_template_takes(template: str, text: str):
    source = "{% for m in messages %}{{ m.role }}:" + template + "|{% endfor %}"
    rendered = ChatTemplate(source, {}).render(Conversation(messages=CALLS)).text
    assert rendered == f"user:Weather?|assistant:{text}|"
