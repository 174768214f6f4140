"""The shape of a trained round's per-token scores: one row per trained segment, version 3.

A segment is a rollout, or a part of one, that was trained on. The lists of a row are parallel:
entry i of each is about the i-th trained token of the segment, which is token `positions[i]` of it.
Version 2 adds the values of a critic, version 3 what an optimal token baseline is made of. A run
goes on writing the lowest version that has its columns, whose bytes are fewer.
"""

import pyarrow as pa

from schemas.arrow import list_of, required

FORMAT = "marin-rl/scores"
SCHEMA_VERSION = 3

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
