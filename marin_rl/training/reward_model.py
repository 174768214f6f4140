"""The training of a reward model: its pairs committed, then segments of steps, each committed.

A segment starts from the checkpoint of the one before and takes pairs that depend on the seed and
the step alone, so a run that was killed ends in the same bits as one that was not. What a segment
measured is in its manifest, and so is the scale of the rewards, for normalisation.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import (
    PairBatch,
    PairTokenizer,
    longest,
    pair_batch,
    pairs_of_step,
)
from marin_rl.compilation import set_matmul_precision
from marin_rl.config import RewardModelConfig, fingerprint_fields
from marin_rl.errors import ConfigError
from marin_rl.metrics import over_steps
from marin_rl.progress import ProgressEvent, publish
from marin_rl.storage.commits import find_commit, fingerprint
from marin_rl.storage.runs import (
    Run,
    committed,
    latest_reward_model,
    pairs_slot,
    reward_model_slot,
)
from marin_rl.storage.tables.pairs import commit_pairs, committed_pairs, read_pairs
from marin_rl.tokenizers import TokenizerIdentity, trained_ends
from marin_rl.training.adapters import Modules, modules_of
from marin_rl.training.compiled_step import check_finite
from marin_rl.training.critic import ScalarModel
from marin_rl.training.mesh import layout_of
from marin_rl.training.model import (
    matrix_mask,
    named_parameters,
    with_gradient_checkpointing,
    with_parameters,
)
from marin_rl.training.optimizer import learning_rate_schedule, make_optimizer, sft_adamw
from marin_rl.training.policy_source import (
    adapter_before_training,
    adapter_of_run,
    commit_base,
    policy_parameters,
    read_base,
    recorded_modules,
)
from marin_rl.training.preference import (
    SequenceScorer,
    make_preference_step,
    padded_length,
    pair_arrays,
    preference_totals,
)
from marin_rl.training.scalar_adapters import first_scalar, frozen_trunk, scalar_template
from marin_rl.training.sft import STEPS_PER_EVENT, made_ahead
from marin_rl.training.state import (
    AdapterOf,
    CheckpointSlot,
    CommittedState,
    fresh_state,
    sft_result,
    state_like,
    template_of,
)
from marin_rl.training.step import as_array
from marin_rl.training.step_types import Parameters, TrainState
from marin_rl.types import PreferencePair, SlotRef
from schemas.tables import PAIRS_VERSION

# Counts up when the same pairs would train other parameters.
PROGRAM_VERSION = 1
MEASURED_PAIRS_MAX = 1024  # held-out pairs that are measured at a segment's end
STD_MIN = 1e-6


class RewardModelTraining:
    """Trains the reward model of one run, segment by segment."""

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError where the run configures no reward model."""
        config, self._settings = run.config, settings_of(run)
        set_matmul_precision(config.policy.compute_dtype)
        self._run, self._tokenizer = run, tokenizer
        self._names = TokenizerIdentity.of(tokenizer)
        self._layout = layout_of(config.mesh)
        self._trunk = template_of(config.policy, tokenizer)
        checkpointing = config.training.gradient_checkpointing
        trunk = with_gradient_checkpointing(self._trunk) if checkpointing else self._trunk
        adamw, lora = sft_adamw(self._settings, config.training), config.policy.lora
        self._modules: Modules = {}
        if lora is not None:
            # By the last checkpoint: an adapter's folder may be gone, or changed, since the run
            # began.
            recorded = recorded_modules(run, latest_reward_model(run))
            self._modules = recorded or modules_of(config.policy, self._trunk)
            rate = adamw.learning_rate * lora.learning_rate_factor
            adamw = dataclasses.replace(adamw, learning_rate=rate)
        self._template = scalar_template(config.policy, trunk, self._modules)
        self._optimizer = make_optimizer(adamw, matrix_mask(self._template))
        like = state_like(self._template, self._optimizer)
        place = partial(
            self._layout.place_state, template=self._template, optimizer=self._optimizer
        )
        self._committed = CommittedState(run, self._names, like, place)
        schedule, dtype = learning_rate_schedule(adamw), config.policy.compute_dtype
        self._step = make_preference_step(
            self._template, self._optimizer, schedule, dtype, self._layout
        )
        self._scorer = SequenceScorer(self._template, config.policy)
        self._pairs: _Sides | None = None
        self._base: Parameters | None = None

    def prepare(self) -> SlotRef:
        """Commit the run's pairs, tokens and split included, or return them if they are there.

        The user's file is not needed any more once they are. Raises InputError naming row or pair
        and field, CommitConflict where the file is another than the one the run began with.
        """
        run, settings = self._run, self._settings
        existing = committed(run, pairs_slot())
        # Only where the file is gone: where it is there, it must be the one that was committed.
        if existing is not None and not Path(settings.pairs).exists():
            return existing
        file = read_pairs(settings.pairs)
        decides = {
            "file": file.sha256,
            "held_out_fraction": settings.held_out_fraction,
            "context_length": run.config.policy.context_length,
            **asdict(self._names),
        }
        decided = fingerprint("pairs", decides, (), PAIRS_VERSION)
        if (existing := find_commit(run.store, pairs_slot(), decided)) is not None:
            return existing
        tokenizer = PairTokenizer(
            tokenizer=self._tokenizer,
            vocab_size=self._trunk.Vocab.size,
            context_length=run.config.policy.context_length,
            ends=trained_ends(run.config.policy, self._tokenizer),
            **asdict(self._names),
        )
        pairs = tokenizer.tokenized(file.pairs, settings.held_out_fraction)
        extra = {"file": settings.pairs, "file_sha256": file.sha256, **asdict(self._names)}
        return commit_pairs(run, pairs, decided=decided, extra=extra)

    def run_segment(self, step_from: int, pairs: SlotRef) -> SlotRef:
        """Train from `step_from` to the segment's end on the committed `pairs`, and commit.

        Returns the commit that exists already. The summary holds the means of the segment's steps
        and the metrics of the held-out pairs at its end. Raises NonFiniteUpdate, CommitConflict.
        """
        settings, run = self._settings, self._run
        assert 0 <= step_from < settings.steps, (step_from, settings.steps)
        assert step_from % settings.steps_per_checkpoint == 0, (step_from, settings)
        step_to = min(step_from + settings.steps_per_checkpoint, settings.steps)
        slot = self._slot(step_from, step_to, pairs)
        if existing := slot.find():
            return existing
        sides, history = self._sides(pairs), list[Mapping[str, float]]()
        frozen = self._frozen(slot.adapter)
        state = self._committed.take(slot.parents[0]) if step_from else self._first_state()
        limit = run.config.training.nonfinite_updates_max
        for step, batch in made_ahead(partial(self._batch, sides.train), step_from, step_to):
            state, metrics = self._take(state, batch, frozen)
            check_finite(metrics, int(state.refused) if metrics["updates/skipped"] else 0, limit)
            history.append(_named(metrics))
            if (step + 1) % STEPS_PER_EVENT == 0 or step + 1 == step_to:
                self._publish(step + 1, history[-1])
        measured = self._measured({**frozen, **state.parameters}, sides)
        totals = over_steps(history) | _named(measured.totals, "held_out_")
        extra = {"reward_mean": measured.mean, "reward_std": measured.std}
        ref = slot.commit(state, totals, extra)
        self._publish(step_to, totals)
        # Another attempt that was first may have other bits: its state is read then.
        if not ref.reused:
            self._committed.keep(state, ref)
        return ref

    def _slot(self, step_from: int, step_to: int, pairs: SlotRef) -> CheckpointSlot:
        """The slot of a segment, whose parents are its first checkpoint and the pairs.

        The first one of an adapter has its base, which is committed here, as a parent too.
        """
        before: tuple[SlotRef, ...] = ()
        if step_from:
            ref = committed(self._run, reward_model_slot(step_from))
            assert ref is not None, f"step {step_from} is committed before the segment after it"
            before = (ref,)
        else:
            if self._modules:
                before = (commit_base(self._run, self._names, self._tokenizer, self._trunk),)
            if self._run.config.policy.init == "sft":
                before = (*before, sft_result(self._run))
        return CheckpointSlot(
            run=self._run,
            slot=reward_model_slot(step_to),
            tokenizer=self._names,
            content=self._content(),
            parents=(*before, pairs),
            adapter=adapter_of_run(self._run, self._modules),
        )

    def _first_state(self) -> TrainState:
        """The trunk of a policy, or an adapter of it, and a head that returns 0 for everything."""
        config, trunk = self._run.config, self._trunk
        if self._modules:
            adapter = adapter_before_training(self._run, self._modules, trunk)
            parameters = first_scalar(adapter, trunk)
        else:
            policy = policy_parameters(self._run, self._names, self._tokenizer, trunk)
            parameters = named_parameters(ScalarModel.of(with_parameters(trunk, policy)))
        state = fresh_state(parameters, self._optimizer, config.seed)
        return self._layout.place_state(state, self._template, self._optimizer)

    def _frozen(self, adapter: AdapterOf | None) -> Parameters:
        """The trunk that an adapter leaves as it is, on the devices; read once, nothing without."""
        if adapter is None:
            return {}
        if self._base is None:
            base = read_base(self._run, adapter.base_digest, self._trunk)
            frozen = frozen_trunk(self._run.config.policy, self._template, base)
            self._base = self._layout.place_parameters(frozen, self._template)
        return self._base

    def _content(self) -> dict[str, object]:
        config = self._run.config
        return {
            "program": PROGRAM_VERSION,
            "policy": fingerprint_fields(config.policy),
            "reward_model": fingerprint_fields(self._settings),
            # Of `training`, what the optimizer of a reward model uses; changing the rest keeps it.
            "moments": [config.training.beta1, config.training.beta2, config.training.epsilon],
            "seed": config.seed,
        }

    def _sides(self, pairs: SlotRef) -> "_Sides":
        """Training pairs and held-out pairs, read once."""
        if self._pairs is None:
            everything = committed_pairs(self._run, pairs)
            self._pairs = _Sides(
                train=[pair for pair in everything if pair.split != "eval"],
                held_out=[pair for pair in everything if pair.split == "eval"],
            )
        return self._pairs

    def _batch(self, pairs: Sequence[PreferencePair], step: int) -> PairBatch:
        settings, config = self._settings, self._run.config
        taken = pairs_of_step(len(pairs), settings.pairs_per_step, config.seed, step)
        chosen = [pairs[index] for index in taken]
        length = padded_length(longest(chosen), config.policy.context_length)
        return pair_batch(chosen, settings.margin, length)

    def _take(
        self, state: TrainState, batch: PairBatch, frozen: Parameters
    ) -> tuple[TrainState, dict[str, float]]:
        settings, layout = self._settings, self._layout
        shape = settings.microbatch_pairs, settings.pairs_per_step
        arrays, used = pair_arrays(batch, *shape, layout)
        with layout.active():
            placed = layout.place_rows(arrays)
            state, metrics = self._step(state, placed, as_array(used), frozen)
        return state, {name: float(value) for name, value in jax.device_get(metrics).items()}

    def _measured(self, parameters: Parameters, sides: "_Sides") -> "_Measured":
        """Metrics of the held-out pairs, and the scale of rewards (theirs, else the others')."""
        pairs = (sides.held_out or sides.train)[:MEASURED_PAIRS_MAX]
        batch = pair_batch(pairs, self._settings.margin, longest(pairs))
        rows = zip(batch.token_ids, batch.inside, strict=True)
        with self._layout.active():
            rewards = self._scorer.score(parameters, [ids[inside] for ids, inside in rows])
        totals = preference_totals(rewards[0::2], rewards[1::2], batch.margins)
        return _Measured(
            totals=totals if sides.held_out else {},
            mean=float(rewards.mean()),
            # A model that gives one reward to all would make its users divide by 0.
            std=max(float(rewards.std()), STD_MIN),
        )

    def _publish(self, step: int, metrics: Mapping[str, float]) -> None:
        publish(
            ProgressEvent(
                run_id=self._run.run_id,
                stage="reward_model",
                done=step,
                total=self._settings.steps,
                metrics=metrics,
            )
        )


@dataclass(frozen=True, slots=True)
class _Sides:
    train: list[PreferencePair]
    held_out: list[PreferencePair]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    totals: Mapping[str, float]
    mean: float
    std: float


def settings_of(run: Run) -> RewardModelConfig:
    """The section `reward_model` of a run. Raises ConfigError without one."""
    settings = run.config.reward_model
    if settings is None:
        raise ConfigError(
            f"run {run.run_id!r} has no section reward_model: add one that names the file of pairs "
            "(reward_model.pairs)"
        )
    return settings


def _named(metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Under the names of marin_rl.metrics; numbers that are not finite are left out."""
    own = {name: f"reward_model/{prefix}{name}" for name in ("loss", "accuracy", "margin")}
    names = own | {name: name for name in ("grad_norm", "lr")}
    return {
        names[name]: value
        for name, value in metrics.items()
        if name in names and math.isfinite(value)
    }
