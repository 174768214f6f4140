"""The shape of a rollout shard on disk: one Parquet row per rollout, version 3.

The rows of a group are adjacent, in one file and one row group. Token arrays lie flat next to the
readable turns, so a query over rewards never touches tokens. Evolution is add-only and nullable;
what each version added is in `schemas.migrations`. Writing and reading is `marin_rl.storage`'s.
"""

import pyarrow as pa

FORMAT = "marin-rl/rollouts"
SCHEMA_VERSION = 3

# What fingerprints cover. Versions 2 and 3 add measurements, what token ids say already, and what
# only a new configuration key can bring about, so that shards of all versions are interchangeable
# and a run that was begun with version 1 goes on.
CONTENT_VERSION = 1

STATUSES = ("complete", "truncated", "aborted", "error")
UNFINISHED = "unfinished"  # finish reason of what was cancelled, for others were finished first


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


TIMESTAMP = pa.timestamp("us", tz="UTC")

MESSAGE = pa.struct([_required("role", pa.string()), _required("content", pa.string())])

REWARD_COMPONENT = pa.struct(
    [
        _required("name", pa.string()),
        _required("value", pa.float64()),
        _required("weight", pa.float64()),
    ]
)

NAMED_REWARD = pa.struct([_required("name", pa.string()), _required("value", pa.float64())])

SAMPLING_FIELDS = [
    _required("temperature", pa.float64()),
    _required("top_p", pa.float64()),
    _required("top_k", pa.int32()),
    _required("max_tokens", pa.int32()),
    _required("stop", _list_of(pa.string())),
    pa.field("seed", pa.int64()),
]

SAMPLING = pa.struct(SAMPLING_FIELDS)

INFERENCE_METADATA = pa.struct(
    [
        _required("model", pa.string()),
        _required("weight_version", pa.int32()),
        *SAMPLING_FIELDS,
        _required("request_id", pa.string()),
        _required("finish_reason", pa.string()),
    ]
)

TOOL_CALL = pa.struct(
    [
        _required("id", pa.string()),
        _required("name", pa.string()),
        _required("arguments", pa.string()),
    ]
)

TURN = pa.struct(
    [
        _required("role", pa.string()),
        _required("content", pa.string()),
        pa.field("start", pa.int32()),
        pa.field("end", pa.int32()),
        pa.field("reward", pa.float64()),
        pa.field("tool_name", pa.string()),
        pa.field("tool_call_id", pa.string()),
        pa.field("inference_metadata", INFERENCE_METADATA),
        # of version 2
        pa.field("tool_calls", _list_of(TOOL_CALL)),
        pa.field("cut", pa.bool_()),
        pa.field("queue_s", pa.float64()),
        pa.field("prefill_s", pa.float64()),
        pa.field("decode_s", pa.float64()),
        pa.field("environment_s", pa.float64()),
        # of version 3
        pa.field("rewards", _list_of(NAMED_REWARD)),
        pa.field("malformed", pa.string()),
    ]
)

# `segment_lengths` cuts the token columns into segments, each with a prompt of its own; null where
# a rollout is one segment.
ROLLOUTS = pa.schema(
    [
        _required("run_id", pa.string()),
        _required("round", pa.int32()),
        _required("shard", pa.int32()),
        _required("group_id", pa.string()),
        _required("rollout_id", pa.string()),
        _required("index_in_group", pa.int32()),
        _required("group_size", pa.int32()),
        _required("attempt", pa.string()),
        _required("replica", pa.string()),
        _required("environment", pa.string()),
        _required("environment_version", pa.string()),
        _required("example_id", pa.string()),
        _required("split", pa.string()),
        _required("prompt_seed", pa.int64()),
        _required("messages", _list_of(MESSAGE)),
        pa.field("answer", pa.string()),
        _required("metadata", pa.string()),
        _required("policy_version_min", pa.int32()),
        _required("policy_version_max", pa.int32()),
        _required("policy_digest", pa.string()),
        _required("tokenizer_digest", pa.string()),
        _required("chat_template_digest", pa.string()),
        _required("model", pa.string()),
        _required("sampling", SAMPLING),
        pa.field("reward", pa.float64()),
        _required("reward_components", _list_of(REWARD_COMPONENT)),
        _required("status", pa.string()),
        _required("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        _required("token_ids", _list_of(pa.int32())),
        _required("loss_mask", _list_of(pa.int8())),
        _required("logprobs", _list_of(pa.float32())),
        pa.field("policy_versions", _list_of(pa.int32())),
        _required("n_prompt_tokens", pa.int32()),
        _required("n_completion_tokens", pa.int32()),
        _required("turns", _list_of(TURN)),
        _required("started_at", TIMESTAMP),
        _required("finished_at", TIMESTAMP),
        pa.field("queue_s", pa.float64()),
        pa.field("prefill_s", pa.float64()),
        pa.field("decode_s", pa.float64()),
        _required("worker", pa.string()),
        # of version 3
        pa.field("segment_lengths", _list_of(pa.int32())),
        pa.field("start_s", pa.float64()),
    ]
)

TOKEN_COLUMNS = ("token_ids", "loss_mask", "logprobs", "policy_versions")
