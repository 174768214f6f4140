"""Texts and responses as they grow, and the threads that prepare and write them."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.templates import byte_fallback_tokenizer, byte_level_tokenizer
from transformers import PreTrainedTokenizerFast

from marin_rl.serving.api.worker_threads import (
    SHORT_BYTES,
    SHORT_S,
    ResponseQueue,
    ResponseWriter,
    TokenizeWorker,
)
from marin_rl.serving.text.detokenizer import Detokenizer, Offsets, TextDecoding
from marin_rl.tokenizers import character_tokenizer

TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "byte-fallback": byte_fallback_tokenizer(),
    "characters": character_tokenizer(),
}
STOPS = ("é", "ab", "中文", "文", "😀", ". ", "aab", "the")


def as_the_engine(reading: TextDecoding, ids: list[int]) -> tuple[list[int], str]:
    """End of a sample: its stop token, the token that completes a stop string, or none."""
    for length in range(1, len(ids) + 1):
        if ids[length - 1] in reading.stop_token_ids:
            return ids[:length], "stop"
        text = reading.detokenizer.of(ids[:length])
        if any(string in text for string in reading.stop):
            return ids[:length], "stop"
    return ids, "length"


def cut_up(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """The ids in chunks that end after `cuts` tokens each, the last one last."""
    chunks, at = [], 0
    for size in cuts:
        if at + size < len(ids):
            chunks.append(ids[at : at + size])
            at += size
    return [*chunks, ids[at:]]


@st.composite
def samples(draw: st.DrawFn) -> tuple[str, list[int], list[int], tuple[str, ...]]:
    """A tokenizer, ids (texts that are whole, and any), chunk sizes, stop strings."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    any_ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    written = st.text("abcé中文😀 .the", max_size=8).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    parts = draw(st.lists(st.one_of(any_ids, written), min_size=1, max_size=6))
    ids = [token for part in parts for token in part] or [len(tokenizer) - 1]
    cuts = draw(st.lists(st.integers(1, 7), max_size=40))
    stop = tuple(draw(st.lists(st.sampled_from(STOPS), unique=True, max_size=3)))
    return name, ids, cuts, stop


@settings(max_examples=100)
@given(samples())
def test_the_pieces_put_together_are_the_whole(sample):
    name, ids, cuts, stop = sample
    tokenizer = TOKENIZERS[name]
    ends = frozenset([tokenizer.eos_token_id])
    reading = TextDecoding(detokenizer=Detokenizer(tokenizer), stop_token_ids=ends, stop=stop)
    ids, reason = as_the_engine(reading, ids)
    whole = reading.text(ids, reason)
    assert not any(string in whole for string in stop)
    growing, shown = reading.incremental(), ""
    chunks = cut_up(ids, cuts)
    for number, chunk in enumerate(chunks):
        last = number == len(chunks) - 1
        shown += reading.new_text(growing, chunk, reason if last else "")
        assert whole.startswith(shown), (whole, shown)
    assert shown == whole


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_text_before_a_stop_string_is_the_tokenizers(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    reading = TextDecoding(
        detokenizer=Detokenizer(tokenizer), stop_token_ids=frozenset([1]), stop=("文",)
    )
    ids = tokenizer.encode("a中文", add_special_tokens=False)
    assert reading.text(ids, "stop") == "a中"
    assert reading.text([*ids, 1], "stop") == "a中文"
    assert reading.text(ids, "length") == "a中文"


def test_a_character_comes_when_its_last_byte_is_there() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    reading = TextDecoding(detokenizer=Detokenizer(tokenizer), stop_token_ids=frozenset([1]))
    growing = reading.incremental()
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    shown = [reading.new_text(growing, [token], "") for token in ids]
    assert shown == ["a", "", "", "", "😀", "b"]


def test_a_possible_beginning_of_a_stop_string_is_delayed() -> None:
    tokenizer = TOKENIZERS["characters"]
    texts = Detokenizer(tokenizer)
    reading = TextDecoding(detokenizer=texts, stop_token_ids=frozenset([1]), stop=("END",))
    growing = reading.incremental()
    shown = [
        reading.new_text(growing, tokenizer.encode(text), "") for text in ("xE", "N", "x", "EN")
    ]
    assert shown == ["x", "", "ENx", ""]
    assert reading.new_text(growing, tokenizer.encode("D"), "stop") == ""


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    texts = Detokenizer(tokenizer)
    text = {"byte-level": "aé中😀 b", "byte-fallback": "a b中😀", "characters": "a b."}[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(bytes(texts.piece(token).data) for token in ids)
    assert joined.decode() == text
    offsets = Offsets(texts).of(ids)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(text) - 1


def test_offsets_count_characters_and_give_special_tokens_no_room() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    letters = {letter: tokenizer.encode(letter, add_special_tokens=False) for letter in "a中"}
    ids = [*letters["a"], *letters["中"], 3, *letters["a"]]
    assert Offsets(Detokenizer(tokenizer), 5).of(ids) == [5, 6, 6, 6, 7, 7]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_decoding_is_the_tokenizers_own(name: str) -> None:
    tokenizer: PreTrainedTokenizerFast = TOKENIZERS[name]
    texts = Detokenizer(tokenizer)
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, len(tokenizer), 20).tolist()
        for special in (False, True):
            theirs = tokenizer.decode(
                ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
            assert texts.of(ids, special=special) == theirs


def test_a_reply_gives_what_came_then_the_end_or_the_error() -> None:
    async def check() -> None:
        writer, reply, failing = ResponseWriter(), ResponseQueue(), ResponseQueue()
        try:
            writer.put(reply, lambda: (b"a", False))
            writer.put(failing, lambda: (b"x", False))
            writer.put(reply, lambda: (b"b", True))
            writer.put(failing, lambda: (b"%d" % (1 // 0), True))
            read = b""
            while (data := await reply.read()) is not None:
                read += data
            assert read == b"ab"
            assert await failing.read() == b"x"
            with pytest.raises(ZeroDivisionError):
                await failing.read()
        finally:
            writer.close()

    asyncio.run(check())


def test_the_loop_is_woken_once_for_all_that_waits() -> None:
    async def check() -> None:
        writer, replies = ResponseWriter(), [ResponseQueue() for _ in range(50)]
        loop, woken = asyncio.get_running_loop(), []
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *given: (woken.append(1), original(*given))[1]
        held = threading.Event()
        try:
            writer.put(replies[0], lambda: (held.wait(10) and b"x", False))
            for reply in replies:
                writer.put(reply, lambda: (b"y", True))
            held.set()
            for reply in replies:
                while await reply.read() is not None:
                    pass
        finally:
            writer.close()
        assert len(woken) <= 3

    asyncio.run(check())


def test_a_response_whose_loop_is_closed_is_dropped() -> None:
    async def make() -> ResponseQueue:
        return ResponseQueue()

    gone = asyncio.run(make())
    writer = ResponseWriter()
    writer.put(gone, lambda: (b"x", True))
    reached = threading.Event()
    writer.put(gone, lambda: (reached.set(), (b"", True))[1])
    assert reached.wait(10)
    writer.close()


CHAT = {"model": "policy", "messages": [{"role": "user", "content": "reverse abc"}], "n": 4}


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def where(preparer: TokenizeWorker, body: Any) -> threading.Thread:
    """The thread on which a body is prepared."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found: list[threading.Thread] = []
    done = threading.Event()

    def work() -> None:
        found.append(threading.current_thread())
        done.set()

    preparer.add(data, work)
    assert done.wait(10)
    return found[0]


def used(worker: ThreadPoolExecutor, **options: Any) -> TokenizeWorker:
    """One that has seen that requests take no time."""
    preparer = TokenizeWorker(worker, **options)
    for _ in range(40):
        where(preparer, CHAT)
    return preparer


def test_the_first_are_the_threads_and_short_ones_then_are_not(worker: ThreadPoolExecutor) -> None:
    here = threading.current_thread()
    assert where(TokenizeWorker(worker), CHAT) is not here
    assert where(used(worker), CHAT) is here
    assert where(used(worker, alone=True), CHAT) is not here


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"tools": []},
        CHAT | {"response_format": {"type": "json_object"}},
        b'{"t\\u006fols": []}',
        CHAT | {"user": "x" * SHORT_BYTES},
        {"prompt": ["a"] * 200},
        {"prompt": [[5]] * 200},
    ],
    ids=["tools", "form", "hidden", "large", "prompts", "lists"],
)
def test_long_bodies_go_to_the_thread(worker: ThreadPoolExecutor, body: Any) -> None:
    preparer = used(worker)
    assert where(preparer, body) is not threading.current_thread()
    assert where(preparer, CHAT) is threading.current_thread()


def spin(seconds: float) -> Callable[[], None]:
    def work() -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    return work


def test_slow_bodies_go_to_the_thread_until_they_are_fast_again(worker):
    preparer, here = used(worker), threading.current_thread()
    data = json.dumps(CHAT).encode()
    preparer.add(data, spin(10 * SHORT_S))
    assert where(preparer, CHAT) is not here
    assert any(where(preparer, CHAT) is here for _ in range(40))


def test_nothing_is_read_that_comes_after_the_end() -> None:
    """Two threads may each find that they finished a request."""

    async def read() -> list[bytes | None]:
        reply = ResponseQueue()
        for _ in range(2):
            reply.add(b"all", last=True)
        reply.fail(ValueError("late"))
        return [await reply.read(), await reply.read()]

    assert asyncio.run(read()) == [b"all", None]
