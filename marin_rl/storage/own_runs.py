"""The runs that this user started on this machine, and the settings that they were started with.

A run's folder may come from anyone, so it cannot say itself whose it is. Whenever a run is started
or continued, a small file in the user's state folder remembers the digest of its run.json and the
free keys of that time. Leaves out what follows from it (trust.py).
"""

import logging
import os
import secrets
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from marin_rl.config import WITHDRAWN
from marin_rl.storage.run_records import RUN_KEY
from marin_rl.storage.runs import Run

_log = logging.getLogger(__name__)

FORMAT = "marin-rl/own-run"


class _OwnRun(BaseModel):
    """Record of a run of this user; `free` are its free keys as `dotted.key=JSON`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str = FORMAT
    version: int = 1
    run_id: str
    url: str
    free: tuple[str, ...]


def state_folder() -> Path:
    """The folder of these files: `marin-rl/runs` below XDG_STATE_HOME or ~/.local/state."""
    chosen = os.environ.get("XDG_STATE_HOME")
    base = Path(chosen) if chosen else Path(os.path.expanduser("~"), ".local", "state")  # noqa: PTH111 - never raises
    return base / "marin-rl" / "runs"


def remember(run: Run) -> None:
    """Remember `run`, with the free keys it has now, as this user's own. Raises OSError."""
    own = _OwnRun(run_id=run.run_id, url=run.folder.url, free=run.reference.free)
    path = _path_of(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_text(own.model_dump_json() + "\n", encoding="utf-8")
        # One rename: another command never reads half a record.
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def try_to_remember(run: Run) -> None:
    """Remember `run`, or say in the log why that does not work and what to do."""
    try:
        remember(run)
    except OSError as error:
        _log.warning(
            "this run cannot be remembered as yours (%s), so other commands may ask for --trust; "
            "set XDG_STATE_HOME to a folder that you may write",
            error,
        )


def remembered(run: Run) -> tuple[str, ...] | None:
    """Return the free keys that `run` was last run with; None where it is not this user's own."""
    try:
        own = _OwnRun.model_validate_json(_path_of(run).read_bytes())
    # A record that cannot be read is that of another user, or of a later version: then --trust
    # decides.
    except (OSError, ValidationError):
        return None
    # A key was withdrawn, or a key with a value.
    return tuple(
        item
        for item in own.free
        if not {item.partition("=")[0], item.replace('"', "")} & WITHDRAWN.keys()
    )


def _path_of(run: Run) -> Path:
    # By content and not by place: a copied run is still the user's own, an edited one is not.
    digest = sha256(run.folder.read(RUN_KEY)).hexdigest()
    return state_folder() / f"{digest}.json"
