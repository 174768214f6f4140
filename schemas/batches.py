"""The shapes that processing leaves on disk: training batches and dispositions, version 1.

A batch file has one row per padded sequence and one row group per optimizer step; arrays are
fixed-size lists of one length, so that readers get NumPy views without a copy (which is why the
mask is int32 here). Dispositions say of every rollout of a round what became of it.
"""

import pyarrow as pa

BATCHES_FORMAT = "marin-rl/batches"
DISPOSITIONS_FORMAT = "marin-rl/dispositions"
SCHEMA_VERSION = 1

INTEGER_ARRAYS = ("token_ids", "loss_mask", "segment_ids", "positions")
FLOAT_ARRAYS = ("policy_logprobs", "advantages", "returns")
ARRAYS = INTEGER_ARRAYS + FLOAT_ARRAYS

DISPOSITION_KINDS = ("consumed", "filtered", "stale", "failed")


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _names() -> pa.DataType:
    return pa.list_(_required("element", pa.string()))


def batches_schema(length: int) -> pa.Schema:
    """Schema of a batch file whose rows are padded to `length` tokens (at least 1).

    `returns` are the undiscounted sum of the rewards from a token on, `advantages` 0 where they are
    to come from a critic.
    `step` is the optimizer step within the round, `row` the row within that step; `rollout_ids` and
    `environments` are in segment order.
    """
    if length < 1:
        raise ValueError(f"expected a padded length of at least 1 token, found {length}")
    integers = pa.list_(_required("element", pa.int32()), length)
    floats = pa.list_(_required("element", pa.float32()), length)
    return pa.schema(
        [
            _required("step", pa.int32()),
            _required("row", pa.int32()),
            *(_required(name, integers) for name in INTEGER_ARRAYS),
            *(_required(name, floats) for name in FLOAT_ARRAYS),
            _required("rollout_ids", _names()),
            _required("environments", _names()),
        ]
    )


# `step`, `row` and `segment` (counted from 1) are null unless consumed; `reason` is null if it is.
# `advantage` is null too where it differs from token to token (a critic's; see the scores).
DISPOSITIONS = pa.schema(
    [
        _required("rollout_id", pa.string()),
        _required("group_id", pa.string()),
        _required("round_generated", pa.int32()),
        _required("environment", pa.string()),
        _required("policy_version_min", pa.int32()),
        _required("policy_version_max", pa.int32()),
        _required("n_tokens", pa.int32()),
        _required("disposition", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("step", pa.int32()),
        pa.field("row", pa.int32()),
        pa.field("segment", pa.int32()),
        pa.field("advantage", pa.float64()),
        pa.field("reward", pa.float64()),
    ]
)
