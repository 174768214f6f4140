"""The flows: order, retries and concurrency of the stages. They compute nothing."""

import os

# Read when Prefect is imported, which would otherwise report its first use to its makers.
os.environ.setdefault("DO_NOT_TRACK", "1")
