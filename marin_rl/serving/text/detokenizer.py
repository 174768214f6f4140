"""Detokenizer, from token ids to text: whole, token by token, and as it grows.

Owns the texts and bytes of single tokens, and which part of an unfinished text can be shown because
nothing that follows can change it. Leaves out encoding (`templates`, `service`) and how a response
looks (`dialect`).
"""

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from marin_rl.inference.stops import UNFINISHED, text_before_stop

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one token and its bytes (UTF-8); text leaves `special` ones out."""

    text: str
    data: list[int]
    special: bool


class Detokenizer:
    """A tokenizer's decoder. May be used by several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._decode = _decoder(tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        vocabulary = tokenizer.get_vocab()
        bytes_as_tokens = (f"<0x{byte:02X}>" for byte in range(256))
        self._names = {index: token for token, index in vocabulary.items()}
        self._byte_ids = frozenset(
            vocabulary[token] for token in bytes_as_tokens if token in vocabulary
        )
        # A token to put before another, for some decoders drop a text's first space.
        letter = vocabulary.get("a")
        whole = letter is not None and self._decode([letter, letter], False) == "aa"
        self._anchor = [letter] if letter is not None and whole else []
        self._pieces: dict[int, Piece] = {}

    def of(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._decode(ids, not special)

    def name(self, token: int) -> str:
        return self._names.get(token, "")

    def piece(self, token: int) -> Piece:
        """Text of a token by itself, inside a text."""
        piece = self._pieces.get(token)
        if piece is None:
            text = self._decode([*self._anchor, token], False)[len(self._anchor) :]
            data = text.encode()
            if UNFINISHED in text:
                data = _bytes_of(self.name(token)) or data
            piece = self._pieces[token] = Piece(text, list(data), token in self._special)
        return piece

    def ends_open(self, ids: Sequence[int]) -> int:
        """Number of tokens at the end that are single bytes, whose text the next byte may change.

        Tokens that have no text do not separate bytes.
        """
        open_ids = 0
        for back, token in enumerate(reversed(ids if self._byte_ids else ()), 1):
            if token in self._byte_ids:
                open_ids = back
            elif token not in self._special and token in self._names:
                break
        return open_ids


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int], bool], str]:
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        backend = tokenizer.backend_tokenizer
        # a padding or truncation that a file sets would be unset by the first call, under others
        backend.no_padding()
        backend.no_truncation()
        return lambda ids, skip: backend.decode(ids, skip_special_tokens=skip)
    return lambda ids, skip: tokenizer.decode(
        list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )


# GPT-2's letters for bytes: a printable one stands for itself, the others follow from 256 on.
_LETTERS = sorted(ByteLevel.alphabet())
_FURTHER = iter(letter for letter in _LETTERS if ord(letter) >= 256)
BYTE_LETTERS = {b: chr(b) if chr(b) in _LETTERS else next(_FURTHER) for b in range(256)}
_ALPHABET = {letter: byte for byte, letter in BYTE_LETTERS.items()}


def _bytes_of(name: str) -> bytes | None:
    """The bytes that a token's name in the vocabulary stands for, where it stands for bytes."""
    single = _BYTE.fullmatch(name)
    if single is not None:
        return bytes([int(single[1], 16)])
    if all(letter in _ALPHABET for letter in name):
        return bytes(_ALPHABET[letter] for letter in name)
    return None


class Offsets:
    """Offset of each token in a growing text, in characters; special tokens have no width."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, ids: Sequence[int]) -> list[int]:
        offsets = []
        for token in ids:
            offsets.append(self._at)
            piece = self._detokenizer.piece(token)
            if not piece.special:
                self._at += len(self._decoder.decode(bytes(piece.data)))
        return offsets


class IncrementalDetokenizer:
    """Incremental detokenizer: returns the text that is certain and buffers the rest.

    Buffered are characters whose bytes are incomplete, and what may be the beginning of a stop
    string. What `feed` and `finish` give is, put together, the whole text. Each call costs as much
    as the tokens since the call before the last, not as the whole text.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), *, special: bool = False
    ) -> None:
        self.ids: list[int] = []
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._special = special
        self._window = 0  # the first token that is decoded again
        self._closed = 0  # tokens whose text is complete: where the window may begin next
        self._shown = 0  # characters of the window's text that were taken
        self._buffer = ""
        self._emitted = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Append tokens; return the text that is certain now."""
        self.ids.extend(ids)
        self._buffer += self._decoded()
        keep = overlap(self._buffer, self._stop) if self._stop else 0
        certain = self._buffer[: len(self._buffer) - keep]
        self._buffer = self._buffer[len(certain) :]
        self._emitted += len(certain)
        return certain

    def finish(self, text: str) -> str:
        unseen, self._emitted = text[self._emitted :], len(text)
        return unseen

    def _decoded(self) -> str:
        end = len(self.ids) - self._detokenizer.ends_open(self.ids)
        if end <= self._closed:
            return ""
        text = self._detokenizer.of(self.ids[self._window : end], special=self._special)
        certain = text.rstrip(UNFINISHED)
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if len(certain) == len(text):
            # Begin at the last tokens only; a window needs text, for a text's first space may go.
            kept = len(self._detokenizer.of(self.ids[self._closed : end], special=self._special))
            if kept and self._closed:
                self._window, self._shown = self._closed, kept
            self._closed = end
        return new


def overlap(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDecoding:
    """Conversion of samples to text: stop strings, and special tokens kept or left out."""

    detokenizer: Detokenizer
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    special: bool = False

    def incremental(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.detokenizer, self.stop, special=self.special)

    def new_text(self, text: IncrementalDetokenizer, ids: Sequence[int], finish_reason: str) -> str:
        """Text that a sample gains by more tokens; all the remaining text if they are the last."""
        if not finish_reason:
            return text.feed(ids)
        text.ids.extend(ids)
        return text.finish(self.text(text.ids, finish_reason))

    def text(self, ids: Sequence[int], finish_reason: str) -> str:
        """The text of a finished sample: without its stop token, and cut before a stop string."""
        decode = partial(self.detokenizer.of, special=self.special)
        if finish_reason != "stop" or not ids:
            return decode(ids)
        if ids[-1] in self.stop_token_ids:
            return decode(ids[:-1])
        return text_before_stop(decode, ids, self.stop)
