"""The places from which an admin may have weights loaded.

The admin token changes the weights; it is no right to have the server read any file
that its user can. So a place is taken only below a root that the server was started with: the run's
own root, the folder that holds the model folder, and what `inference.server.update_roots` lists.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from marin_rl.config import InferenceConfig
from marin_rl.errors import InputError
from marin_rl.serving.weights.checkpoint_loader import Loaded, Served, Source

_LOCAL_SCHEMES = ("file", "local")


def with_update_root(config: InferenceConfig, root: str | Path) -> InferenceConfig:
    """The configuration of a server that may load weights from below `root` too."""
    roots = (*config.server.update_roots, str(root))
    server = config.server.model_copy(update={"update_roots": roots})
    return config.model_copy(update={"server": server})


class Places:
    """Places below a list of roots: local folders, symbolic links followed, or URLs."""

    def __init__(self, roots: Sequence[str]) -> None:
        # these are the user's own words, so `~` is their home
        folders = {root: _local(os.path.expanduser(root)) for root in roots}  # noqa: PTH111 - or a URL
        self._folders = [folder for folder in folders.values() if folder is not None]
        self._urls = [root.rstrip("/") for root, folder in folders.items() if folder is None]

    def holds(self, place: str) -> bool:
        """Return True for a place at or below one of the roots."""
        folder = _local(place)
        if folder is not None:
            return any(folder.is_relative_to(root) for root in self._folders)
        parts = place.split("/")
        if "://" not in place or "::" in place or ".." in parts or "." in parts:
            return False
        return any(place.rstrip("/") == url or place.startswith(f"{url}/") for url in self._urls)

    def only(self, source: Source) -> Source:
        """The same source, but that reading it raises InputError where no root holds it."""

        def read(served: Served) -> Loaded:
            if not self.holds(source.place):
                raise InputError(
                    f"expected a place below a root that this server was started with, found "
                    f"{source.place!r:.200}: list its folder in inference.server.update_roots"
                )
            return source.read(served)

        return dataclasses.replace(source, read=read)


def _local(place: str) -> Path | None:
    """The folder that a local place names, links resolved; None for URLs of object stores.

    A place that begins with `~` names no folder: it would be another user's home.
    """
    scheme, separator, rest = place.partition("://")
    if separator and scheme not in _LOCAL_SCHEMES:
        return None
    path = rest if separator else place
    return None if path.startswith("~") or "\0" in path else Path(os.path.realpath(path))
