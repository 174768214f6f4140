"""Tool calls: which format a chat template writes them in, and how they are read back.

Owns the four formats that are known (Hermes and Qwen, Llama 3.1's JSON, Mistral's list, the tags of
Qwen3-Coder and Qwen3.5) and the reading of a completion's text, whole or piece by piece. A call
that is not well-formed stays text. The server and the loop of rollouts both read calls here, so
they agree on what a call is. Leaves out how tools are put into a prompt (`chat_templates`), how a
call is forced (the server's `constraints`) and what is done with one (`environments.tool_class`).
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from marin_rl.chat_templates import CALL_PROBE, PROBE_QUESTION, ChatTemplate
from marin_rl.errors import TemplateFault, TemplateRefusal
from marin_rl.types import ToolCall

# transformers takes seconds to import, and only its tokenizers' types are named here
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALLS_MAX = 128

# Mistral's templates refuse any other id of a call when it comes back; others take every one.
ID_LETTERS, ID_LENGTH = string.ascii_letters + string.digits, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format of a tool call in a template: `{"name": …, <arguments>: {…}}` between two markers.

    `opening` and `closing` are searched for, `before` and `after` are the text around the JSON
    exactly; an empty `opening` means that the whole answer is the call, an empty `closing` that it
    runs to the end. With `tagged` there is no JSON, but `<function=NAME>` around `<parameter=KEY>`
    of each argument. `special` says that a marker is a special token: a text that is to be read
    must then be decoded with special tokens kept.
    """

    opening: str
    closing: str
    arguments: str
    before: str
    after: str
    listed: bool = False
    special: bool = False
    tagged: bool = False


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
                listed=listed,
                special=before.strip().startswith(special) if before.strip() else False,
                tagged=kind == "tagged",
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
_FORMATS = (  # with the key of the arguments, and the kind
    (re.compile(_HERMES), "arguments", "json"),
    (re.compile(_MISTRAL), "arguments", "listed"),
    (re.compile(_LLAMA), "parameters", "json"),
    (re.compile(_TAGGED), "arguments", "tagged"),
)
_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"
# As some templates write them, where JSON has other words.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


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
        if self._inside:
            self._inside = False
            calls = [] if self._form.closing else self._calls(buffer)
            if calls:
                return [*out, *calls]
            buffer = self._gap + buffer
        return out if not buffer or (self.calls and buffer.isspace()) else [*out, buffer]

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
            if self._form.tagged and not self._buffer[:at].rstrip().endswith(_END_OF_FUNCTION):
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
        values = self._tagged(inner) if form.tagged else _values(inner, listed=form.listed)
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


def arguments_text(arguments: Mapping[str, Any], *, sort_keys: bool = False) -> str:
    """Arguments of a call as JSON text, which is UTF-8.

    Raises ValueError for a number beyond a double's range, which is no JSON, and for depth.
    """
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
