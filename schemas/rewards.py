"""The shape of a reward table: rewards of a round's rollouts by another function, version 1.

One row per rollout, in shard order. The shards keep the reward that was trained on; this table is
separate.
"""

import pyarrow as pa

from schemas.arrow import list_of, required
from schemas.rollouts import REWARD_COMPONENT

FORMAT = "marin-rl/rewards"
SCHEMA_VERSION = 1

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
