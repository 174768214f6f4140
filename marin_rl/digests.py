"""Digest of named arrays: the identity of a policy's parameters, of a critic's, of an adapter's."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def digest_of(parameters: Mapping[str, Any]) -> str:
    """SHA-256 over path, dtype, shape and bytes of every array, as hex."""
    digest = hashlib.sha256()
    for path in sorted(parameters):
        array = np.ascontiguousarray(np.asarray(parameters[path]))
        digest.update(f"{path} {array.dtype.name} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
