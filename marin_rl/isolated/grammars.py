"""A trial of compiling a grammar, in a process that is killed where it takes too long.

llguidance's limits of fuel and size do not bound all that a schema may ask for (a `multipleOf` of
99,991 is an automaton of as many states), and nothing interrupts a compilation. How long one takes
depends on the schema and hardly on the vocabulary, so the trial knows a vocabulary of bytes alone.
Leaves out what becomes of a grammar that passes (`serving.constraints`).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Blank space between two parts of a JSON text: enough for an indent, never without end.
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
# Room for an object of a thousand optional properties; a step then still takes some milliseconds.
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    max_grammar_size=100_000,
    max_items_in_row=16_000,
    verbose_errors=False,
)
SCHEMA, LARK = "schema", "lark"


def matcher_of(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Compile a form as far as its first mask; the matcher reports errors."""
    if kind == SCHEMA:
        text = LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


class _Bytes:
    """A tokenizer whose tokens are the 256 bytes and an end; llguidance's wrapper shape."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    wrapper: Any = _Bytes()
    return LLTokenizer(wrapper, eos_token=[256])


def begin(_settings: object) -> Callable[[tuple[str, str]], bytes]:
    return answer


def answer(request: tuple[str, str]) -> bytes:
    """Try a form in a worker: its kind and its text.

    An answer says only that the trial came to its end: errors are for the real compilation to
    report, which knows the model's vocabulary.
    """
    matcher_of(_bytes(), *request)
    return b"true"
