"""The canary's prompt and length, for checks that come before JAX is imported.

What is done with its answer is in `marin_rl.serving.weights.canary`.
"""

from marin_rl.types import Message

CANARY_PROMPT = (Message(role="user", content="Which policy are you?"),)
CANARY_TOKENS = 4
CANARY_SEED = 20_240_229
