"""Groups of rollouts from environments of atropos, pushed here or taken from its API server."""

from marin_rl.integrations.atropos.api import serve_trajectories
from marin_rl.integrations.atropos.poller import poll_trajectories
from marin_rl.integrations.atropos.receiver import Receiver

__all__ = ["Receiver", "poll_trajectories", "serve_trajectories"]
