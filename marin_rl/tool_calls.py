"""Tool calls: which format a chat template writes them in, and how they are read back.

Owns the formats that are known (Hermes and Qwen, Llama 3.1's JSON, Mistral's list, the tags of
Qwen3-Coder and Qwen3.5, those of GLM 4, DeepSeek V3's names before JSON, LFM2's Python, GPT-OSS's
channels) and the reading of a completion's text, whole or piece by piece. A call that is not
well-formed stays text. The server and the loop of rollouts both read calls here, so they agree on
what a call is. Leaves out how tools are put into a prompt (`chat_templates`), how a call is forced
(the server's `constraints`) and what is done with one (`environments.tool_class`).
"""

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from marin_rl.chat_templates import CALL_PROBE, PROBE_QUESTION, ChatTemplate
from marin_rl.errors import TemplateFault, TemplateRefusal
from marin_rl.types import ToolCall

# transformers takes seconds to import, and only its tokenizers' types are named here
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALLS_MAX = 128

# Mistral's templates refuse any other id of a call when it comes back; others take every one.
ID_LETTERS, ID_LENGTH = string.ascii_letters + string.digits, 9


# What is between the markers of a call: an object of JSON; a list of these; `<function=NAME>` with
# `<parameter=KEY>` of each argument; a name before `<arg_key>` and `<arg_value>` of each; a list of
# names before objects of JSON; a list of Python's calls. Of channels, the whole is messages.
Kind = Literal["json", "listed", "tagged", "pairs", "named", "python", "channels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format of tool calls in a template; of JSON, `{"name": …, <arguments>: {…}}`.

    `opening` and `closing` are searched for, `before` and `after` are the text around the JSON
    exactly; an empty `opening` means that the whole answer is the call, an empty `closing` that it
    runs to the end. `special` says that a marker is a special token: a text that is to be read must
    then be decoded with special tokens kept.
    """

    opening: str
    closing: str
    arguments: str
    before: str
    after: str
    kind: Kind = "json"
    special: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """Content and tool calls of a completion; `content` is None if there are only calls."""

    content: str | None
    calls: tuple[ToolCall, ...]


def tool_format(tokenizer: "PreTrainedTokenizerBase") -> ToolFormat | None:
    """The format in which the tokenizer's chat template writes tool calls, or None.

    Determined by rendering a conversation with a call in it, so that text of the template about
    calls elsewhere, in comments or instructions, cannot mislead.
    """
    try:
        template = ChatTemplate.of(tokenizer, tools=True)
        text = template.render(CALL_PROBE).text
    except (TemplateRefusal, TemplateFault):
        return None
    tail = text[text.rfind(PROBE_QUESTION) + len(PROBE_QUESTION) :]
    special = tuple(tokenizer.all_special_tokens)
    for pattern, arguments, kind in _FORMATS:
        match = pattern.search(tail)
        if match is not None:
            before, after, listed = match["before"], match["after"], kind == "listed"
            return ToolFormat(
                opening=before.strip().removesuffix("[{").strip() if listed else before.strip(),
                closing="" if listed else after.strip(),
                arguments=arguments,
                before=before.removesuffix("[{") if listed else before,
                after="" if listed else after,
                kind=kind,
                special=kind == "channels" or before.strip().startswith(special),
            )
    return None


_OBJECT = r'\{{\s*"name":\s*"probe_of_format",\s*"{0}":\s*\{{"key":\s*"value"\}}\s*\}}'
_HERMES = rf"(?P<before><tool_call>\s*){_OBJECT.format('arguments')}(?P<after>\s*</tool_call>)"
_MISTRAL = r'(?P<before>\[TOOL_CALLS\]\s*\[\{)[^\[]*"probe_of_format"(?P<after>)'
_LLAMA = rf"(?P<before>(<\|python_tag\|>)?){_OBJECT.format('parameters')}(?P<after>)"
_TAGGED = (
    r"(?P<before><tool_call>\s*)<function=probe_of_format>\s*<parameter=key>\s*value\s*</parameter>"
    r"\s*</function>(?P<after>\s*</tool_call>)"
)
_PAIRS = (
    r"(?P<before><tool_call>)probe_of_format\s*<arg_key>key</arg_key>\s*<arg_value>value</arg_value>"
    r"(?P<after>\s*</tool_call>)"
)
_DEEPSEEK = (
    r"(?P<before><\uff5ctool▁calls▁begin\uff5c>)<\uff5ctool▁call▁begin\uff5c>[^{]*probe_of_format[^{]*\{[^}]*\}"
    r"[^{]*(?P<after><\uff5ctool▁calls▁end\uff5c>)"
)
_PYTHON = (
    r"(?P<before><\|tool_call_start\|>)\[probe_of_format\(key=[\"']value[\"']\)\]"
    r"(?P<after><\|tool_call_end\|>)"
)
_CHANNELS = (
    r"(?P<before>to=functions\.)probe_of_format<\|channel\|>commentary json<\|message\|>"
    r'\{"key": "value"\}(?P<after>)'
)
_FORMATS: tuple[tuple[re.Pattern[str], str, Kind], ...] = (  # with the key of the arguments
    (re.compile(_HERMES), "arguments", "json"),
    (re.compile(_MISTRAL), "arguments", "listed"),
    (re.compile(_LLAMA), "parameters", "json"),
    (re.compile(_TAGGED), "arguments", "tagged"),
    (re.compile(_PAIRS), "arguments", "pairs"),
    (re.compile(_DEEPSEEK), "arguments", "named"),
    (re.compile(_PYTHON), "arguments", "python"),
    (re.compile(_CHANNELS), "arguments", "channels"),
)
_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"
_NAME = r"[\w.-]+"
_PAIR = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|$))", re.DOTALL
)
# Of DeepSeek V3, and of V3.1, which has neither the word nor the fence.
_NAMED = re.compile(
    rf"\s*<\uff5ctool▁call▁begin\uff5c>(?:function<\uff5ctool▁sep\uff5c>)?({_NAME})(?:<\uff5ctool▁sep\uff5c>|\s*```json\s)"
    r"(.*?)(?:\s```)?<\uff5ctool▁call▁end\uff5c>",
    re.DOTALL,
)
# A message of channels: its header and its text.
_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?([^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>(.*?)"
    r"(?:<\|(?:end|call|return)\|>|$)",
    re.DOTALL,
)
_RECIPIENT = re.compile(rf"\bto=functions\.({_NAME})")
# As some templates write them, where JSON has other words.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_JSON_WORDS = {"true": True, "false": False, "null": None}


def new_call_id() -> str:
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


Parameters = Mapping[str, Mapping[str, Any]]


def parameters_of(tools: Iterable[Mapping[str, Any]]) -> Parameters:
    """The schema of each tool's parameters by the tool's name, empty where it says none."""
    functions = [tool["function"] for tool in tools]
    return {str(each["name"]): each.get("parameters") or {} for each in functions}


def called_tools(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Tools of these calls, as far as reading the calls again takes: their strings stay strings."""
    tools = list[dict[str, Any]]()
    for call in calls:
        strings = (key for key, value in json.loads(call.arguments).items() if type(value) is str)
        schema = {"properties": {key: {"type": "string"} for key in strings}}
        tools.append({"type": "function", "function": {"name": call.name, "parameters": schema}})
    return tools


def parse_tool_calls(
    form: ToolFormat,
    text: str,
    tools: Parameters,
    *,
    most: int | None = None,
    new_id: Callable[[], str] = new_call_id,
) -> ParsedAnswer:
    """A whole completion's content and its calls, the first `most` of them.

    `tools` are those that were offered (`parameters_of`); `new_id` makes the calls' ids.
    """
    stream = ToolCallStream(form, tools, new_id)
    pieces = [*stream.feed(text), *stream.finish()]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = tuple(piece for piece in pieces if isinstance(piece, ToolCall))[:most]
    return ParsedAnswer(content=content or (None if calls else ""), calls=calls)


class ToolCallStream:
    """Incremental parser of a completion: returns content, and each call when it is complete.

    Text that may be the beginning of a call is buffered, and so is blank space that may precede
    one. What `feed` and `finish` give is, put together, the same however the text is cut.
    """

    def __init__(
        self, form: ToolFormat, tools: Parameters, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self._form = form
        self._new_id = new_id
        self._tools = tools
        self._buffer = ""
        self._gap = ""  # blank space before the call that is being read
        self._inside = False
        self._begun = False
        self._looked = 0  # up to where the call being read has closing markers in a string alone
        self.calls = 0

    def feed(self, text: str) -> list[str | ToolCall]:
        """Take in more text; returns what is certain now, in order."""
        self._buffer += text
        out: list[str | ToolCall] = []
        if self._form.kind == "channels":  # read at the end: a header says what a text is
            return out
        while self._closed(out) if self._inside else self._opened(out):
            pass
        return out

    def finish(self) -> list[str | ToolCall]:
        """End the text: return the buffered calls or text."""
        out: list[str | ToolCall] = []
        while self._inside and self._looked:  # the string has no end: its markers were markers
            self._cut(self._first_closing(), out)
            out += self.feed("")
        buffer, self._buffer = self._buffer, ""
        if self._form.kind == "channels":
            return self._of_channels(buffer)
        if self._inside:
            self._inside = False
            calls = [] if self._form.closing else self._calls(buffer)
            if calls:
                return [*out, *calls]
            buffer = self._gap + buffer
        return out if not buffer or (self.calls and buffer.isspace()) else [*out, buffer]

    def _of_channels(self, text: str) -> list[str | ToolCall]:
        """Calls, and texts that are no analysis; all as it is where that is not well-formed."""
        out, at = list[str | ToolCall](), 0
        while message := _MESSAGE.match(text, at):
            header, body = message.groups()
            if (recipient := _RECIPIENT.search(header)) is not None:
                values = _values(body, listed=False)
                named = {"name": recipient[1], "arguments": values[0] if len(values) == 1 else None}
                call = self._call(named)
                if call is None or self.calls == CALLS_MAX:
                    break
                out.append(call)
                self.calls += 1
            elif body and "analysis" not in header:
                out.append(body)
            at = message.end()
        if text[at:].strip():
            self.calls = 0
            return [text]
        return out

    def _opened(self, out: list[str | ToolCall]) -> bool:
        """Emit text up to the opening tag of a call; return True if there is one."""
        at, end = self._opening()
        certain = self._buffer[:at].rstrip()
        if certain:
            out.append(certain)
            self._begun = True
        self._gap, self._buffer = self._buffer[len(certain) : at], self._buffer[at:]
        if end:
            self._inside = True
            return True
        self._buffer, self._gap = self._gap + self._buffer, ""
        return False

    def _opening(self) -> tuple[int, bool]:
        """(index of the call's possible beginning, True if it certainly begins there)."""
        buffer, opening = self._buffer, self._form.opening
        if not opening:  # the whole answer is the call: its first character decides
            start = len(buffer) - len(buffer.lstrip())
            begins = not self._begun and buffer[start : start + 1] == "{"
            return (start, True) if begins else (len(buffer), False)
        at = buffer.find(opening)
        if at >= 0:
            return at, True
        length = next(n for n in range(len(opening) - 1, -1, -1) if buffer.endswith(opening[:n]))
        return len(buffer) - length, False

    def _closed(self, out: list[str | ToolCall]) -> bool:
        """Emit the tool call, or plain text, up to its closing tag; return True if it is there.

        A closing marker in a JSON string, or in the value of a parameter, is a part of that.
        """
        opening, closing = self._form.opening, self._form.closing
        if not closing:
            return False
        while (at := self._buffer.find(closing, max(self._looked, len(opening)))) >= 0:
            end = at + len(closing)
            if self._in_value(self._buffer[len(opening) : at]):
                self._looked = end
                continue
            try:
                list(_decoded(self._buffer[len(opening) : at]))
            except json.JSONDecodeError as error:
                if error.msg.startswith("Unterminated string"):
                    self._looked = end
                    continue
            except (ValueError, RecursionError):
                pass
            self._cut(end, out)
            return True
        return False

    def _in_value(self, inner: str) -> bool:
        """True if a call without JSON goes on, with a value that the closing marker is in."""
        if self._form.kind == "pairs":
            return inner.count("<arg_value>") > inner.count("</arg_value>")
        ends = {"tagged": _END_OF_FUNCTION, "python": ")]"}.get(self._form.kind, "")
        return not inner.rstrip().endswith(ends)

    def _cut(self, end: int, out: list[str | ToolCall]) -> None:
        """Emit the calls that end at `end`, else plain text up to the first closing tag."""
        calls = self._calls(self._buffer[:end])
        if not calls:
            end = self._first_closing()
        out.extend(calls or [self._gap + self._buffer[:end]])
        self._buffer = self._buffer[end:]
        self._gap, self._inside, self._begun, self._looked = "", False, True, 0

    def _first_closing(self) -> int:
        form = self._form
        return self._buffer.index(form.closing, len(form.opening)) + len(form.closing)

    def _calls(self, span: str) -> list[ToolCall]:
        form = self._form
        inner = span.removeprefix(form.opening).removesuffix(form.closing)
        values = self._read(inner)
        parsed = [self._call(value) for value in values]
        calls = [call for call in parsed if call is not None]
        if len(calls) != len(parsed) or self.calls + len(calls) > CALLS_MAX:
            return []
        self.calls += len(calls)
        return calls

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get(self._form.arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        # Without a marker only the name tells a call from an answer in JSON.
        if not self._form.opening and name not in self._tools:
            return None
        try:
            text = arguments_text(arguments)
            name.encode()
        except ValueError:
            return None
        return ToolCall(id=self._new_id(), name=name, arguments=text)

    def _read(self, inner: str) -> list[Any]:
        """The calls of a text between markers, as of JSON; [] if they are none."""
        match self._form.kind:
            case "tagged":
                return self._tagged(inner)
            case "pairs":
                return self._pairs(inner)
            case "named":
                return _named(inner)
            case "python":
                return _python_calls(inner)
            case kind:
                return _values(inner, listed=kind == "listed")

    def _pairs(self, text: str) -> list[dict[str, Any]]:
        """The call of a name and pairs of tags; [] if they write none."""
        name = re.match(rf"\s*({_NAME})\s*", text)
        if name is None:
            return []
        known, arguments = self._tools.get(name[1], {}).get("properties", {}), dict[str, Any]()
        at, text = name.end(), text.rstrip()
        while at < len(text):
            pair = _PAIR.match(text, at)
            if pair is None:
                return []
            arguments[pair[1]] = _typed(pair[2], known.get(pair[1], {}))
            at = pair.end()
        return [{"name": name[1], "arguments": arguments}]

    def _tagged(self, text: str) -> list[dict[str, Any]]:
        """The call that tags write; [] if they write none."""
        text = text.strip()
        if not text.startswith(_FUNCTION) or not text.endswith(_END_OF_FUNCTION):
            return []
        name, _, rest = text.removeprefix(_FUNCTION).partition(">")
        rest, arguments = rest.removesuffix(_END_OF_FUNCTION), dict[str, Any]()
        known = self._tools.get(name, {}).get("properties", {})
        while rest := rest.lstrip():
            if not rest.startswith(_PARAMETER):
                return []
            key, _, rest = rest.removeprefix(_PARAMETER).partition(">")
            value, end, rest = rest.partition(_END_OF_PARAMETER)
            if not end:
                return []
            # A line each, by the templates; what is between is the value.
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, known.get(key, {}))
        return [{"name": name, "arguments": arguments}]


def _named(text: str) -> list[dict[str, Any]]:
    """Calls of a name and an object of JSON each; [] if they are none."""
    calls, at = list[dict[str, Any]](), 0
    while match := _NAMED.match(text, at):
        values = _values(match[2], listed=False)
        if len(values) != 1:
            return []
        calls.append({"name": match[1], "arguments": values[0]})
        at = match.end()
    return [] if text[at:].strip() else calls


def _python_calls(text: str) -> list[dict[str, Any]]:
    """Calls of a list in Python, with values by name; [] if they are none."""
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        calls = [_python_call(node) for node in getattr(listed, "elts", ())]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return calls if isinstance(listed, ast.List) else []


def _python_call(node: ast.AST) -> dict[str, Any]:
    match node:
        case ast.Call(func=ast.Name() | ast.Attribute() as function, args=[], keywords=keywords):
            arguments = {each.arg: _python_value(each.value) for each in keywords if each.arg}
            if len(arguments) == len(keywords):
                return {"name": ast.unparse(function), "arguments": arguments}
    raise ValueError("expected a call by names")


def _python_value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant)]
            if len(names) == len(keys) and all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_python_value, values), strict=True))
    raise ValueError("expected what JSON can write")


def arguments_text(arguments: Mapping[str, Any], *, sort_keys: bool = False) -> str:
    """Arguments of a call as JSON in UTF-8. ValueError for infinite numbers and for depth."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    except RecursionError as error:
        raise ValueError("too many levels within each other") from error
    # half a character, which JSON can spell, goes back to how it was spelled
    return text.encode(errors="backslashreplace").decode()


def _typed(text: str, schema: Any) -> Any:
    """The value of a text: itself where the schema has a string, else what it is in JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    values = _values(text, listed=False)
    return values[0] if len(values) == 1 else text


def malformed_call(form: ToolFormat, content: str) -> str | None:
    """Return the part of a parsed answer's content that was meant as a call; None without one.

    It begins at a marker of a call that could not be read. Without a marker, only JSON at the
    beginning with both keys of a call is taken for one: other JSON is an answer.
    """
    if form.opening:
        _, marker, after = content.partition(form.opening)
        return marker + after if marker else None
    text = content.lstrip()
    keys = ('"name"', f'"{form.arguments}"')
    return text if text.startswith("{") and all(key in text for key in keys) else None


def _values(text: str, *, listed: bool) -> list[Any]:
    """The JSON values of a call's text; [] if they are none."""
    try:
        values = list(_decoded(text))
    except (ValueError, RecursionError):
        return []
    if listed:
        return values[0] if len(values) == 1 and isinstance(values[0], list) else []
    return values


def _decoded(text: str) -> Iterator[Any]:
    """The JSON values of a text, with `;` between them. Raises ValueError and RecursionError."""
    decoder = json.JSONDecoder(parse_constant=no_constant)
    text, at = text.strip(), 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield value
        at += len(text[at:]) - len(text[at:].lstrip("; \n"))


def no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
