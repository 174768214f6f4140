"""The shapes that processing leaves on disk: training batches and dispositions, version 1.

A batch file has one row per padded sequence and one row group per optimizer step; arrays are
fixed-size lists of one length, so that readers get NumPy views without a copy (which is why the
mask is int32 here). Dispositions say of every rollout of a round what became of it.
"""

import pyarrow as pa

from schemas.arrow import list_of, required

BATCHES_FORMAT = "marin-rl/batches"
DISPOSITIONS_FORMAT = "marin-rl/dispositions"
SCHEMA_VERSION = 1

INTEGER_ARRAYS = ("token_ids", "loss_mask", "segment_ids", "positions")
FLOAT_ARRAYS = ("policy_logprobs", "advantages", "returns")
ARRAYS = INTEGER_ARRAYS + FLOAT_ARRAYS

DISPOSITION_KINDS = ("consumed", "filtered", "stale", "failed")


def batches_schema(length: int) -> pa.Schema:
    """Schema of a batch file whose rows are padded to `length` tokens (at least 1).

    `returns` are the undiscounted sum of the rewards from a token on where a critic or a baseline
    by token reads them, else the rollout's whole reward at every token. `advantages` are 0 where
    they are to come from a critic.
    `step` is the optimizer step within the round, `row` the row within that step; `rollout_ids` and
    `environments` are in segment order.
    """
    if length < 1:
        raise ValueError(f"expected a padded length of at least 1 token, found {length}")
    integers, floats = list_of(pa.int32(), length), list_of(pa.float32(), length)
    return pa.schema(
        [
            required("step", pa.int32()),
            required("row", pa.int32()),
            *(required(name, integers) for name in INTEGER_ARRAYS),
            *(required(name, floats) for name in FLOAT_ARRAYS),
            required("rollout_ids", list_of(pa.string())),
            required("environments", list_of(pa.string())),
        ]
    )


# `step`, `row` and `segment` (counted from 1) are null unless consumed; `reason` is null if it is.
# `advantage` is null too where it differs from token to token (a critic's; see the scores).
DISPOSITIONS = pa.schema(
    [
        required("rollout_id", pa.string()),
        required("group_id", pa.string()),
        required("round_generated", pa.int32()),
        required("environment", pa.string()),
        required("policy_version_min", pa.int32()),
        required("policy_version_max", pa.int32()),
        required("n_tokens", pa.int32()),
        required("disposition", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("step", pa.int32()),
        pa.field("row", pa.int32()),
        pa.field("segment", pa.int32()),
        pa.field("advantage", pa.float64()),
        pa.field("reward", pa.float64()),
    ]
)
