"""Reading runs: lazy scans, lineage, status, curves. Writes nothing into a run's slots."""
