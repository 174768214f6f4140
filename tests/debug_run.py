"""configs/debug.yaml with a warm start, as the tests of whole runs play it."""

from dataclasses import dataclass, field
from pathlib import Path

from marin_rl.config import Config, load_config
from marin_rl.progress import ProgressEvent
from marin_rl.types import SlotRef

REPOSITORY = Path(__file__).parents[1]
DEBUG = REPOSITORY / "configs" / "debug.yaml"
ROUNDS, SHARDS = 3, 2


def debug(root: Path, *overrides: str) -> Config:
    """The configuration below `root`, always under one name: samples depend on it."""
    return load_config(DEBUG, [f"root={root}", "run_id=whole", "policy.init=sft", *overrides])


@dataclass(slots=True)
class Played:
    """A run that was played once, and what was heard of it."""

    config: Config
    checkpoint: SlotRef
    events: list[ProgressEvent] = field(default_factory=list)
