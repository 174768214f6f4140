"""The shape of a round's metrics: who and when, and one nullable float64 column per metric.

Which metrics a row has differs from round to round, so only the identity is fixed, version 1.
"""

import pyarrow as pa

FORMAT = "marin-rl/metrics"
SCHEMA_VERSION = 1

METRICS_IDENTITY = pa.schema([pa.field("run_id", pa.string()), pa.field("round", pa.int32())])
