"""The names by which environments that sample by themselves import their records."""

from marin_rl.environments.episode import FinishedMessage, FinishedRollout, PolicyAddress

__all__ = ["FinishedMessage", "FinishedRollout", "PolicyAddress"]
