"""Stop strings: after which token does a growing text first contain one?

Owns the search, which decodes only the end of the text that can still matter. Leaves out what
happens then (`batch`). The answer is that of decoding every prefix of the tokens from the start,
token by token, and so knows nothing of how the tokens came in chunks.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

# What decoders write for bytes that are no character (yet). Where it is in a stop string, or in a
# text, a match in one prefix may be gone from the next, and so every prefix is looked at.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"

# Characters that a window has beyond what a match needs: a character cut at its start may show as
# up to three of them, and some tokenizers drop a leading space.
SPARE = 8

# Tokens of context that a window's start is tried with.
CONTEXT = 8


class StopStringScanner:
    """Watches one sample for its stop strings.

    What tokens stand for may depend on their neighbours, and a token may be part of a character
    only: the window starts where decoding with more context changes nothing, and a match in it is
    confirmed on the whole. (A tokenizer that falls back to bytes may hide one match from it: of a
    stop string that itself holds unfinished characters.)
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        assert all(stop)
        self._decode = decode
        self._stop = tuple(stop)
        self._needed = max(len(string) for string in stop) - 1 + SPARE
        self._fleeting = any(UNFINISHED in string for string in stop)
        self._start = 0

    def first_end(self, tokens: list[int], before: int) -> int | None:
        """The least length > before at which the text of tokens[:length] contains a stop string.

        None without one; the first `before` tokens were looked through by earlier calls.
        """
        window = self._decode(tokens[self._start :])
        passing = self._fleeting or UNFINISHED in window
        if passing or first_stop(window, self._stop) is not None:
            for length in range(before + 1, len(tokens) + 1):
                # the window first: it is short, and rules out nearly every length
                if self._has_stop(tokens[self._start : length]) and self._has_stop(tokens[:length]):
                    return length
        # the window starts later, once it is much longer than it needs to be
        keep = self._needed + CONTEXT
        while len(tokens) - self._start > 2 * keep:
            if self._settle(tokens, len(tokens) - keep):
                break
            # no start among these serves; one further back may
            keep *= 2
        return None

    def _has_stop(self, tokens: list[int]) -> bool:
        return first_stop(self._decode(tokens), self._stop) is not None

    def _settle(self, tokens: list[int], wanted: int) -> bool:
        """Try starts from `wanted` back to the one CONTEXT before it."""
        for start in range(wanted, max(self._start, wanted - CONTEXT), -1):
            window = self._decode(tokens[start:])
            if len(window) < self._needed:
                return False
            if window.startswith(UNFINISHED):  # it may begin within a character
                continue
            context = self._decode(tokens[max(self._start, start - CONTEXT) :])
            if context.endswith(window):
                self._start = start
                return True
        return False


def text_before_stop(decode: Decode, ids: Sequence[int], stop: Sequence[str]) -> str:
    """The text of a sample that a stop string ended, cut before it."""
    text = decode(ids)
    # looked for from the last character on that the token which completes it cannot have changed
    before = len(decode(ids[:-1]).rstrip(UNFINISHED))
    from_here = max(0, before - max(map(len, stop), default=0))
    return text[: first_stop(text, stop, from_here)]


def first_stop(text: str, stop: Sequence[str], start: int = 0) -> int | None:
    """Index of the earliest stop string in the text from `start` on, or None."""
    places = (text.find(string, start) for string in stop)
    return min((at for at in places if at >= 0), default=None)
