"""marin-rl: reinforcement learning for language models as durable, file-based stages.

The library behind the stages. It never imports Prefect; the flows do.
"""

from importlib.metadata import PackageNotFoundError, version

from marin_rl.machine import ensure_threads

try:
    __version__ = version("marin-rl")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

# Before anything can start JAX: afterwards its thread pool has its size.
ensure_threads()
