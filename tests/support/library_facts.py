"""Facts about environments of other libraries, as tests with the real packages see them.

They are kept in `docs/data/libraries.json`, and the table in docs/other-libraries.md has its cells
from there. A test compares what it sees with the file; `make library-facts` empties the file, runs
those tests, and each writes what it sees.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock

from marin_rl.integrations.hosted import installed_version
from marin_rl.types import Rollout, RolloutGroup

TOP = Path(__file__).parents[2]
FILE = TOP / "docs/data/libraries.json"
WRITE = "MARIN_RL_WRITE_FACTS"
COLUMNS = ("tried", "runs", "tools", "turns", "group rewards", "exact ids", "replayable")

Facts = dict[str, dict[str, str]]


def read_facts() -> Facts:
    """Facts by library and column: a version, and "yes" for what a test has seen."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def note(library: str, *seen: str, python: Path | None = None, package: str = "") -> None:
    """Compare what was seen of a library with the file, or write it there.

    `python` has the `package` whose version was tried.
    """
    facts = dict.fromkeys(seen, "yes")
    assert facts.keys() <= set(COLUMNS), facts
    if python is not None:
        facts["tried"] = installed_version(str(python), package, ">=0")
    if not os.environ.get(WRITE):
        known = read_facts().get(library, {})
        assert facts == {name: known.get(name) for name in facts}, "run `make library-facts`"
        return
    with FileLock(TOP / ".pytest_cache/library-facts.lock"):
        every = read_facts()
        every[library] = every.get(library, {}) | facts
        FILE.write_text(json.dumps(every, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def seen_in(groups: Sequence[RolloutGroup]) -> tuple[str, ...]:
    """Columns that the rollouts of a scripted policy show."""
    rollouts = [r for group in groups for r in group.rollouts if len(r.token_ids)]
    roles = [[turn.role for turn in rollout.turns] for rollout in rollouts]
    seen = {
        "tools": any("tool" in each for each in roles),
        "turns": any(each.count("assistant") > 1 for each in roles),
        "exact ids": all(map(has_sampled_ids, rollouts)),
    }
    return tuple(name for name, there in seen.items() if there)


def has_sampled_ids(rollout: Rollout) -> bool:
    """True where what is trained on are the ids and logprobs (-1, a script's) of its own turns."""
    spans = np.zeros(len(rollout.token_ids), np.int32)
    for turn in rollout.turns:
        if turn.role == "assistant":
            spans[turn.start : turn.end] = 1
    return np.array_equal(spans, rollout.loss_mask) and bool(
        np.all(rollout.logprobs[spans == 1] == -1.0)
    )
