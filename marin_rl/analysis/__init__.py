"""Reading runs: lazy scans, lineage, status, curves. Writes nothing into a run's slots.

The scans are imported when they are first asked for: DuckDB and Polars take memory that a process
which trains has better use for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marin_rl.analysis.query import sql
    from marin_rl.analysis.scan import (
        scan_batches,
        scan_dispositions,
        scan_evals,
        scan_metrics,
        scan_rewards,
        scan_rollouts,
        scan_scores,
    )

__all__ = [
    "scan_batches", "scan_dispositions", "scan_evals", "scan_metrics", "scan_rewards",
    "scan_rollouts", "scan_scores", "sql",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from marin_rl.analysis import query, scan

    return getattr(query if name == "sql" else scan, name)
