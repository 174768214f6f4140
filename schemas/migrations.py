"""Ladders of pure upgrades: how a table of an older version becomes one of the newest.

A ladder maps a version to the function that makes the next one out of it; each rung only adds
nullable columns. Version 1 is the first of every format, and the only one of most.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from schemas import Malformed, NewerVersion, tables

Upgrade = Callable[[pa.Table], pa.Table]


@dataclass(frozen=True, slots=True)
class Ladder:
    """Versions of a format, a rung below each; `schema` is None where columns differ by file."""

    format: str
    newest: int
    rungs: Mapping[int, Upgrade] = field(default_factory=dict)
    schema: pa.Schema | None = None

    def check(self, version: int) -> None:
        """Raise NewerVersion above the newest version, Malformed below 1."""
        if version > self.newest:
            raise NewerVersion(
                f"{self.format} version {version} is newer than {self.newest}, the newest this "
                "software reads: upgrade marin-rl"
            )
        if version < 1:
            raise Malformed(f"expected a version of {self.format} from 1, found {version}")

    def upgrade(self, table: pa.Table, version: int) -> pa.Table:
        """`table` of `version` as one of the newest version. Raises as `check` does."""
        self.check(version)
        for rung in range(version, self.newest):
            table = self.rungs[rung](table)
        return table


def _with_nulls(table: pa.Table, schema: pa.Schema, names: tuple[str, ...]) -> pa.Table:
    for name in names:
        kind = schema.field(name)
        table = table.append_column(kind, pa.nulls(table.num_rows, kind.type))
    return table


def _with_new_fields(table: pa.Table) -> pa.Table:
    """Cast columns to the newest types, where what structs gained is null: versions 1, 4 and 5."""
    for index, name in enumerate(table.column_names):
        field = tables.ROLLOUTS.field(name)
        if not table.schema.field(index).equals(field):
            table = table.set_column(index, field, table[name].cast(field.type))
    return table


_SEGMENTS = ("segment_lengths", "start_s")  # rollouts of version 2 are one segment each
ROLLOUTS = Ladder(
    tables.ROLLOUTS_FORMAT,
    tables.SCHEMA_VERSION,
    {
        1: _with_new_fields,
        2: lambda table: _with_nulls(_with_new_fields(table), tables.ROLLOUTS, _SEGMENTS),
        3: partial(_with_nulls, schema=tables.ROLLOUTS, names=("teacher_logprobs",)),
        4: _with_new_fields,
        5: _with_new_fields,
    },
    tables.ROLLOUTS,
)
# Rows differ in length. Version 2 has `teacher_logprobs`, and is written by runs with a teacher.
BATCHES = Ladder("marin-rl/batches", 2, {1: lambda table: table})
DISPOSITIONS = Ladder("marin-rl/dispositions", tables.BATCHES_VERSION, schema=tables.DISPOSITIONS)
METRICS = Ladder("marin-rl/metrics", 1)  # a column for each metric of the round
# Version 2 adds the values of a critic, version 3 what an optimal token baseline is made of.
SCORES = Ladder(
    "marin-rl/scores",
    3,
    {
        1: partial(_with_nulls, schema=tables.SCORES, names=tables.VALUED),
        2: partial(_with_nulls, schema=tables.SCORES, names=tables.WEIGHED),
    },
    tables.SCORES,
)
PAIRS = Ladder(
    "marin-rl/pairs",
    tables.PAIRS_VERSION,
    {
        1: partial(_with_nulls, schema=tables.PAIRS, names=tables.LEARNED),
        2: partial(_with_nulls, schema=tables.PAIRS, names=(tables.LABEL,)),
    },
    tables.PAIRS,
)
REWARDS = Ladder("marin-rl/rewards", 1, schema=tables.REWARDS)
