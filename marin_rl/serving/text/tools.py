"""Forced tool calls: the grammar of an answer that is calls of given tools and nothing else.

Leaves out the formats of calls and how they are read back (`marin_rl.tool_calls`), and how a
grammar is enforced (`constraints`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from marin_rl.isolated.grammars import JSON_OPTIONS
from marin_rl.tool_calls import CALLS_MAX, ToolFormat


def forced_calls_grammar(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    several: bool,
) -> str:
    """The Lark grammar (llguidance's dialect) of an answer that is calls of these tools alone.

    `several` allows more than one call where the format has room for it. `constraints` compiles it
    and refuses what is too large.
    """
    call: dict[str, Any] = {"anyOf": [_call_schema(form, tool["function"]) for tool in tools]}
    if form.listed:
        most = CALLS_MAX if several else 1
        call = {"type": "array", "items": call, "minItems": 1, "maxItems": most}
    call["x-guidance"] = JSON_OPTIONS
    body = f"%json {json.dumps(call)}"
    before, after = _literal(form.before, form, tokenizer), _literal(form.after, form, tokenizer)
    more = ' ("\\n" call)*' if several and form.closing else ""
    return f"start: call{more}\ncall: {before} {body} {after}\n"


def _call_schema(form: ToolFormat, function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, form.arguments: arguments},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _literal(text: str, form: ToolFormat, tokenizer: PreTrainedTokenizerBase) -> str:
    """A marker in Lark: a special token by its id, the rest as a string."""
    if not form.special or not form.opening or not text.startswith(form.opening):
        return json.dumps(text) if text else ""
    marker = f"<[{tokenizer.get_vocab()[form.opening]}]>"
    literal = text.removeprefix(form.opening)
    return f"{marker} {json.dumps(literal)}" if literal else marker
