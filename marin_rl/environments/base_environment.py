"""The name by which environments of users and other packages import their base."""

from marin_rl.environments.base import Environment


class BaseEnvironment(Environment):
    """Base of environments of one's own: define `example` and `score`, and change the rest."""
