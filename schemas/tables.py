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
SCHEMA_VERSION = 6

# What fingerprints cover. Later versions add measurements, what token ids say already, and what
# only a new configuration key can bring about, so that shards of all versions are interchangeable
# and a run that was begun with version 1 goes on.
CONTENT_VERSION = 1

STATUSES = ("complete", "truncated", "aborted", "error")
UNFINISHED = "unfinished"  # finish reason of what was cancelled, for others were finished first


def required(kind: pa.DataType, *names: str) -> list[pa.Field]:
    """Columns of one type, none of them nullable."""
    return [pa.field(name, kind, nullable=False) for name in names]


def optional(kind: pa.DataType, *names: str) -> list[pa.Field]:
    return [pa.field(name, kind) for name in names]


def list_of(kind: pa.DataType, length: int = -1) -> pa.DataType:
    """List whose elements are never null; of a fixed size where `length` is given."""
    return pa.list_(*required(kind, "element"), length)


TEXT, INT, FLOAT = pa.string(), pa.int32(), pa.float64()
TIMESTAMP = pa.timestamp("us", tz="UTC")
INTS, FLOATS_32 = list_of(INT), list_of(pa.float32())
MESSAGES = list_of(pa.struct(required(TEXT, "role", "content")))
REWARD_COMPONENTS = list_of(
    pa.struct([*required(TEXT, "name"), *required(FLOAT, "value", "weight")])
)
NAMED_REWARD = pa.struct([*required(TEXT, "name"), *required(FLOAT, "value")])
SAMPLING_FIELDS = [
    *required(FLOAT, "temperature", "top_p"),
    *required(INT, "top_k", "max_tokens"),
    *required(list_of(TEXT), "stop"),
    *optional(pa.int64(), "seed"),
    *optional(FLOAT, "min_p", "repetition_penalty"),
]
INFERENCE_METADATA = pa.struct(
    [
        *required(TEXT, "model"),
        *required(INT, "weight_version"),
        *SAMPLING_FIELDS,
        *required(TEXT, "request_id", "finish_reason"),
    ]
)
TURN = pa.struct(
    [
        *required(TEXT, "role", "content"),
        *optional(INT, "start", "end"),
        *optional(FLOAT, "reward"),
        *optional(TEXT, "tool_name", "tool_call_id"),
        *optional(INFERENCE_METADATA, "inference_metadata"),
        # of version 2
        *optional(list_of(pa.struct(required(TEXT, "id", "name", "arguments"))), "tool_calls"),
        *optional(pa.bool_(), "cut"),
        *optional(FLOAT, "queue_s", "prefill_s", "decode_s", "environment_s"),
        # of version 3
        *optional(list_of(NAMED_REWARD), "rewards"),
        *optional(TEXT, "malformed"),
    ]
)

# `segment_lengths` cuts the token columns into segments, each with a prompt of its own; null where
# a rollout is one segment. `teacher_logprobs` are a teacher's, in nats, 0 off the loss mask; null
# where none was asked.
ROLLOUTS = pa.schema(
    [
        *required(TEXT, "run_id"),
        *required(INT, "round", "shard"),
        *required(TEXT, "group_id", "rollout_id"),
        *required(INT, "index_in_group", "group_size"),
        *required(TEXT, "attempt", "replica"),
        *required(TEXT, "environment", "environment_version", "example_id", "split"),
        *required(pa.int64(), "prompt_seed"),
        *required(MESSAGES, "messages"),
        *optional(TEXT, "answer"),
        *required(TEXT, "metadata"),
        *required(INT, "policy_version_min", "policy_version_max"),
        *required(TEXT, "policy_digest", "tokenizer_digest", "chat_template_digest", "model"),
        *required(pa.struct(SAMPLING_FIELDS), "sampling"),
        *optional(FLOAT, "reward"),
        *required(REWARD_COMPONENTS, "reward_components"),
        *required(TEXT, "status", "finish_reason"),
        *optional(TEXT, "error"),
        *required(INTS, "token_ids"),
        *required(list_of(pa.int8()), "loss_mask"),
        *required(FLOATS_32, "logprobs"),
        *optional(INTS, "policy_versions"),
        *required(INT, "n_prompt_tokens", "n_completion_tokens"),
        *required(list_of(TURN), "turns"),
        *required(TIMESTAMP, "started_at", "finished_at"),
        *optional(FLOAT, "queue_s", "prefill_s", "decode_s"),
        *required(TEXT, "worker"),
        # of version 3
        *optional(INTS, "segment_lengths"),
        *optional(FLOAT, "start_s"),
        # of version 4
        *optional(FLOATS_32, "teacher_logprobs"),
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
    return pa.schema(
        [
            *required(INT, "step", "row"),
            *required(list_of(INT, length), *INTEGER_ARRAYS),
            *required(
                list_of(pa.float32(), length), *FLOAT_ARRAYS, *((TEACHER,) if distilled else ())
            ),
            *required(list_of(TEXT), "rollout_ids", "environments"),
        ]
    )


# `step`, `row` and `segment` (counted from 1) are null unless consumed; `reason` is null if it is.
# `advantage` is null too where it differs from token to token (a critic's; see the scores).
DISPOSITIONS = pa.schema(
    [
        *required(TEXT, "rollout_id", "group_id"),
        *required(INT, "round_generated"),
        *required(TEXT, "environment"),
        *required(INT, "policy_version_min", "policy_version_max", "n_tokens"),
        *required(TEXT, "disposition"),
        *optional(TEXT, "reason"),
        *optional(INT, "step", "row", "segment"),
        *optional(FLOAT, "advantage", "reward"),
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
        *required(INT, "round"),
        *required(TEXT, "rollout_id"),
        *required(INT, "step", "row", "segment"),
        *required(INTS, "positions"),
        *(pa.field(name, FLOATS_32, nullable=name in NULLABLE) for name in FLOATS),
        *required(list_of(pa.bool_()), "clipped"),
    ]
)

# Of a critic: the value of each token before the update of the step, and before the first update of
# the round; `returns`, which it is to learn, are the latter and the advantage before whitening.
SCORES_V2 = pa.schema([*SCORES_V1, *optional(FLOATS_32, *VALUED)])

# Of an optimal token baseline: 1 - 2 p(y) + sum_v p(v)^2 by the parameters before the first update
# of the round, the squared norm of the gradient of log p(y) by logits / temperature.
SCORES = pa.schema([*SCORES_V2, *optional(FLOATS_32, *WEIGHED)])

# Rewards of a round's rollouts by another function, a row per rollout in shard order; the shards
# keep the reward that was trained on.
# `reward` is null where there was nothing to score or the function failed, see `error`;
# `reward_before` is the shard's own.
REWARDS = pa.schema(
    [
        *required(TEXT, "rollout_id"),
        *optional(FLOAT, "reward", "reward_before"),
        *required(REWARD_COMPONENTS, "reward_components"),
        *optional(TEXT, "error"),
    ]
)

# Preference pairs: one prompt and two answers. Files that people give must have `id`, a prompt,
# `chosen` and `rejected`; a run's own copy has all columns.
# `margin` is asked between the two rewards; `*_id`, `*_reward` and `source` say where an answer
# came from. `*_token_ids` are prompt and answer together, under the tokenizer of the two digests.
PAIRS_V1 = pa.schema(
    [
        *required(TEXT, "id"),
        *required(MESSAGES, "messages"),
        *required(TEXT, "chosen", "rejected"),
        *optional(FLOAT, "margin"),
        *optional(TEXT, "split", "source", "chosen_id", "rejected_id"),
        *optional(FLOAT, "chosen_reward", "rejected_reward"),
        *optional(INTS, "chosen_token_ids", "rejected_token_ids"),
        *optional(TEXT, "tokenizer_digest", "chat_template_digest"),
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
        *optional(list_of(pa.int8()), *LEARNED[:2]),
        *optional(FLOATS_32, *LEARNED[2:]),
        *optional(pa.bool_(), LABEL),
    ]
)

# Besides these a row of a round's metrics has a nullable float64 column per metric.
METRICS_IDENTITY = pa.schema([*optional(TEXT, "run_id"), *optional(INT, "round")])
