"""Parameters from a run's trainer, which hands them out by Arrow Flight, else from files.

Leaves out how they travel (`flight`) and what they must be (`checkpoint_loader`,
`adapter_versions`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from marin_rl.errors import ConfigError, EndpointUnavailable, InputError, StalePolicy
from marin_rl.lora import Shapes
from marin_rl.training.policy_source import Fetch

Read = TypeVar("Read")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerSource:
    """A trainer at `url` that hands out parameters to those with its token.

    `ca` is a PEM file of the authorities that may have signed its certificate (None: the system's).
    """

    url: str
    token: str | None
    ca: str | None = None

    def fetch(self, digest: str, shapes: Shapes) -> dict[str, np.ndarray]:
        """The parameters with a digest. Raises as `flight.fetch` does."""
        from marin_rl.serving.weights.flight import fetch  # Arrow's takes half a second to import

        return fetch(self.url, digest, shapes, self.token, self.ca)


def trainer_at(url: str | None, token: str | None, ca: str | None = None) -> TrainerSource | None:
    """The trainer that hands out parameters at `url`; None where none does."""
    return None if url is None else TrainerSource(url, token, ca)


def from_trainer_or_files(
    source: TrainerSource | None, name: str, read: Callable[[Fetch | None], Read]
) -> Read:
    """`read` from a trainer, where it gives the right parameters, else from files.

    `name` says in the log what they are. Raises what reading files does.
    """
    if source is not None:
        try:
            result = read(source.fetch)
            _log.info("%s came from %s", name, source.url)
            return result
        # Either way the digest decides: files give the same parameters, only later.
        except (ConfigError, EndpointUnavailable, InputError, StalePolicy) as error:
            _log.warning("%s is read from files: %s", name, error)
    return read(None)
