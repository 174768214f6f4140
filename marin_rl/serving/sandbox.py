"""Where chat templates run: Jinja's immutable sandbox, with a budget of time and of characters.

A template is code of the model folder. It sees messages, tools and special tokens, may call
`raise_exception` and `strftime_now`, and gets no attribute that leads out. Every turn of a loop and
every operation that makes a longer string is held against a budget, so that neither an endless loop
nor a string that doubles costs more than that. Renders what transformers renders: same switches,
same `tojson`, same `generation` and loop control tags. Leaves out what a template is given
(`templates`).
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS_MAX = 1.0
CHARACTERS_MAX = 2**20  # beside so many times what went in:
GROWTH_MAX = 8
# The clock is looked at now and then, for that costs more than a turn of a loop.
STEPS_PER_LOOK = 64
LONG_CHARACTERS = 2**16
INTEGER_BITS_MAX = 4096
INDENT_MAX = 16
STRFTIME_CHARACTERS_MAX = 64


class LimitExceeded(Exception):
    """A template took more time, or made a longer string, than it may."""


class Budget:
    """What one rendering may use: CPU-seconds of its thread, and characters of any one string."""

    __slots__ = ("_characters", "_steps", "_until")

    def __init__(self, characters: int = CHARACTERS_MAX) -> None:
        self._characters = characters
        self._steps = 0
        self._until = time.thread_time() + CPU_SECONDS_MAX

    def spend(self, characters: int = 0) -> None:
        """Raise LimitExceeded if a string would become this long, or if the time is up."""
        if characters > self._characters:
            raise LimitExceeded(f"a string over {self._characters} characters")
        self._steps += 1
        looks = characters > LONG_CHARACTERS or self._steps % STEPS_PER_LOOK == 0
        if looks and time.thread_time() > self._until:
            raise LimitExceeded(f"over {CPU_SECONDS_MAX:g} seconds")


_budget: ContextVar[Budget] = ContextVar("budget")


def _spend(characters: int = 0) -> None:
    (_budget.get(None) or Budget()).spend(characters)


def render(template: jinja2.Template, *, characters_in: int, **variables: Any) -> str:
    """The template's text; `characters_in` is the size of what the caller put into it.

    Raises LimitExceeded, and whatever the template raises.
    """
    budget = Budget(CHARACTERS_MAX + GROWTH_MAX * characters_in)
    token = _budget.set(budget)
    try:
        pieces, length = [], 0
        known = _globals() | variables
        context = Context(template.environment, known, template.name, template.blocks)
        for piece in template.root_render_func(context):
            length += len(piece)
            budget.spend(length)
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


@cache
def _globals() -> dict[str, Any]:
    """What every template may call; `Template.new_context` would collect it each time."""
    return dict(_Sandbox().globals)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """A template ready to run; compiled once. Raises jinja2.TemplateError where it is wrong."""
    token = _budget.set(Budget())  # constants are computed while compiling
    try:
        return _Sandbox().from_string(source)
    except LimitExceeded as error:
        raise SecurityError(str(error)) from None
    finally:
        _budget.reset(token)


class _Metered(CodeGenerator):
    """Compiles a payment into every turn of a loop, every macro and every `~`."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, _payment())
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        node.body.insert(0, _payment())
        super().visit_Macro(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        if node.node == _PAY:  # which needs none of what a template's own calls go through
            self.writeline("environment.pay()", node)
        else:
            super().visit_ExprStmt(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(environment.text, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


_PAY = nodes.EnvironmentAttribute("pay")


def _payment() -> nodes.Stmt:
    return nodes.ExprStmt(_PAY)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says: of use to training, nothing to see here."""

    tags = {"generation"}  # noqa: RUF012 as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Metered
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_measured,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        for name in _FILTERS_LEFT_OUT:
            del self.filters[name]
        self.filters |= {
            "tojson": _tojson,
            "indent": _indent,
            "replace": _replace,
            "join": _join,
            "string": _string,
        }
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    @staticmethod
    def pay() -> str:
        """What a turn of a loop costs."""
        _spend()
        return ""

    @staticmethod
    def text(value: Any) -> str:
        """How `~` sees a value."""
        return str(_measured(value))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """How blocks, macros and `~` put strings together."""
        found = list(parts)
        _spend(sum(map(len, found)))
        return "".join(found)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, unless the result would be too large."""
        _GROWING[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's rule, and of a string's methods those that templates need."""
        if isinstance(obj, str) and attr not in _STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of the sandbox, unless a width could make the result too long."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return formatted

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call, unless it would make a string that is too long."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)


# These pad or repeat by a number, guess, or make HTML; no chat needs them.
_FILTERS_LEFT_OUT = (
    "batch", "center", "filesizeformat", "format", "forceescape", "pprint", "random", "round",
    "slice", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
_STRING_METHODS = frozenset(
    [
        "capitalize", "casefold", "count", "endswith", "find", "index",
        "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
        "islower", "isnumeric", "isspace", "istitle", "isupper", "join",
        "lower", "lstrip", "partition", "removeprefix",
        "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
        "rstrip", "split", "splitlines", "startswith",
        "strip", "swapcase", "title", "upper",
    ]
)  # fmt: skip


def _check_method(owner: str, method: str, args: tuple[Any, ...]) -> None:
    if method == "replace" and len(args) >= 2:
        _check_replace(owner, str(args[0]), str(args[1]))
    elif method == "join" and args:
        _spend(_joined_length(owner, args[0]))


def _check_format(form: str, values: list[Any]) -> None:
    if re.search(r":[^{}]*(\d{4}|\{)", form):
        raise SecurityError("format takes no width over 999, and none from a value")
    _spend(len(form) + form.count("{") * sum(len(str(value)) + 1000 for value in values))


def _check_replace(text: str, old: str, new: str) -> None:
    _spend(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _joined_length(separator: str, parts: Any) -> int:
    if not isinstance(parts, str | list | tuple | Mapping):
        raise SecurityError("join takes a list")
    between = len(parts) * len(separator)
    _spend(between)
    if isinstance(parts, str):
        return len(parts) + between
    texts = (part if isinstance(part, str) else str(_measured(part)) for part in parts)
    return sum(map(len, texts)) + between


def _measured(value: Any) -> Any:
    """The value, unless its text would be too long: lists in lists double as strings do."""
    if isinstance(value, str):
        _spend(len(value))
        return value
    characters, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            characters += len(part)
        elif isinstance(part, int):
            characters += part.bit_length() // 3
        elif isinstance(part, Mapping):
            _spend(characters := characters + len(part))
            waiting += [*part, *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            _spend(characters := characters + len(part))
            waiting += part
    _spend(characters)
    return value


def _string(value: Any) -> str:
    return value if isinstance(value, str) else str(_measured(value))


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _spend(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    for several, times in ((left, right), (right, left)):
        if isinstance(several, str | list | tuple) and isinstance(times, int):
            _spend(len(several) * max(0, times))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > INTEGER_BITS_MAX:
        raise LimitExceeded(f"an integer over {INTEGER_BITS_MAX} bits")


def _check_remainder(left: Any, right: Any) -> None:
    if isinstance(left, str):
        raise SecurityError("% does not format strings here: join them by ~")


_GROWING: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "%": _check_remainder,
}


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > STRFTIME_CHARACTERS_MAX or re.search(r"\d", form):
        raise SecurityError("strftime_now takes a short format without widths")
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """As transformers has it: Jinja's own escapes HTML."""
    _measured(value)
    widths = [len(part) for part in separators or ()]
    widths.append(len(indent) if isinstance(indent, str) else indent or 0)
    if max(widths) > INDENT_MAX:
        raise LimitExceeded(f"tojson with an indent or separator over {INDENT_MAX} characters")
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    _spend(len(text))
    return text


def _indent(
    text: str,
    width: int | str = 4,
    first: bool = False,  # noqa: FBT001, FBT002
    blank: bool = False,  # noqa: FBT001, FBT002
) -> str:
    size = len(width) if isinstance(width, str) else width
    _spend(len(text) + (text.count("\n") + 1) * size)
    return filters.do_indent(text, width, first, blank)


@jinja2.pass_eval_context
def _replace(
    context: nodes.EvalContext, text: str, old: str, new: str, count: int | None = None
) -> str:
    _check_replace(str(text), str(old), str(new))
    return filters.do_replace(context, text, old, new, count)


@jinja2.pass_eval_context
def _join(
    context: nodes.EvalContext,
    value: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    parts = list(value)
    _spend(_joined_length(str(d), parts))
    return filters.sync_do_join(context, parts, d, attribute)
