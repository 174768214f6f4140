"""Uses of rollouts in an audit: in how many rounds each was trained on, and what may be.

Without `asynchrony.replay` a rollout is trained on in one round at most, its own. With it a later
round may use it again, within the window and up to a number of uses. Leaves out which groups are
used again, which `batching.reuse` decides.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import iter_row_groups, rollouts_manifest

Offences = Mapping[str, Iterable[str]]  # offending names by kind of offence, also of none


class Seen(dict[str, tuple[int, ...]]):
    """Rounds that trained on each rollout; `complete` where all earlier rounds were audited."""

    def __init__(self, *, complete: bool = False) -> None:
        super().__init__()
        self.complete = complete


def rows_of_earlier(
    run: Run, dispositions: pa.Table, round: int, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Rows of the rollouts that dispositions name of earlier rounds, by round."""
    for number in sorted({n for n in dispositions["round_generated"].to_pylist() if n < round}):
        rows = dispositions.filter(pc.equal(dispositions["round_generated"], number))
        names = rows["rollout_id"].combine_chunks()
        for table in iter_row_groups(run, rollouts_manifest(run, number), columns):
            yield table.filter(pc.is_in(table["rollout_id"], names))


def unsampled(again: pa.Table, dispositions: pa.Table) -> Offences:
    """Rollouts that are said to be of earlier rounds, and are among the rollouts of none."""
    there = set(again["rollout_id"].to_pylist())
    named = dispositions["rollout_id"].to_pylist()
    return {"used again but never generated": [n for n in named if n not in there]}


def uses_offences(run: Run, consumed: pa.Table, round: int, seen: "Seen") -> Offences:
    """Rollouts that are trained on in more rounds than the run allows, or outside of their window.

    Without replay that is any round but the first. A rollout that is used again was sampled by an
    earlier round, and trained on by it.
    """
    replay = run.at_round(round).config.replay
    most, window = (1, 0) if replay is None else (replay.max_uses, replay.window_rounds)
    names, rounds = (consumed[name].to_pylist() for name in ("rollout_id", "round_generated"))
    again, strange = list[str](), list[str]()
    for name, generated in zip(names, rounds, strict=True):
        uses = seen.get(name, ())
        if len(uses) >= most:
            again.append(f"{name} (round {uses[-1]})")
        if replay is not None and generated != round:
            # Only an audit of the whole run has seen the round that generated it.
            known = seen.complete and generated not in uses
            if known or not 0 < round - generated <= window:
                strange.append(name)
    # After the look-up: a repetition within this round is reported by `_identities`.
    for name in dict.fromkeys(names):
        seen[name] = (*seen.get(name, ()), round)
    return {
        "consumed in an earlier round": again,
        "used again though never trained on, or outside of the window": strange,
    }
