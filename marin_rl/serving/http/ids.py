"""Ids that tell one answer from all others."""

import random
import secrets

# Seeded by the system once: asking it for every id would release the interpreter lock each time.
_random = random.Random(secrets.randbits(256))


def new_id() -> str:
    """An id that nothing else has; no secret."""
    return f"{_random.getrandbits(128):032x}"
