"""Trees of arrays in one file: equal trees give equal bytes, and other bytes are refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import serialize

from marin_rl.errors import CorruptObject
from marin_rl.storage.packed_arrays import packed, unpacked

TREE = {
    "parameters": {
        "trunk/x:A": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.array([1, 2.5], ml_dtypes.bfloat16),
    },
    "critic": {"parameters": {"head/bias": np.float32(3) * np.ones((), np.float32)}},
    "step": np.asarray(7, np.int32),
    "rng": np.array([0, 2**32 - 1], np.uint32),
    "none": np.zeros((0, 2), np.float32),
}


def flat(tree, path=()):
    for name, branch in tree.items():
        if isinstance(branch, dict):
            yield from flat(branch, (*path, name))
        else:
            yield (*path, name), np.asarray(branch)


def test_a_tree_reads_back_to_the_bit():
    data = packed(TREE)
    tree = unpacked(data, "file")
    expected, found = dict(flat(TREE)), dict(flat(tree))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert (found[path].dtype, found[path].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[path], array)
    assert packed(tree) == data


def named(name: str) -> bytes:
    return serialize({name: {"dtype": "float32", "shape": [1], "data": bytes(4)}})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff" * 8, packed(TREE)[:-1], packed(TREE)[:40], named("no list"), named("[]"),
        named("3"), named(json.dumps([[]])),
        serialize({json.dumps(path): {"dtype": "float32", "shape": [1], "data": bytes(4)}
                   for path in (["a"], ["a", "b"])}),
    ],
)  # fmt: skip
def test_other_bytes_are_refused(data):
    with pytest.raises(CorruptObject, match="file: expected a tree of arrays, found"):
        unpacked(data, "file")
