"""Following a run: the checkpoint that its trainer asks for, else the newest one, as committed.

A trainer that samples from followers names a checkpoint next to the run (`storage.fleet.Target`):
the policy of a round follows from its number, and a run that is resumed may go back by one. Leaves
out how weights are loaded, proven and switched (`weight_updates`).
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from marin_rl.errors import CorruptObject, MarinRLError, NewerSchema, ObjectMissing
from marin_rl.serving.weights.checkpoint_loader import Loaded, Served, Source, read_checkpoint
from marin_rl.serving.weights.weight_updates import Update, UpdateRunning, WeightUpdater
from marin_rl.storage.fleet import FleetBoard, Target, run_sha256
from marin_rl.storage.runs import Run, committed_checkpoint, round_of

POLL_S = 2.0
BACK_OFF_MAX_S = 60.0  # between looks at a store that is away
REFUSED_FIRST_S = 15.0  # before a checkpoint that was refused is read again
REFUSED_MAX_S = 600.0
STOP_S = 30.0  # for an update that is under way

_log = logging.getLogger(__name__)


Take = Callable[[int, str | None], Update]  # serves a round, with the digest promised of it
Answer = Callable[[Target], None]


def whole_checkpoints(updater: WeightUpdater, run: Run) -> Take:
    """Take the checkpoint of a round as new weights of the engine: see `WeightUpdater.load`."""

    def take(round: int, promised: str | None) -> Update:
        def read(served: Served) -> Loaded:
            return read_checkpoint(run, round, promised, served)

        source = Source(kind="watcher", place=run.store.url, read=read)
        return updater.load(source, recompute_kv_cache=run.config.recompute_kv_cache)

    return take


@dataclass(frozen=True, slots=True)
class Refusal:
    """A checkpoint that was refused: when to look at it again, and after how long a pause."""

    again_at: float
    pause_s: float


class CheckpointWatcher:
    """Serves the checkpoint that is asked for on `board`, else the newest of `run` that can be.

    As a context it looks from a thread. `take` serves the checkpoint of a round; `answer` gets each
    target that is read, before that. It begins after `round`. A round is taken once: weights that
    are loaded by hand stay until the next one is committed. A refused round is looked at again
    after `again_s`, and then less and less often.
    """

    def __init__(
        self,
        take: Take,
        run: Run,
        round: int,
        *,
        board: FleetBoard | None = None,
        answer: Answer | None = None,
        poll_s: float | int = POLL_S,
        again_s: float | int = REFUSED_FIRST_S,
    ) -> None:
        self._board, self._ignored, self._answer = board, "", answer
        self._take, self._run = take, run
        self._poll_s, self._again_s = float(poll_s), float(again_s)
        # the round whose checkpoint was taken last
        self.round = round
        self._refused: dict[int, Refusal] = {}
        self._stopping = threading.Event()
        # a daemon: an update that outlasts STOP_S must not keep the process alive
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> "CheckpointWatcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop looking. An update that is under way ends first, if it does so within STOP_S."""
        self._stopping.set()
        self._thread.join(timeout=STOP_S)

    def _follow(self) -> None:
        pause_s = self._poll_s
        while not self._stopping.wait(pause_s):
            try:
                self.look()
                pause_s = self._poll_s
            except (MarinRLError, OSError) as error:
                pause_s = self._longer(pause_s)
                _log.warning(
                    "cannot look at %s, again in %.3g s: %s", self._run.store.url, pause_s, error
                )
            except (RuntimeError, ValueError, LookupError, TypeError):
                # a fault of ours; a server that silently stopped to follow would be worse
                pause_s = self._longer(pause_s)
                _log.exception("looking at %s failed", self._run.store.url)

    def _longer(self, pause_s: float) -> float:
        return min(2 * pause_s, max(BACK_OFF_MAX_S, self._poll_s))

    def look(self) -> None:
        """Take the checkpoint that is asked for, else the newest one that is newer than the last.

        Raises what the store raises where that may pass; nothing is refused for it.
        """
        target = self._target()
        if target is not None:
            if self._answer is not None:
                self._answer(target)
            # unequal, and not larger: a run that is resumed may go back by one
            if target.version != self.round and self._may_try(target.version):
                self._load(target.version, target.parameters_digest)
            return
        # Newest first: after an outage of an hour only the last checkpoint is read.
        for round in sorted((r for r in self._rounds() if r > self.round), reverse=True):
            if self._may_try(round) and self._is_committed(round) and self._load(round):
                return

    def _may_try(self, round: int) -> bool:
        return round not in self._refused or time.monotonic() >= self._refused[round].again_at

    def _target(self) -> Target | None:
        """The checkpoint that a trainer asks for; None where none does, or none does any more."""
        if self._board is None:
            return None
        try:
            target = self._board.target()
            if target is None or target.run_sha256 != run_sha256(self._run.folder):
                return None
        except (CorruptObject, NewerSchema, ObjectMissing) as error:
            if str(error) != self._ignored:
                self._ignored = str(error)
                _log.warning("what a trainer asks for is ignored: %s", error)
            return None
        # One that was killed left it behind, once others have trained beyond what it can have.
        beyond = (r for r in self._rounds() if r > target.through)
        return None if any(map(self._is_committed, beyond)) else target

    def _rounds(self) -> list[int]:
        rounds = map(round_of, self._run.store.children("checkpoints"))
        return [round for round in rounds if round is not None]

    def _is_committed(self, round: int) -> bool:
        try:
            return committed_checkpoint(self._run, round) is not None
        except CorruptObject:
            return True  # and refused, with a word on why, by those who load it

    def _load(self, round: int, promised: str | None = None) -> bool:
        run = self._run
        try:
            update = self._take(round, promised)
        except UpdateRunning:
            return True  # nothing older is wanted either: next time
        except MarinRLError as error:
            # no fault of the checkpoint: the same one is tried at the next look
            if error.transient:
                raise
            before = self._refused.get(round)
            # Doubled: a checkpoint that is damaged for good is read hundreds of times otherwise.
            pause_s = self._again_s if before is None else min(2 * before.pause_s, REFUSED_MAX_S)
            self._refused[round] = Refusal(time.monotonic() + pause_s, pause_s)
            _log.warning(
                "round %d of %s is refused, round %d goes on; looked at again in %.3g s: %s",
                *(round, run.run_id, self.round, pause_s, error),
            )
            return False
        _log.info("round %d of %s is served after %.3g s", round, run.run_id, update.seconds)
        self.round = round
        # Older refusals are forgotten, since older rounds are not looked at again.
        self._refused = {r: refusal for r, refusal in self._refused.items() if r > round}
        return True
