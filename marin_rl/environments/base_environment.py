"""The name by which environments of users and other packages import their base."""

from marin_rl.environments.base import Environment as BaseEnvironment

__all__ = ["BaseEnvironment"]
