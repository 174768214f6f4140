"""Columns of the tables that SQL has, as Arrow schemas; `frames` reads the same with Polars.

Columns that files lack because their place says them come first: run, round, name and version.
Leaves out metrics, whose columns differ from round to round.
"""

from collections.abc import Mapping

import pyarrow as pa

from schemas.rollouts import ROLLOUTS
from schemas.tables import ARRAYS, DISPOSITIONS, REWARDS, SCORES, batches_schema

RUN = pa.field("run_id", pa.string())
PLACE = (RUN, pa.field("round", pa.int32()))
NAMED = (*PLACE, pa.field("name", pa.string()), pa.field("version", pa.int32()))


def listed(schema: pa.Schema) -> pa.Schema:
    """Return the schema with lists instead of fixed-size lists."""
    return pa.schema(
        field.with_type(pa.list_(field.type.value_type)) if field.name in ARRAYS else field
        for field in schema
    )


SCHEMAS: Mapping[str, pa.Schema] = {
    "rollouts": ROLLOUTS,
    "evals": ROLLOUTS,
    "batches": pa.schema([*PLACE, *listed(batches_schema(1))]),
    "dispositions": pa.schema([*PLACE, *DISPOSITIONS]),
    "scores": pa.schema([RUN, *SCORES]),
    "rewards": pa.schema([*NAMED, *REWARDS]),
}
