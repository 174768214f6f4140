"""The shapes of all tables: rollouts, batches, dispositions, scores, rewards, pairs, metrics.

A rollout shard has one row per rollout; the rows of a group are adjacent, in one file and one row
group. Token arrays lie flat next to the readable turns, so a query over rewards never touches
tokens. Evolution is add-only and nullable; what each version added is in `schemas.migrations`.

A batch file has one row per padded sequence and one row group per optimizer step; arrays are
fixed-size lists of one length, so that readers get NumPy views without a copy (which is why the
mask is int32 here). Dispositions say of every rollout of a round what became of it. Formats and
versions are those of the ladders in `schemas.migrations`.
"""

import pyarrow as pa

ROLLOUTS_FORMAT = "marin-rl/rollouts"
SCHEMA_VERSION = 5

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
    pa.field("min_p", pa.float64()),
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


BATCHES_VERSION = 1
PAIRS_VERSION = 3

INTEGER_ARRAYS = ("token_ids", "loss_mask", "segment_ids", "positions")
FLOAT_ARRAYS = ("policy_logprobs", "advantages", "returns")
ARRAYS = INTEGER_ARRAYS + FLOAT_ARRAYS
TEACHER = "teacher_logprobs"

DISPOSITION_KINDS = ("consumed", "filtered", "stale", "failed")


def batches_schema(length: int, *, distilled: bool = False) -> pa.Schema:
    """Schema of a batch file whose rows are padded to `length` tokens (at least 1).

    `returns` are the undiscounted sum of the rewards from a token on where a critic or a baseline
    by token reads them, else the rollout's whole reward at every token. `advantages` are 0 where
    they are to come from a critic. Those that are `distilled` have `teacher_logprobs` too, NaN on
    trained tokens that no teacher scored.
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
            *([required(TEACHER, floats)] if distilled else []),
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


# Scores have a row per trained segment: a rollout, or a part of one. The lists of a row are
# parallel: entry i of each is about the i-th trained token of the segment, which is token
# `positions[i]` of it. A run goes on writing the lowest version that has its columns, whose bytes
# are fewer.
FLOATS = (
    "trainer_logprobs", "sampler_logprobs", "reference_logprobs", "old_logprobs", "entropies",
    "ratios", "advantages",
)  # fmt: skip
VALUED = ("values", "old_values", "returns")
WEIGHED = ("squared_score_norms",)
NULLABLE = ("reference_logprobs", "old_logprobs", *VALUED, *WEIGHED)

# Log-probabilities and entropies are in nats, by the parameters before the update of the step that
# trained on the segment first. `round` is the round that was trained, `step`, `row` and `segment`
# (counted from 1) are the place in its batches. `ratios` are those of the objective, at its level;
# they are taken against `old_logprobs`, and against the sampler's where that is null. `advantages`
# are those that the step used, which KL in the reward has changed. `clipped` is true where the
# advantage is not 0 and the surrogate, times its correction, gave the log-probability no gradient.
SCORES_V1 = pa.schema(
    [
        required("round", pa.int32()),
        required("rollout_id", pa.string()),
        required("step", pa.int32()),
        required("row", pa.int32()),
        required("segment", pa.int32()),
        required("positions", list_of(pa.int32())),
        *(pa.field(name, list_of(pa.float32()), nullable=name in NULLABLE) for name in FLOATS),
        required("clipped", list_of(pa.bool_())),
    ]
)

# Of a critic: the value of each token before the update of the step, and before the first update of
# the round; `returns`, which it is to learn, are the latter and the advantage before whitening.
SCORES_V2 = pa.schema([*SCORES_V1, *(pa.field(name, list_of(pa.float32())) for name in VALUED)])

# Of an optimal token baseline: 1 - 2 p(y) + sum_v p(v)^2 by the parameters before the first update
# of the round, the squared norm of the gradient of log p(y) by logits / temperature.
SCORES = pa.schema([*SCORES_V2, *(pa.field(name, list_of(pa.float32())) for name in WEIGHED)])

# Rewards of a round's rollouts by another function, a row per rollout in shard order; the shards
# keep the reward that was trained on.
# `reward` is null where there was nothing to score or the function failed, see `error`;
# `reward_before` is the shard's own.
REWARDS = pa.schema(
    [
        required("rollout_id", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("reward_before", pa.float64()),
        required("reward_components", list_of(REWARD_COMPONENT)),
        pa.field("error", pa.string()),
    ]
)

# Preference pairs: one prompt and two answers. Files that people give must have `id`, a prompt,
# `chosen` and `rejected`; a run's own copy has all columns.
# `margin` is asked between the two rewards; `*_id`, `*_reward` and `source` say where an answer
# came from. `*_token_ids` are prompt and answer together, under the tokenizer of the two digests.
PAIRS_V1 = pa.schema(
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

# `*_loss_mask` is 1 on the tokens of an answer that are trained on; `*_reference_logprobs` are of
# these by the policy before its first update, in nats, and 0 elsewhere. With a `label`, `rejected`
# is an answer to another prompt.
LABEL = "label"
LEARNED = (
    "chosen_loss_mask", "rejected_loss_mask", "chosen_reference_logprobs",
    "rejected_reference_logprobs",
)  # fmt: skip
PAIRS = pa.schema(
    [
        *PAIRS_V1,
        *(pa.field(name, list_of(pa.int8())) for name in LEARNED[:2]),
        *(pa.field(name, list_of(pa.float32())) for name in LEARNED[2:]),
        pa.field(LABEL, pa.bool_()),
    ]
)

# A row of a round's metrics has a nullable float64 column per metric besides these: which, differs
# from round to round.
METRICS_IDENTITY = pa.schema([pa.field("run_id", pa.string()), pa.field("round", pa.int32())])
