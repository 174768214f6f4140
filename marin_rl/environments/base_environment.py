"""The name by which environments of users and other packages import their base."""

from marin_rl.environments.base import Environment


class BaseEnvironment(Environment):
    """Base of user-defined environments: define `example` and `score`, override the rest."""
