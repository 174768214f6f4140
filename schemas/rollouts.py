"""The shape of a rollout shard on disk: one Parquet row per rollout, version 4.

The rows of a group are adjacent, in one file and one row group. Token arrays lie flat next to the
readable turns, so a query over rewards never touches tokens. Evolution is add-only and nullable;
what each version added is in `schemas.migrations`. Writing and reading is `marin_rl.storage`'s.
"""

import pyarrow as pa

FORMAT = "marin-rl/rollouts"
SCHEMA_VERSION = 4

# What fingerprints cover. Later versions add measurements, what token ids say already, and what
# only a new configuration key can bring about, so that shards of all versions are interchangeable
# and a run that was begun with version 1 goes on.
CONTENT_VERSION = 1

STATUSES = ("complete", "truncated", "aborted", "error")
UNFINISHED = "unfinished"  # finish reason of what was cancelled, for others were finished first


def required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def list_of(kind: pa.DataType, length: int = -1) -> pa.DataType:
    """List whose elements are never null; of a fixed size where `length` is given."""
    return pa.list_(required("element", kind), length)


MESSAGE = pa.struct([required("role", pa.string()), required("content", pa.string())])

TIMESTAMP = pa.timestamp("us", tz="UTC")

REWARD_COMPONENT = pa.struct(
    [
        required("name", pa.string()),
        required("value", pa.float64()),
        required("weight", pa.float64()),
    ]
)

NAMED_REWARD = pa.struct([required("name", pa.string()), required("value", pa.float64())])

SAMPLING_FIELDS = [
    required("temperature", pa.float64()),
    required("top_p", pa.float64()),
    required("top_k", pa.int32()),
    required("max_tokens", pa.int32()),
    required("stop", list_of(pa.string())),
    pa.field("seed", pa.int64()),
]

SAMPLING = pa.struct(SAMPLING_FIELDS)

INFERENCE_METADATA = pa.struct(
    [
        required("model", pa.string()),
        required("weight_version", pa.int32()),
        *SAMPLING_FIELDS,
        required("request_id", pa.string()),
        required("finish_reason", pa.string()),
    ]
)

TOOL_CALL = pa.struct(
    [
        required("id", pa.string()),
        required("name", pa.string()),
        required("arguments", pa.string()),
    ]
)

TURN = pa.struct(
    [
        required("role", pa.string()),
        required("content", pa.string()),
        pa.field("start", pa.int32()),
        pa.field("end", pa.int32()),
        pa.field("reward", pa.float64()),
        pa.field("tool_name", pa.string()),
        pa.field("tool_call_id", pa.string()),
        pa.field("inference_metadata", INFERENCE_METADATA),
        # of version 2
        pa.field("tool_calls", list_of(TOOL_CALL)),
        pa.field("cut", pa.bool_()),
        pa.field("queue_s", pa.float64()),
        pa.field("prefill_s", pa.float64()),
        pa.field("decode_s", pa.float64()),
        pa.field("environment_s", pa.float64()),
        # of version 3
        pa.field("rewards", list_of(NAMED_REWARD)),
        pa.field("malformed", pa.string()),
    ]
)

# `segment_lengths` cuts the token columns into segments, each with a prompt of its own; null where
# a rollout is one segment. `teacher_logprobs` are a teacher's, in nats, 0 off the loss mask; null
# where none was asked.
ROLLOUTS = pa.schema(
    [
        required("run_id", pa.string()),
        required("round", pa.int32()),
        required("shard", pa.int32()),
        required("group_id", pa.string()),
        required("rollout_id", pa.string()),
        required("index_in_group", pa.int32()),
        required("group_size", pa.int32()),
        required("attempt", pa.string()),
        required("replica", pa.string()),
        required("environment", pa.string()),
        required("environment_version", pa.string()),
        required("example_id", pa.string()),
        required("split", pa.string()),
        required("prompt_seed", pa.int64()),
        required("messages", list_of(MESSAGE)),
        pa.field("answer", pa.string()),
        required("metadata", pa.string()),
        required("policy_version_min", pa.int32()),
        required("policy_version_max", pa.int32()),
        required("policy_digest", pa.string()),
        required("tokenizer_digest", pa.string()),
        required("chat_template_digest", pa.string()),
        required("model", pa.string()),
        required("sampling", SAMPLING),
        pa.field("reward", pa.float64()),
        required("reward_components", list_of(REWARD_COMPONENT)),
        required("status", pa.string()),
        required("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        required("token_ids", list_of(pa.int32())),
        required("loss_mask", list_of(pa.int8())),
        required("logprobs", list_of(pa.float32())),
        pa.field("policy_versions", list_of(pa.int32())),
        required("n_prompt_tokens", pa.int32()),
        required("n_completion_tokens", pa.int32()),
        required("turns", list_of(TURN)),
        required("started_at", TIMESTAMP),
        required("finished_at", TIMESTAMP),
        pa.field("queue_s", pa.float64()),
        pa.field("prefill_s", pa.float64()),
        pa.field("decode_s", pa.float64()),
        required("worker", pa.string()),
        # of version 3
        pa.field("segment_lengths", list_of(pa.int32())),
        pa.field("start_s", pa.float64()),
        # of version 4
        pa.field("teacher_logprobs", list_of(pa.float32())),
    ]
)

TOKEN_COLUMNS = ("token_ids", "loss_mask", "logprobs", "policy_versions", "teacher_logprobs")
