"""Chat templates as transformers renders them: the same Jinja environment, to the letter.

A template is code of a model folder. Jinja's immutable sandbox keeps it from attributes that lead
out and from changing its input; how long it takes and how much it makes is limited by the process
that it runs in. Imports Jinja alone, so that a worker starts fast. Leaves out what a template is
given, and who may render where (`marin_rl.chat_templates`).
"""

import json
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

DATE = "chat_template_date"  # variable with the day that strftime_now gives, as YYYY-MM-DD
CLOCK = "strftime_now"

CHARACTERS_MAX = 2**20  # and for each byte of the conversation:
CHARACTERS_PER_BYTE_MAX = 8
MESSAGE_CHARACTERS_MAX = 300


class TooLong(Exception):
    """A rendering has more characters than it may have."""


class _Tracker(threading.local):
    """The rendering of this thread, as far as it has come; None where spans are not requested."""

    def __init__(self) -> None:
        self.pieces: list[str] | None = None
        self.spans: list[tuple[int, int]] = []


_tracker = _Tracker()


class _Generation(Extension):
    """Extension `{% generation %}`, which marks the assistant's text for the loss mask."""

    tags = {"generation"}  # noqa: RUF012 as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_generation_support")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _generation_support(self, caller: Callable[[], str]) -> str:
        text = caller()
        # transformers tracks nothing before the first piece of text; so does this
        if _tracker.pieces or _tracker.spans:
            start = sum(map(len, _tracker.pieces or ()))
            _tracker.spans.append((start, start + len(text)))
        return text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter writes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _strftime_now(context: Context, form: str) -> str:
    day = context.get(DATE)
    if day is None:
        return datetime.now().strftime(form)  # noqa: DTZ005 local time, as transformers has it
    # Midnight of no zone in particular: neither clock nor zone of this machine is read.
    midnight = datetime.combine(date.fromisoformat(day), time())
    seconds = int(midnight.replace(tzinfo=UTC).timestamp())
    return midnight.strftime(form.replace("%s", str(seconds)))


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals[CLOCK] = _strftime_now
    return environment


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Return a template ready to render; raises jinja2.TemplateError where it is wrong."""
    return _environment().from_string(source)


def render(
    source: str, variables: Mapping[str, Any], *, spans: bool, characters_max: int | None = None
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a template, and where its generation blocks lie if `spans` is set.

    Raises TooLong, and whatever the template raises.
    """
    pieces, length = list[str](), 0
    _tracker.pieces, _tracker.spans = (pieces if spans else None), []
    try:
        for piece in compile_template(source).generate(variables):
            length += len(piece)
            if characters_max is not None and length > characters_max:
                raise TooLong(f"a text over {characters_max} characters")
            pieces.append(piece)
        return "".join(pieces), _tracker.spans
    finally:
        _tracker.pieces, _tracker.spans = None, []


def failure_of(error: Exception) -> dict[str, str]:
    """Describe why a template was not rendered: `kind` and `message`.

    A `refusal` is about the messages, a `fault` about the template. Messages do not quote the
    conversation, unless the template's own `raise_exception` does.
    """
    text = (str(error) or type(error).__name__)[:MESSAGE_CHARACTERS_MAX]
    name = type(error).__name__
    match error:
        case jinja2.TemplateSyntaxError():
            return {"kind": "fault", "message": f"cannot be compiled ({text})"}
        case SecurityError() | SyntaxError():
            return {"kind": "fault", "message": f"does what the sandbox refuses ({name})"}
        case TooLong() | RecursionError() | MemoryError():
            return {"kind": "fault", "message": f"exceeds a limit ({text})"}
        case jinja2.UndefinedError():
            return {"kind": "refusal", "message": f"it finds something missing: {text}"}
        case jinja2.TemplateError():
            return {"kind": "refusal", "message": text}
        case _:
            return {"kind": "refusal", "message": f"it cannot work with them ({name})"}


def begin(_settings: object) -> Callable[[Mapping[str, Any]], bytes]:
    return answer


def answer(request: Mapping[str, Any]) -> bytes:
    """Render a conversation in a worker, by its `template`, `variables` and `characters_max`.

    Without variables, returns the names of those that the template reads.
    Returns JSON: `text` and `spans`, `names`, or what `failure_of` returns. Raises MemoryError.
    """
    try:
        source = request["template"]
        if "variables" not in request:
            tree = _environment().parse(source)
            called = {node.name for node in tree.find_all(nodes.Name) if node.name == CLOCK}
            return json.dumps(
                {"names": sorted(meta.find_undeclared_variables(tree) | called)}
            ).encode()
        text, spans = render(
            source,
            request["variables"],
            spans=request["spans"],
            characters_max=request["characters_max"],
        )
        return json.dumps({"text": text, "spans": spans}, ensure_ascii=False).encode()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - it is other people's code
        return json.dumps(failure_of(error)).encode()
