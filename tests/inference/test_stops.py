"""The search for stop strings against the slow way: decoding every prefix from its start."""

import random
from collections.abc import Sequence

import pytest
from support.cases import others_slow, printed_seed

from marin_rl.inference.stops import StopStringScanner, first_stop

CHARACTERS = ["a", "b", " ", ".", "\n", "é", "ß", "中", "文", "🙂", "👩‍🚀", "e\u0301"]


class Bytes:
    """Tokens are runs of bytes of no matter what length, joined and then decoded as UTF-8."""

    characters = (*CHARACTERS, "\N{REPLACEMENT CHARACTER}")

    def __init__(self, rng: random.Random) -> None:
        self.pieces = [bytes([b]) for b in range(256)]
        self.pieces += [c.encode() for c in CHARACTERS]
        self.pieces += [rng.choice(CHARACTERS).encode() + b"a" for _ in range(4)]
        self.pieces += ["".join(rng.choices(CHARACTERS, k=4)).encode()[1:] for _ in range(8)]
        self.pieces += [b""]
        self.starting: dict[int, list[int]] = {}
        for i, piece in enumerate(self.pieces[:-1]):
            self.starting.setdefault(piece[0], []).append(i)

    def ids_of(self, text: str, rng: random.Random) -> list[int]:
        """The text's bytes, some as whole pieces and some one by one."""
        data, ids = text.encode(), []
        while data:
            fitting = [i for i in self.starting[data[0]] if data.startswith(self.pieces[i])]
            ids.append(rng.choice(fitting))
            data = data[len(self.pieces[ids[-1]]) :]
            if rng.random() < 0.05:
                ids.append(rng.choice((len(self.pieces) - 1, rng.randrange(256))))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


class Fallback(Bytes):
    """A run of byte tokens that is not UTF-8 is all unknown; a leading space is dropped."""

    characters = tuple(CHARACTERS)

    def decode(self, ids: Sequence[int]) -> str:
        parts, run = [], b""
        for i in [*ids, -1]:
            if 0 <= i < 256:
                run += self.pieces[i]
                continue
            try:
                parts.append(run.decode())
            except UnicodeDecodeError:
                parts.append("\N{REPLACEMENT CHARACTER}" * len(run))
            run = b""
            if i >= 0:
                parts.append(self.pieces[i].decode("utf-8", errors="replace"))
        return "".join(parts).removeprefix(" ")


def the_slow_way(decode, stop: Sequence[str], tokens: list[int]) -> int | None:
    for length in range(1, len(tokens) + 1):
        if first_stop(decode(tokens[:length]), stop) is not None:
            return length
    return None


def in_chunks(watch: StopStringScanner, tokens: list[int], rng: random.Random) -> int | None:
    """As the engine does: ever more tokens, until one ends it."""
    before = 0
    while before < len(tokens):
        after = min(len(tokens), before + rng.randint(1, 16))
        end = watch.first_end(tokens[:after], before)
        if end is not None:
            return end
        before = after
    return None


# A window once began within a character of a run of byte tokens that was not over.
CUT_CHARACTER = 1018204526


@pytest.mark.parametrize(
    ("kind", "seed"),
    others_slow(
        [(Bytes, None), (Fallback, None), (Fallback, CUT_CHARACTER)], first=1, several=True
    ),
)
def test_the_end_is_that_of_decoding_every_prefix(kind, seed):
    rng = random.Random(printed_seed() if seed is None else seed)
    found = 0
    for _ in range(150):
        vocabulary = kind(rng)
        text = "".join(rng.choices(CHARACTERS, k=rng.randint(1, 250)))
        tokens = vocabulary.ids_of(text, rng)
        stop = tuple(
            "".join(rng.choices(vocabulary.characters, k=rng.randint(2, 5)))
            for _ in range(rng.randint(1, 3))
        )
        if rng.random() < 0.5:
            at = rng.randrange(len(text))
            stop += (text[at : at + 4],)
        expected = the_slow_way(vocabulary.decode, stop, tokens)
        for _ in range(2):
            watch = StopStringScanner(vocabulary.decode, stop)
            assert in_chunks(watch, tokens, rng) == expected
        found += expected is not None
    assert found > 30


def test_random_bytes_are_no_harder():
    rng = random.Random(printed_seed())
    vocabulary = Bytes(rng)
    for _ in range(100):
        tokens = [rng.randrange(len(vocabulary.pieces)) for _ in range(200)]
        stop = (vocabulary.decode(tokens[120:123]) or "a", "中文")
        watch = StopStringScanner(vocabulary.decode, stop)
        assert in_chunks(watch, tokens, rng) == the_slow_way(vocabulary.decode, stop, tokens)


def test_a_long_text_is_decoded_about_once_over():
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return "".join(chr(97 + i) for i in ids)

    tokens = [i % 7 for i in range(8000)]
    watch = StopStringScanner(decode, ("never", "there"))
    for after in range(16, 8001, 16):
        assert watch.first_end(tokens[:after], after - 16) is None
    # the whole text once per chunk would be two million
    assert decoded < 8 * 8000


def test_a_stop_string_longer_than_the_text_so_far_matches_once_complete():
    decode = lambda ids: "".join(chr(97 + i) for i in ids)
    stop = "ab" * 128
    tokens = [5] * 300 + [0, 1] * 128 + [5] * 10
    watch = StopStringScanner(decode, (stop,))
    ends = [watch.first_end(tokens[:after], after - 7) for after in range(7, 567, 7)]
    assert next(end for end in ends if end is not None) == 556
