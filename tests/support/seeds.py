"""Seeds of what tests draw at random: new ones where people work, always the same one in CI."""

import os
import random


def printed_seed() -> int:
    """Return the seed of MARIN_RL_SEED, else a new one, and print it so that the test can be
    repeated.
    """
    asked = os.environ.get("MARIN_RL_SEED")
    seed = int(asked) if asked else random.SystemRandom().randrange(10**9)
    print(f"MARIN_RL_SEED={seed}")
    return seed
