"""The shape of preference pairs on disk, version 1: one prompt, two answers, which one is better.

Files that people give have these columns (only `id`, a prompt, `chosen` and `rejected` must be
there); a run's own copy has all of them, with tokens and split filled in.
"""

import pyarrow as pa

from schemas.arrow import MESSAGE, list_of, required

FORMAT = "marin-rl/pairs"
SCHEMA_VERSION = 1


# `margin` is asked between the two rewards; `*_id`, `*_reward` and `source` say where an answer
# came from. `*_token_ids` are prompt and answer together, under the tokenizer of the two digests.
PAIRS = pa.schema(
    [
        required("id", pa.string()),
        required("messages", list_of(MESSAGE)),
        required("chosen", pa.string()),
        required("rejected", pa.string()),
        pa.field("margin", pa.float64()),
        pa.field("split", pa.string()),
        pa.field("source", pa.string()),
        pa.field("chosen_id", pa.string()),
        pa.field("rejected_id", pa.string()),
        pa.field("chosen_reward", pa.float64()),
        pa.field("rejected_reward", pa.float64()),
        pa.field("chosen_token_ids", list_of(pa.int32())),
        pa.field("rejected_token_ids", list_of(pa.int32())),
        pa.field("tokenizer_digest", pa.string()),
        pa.field("chat_template_digest", pa.string()),
    ]
)
