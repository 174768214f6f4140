"""Records of a run for a page, in the shape of its JSON.

Numbers that are not finite become null in the JSON. Texts are raw; the renderer escapes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from marin_rl.analysis.dialogues import BeforeAfter

Number = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Line, or layer of bars, of a chart: `y[i]` at `x[i]`, within `low[i]` to `high[i]`."""

    name: str
    x: Sequence[int]
    y: Sequence[Number]
    low: Sequence[Number] | None = None
    high: Sequence[Number] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Chart over rounds, or steps. `about` describes it in a sentence, for screen readers too."""

    key: str
    title: str
    unit: str
    about: str
    lines: Sequence[Line]
    kind: Literal["lines", "stack"] = "lines"
    axis: Literal["round", "step"] = "round"
    logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The last tokens of a rollout, in parallel lists; `left_out` came before them.

    `trained` is 1 where the token was the policy's own. `sampler` and `trainer` are logprobs in
    nats, null where there is none; `entropies` as well; `clipped` is 1 where clipping stopped the
    gradient.
    """

    left_out: int
    ids: Sequence[int]
    texts: Sequence[str]
    trained: Sequence[int]
    sampler: Sequence[Number]
    trainer: Sequence[Number] | None = None
    entropies: Sequence[Number] | None = None
    clipped: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Disposition of a rollout; `round` is that of the batches, null while nothing is decided."""

    kind: str = "undecided"
    reason: str = ""
    round: int | None = None
    step: int | None = None
    row: int | None = None
    segment: int | None = None
    advantage: Number = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCard:
    """Group: its example, all its rewards, and its shown rollouts (`cards`).

    `why` is the reason that this group was picked; `mean` is over its valid rewards. A card is the
    record of `analysis.dialogues` with texts of bounded length, and what a page adds: `fate`,
    `tokens`, the `shard`, and its `place` within the group, which is best, worst or empty.
    """

    id: str
    round: int
    environment: str
    example: str
    answer: str
    metadata: str
    sampling: str
    why: str
    size: int
    rewards: Sequence[Number]
    mean: Number
    cards: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A committed slot of the run, with its parents. `parts` are the first of `n_parts`."""

    name: str
    sha256: str
    created_at: str
    attempt: str
    bytes: int
    rows: int | None
    parents: Sequence[tuple[str, str]]
    parts: Sequence[tuple[str, str]] = ()
    n_parts: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSlots:
    """The slots of one round in the order they were made: the title and name of each."""

    round: int
    slots: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The head of the page and the run's provenance.

    `shared` are the ancestors of a fork: run id, first round that it did not play, and the digest
    of its configuration.
    """

    run_id: str
    root: str
    headline: str
    lines: Sequence[tuple[str, str]]
    config: str
    content_digest: str
    shared: Sequence[tuple[str, int, str]]
    environment: Sequence[tuple[str, str]]
    code: Sequence[tuple[str, str]]
    libraries: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of a page. `notes` describe the selection; `absent` are charts without data.

    `slots` are those that `rounds` name, by name. `held_out` are answers of the first and the
    latest evaluation side by side.
    """

    facts: Facts
    charts: Sequence[Chart]
    absent: Sequence[str]
    groups: Sequence[GroupCard]
    rounds: Sequence[RoundSlots]
    slots: Mapping[str, Slot]
    notes: Sequence[str]
    held_out: BeforeAfter | None = None
    tokenizer_digest: str = ""
    made_at: str = ""
    stage: str = ""
    ended: bool = False
