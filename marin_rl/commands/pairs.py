"""The command `marin-rl pairs`: preference pairs out of the rollouts of a run, as a file.

What makes a pair is `rollouts.pairs`; here are the options and what is printed. Heavy modules are
imported when the command runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from marin_rl.commands.options import Root, RunName, tell
from marin_rl.errors import ConfigError

SUFFIXES = (".jsonl", ".parquet")


def pairs(
    run_name: RunName,
    *,
    output: Annotated[Path, typer.Option("--out", "-o", help="JSONL or Parquet file")],
    component: Annotated[
        str | None, typer.Option(help="reward component to rank by; default: the reward")
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, help="least difference of best and worst in a group")
    ] = 0.0,
    rounds: Annotated[str | None, typer.Option(help="like 3 or 0-9; default: all")] = None,
    root: Root = "runs",
) -> None:
    """Pair the best with the worst answer of each group of a run, for `marin-rl reward-model`."""
    if output.suffix not in SUFFIXES:
        raise ConfigError(f"--out {output}: expected a name ending in {' or '.join(SUFFIXES)}")
    from marin_rl.rollouts.pairs import pairs_of_run
    from marin_rl.storage.runs import Run
    from marin_rl.storage.tables.pairs import write_pairs

    found = pairs_of_run(
        Run.open(root, run_name), component=component, margin_min=margin, rounds=_numbers(rounds)
    )
    write_pairs(output, found)
    tell(f"wrote {len(found)} pairs to {output}")


def _numbers(text: str | None) -> list[int] | None:
    """`3` or `0-9`, the last one included, as numbers. Raises ConfigError."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    try:
        numbers = list(range(int(first), int(last or first) + 1))
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"--rounds: expected a round or a span like 0-9, found {text!r}")
    return numbers
