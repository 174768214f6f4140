"""Runtime of a run in this process: tokenizer, trainer, reward model, server, kept between tasks.

Tasks ask for what they need by run; it is made on first use and kept, so a round compiles nothing,
reads no checkpoint it just wrote, and hands weights to the engine as references. Nothing here is
needed for correctness: a new process reads all of it from the committed slots.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from marin_rl.errors import ConfigError, MarinRLError
from marin_rl.machine import give_back_freed_memory
from marin_rl.processes import joined
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.runs import Run, RunRef, round_of
from marin_rl.storage.written_behind import end_writes
from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for
from marin_rl.types import PairSection, ServedPolicy, SlotRef

# JAX takes seconds to import, and processes that only sample or read need neither:
# properties that need them import them.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from marin_rl.rollouts.rewards import RewardScorer
    from marin_rl.rollouts.teaching import Teacher
    from marin_rl.training.loop import Trainer
    from marin_rl.training.pair_phase import PairPhase
    from marin_rl.training.sft import WarmStart
    from marin_rl.weight_sync import Transport, Weights


P = ParamSpec("P")
T = TypeVar("T")

# Methods that every process of a run calls with the same arguments: they take the devices of all.
CALLS = (
    "init_policy", "run_sft_segment", "train_round", "prepare_pairs", "run_pair_segment",
    "trained_weights",
)  # fmt: skip


def on_all_processes(
    method: "Callable[Concatenate[RunRuntime, P], T]",
) -> "Callable[Concatenate[RunRuntime, P], T]":
    """Make a method one of CALLS, of which a runtime makes one at a time.

    Where it fails all processes forget what they keep: they go on from the same files.
    """
    assert method.__name__ in CALLS, method.__name__

    @wraps(method)
    def call(self: "RunRuntime", *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "arguments of calls are posted by position"
        with self._lock:
            work, processes = partial(method, self, *arguments), joined()
            if processes is None:
                return work()
            try:
                if processes.number:
                    return work()
                return processes.call(method.__name__, [self._named_run, *arguments], work)
            except BaseException:
                self._forget()
                raise

    return call


def perform(method: str, arguments: Sequence[Any]) -> None:
    """Make a call that process 0 has posted. Raises ConfigError where this host has another run."""
    assert method in CALLS, method
    named, *others = arguments
    reference = {**named["reference"], "free": tuple(named["reference"]["free"])}
    run = Run.of(RunRef(**reference))
    if (record := run_sha256(run.folder)) != named["record"]:
        raise ConfigError(
            f"expected the run of process 0 at {run.folder.url}, with digest "
            f"{named['record'][:12]} of its run.json, found {record[:12]}: give all processes one "
            "root"
        )
    getattr(runtime_for(run), method)(*others)


class RunRuntime:
    """Tokenizer, trainer, reward model and server of one run, each made on first use.

    Methods may be called from any thread. What trains runs one at a time, and so does what serves;
    both at once only where rounds are sampled ahead of training.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.RLock()
        self._serving = threading.RLock()
        self._pair_phases: dict[PairSection, PairPhase] = {}
        self._transfers_failed = 0

    @property
    def _named_run(self) -> Mapping[str, Any]:
        """The run for other processes, and the digest of its run.json."""
        return {"reference": asdict(self._run.reference), "record": run_sha256(self._run.folder)}

    def _forget(self) -> None:
        for name in ("trainer", "_warm_start"):
            self.__dict__.pop(name, None)
        self._pair_phases.clear()

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return tokenizer_for(self._run.config.policy)

    @cached_property
    def trainer(self) -> "Trainer":
        """The run's trainer, before any checkpoint is loaded. Raises InputError, ConfigError."""
        from marin_rl.training.loop import Trainer

        return Trainer(self._run, self.tokenizer)

    @cached_property
    def _warm_start(self) -> "WarmStart":
        from marin_rl.training.sft import WarmStart

        return WarmStart(self._run, self.tokenizer)

    def _pair_phase(self, section: PairSection) -> "PairPhase":
        from marin_rl.training.pair_phase import PreferenceTraining, RewardModelTraining

        if section not in self._pair_phases:
            kind = PreferenceTraining if section == "preference" else RewardModelTraining
            self._pair_phases[section] = kind(self._run, self.tokenizer)
        return self._pair_phases[section]

    @cached_property
    def _reward_scorer(self) -> "RewardScorer":
        from marin_rl.compilation import enable_compilation_cache
        from marin_rl.rollouts.rewards import reward_model_slot_of
        from marin_rl.training.bradley_terry import LearnedReward

        enable_compilation_cache()
        names = TokenizerIdentity.of(self.tokenizer)
        slot = reward_model_slot_of(
            self._run.config, names.tokenizer_digest, names.chat_template_digest
        )
        return LearnedReward(slot, self.tokenizer)

    @cached_property
    def _teacher(self) -> "Teacher":
        from marin_rl.rollouts.teaching import prove_teacher

        settings = self._run.config.distillation
        if settings is not None and settings.endpoint is not None:
            from marin_rl.rollouts.teaching import EndpointTeacher

            teacher: Teacher = EndpointTeacher(self._run.config)
        else:
            from marin_rl.compilation import enable_compilation_cache
            from marin_rl.training.teacher import local_teacher

            enable_compilation_cache()
            teacher = local_teacher(self._run, self.tokenizer)
        prove_teacher(self._run, teacher)
        return teacher

    @cached_property
    def transport(self) -> "Transport":
        from marin_rl.weight_sync import transport_of

        return transport_of(self._run, self.tokenizer)

    def reward_scorer(self) -> "RewardScorer | None":
        """The reward model that the run's environment names, read once; None where it names none.

        Raises ConfigError and InputError as `reward_model_slot_of` does, CorruptObject.
        """
        if self._run.config.environment.reward_model is None:
            return None
        with self._serving:
            return self._reward_scorer

    def teacher(self) -> "Teacher | None":
        """The teacher that scores rollouts, read and proven once; None without one.

        Raises as `local_teacher`, `EndpointTeacher` and `prove_teacher` do.
        """
        if self._run.config.rollout_teacher is None:
            return None
        with self._serving:
            return self._teacher

    @on_all_processes
    def prepare_pairs(self, section: PairSection) -> SlotRef:
        """Commit the pairs that a phase learns from: see `PairPhase.prepare`."""
        self.__dict__.pop("_warm_start", None)  # its state and programs are not needed again
        return self._pair_phase(section).prepare()

    @on_all_processes
    def run_pair_segment(self, section: PairSection, step_from: int, pairs: SlotRef) -> SlotRef:
        return self._pair_phase(section).run_segment(step_from, pairs)

    @on_all_processes
    def run_sft_segment(self, step_from: int) -> SlotRef:
        return self._warm_start.run_segment(step_from)

    @on_all_processes
    def init_policy(self) -> SlotRef:
        self.__dict__.pop("_warm_start", None)  # its state and programs are not needed again
        return self.trainer.init_policy()

    @on_all_processes
    def train_round(self, round: int, batches: SlotRef, checkpoint: SlotRef) -> SlotRef:
        """Train one round and commit its checkpoint: see `Trainer.train_round`."""
        if "transport" in self.__dict__ and not self._run.config.max_staleness:
            self.transport.sleep()  # its caches' memory is the trainer's meanwhile
        trained = self.trainer.train_round(round, batches, checkpoint)
        # Without this the heap grows from round to round, by 15 MB for a small model, since
        # live arrays fragment what the step freed. The next step's page faults cost less.
        give_back_freed_memory()
        return trained

    @on_all_processes
    def trained_weights(self, checkpoint: SlotRef, version: int, apart: bool) -> "Weights":  # noqa: FBT001 - posted by position
        """The trainer's own arrays of a checkpoint, for servers: see `weight_sync.Weights`."""
        from marin_rl.weight_sync import trained_weights

        self.trainer.load(checkpoint)
        weights = trained_weights(self.trainer, version, apart=apart)
        self.transport.publish_beside(weights)
        return weights

    def serve(self, checkpoint: SlotRef) -> ServedPolicy:
        """Serve a committed checkpoint, verify that it is served, and return the policy.

        The embedded server starts on first use and then takes the trainer's own arrays, whose
        digest the checkpoint's manifest carries; remote endpoints receive a copy, or must have it
        already. Raises StalePolicy where a canary contradicts the trainer's model, BadResponse
        where a server leaves temperature out of its log-probabilities, InputError for a model the
        engine cannot decode, CorruptObject for a damaged checkpoint, and what the client raises.
        """
        with self._serving:
            try:
                policy = self._serve(checkpoint)
            except MarinRLError:
                self._transfers_failed += 1
                raise
            policy = replace(
                policy, transfer={**policy.transfer, "failures": float(self._transfers_failed)}
            )
            self._transfers_failed = 0
            return policy

    def _serve(self, checkpoint: SlotRef) -> ServedPolicy:
        from marin_rl.serving.weights.canary import prove_version

        weights = self._weights_of(checkpoint)
        began, identity = time.monotonic(), weights.identity
        published = self.transport.publish(weights)
        policy = ServedPolicy(
            endpoints=published.endpoints,
            model=published.model,
            weight_version=weights.version,
            parameters_digest=identity.parameters_digest,
            tokenizer_digest=identity.tokenizer_digest,
            chat_template_digest=identity.chat_template_digest,
            checkpoint=checkpoint,
            transfer={
                "bytes": float(published.copies * weights.bytes),
                "seconds": time.monotonic() - began,
                "transfers": float(published.copies),
            },
            weights=published.weights,
        )
        return prove_version(self._run, policy, weights.trained)

    def _weights_of(self, checkpoint: SlotRef) -> "Weights":
        """The trainer's own arrays, or those in files where it is busy or beyond the checkpoint."""
        from marin_rl.weight_sync import committed_weights

        ahead, apart = bool(self._run.config.max_staleness), self.transport.apart
        version = round_of(checkpoint.slot.rpartition("/")[2]) or 0
        if self._lock.acquire(blocking=not ahead):
            try:
                if not ahead or self.trainer.checkpoint in (None, checkpoint):
                    return self.trained_weights(checkpoint, version, apart)
            finally:
                self._lock.release()
        return committed_weights(self._run, checkpoint, version, apart=apart)

    def close(self) -> None:
        """Stop the server, if there is one; the rest is left to the garbage collector."""
        with self._serving:
            if "transport" in self.__dict__:
                self.transport.close()


_runtimes: dict[tuple[str, str], RunRuntime] = {}
_runtimes_lock = threading.Lock()


def runtime_for(run: Run) -> RunRuntime:
    """Return this process's runtime of `run`; the same object for the same root and run id."""
    key = (run.store.url, run.run_id)
    with _runtimes_lock:
        if key not in _runtimes:
            _runtimes[key] = RunRuntime(run)
        return _runtimes[key]


def release(run: Run) -> None:
    """Stop and drop this process's runtime of `run`, once what it writes is committed."""
    end_writes(run.folder.url)
    with _runtimes_lock:
        kept = _runtimes.pop((run.store.url, run.run_id), None)
    if kept is not None:
        kept.close()
