"""Hostile request bodies, made from a seed, and what parsing each of them costs.

    python tests/attacks/hostile_bodies.py SEED COUNT

prints, for a process of its own, one JSON object a body: its shape, bytes, CPU-seconds, the peak of
memory in MB, and the answer.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from marin_rl.machine import give_back_freed_memory
from marin_rl.serving.api.requests import (
    ChatBody,
    ChatTokensBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from marin_rl.serving.http.errors import ApiError, parse

BYTES_MAX = 16 * 2**20
# Parts that come close to the bounds of values, of names, and of objects and lists.
CLOSE = (520_000, 32_000, 65_000)
CHAT = b'{"model":"policy","messages":[{"role":"user","content":"a"}],'
# By name: the body's class, what stands before the part that is repeated, the part (with its number
# where it has a `%d`), and what stands after it.
SHAPES = {
    "empty prompts": (CompletionBody, b'{"model":"policy","prompt":[', b'"",', b"1]}"),
    "prompts, then a number": (CompletionBody, b'{"model":"policy","prompt":[', b'"a",', b"1]}"),
    "ids, then a text": (CompletionBody, b'{"model":"policy","prompt":[', b"1,", b'"a"]}'),
    "empty lists": (CompletionBody, b'{"model":"policy","prompt":[', b"[],", b"[]]}"),
    "lists of lists": (CompletionBody, b'{"model":"policy","prompt":[', b"[[1]],", b"[]]}"),
    "lists of ids": (CompletionBody, b'{"model":"policy","prompt":[', b"[1,2,3,4],", b"[]]}"),
    "wrong ids": (CompletionBody, b'{"model":"policy","prompt":[', b"-1,", b"-1]}"),
    "text": (CompletionBody, b'{"model":"policy","prompt":"', b"a b ", b'","x":1}'),
    "wide text": (CompletionBody, b'{"model":"policy","prompt":"\xf0\x9f\x98\x80', b"a", b'"}'),
    "escapes": (CompletionBody, b'{"model":"policy","prompt":"', b"\\u00e9", b'","x":1}'),
    "backslashes": (CompletionBody, b'{"model":"policy","prompt":"', b"\\\\", b'","x":1}'),
    "escaped quotes": (CompletionBody, b'{"model":"policy","prompt":"', b'\\"[{,:', b'","x":1}'),
    "names": (CompletionBody, b"{", b'"k%d":1,', b'"z":1}'),
    "one name": (CompletionBody, b"{", b'"k":1,', b'"z":1}'),
    "a long name": (CompletionBody, b'{"', b"k", b'":1}'),
    "objects": (ChatBody, b'{"model":"policy","messages":[', b"{},", b"{}]}"),
    "wrong messages": (ChatBody, b'{"model":"p","messages":[', b'{"role":1,"a":2},', b"{}]}"),
    "names of a message": (ChatBody, b'{"model":"p","messages":[{', b'"k%d":{},', b'"z":1}]}'),
    "parts": (ChatBody, b'{"messages":[{"role":"user","content":[', b'{"type":"text"},', b"1]}]}"),
    "null messages": (ChatBody, b'{"model":"policy","messages":[', b"null,", b"null]}"),
    "calls": (ChatBody, b'{"messages":[{"role":"assistant","tool_calls":[', b"{},", b"{}]}]}"),
    "biases": (ChatBody, CHAT + b'"logit_bias":{', b'"k%d":1,', b'"z":1}}'),
    "good biases": (ChatBody, CHAT + b'"logit_bias":{', b'"%d":1,', b'"1":1}}'),
    "metadata": (ChatBody, CHAT + b'"metadata":{', b'"k%d":1,', b'"z":1}}'),
    "stops": (ChatBody, CHAT + b'"stop":[', b'"",', b'""]}'),
    "stop ids": (ChatBody, CHAT + b'"stop_token_ids":[', b"1,", b'"a"]}'),
    "tools": (ChatBody, CHAT + b'"tools":[', b'{"type":"function"},', b"{}]}"),
    "a schema": (
        ChatBody,
        CHAT + b'"tools":[{"type":"function","function":{"name":"a","parameters":{"enum":[',
        b"1,",
        b'1]}}}],"x":1}',
    ),
    "a form": (
        ChatBody,
        CHAT + b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{',
        b'"k%d":{"const":1},',
        b'"z":1}}},"x":1}',
    ),
    "options of the template": (
        ChatBody,
        CHAT + b'"chat_template_kwargs":{',
        b'"k%d":[],',
        b'"z":1}}',
    ),
    "annotations": (ChatBody, b'{"messages":[{"role":"user","annotations":[', b"1,", b"1]}]}"),
    "ids beside messages": (ChatTokensBody, CHAT + b'"tokens":[', b"7,", b'-1],"x":1}'),
    "ids": (DetokenizeBody, b'{"tokens":[', b"1000,", b'1],"x":1}'),
    "numbers that are none": (GenerateBody, b'{"model":"p","token_ids":[', b"1.5,", b"1]}"),
    "brackets": (TokenizeBody, b"", b"[", b""),
    "braces": (TokenizeBody, b"", b'{"a":', b""),
    "quotes": (TokenizeBody, b"", b'"', b""),
    "commas": (TokenizeBody, b"[", b",", b"]"),
    "digits": (GenerateBody, b'{"n":', b"1", b"}"),
    "large integers": (GenerateBody, b'{"token_ids":[', b"9" * 4000 + b",", b"1]}"),
    "a fraction": (ChatBody, b'{"temperature":0.', b"1", b"}"),
    "exponents": (ChatBody, b'{"stop_token_ids":[', b"1e-400,", b"1]}"),
    "spaces": (ChatBody, b"{", b" ", b"}"),
    "bytes that are no UTF-8": (CompletionBody, b'{"prompt":"', b"\xff\xfe", b'"}'),
    "zeros": (CompletionBody, b"", b"\0", b""),
}


def body_of(shape: str, size: int) -> bytes:
    """A body of a shape, of about `size` bytes and no more than that."""
    _, before, part, after = SHAPES[shape]
    room = max(0, size - len(before) - len(after))
    if b"%d" not in part:
        return before + part * (room // len(part)) + after
    width = len(part) + 6
    return before + b"".join(part % number for number in range(room // width)) + after


def drawn(seed: int, count: int) -> Iterator[tuple[str, int]]:
    """Shapes and sizes: the largest of every shape, those close to a bound, then random ones."""
    chance = random.Random(seed)
    names = list(SHAPES)
    for number in range(count):
        name = names[number % len(names)]
        yield name, _size(name, number // len(names), chance)


def _size(name: str, lap: int, chance: random.Random) -> int:
    _, before, part, after = SHAPES[name]
    width = len(part) + (6 if b"%d" in part else 0)
    if lap == 0:
        return BYTES_MAX
    if lap <= len(CLOSE):
        return min(BYTES_MAX, len(before) + width * CLOSE[lap - 1] + len(after))
    return int(2 ** chance.uniform(10, 24))


def peak_mb() -> float:
    """The most memory since `clear_peak`, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def cost_of(shape: str, size: int) -> dict[str, object]:
    """Parse one body, and report what that took."""
    data = body_of(shape, size)
    give_back_freed_memory()  # or one body would find what another left
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before, began = peak_mb(), time.process_time()
    try:
        parse(SHAPES[shape][0], data)
        answer = ""
    except ApiError as error:
        answer = str(error)
    cpu_s = time.process_time() - began
    mb = peak_mb() - before
    return {"shape": shape, "bytes": len(data), "cpu_s": cpu_s, "mb": mb, "answer": answer[:200]}


if __name__ == "__main__":
    for chosen in drawn(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(cost_of(*chosen)), flush=True)
