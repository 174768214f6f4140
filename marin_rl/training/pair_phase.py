"""Phases that learn from preference pairs, which are committed first; see phases.py for segments.

A reward model is in reward_model.py, a policy that learns from pairs without sampling in
preference.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from marin_rl.batching.pairs import PairTokenizer, pairs_of_step
from marin_rl.config import fingerprint_fields
from marin_rl.rollouts.rewards import given_pairs
from marin_rl.storage.commits import find_commit, fingerprint, parent_of
from marin_rl.storage.runs import LATEST_OF_PAIRS, Run, committed, pairs_slot
from marin_rl.storage.tables.pairs import commit_pairs, committed_pairs
from marin_rl.tokenizers import trained_ends
from marin_rl.training.adapters import Modules
from marin_rl.training.phases import SegmentedPhase, optimizer_content
from marin_rl.training.policy_source import recorded_modules
from marin_rl.training.state import sft_result
from marin_rl.types import PairSection, PreferencePair, SlotRef

# In the fingerprint of committed pairs: the version of their table when it was first written.
PAIRS_VERSION = 1
MEASURED_PAIRS_MAX = 1024  # held-out pairs that are measured at a segment's end


class PairPhase(SegmentedPhase):
    """A phase of steps over the committed pairs of a run; `section` is that of its settings."""

    section: ClassVar[PairSection]
    program_version: ClassVar[int]
    measured: ClassVar[Sequence[str]]  # metrics of pairs, which are reported as section/NAME
    _settings: Any  # of the section

    def prepare(self) -> SlotRef:
        """Commit the run's pairs, tokens and split included, or return them if they are there.

        The user's file is not needed any more once they are. Raises InputError naming row or pair
        and field, CommitConflict where the file is another than the one the run began with.
        """
        run, settings = self._run, self._settings
        existing = committed(run, pairs_slot())
        # A file that is there must be the one that was committed; a run's folder may have grown.
        if existing is not None and not Path(settings.pairs).is_file():
            return existing
        file = given_pairs(settings.pairs, f"{self.section}.pairs")
        further, parents = self._pairs_content()
        decides = {
            "file": file.sha256,
            "held_out_fraction": settings.held_out_fraction,
            "context_length": run.config.policy.context_length,
            **asdict(self._names),
            **further,
        }
        above = [parent_of(ref) for ref in parents]
        decided = fingerprint("pairs", decides, above, PAIRS_VERSION)
        if (existing := find_commit(run.store, pairs_slot(), decided)) is not None:
            return existing
        tokenizer = PairTokenizer(
            tokenizer=self._tokenizer,
            section=self.section,
            vocab_size=self._program.base_template.spec.vocabulary,
            context_length=run.config.policy.context_length,
            ends=trained_ends(run.config.policy, self._tokenizer),
            **asdict(self._names),
        )
        pairs = self._prepared(tokenizer.tokenized(file.pairs, settings.held_out_fraction))
        extra = {"file": settings.pairs, "file_sha256": file.sha256, **asdict(self._names)}
        return commit_pairs(run, pairs, decided=decided, extra=extra, parents=above)

    def _pairs_content(self) -> tuple[Mapping[str, Any], Sequence[SlotRef]]:
        """Further content of the committed pairs: settings, and slots they are made from."""
        return {}, ()

    def _prepared(self, pairs: Sequence[PreferencePair]) -> Sequence[PreferencePair]:
        """Pairs with tokens as they are committed."""
        return pairs

    def run_segment(self, step_from: int, pairs: SlotRef) -> SlotRef:
        """Train from `step_from` to the segment's end on the committed `pairs`, and commit.

        Returns the commit that exists already. The summary holds the means of the segment's steps
        and the metrics of the held-out pairs at its end. Raises NonFiniteUpdate, CommitConflict.
        """
        ref, totals = self._segment(step_from, pairs)
        if totals:
            step_to = min(step_from + self._settings.steps_per_checkpoint, self._settings.steps)
            self._publish(step_to, self._settings.steps, totals)
        return ref

    @cached_property
    def _pairs(self) -> Sequence[PreferencePair]:
        ref = committed(self._run, pairs_slot())
        assert ref is not None, "pairs are committed before they are trained on"
        return committed_pairs(self._run, ref)

    @cached_property
    def _training_pairs(self) -> Sequence[PreferencePair]:
        return [pair for pair in self._pairs if pair.split != "eval"]

    def _taken(self, count: int, step: int) -> list[int]:
        """Places, among so many training pairs, of those that a step takes."""
        per_step, seed = self._settings.pairs_per_step, self._run.config.seed
        return pairs_of_step(count, per_step, seed, step).tolist()

    def _step_pairs(self, step: int) -> list[PreferencePair]:
        pairs = self._training_pairs
        return [pairs[place] for place in self._taken(len(pairs), step)]

    def _content(self) -> Mapping[str, Any]:
        config = self._run.config
        return {
            "program": self.program_version,
            "policy": fingerprint_fields(config.policy),
            self.section: fingerprint_fields(self._settings),
            "moments": optimizer_content(config),
            "seed": config.seed,
        }

    def _first_parents(self) -> tuple[SlotRef, ...]:
        warm = (sft_result(self._run),) if self._run.config.policy.init == "sft" else ()
        return (*self._base.commit(), *warm)

    def _named(self, metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
        own = {name: f"{self.section}/{prefix}{name}" for name in self.measured}
        names = own | {name: name for name in ("grad_norm", "lr")}
        return {
            names[name]: value
            for name, value in metrics.items()
            if name in names and math.isfinite(value)
        }


def modules_as_begun(run: Run, section: PairSection) -> Modules | None:
    """Modules of a run's adapter by the last checkpoint; None before there is one.

    An adapter's folder may be gone, or changed, since the run began.
    """
    if run.config.policy.lora is None:
        return None
    return recorded_modules(run, LATEST_OF_PAIRS[section](run))


def held_out(pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """The first held-out pairs, as many as are measured."""
    return [pair for pair in pairs if pair.split == "eval"][:MEASURED_PAIRS_MAX]
