"""A run as a page, from committed slots.

A round that is sealed, batched and trained is read once: a page of a running run reads new rounds
alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl

from marin_rl.analysis.scan import scan_evals
from marin_rl.analysis.stage import stage_of
from marin_rl.analysis.status import Followed, status_of
from marin_rl.display.text import evenly
from marin_rl.pages.charts import make_charts
from marin_rl.pages.records import Page, RoundSlots, Slot
from marin_rl.pages.rounds import Amount, RoundPart, read_round
from marin_rl.pages.slots import facts_of, round_slots
from marin_rl.pages.tokens import TokenTexts
from marin_rl.rollouts.estimates import Estimate, estimate_of_groups
from marin_rl.storage.run_progress import RoundProgress
from marin_rl.storage.runs import Run

TOKENS_OF_A_PAGE = 400_000
CHARACTERS_OF_A_PAGE = 2_500_000
TOKENS_MAX, CHARACTERS_MAX = 2048, 20_000

Key = tuple[bool, bool, bool, Amount]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Number of rollouts a page shows: of each shown round, and of the run."""

    groups_per_round: int = 4
    members_per_group: int = 4
    rollouts_max: int = 1600

    def rounds_max(self) -> int:
        """Number of rounds whose rollouts are shown."""
        return max(1, self.rollouts_max // max(1, self.groups_per_round * self.members_per_group))

    def amount(self, rounds: int) -> Amount:
        """Amount of one round that keeps a page of `rounds` rounds small enough for browsers."""
        each = max(1, self.groups_per_round * self.members_per_group)
        count = each * min(max(rounds, 1), self.rounds_max())
        return Amount(
            groups=self.groups_per_round,
            members=self.members_per_group,
            tokens=max(64, min(TOKENS_MAX, TOKENS_OF_A_PAGE // count)),
            characters=max(400, min(CHARACTERS_MAX, CHARACTERS_OF_A_PAGE // count)),
        )


class RunPage:
    """The page of one run; `page()` returns its present state. Not thread safe."""

    def __init__(self, run: Run, choice: Choice | None = None) -> None:
        self._run, self._choice = run, choice or Choice()
        self._followed = Followed(run)
        self._times_begun = self._followed.times_begun
        self._texts = TokenTexts(run.config.policy)
        self._parts: dict[int, tuple[Key, RoundPart]] = {}
        self._slots: dict[int, dict[str, Slot]] = {}
        self._held_out: dict[int, Estimate] = {}

    def page(self) -> Page:
        """The committed state. Raises CorruptObject, NewerSchema, StoreUnavailable."""
        run, committed = self._run, self._followed.progress()
        status = status_of(self._followed, committed)
        self._forget_another()
        stage = stage_of(run, committed)
        sealed = [number for number in committed if committed[number].rollouts]
        shown = evenly(sealed, self._choice.rounds_max())
        parts = self._round_parts(committed, status.planned, shown)
        self._read_evaluations(committed)
        charts, absent = make_charts(
            status.rounds,
            {part.round: part.reward for part in parts if part.reward is not None},
            dict(sorted(self._held_out.items())),
        )
        lines = {k: v for k, v in status.facts.items() if k not in ("root", "in progress")}
        lines["rollouts"] = f"{sum(part.rollouts for part in parts):,}"
        slots = {number: self._slots_of(number, committed) for number in shown}
        notes = self._notes(parts)
        return Page(
            facts=facts_of(run, status.headline, lines),
            charts=charts,
            absent=absent,
            groups=[group for part in parts for group in part.groups],
            rounds=[
                RoundSlots(round=number, slots=[(title, slot.name) for title, slot in own.items()])
                for number, own in slots.items()
            ],
            slots={slot.name: slot for own in slots.values() for slot in own.values()},
            notes=notes,
            tokenizer_digest=self._texts.digest,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            stage="" if stage.ended else stage.text,
            ended=stage.ended,
        )

    def _forget_another(self) -> None:
        """Clear the caches where the folder now has another run of the same name."""
        if self._followed.times_begun != self._times_begun:
            self._times_begun = self._followed.times_begun
            for kept in (self._parts, self._slots, self._held_out):
                kept.clear()

    def _round_parts(
        self, committed: dict[int, RoundProgress], planned: int, shown: Sequence[int]
    ) -> list[RoundPart]:
        sealed = [number for number in committed if committed[number].rollouts]
        amount = self._choice.amount(planned)
        for number in sealed:
            of_round = amount if number in shown else Amount(groups=0)
            trained = number + 1 in committed and committed[number + 1].checkpoint
            key = (committed[number].rollouts, committed[number].batches, trained, of_round)
            if self._parts.get(number, (None, None))[0] != key:
                self._parts[number] = (key, read_round(self._run, number, of_round, self._texts))
        return [self._parts[number][1] for number in sealed]

    def _read_evaluations(self, committed: dict[int, RoundProgress]) -> None:
        new = [n for n in committed if committed[n].evaluation and n not in self._held_out]
        if not new:
            return
        run = self._run
        scanned = scan_evals(run.config.root, run.run_id, dict(run.config.storage_options))
        frame = (
            scanned.filter(pl.col("round").is_in(new))
            .select("round", "example_id", "reward")
            .collect()
        )
        for (number,), rows in frame.group_by("round"):
            groups = rows.group_by("example_id").agg("reward")["reward"].to_list()
            usable = [[r for r in group if r is not None and math.isfinite(r)] for group in groups]
            reward = estimate_of_groups(usable)
            if reward is not None:
                self._held_out[int(number)] = reward  # type: ignore[arg-type]  # an int column

    def _slots_of(self, number: int, committed: dict[int, RoundProgress]) -> dict[str, Slot]:
        if number not in self._slots:
            slots = round_slots(self._run, number)
            trained = number + 1 in committed and committed[number + 1].checkpoint
            if not trained:
                return slots
            self._slots[number] = slots
        return self._slots[number]

    def _notes(self, parts: Sequence[RoundPart]) -> list[str]:
        shown = [part for part in parts if part.groups]
        cards = sum(len(group.cards) for part in shown for group in part.groups)
        total = sum(part.rollouts for part in parts)
        every = len(shown) == len(parts)
        rounds = "every round" if every else f"{len(shown)} of {len(parts)} rounds"
        notes = [
            f"Shown: {cards:,} of {total:,} rollouts, from {rounds}: the group whose rewards "
            "differ most, those with the lowest and the highest mean, then others in order; of "
            "each its best, its worst, then others in order. Nothing is picked by chance. Curves "
            "are over all rollouts."
        ]
        digests = {part.tokenizer_digest for part in shown} - {""}
        if self._texts.problem:
            notes.append(f"Tokens are shown by their ids: {self._texts.problem}")
        elif not self._texts.is_of(digests):
            notes.append(
                "Tokens are read with another tokenizer than the rollouts were sampled with: "
                f"expected {', '.join(sorted(digests))}, found {self._texts.digest}."
            )
        return notes
