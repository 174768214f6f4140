"""Answers that must have a form: JSON, JSON of a schema, or calls of tools.

Owns the grammars (llguidance) and their limits: sizes, depth, fuel. A schema is compiled before any
work is queued, and what it cannot express is refused there; each sample then gets its own walker,
which says at every step which tokens may follow. Leaves out the sampling itself (the engine), and
the formats of calls and how they are read back (`marin_rl.tool_calls`).
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from jaxtyping import UInt32
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from marin_rl.errors import InferenceError, InputError
from marin_rl.isolated.grammars import JSON_OPTIONS, LARK, SCHEMA, matcher_of
from marin_rl.isolated.pool import Pool
from marin_rl.isolated.processes import WorkerFault, WorkerLimits, WorkerSpec
from marin_rl.serving.http.errors import ApiError
from marin_rl.tool_calls import CALLS_MAX, ToolFormat

SCHEMA_BYTES_MAX = 64 * 2**10
SCHEMA_DEPTH_MAX = 32
SCHEMA_NODES_MAX = 4000
GRAMMAR_CHARACTERS_MAX = 4 * SCHEMA_BYTES_MAX
GRAMMARS_KEPT_MAX = 64
ERROR_CHARACTERS_MAX = 300

CPU_S_MAX, MEMORY_BYTES_MAX = 1.0, 512 * 2**20
LIMITS = WorkerLimits(
    cpu_s=CPU_S_MAX, wall_s=20.0, memory_bytes=MEMORY_BYTES_MAX, answer_bytes=2**10
)
TRIALS_MAX = 2
# A short schema without these takes some milliseconds, less than a trial in another process.
SHORT_CHARACTERS = 2048
_HARD_WORDS = (
    "multipleOf", "attern", "format", "$ref", "allOf", "oneOf", "Length", "Items", "Properties",
    "x-guidance", "%regex",
)  # fmt: skip

# Kinds of calls that can be forced.
FORCED_KINDS = ("json", "listed", "tagged", "pairs")

_trials = Pool(WorkerSpec(module="marin_rl.isolated.grammars", limits=LIMITS), TRIALS_MAX)


class Walker:
    """State of a sample in a grammar: the tokens allowed next, and those accepted.

    Stop tokens are allowed exactly where the text may end. Used by one thread.
    """

    __slots__ = ("_matcher", "_words")

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words

    def mask(self) -> UInt32[np.ndarray, " W"]:
        """Bit mask of the tokens that may come next: bit i of word w is token 32 * w + i."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        mask = np.zeros(self._words, np.uint32)
        mask[: len(bits)] = bits[: self._words]
        return mask

    def accept(self, token: int) -> None:
        """A token that was sampled under the last mask. Raises InferenceError on any other."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InferenceError(f"the grammar cannot go on: {_error_text(self._matcher)}")


MakeWalker = Callable[[], Walker]


class Constraints:
    """Compiler of constraints for one tokenizer and one model.

    The tokenizer's vocabulary is read when it is first needed, which takes up to some seconds for a
    large one; compiled grammars are kept. May be used by several threads.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, vocabulary: int, stop_tokens: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_tokens = list(stop_tokens)
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._taken_in: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()

    def response_format(self, form: Mapping[str, Any] | None) -> MakeWalker | None:
        """Constraint for OpenAI's `response_format`; None allows any text. ApiError 400."""
        if form is None or form["type"] == "text":
            return None
        if form["type"] == "json_object":
            return self.json_schema({"type": "object"}, param="response_format")
        where = "response_format.json_schema.schema"
        return self.json_schema(form["json_schema"].get("schema") or {}, param=where)

    def json_schema(self, schema: Mapping[str, Any], *, param: str) -> MakeWalker:
        _check_size(schema, param)
        return self._maker(SCHEMA, _as_text(schema), param)

    def grammar(self, grammar: str, *, param: str) -> MakeWalker:
        """Walkers through the texts of a Lark grammar. Raises ApiError 400, naming `param`."""
        if len(grammar) > GRAMMAR_CHARACTERS_MAX:
            raise ApiError(
                400,
                f"{param}: expected forms of at most {GRAMMAR_CHARACTERS_MAX} characters in all, "
                f"found {len(grammar)}",
                param=param,
            )
        return self._maker(LARK, grammar, param)

    def _maker(self, kind: str, text: str, param: str) -> MakeWalker:
        words = -(-self._vocabulary // 32)
        try:
            matcher = self._matcher(kind, text)
        except InputError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None
        return lambda: Walker(matcher.deep_copy(), words)

    def _matcher(self, kind: str, text: str) -> LLMatcher:
        """Return the compiled form, from the cache or made now, once for all that ask for it.

        A refusal is kept as well. Raises InputError.
        """
        with self._lock:
            compiled = self._compiled.get((kind, text))
            mine = compiled is None
            if compiled is None:
                compiled = self._compiled[kind, text] = Future()
                if len(self._compiled) > GRAMMARS_KEPT_MAX:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end((kind, text))
        if mine:
            try:
                compiled.set_result(self._compile(kind, text))
            except Exception as error:  # noqa: BLE001 - all that wait for it get it
                if not isinstance(error, InputError):
                    with self._lock:
                        self._compiled.pop((kind, text), None)
                compiled.set_exception(error)
        return compiled.result()

    def _compile(self, kind: str, text: str) -> LLMatcher:
        if len(text) > SHORT_CHARACTERS or any(word in text for word in _HARD_WORDS):
            # in a separate process with limits
            (answer,) = _trials.ask([json.dumps((kind, text)).encode()])
            if isinstance(answer, WorkerFault):
                raise InputError(
                    f"expected a form that is compiled within {CPU_S_MAX:g} s and "
                    f"{MEMORY_BYTES_MAX >> 20} MiB, found one that takes {answer}: lower its "
                    "counts, lengths and multiples, or ask for a simpler pattern"
                )
        with self._vocabulary_lock:
            if self._taken_in is None:
                self._taken_in = take_in(self._tokenizer, self._vocabulary, self._stop_tokens)
        matcher = matcher_of(self._taken_in, kind, text)
        if matcher.is_error():
            raise InputError(
                f"expected a form that can be enforced while sampling, found {_error_text(matcher)}"
            )
        return matcher


def take_in(
    tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_tokens: Sequence[int]
) -> LLTokenizer:
    """The tokenizer as llguidance needs it: the bytes of every token.

    Raises InputError for a tokenizer whose tokens do not stand for bytes.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError("this model's tokenizer cannot be constrained: expected a fast tokenizer")
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules |= {"padding": None, "truncation": None}
    if rules["model"]["type"] == "WordLevel":
        words: Any = _Words(tokenizer, rules)
        return LLTokenizer(words, eos_token=list(stop_tokens))
    try:
        return LLTokenizer(json.dumps(rules), n_vocab=vocabulary, eos_token=list(stop_tokens))
    except ValueError as error:
        raise InputError(
            f"this model's tokenizer cannot be constrained ({str(error)[:ERROR_CHARACTERS_MAX]}): "
            "expected a byte-level one, one with byte fallback, or one of whole words"
        ) from None


class _Words:
    """A tokenizer of whole words, where a token's text is its bytes; llguidance's wrapper shape."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rules: Mapping[str, Any]) -> None:
        decoder = (rules["decoder"] or {}).get("type")
        if decoder != "Fuse":
            raise InputError(
                f"this model's tokenizer cannot be constrained: it joins words by {decoder}, "
                "expected Fuse"
            )
        special = {token["id"] for token in rules["added_tokens"] if token["special"]}
        texts = {index: token for token, index in tokenizer.get_vocab().items()}
        self.eos_token_id = tokenizer.eos_token_id
        self.special_token_ids = sorted(special)
        self.tokens = [texts.get(index, "").encode() for index in range(max(texts) + 1)]
        self._encode = tokenizer.backend_tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        """The ids of a text that the grammar forces; none for a text that has no such words."""
        ids = self._encode(text, add_special_tokens=False).ids
        written = b"".join(self.tokens[index] for index in ids)
        return ids if written == text.encode() else []


def _check_size(schema: Any, param: str) -> None:
    nodes, depth, layer = 0, 0, [schema]
    while layer and depth <= SCHEMA_DEPTH_MAX:  # counting stops beyond the depth limit
        nodes, depth = nodes + len(layer), depth + 1
        inside: list[Any] = []
        for value in layer:
            if isinstance(value, Mapping | list | tuple):
                inside += value.values() if isinstance(value, Mapping) else value
        layer = inside
    size = len(_as_text(schema).encode()) if depth <= SCHEMA_DEPTH_MAX else 0
    for count, most, unit in (
        (depth, SCHEMA_DEPTH_MAX, "levels"),
        (nodes, SCHEMA_NODES_MAX, "values"),
        (size, SCHEMA_BYTES_MAX, "bytes"),
    ):
        if count > most:
            message = f"{param}: expected a schema of at most {most} {unit}, found {count} or more"
            raise ApiError(400, message, param=param)


def _as_text(schema: Any) -> str:
    """JSON by the standard library, which knows integers of any size."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _error_text(matcher: LLMatcher) -> str:
    first = matcher.get_error().partition("\n<")[0]
    if first.startswith("NoExtension"):
        return "a form that no text has"
    return first[:ERROR_CHARACTERS_MAX]


def forced_calls_grammar(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    several: bool,
) -> str:
    """Return the Lark grammar (llguidance's dialect) of calls of these tools and nothing else.

    `several` allows more than one call where the format has room for it.
    """
    before, after = _literal(form.before, form, tokenizer), _literal(form.after, form, tokenizer)
    more = ' ("\\n" call)*' if several and form.closing else ""
    if form.kind in ("tagged", "pairs"):
        names = [f"tool_{number}" for number in range(len(tools))]
        rules = [
            rule
            for n, t in zip(names, tools, strict=True)
            for rule in _tags(form, t["function"], n)
        ]
        calls = [f"call: {before} ({' | '.join(names)}) {after}", *rules]
        return "\n".join([f"start: call{more}", *calls, ""])
    call: dict[str, Any] = {"anyOf": [_call_schema(form, tool["function"]) for tool in tools]}
    if form.kind == "listed":
        most = CALLS_MAX if several else 1
        call = {"type": "array", "items": call, "minItems": 1, "maxItems": most}
    call["x-guidance"] = JSON_OPTIONS
    return f"start: call{more}\ncall: {before} %json {json.dumps(call)} {after}\n"


def _tags(form: ToolFormat, function: Mapping[str, Any], rule: str) -> Iterator[str]:
    """Rules of a call that is written as tags: arguments in the order of the schema."""
    schema, tagged = function.get("parameters") or {}, form.kind == "tagged"
    opening = f"<function={function['name']}>\n" if tagged else function["name"]
    ends = ("\n</parameter>\n", "</function>") if tagged else ("</arg_value>", "")
    parts = [json.dumps(opening)]
    for number, (key, value) in enumerate((schema.get("properties") or {}).items()):
        name, required = f"{rule}_{number}", key in schema.get("required", ())
        pair = f"<parameter={key}>\n" if tagged else f"\n<arg_key>{key}</arg_key>\n<arg_value>"
        parts.append(name if required else f"{name}?")
        text, end = json.dumps(pair), json.dumps(ends[0])
        if choices := _texts(value):
            yield f"{name}: {text} ({' | '.join(map(json.dumps, choices))}) {end}"
        elif isinstance(value, Mapping) and value.get("type") == "string":
            yield f"{name}: {text} {name}_text"
            least, most = value.get("minLength", 0), value.get("maxLength", "")
            yield f"{name}_text[suffix={end}]: /(?s:.{{{least},{most}}})/"
        else:
            own = {**value, "x-guidance": JSON_OPTIONS} if isinstance(value, Mapping) else value
            yield f"{name}: {text} %json {json.dumps(own)} {end}"
    yield f"{rule}: {' '.join(parts)} {json.dumps(ends[1]) if ends[1] else ''}"


def _texts(schema: Any) -> list[str]:
    """The texts of an enumeration of texts; [] for other schemas."""
    choices = schema.get("enum", []) if isinstance(schema, Mapping) else []
    return choices if all(isinstance(choice, str) for choice in choices) else []


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
