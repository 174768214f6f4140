"""Training states in memory and in checkpoints: restored, continued from, committed.

A whole checkpoint has `parameters` by path in the model, `optimizer` by path in optax's own state,
and the counters; others leave out what training their rounds again gives. Also here: a run's
architecture, and where its first parameters come from.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from transformers import PreTrainedTokenizerBase

from marin_rl.compilation import device_array
from marin_rl.config import Config, PolicyConfig
from marin_rl.errors import ConfigError, InputError
from marin_rl.lora.adapter import LoraModule, policy_digest
from marin_rl.lora.quantization import quantized_digest
from marin_rl.models.module import LanguageModel
from marin_rl.processes import by_first
from marin_rl.storage.checkpoints import (
    ExtraParts,
    checkpoint_fingerprint,
    commit_checkpoint,
    restore_checkpoint,
)
from marin_rl.storage.commits import find_commit, manifest_of
from marin_rl.storage.layout import POLICY_SLOTS
from marin_rl.storage.run_progress import OPTIMIZER_ROUND
from marin_rl.storage.runs import Run, checkpoint_named, committed, sft_slot
from marin_rl.tokenizers import TokenizerIdentity, check_vocabulary
from marin_rl.training.adapters import trained_shapes
from marin_rl.training.critic import Critic
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.hf_weights import hf_template
from marin_rl.training.model import build_model, digest_of, model_template, named_parameters
from marin_rl.training.optimizer import first_moments
from marin_rl.training.step_types import CriticState, Parameters, TrainState
from marin_rl.types import SlotRef

_taken = partial(device_array, copy=False)  # what was just read is nobody else's

# Branches of a checkpoint that only the trainer reads; not every checkpoint has all of them.
BESIDE_PARAMETERS = ("optimizer", "step", "rng", "refused", "average", "critic")


def vocabulary_of(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of the embedding of a model that is built here. Raises InputError if ids do not fit."""
    size = policy.model.vocab_size or len(tokenizer)
    check_vocabulary(tokenizer, size)
    return size


def template_of(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """The architecture of a run's model, with shapes in place of arrays; no weight is read.

    Raises InputError when the model folder is unfit, or ends before the context does.
    """
    if policy.hf_path is None:
        return model_template(policy, vocabulary_of(policy, tokenizer))
    template = hf_template(policy.hf_path)
    check_vocabulary(tokenizer, template.spec.vocabulary)
    longest = template.spec.context_length
    if longest < policy.context_length:
        raise InputError(
            f"{policy.hf_path} was made for {longest} positions, but policy.context_length is "
            f"{policy.context_length}: expected at most {longest}; lower it"
        )
    return template


def first_parameters(
    config: Config, tokenizer: PreTrainedTokenizerBase, like: Mapping[str, Any] | None = None
) -> Parameters:
    """The weights a model has before any training: from its folder, or random by the run's seed.

    Where `like` has shardings, a process keeps its own part of them.
    """
    policy = config.policy
    if policy.hf_path is not None:
        return named_parameters(load_hf(policy.hf_path, like))
    rows = vocabulary_of(policy, tokenizer)
    return named_parameters(build_model(policy, rows, config.seed, like))


def fresh_state(
    parameters: Parameters,
    optimizer: optax.GradientTransformationExtraArgs,
    seed: int,
    *,
    averaged: bool = False,
    critic: CriticState | None = None,
    shardings: Any = None,
) -> TrainState:
    """A state before its first step; the moments are zero, the average begins at the parameters.

    `shardings` are of the optimizer's state; None: any.
    """
    return TrainState(
        parameters=parameters,
        optimizer=first_moments(optimizer, parameters, shardings),
        step=device_array(np.zeros((), np.int32)),
        # Both halves of a 64-bit seed: without x64, JAX would make a key of the lower one only.
        rng=device_array(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)),
        refused=device_array(np.zeros((), np.int32)),
        average=dict(parameters) if averaged else None,
        critic=critic,
    )


def state_like(
    template: eqx.Module,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    averaged: bool = False,
    critic: Critic | None = None,
) -> TrainState:
    """A state with shapes in place of arrays; of an adapter run it has only the adapter's."""
    shapes = trained_shapes(template)
    like = jax.eval_shape(
        lambda parameters: fresh_state(parameters, optimizer, 0, averaged=averaged), shapes
    )
    return like._replace(critic=None if critic is None else critic.state_like())


def tree_of(state: TrainState, *, whole: bool = True) -> dict[str, Any]:
    """Return the state as nested dicts of arrays: what a checkpoint holds, whole or not."""
    if not whole:
        counters = {"step": state.step, "rng": state.rng, "refused": state.refused}
        return {"parameters": dict(state.parameters), **counters}
    # Left out rather than empty: checkpoints of runs without a branch have the same arrays as ever.
    average = {} if state.average is None else {"average": dict(state.average)}
    critic = {} if state.critic is None else {"critic": _trained_tree(state.critic)}
    return {
        **average,
        **critic,
        **_trained_tree(state),
        "rng": state.rng,
        "refused": state.refused,
    }


def state_of(tree: Mapping[str, Any], like: TrainState) -> TrainState:
    """Return the state that `tree_of` described, with the structure of `like`.

    A CPU may take the very memory of NumPy's arrays, which nobody else is to write to.
    """
    average, critic = like.average, like.critic
    if average is not None:
        average = {name: _taken(tree["average"][name]) for name in average}
    if critic is not None:
        critic = CriticState(**_trained_of(tree["critic"], critic))
    return TrainState(
        **_trained_of(tree, like),
        rng=_taken(tree["rng"]),
        refused=_taken(tree["refused"]),
        average=average,
        critic=critic,
    )


def _trained_tree(state: TrainState | CriticState) -> dict[str, Any]:
    """Return parameters, moments and number of updates, which a policy and a critic both have."""
    return {
        "parameters": dict(state.parameters),
        "optimizer": dict(_optimizer_leaves(state.optimizer)),
        "step": state.step,
    }


def _trained_of(tree: Mapping[str, Any], like: TrainState | CriticState) -> dict[str, Any]:
    leaves = _optimizer_leaves(like.optimizer)
    moments = [_taken(tree["optimizer"][name]) for name, _ in leaves]
    return {
        "parameters": {name: _taken(tree["parameters"][name]) for name in like.parameters},
        "optimizer": jax.tree.unflatten(jax.tree.structure(like.optimizer), moments),
        "step": _taken(tree["step"]),
    }


def _optimizer_leaves(optimizer: Any) -> list[tuple[str, Any]]:
    """Leaves of optax's state by names such as `1.0.mu.transformer/norm/weight`."""
    # By path and not by position: a checkpoint survives a change in the order of optax's leaves.
    leaves = jax.tree_util.tree_flatten_with_path(optimizer)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOf:
    """The base of an adapter, by its digest, and the modules that it adapts.

    `quantize_base` is the base's quantisation in training and sampling, if any.
    """

    base_digest: str
    modules: Mapping[str, LoraModule]
    quantize_base: str | None = None

    def policy_digest(self, adapter_digest: str) -> str:
        # The scheme is part of it: the same adapter next to rounded weights is another policy.
        base = quantized_digest(self.base_digest, self.quantize_base)
        return policy_digest(base, self.modules, adapter_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a checkpoint in its manifest; fields that do not apply are None.

    `parameters_digest` identifies the policy: by all parameters or, with an adapter, by
    `adapter_digest`, `base_digest` and `lora`, each module's rank, alpha and rslora by path.
    `base_digest` is of the base as it was, before `quantize_base`.
    """

    parameters_digest: str
    tokenizer_digest: str
    chat_template_digest: str
    step: int
    critic_digest: str | None = None
    adapter_digest: str | None = None
    base_digest: str | None = None
    lora: Mapping[str, Sequence[Any]] | None = None
    quantize_base: str | None = None

    @classmethod
    def of(
        cls, state: TrainState, tokenizer: TokenizerIdentity, adapter: AdapterOf | None = None
    ) -> "Identity":
        """The identity of a state that is trained and served with a tokenizer.

        Where it is spread over processes all of them call this: see `model.digest_of`.
        """
        own = digest_of(state.parameters)
        of_adapter: dict[str, Any] = {}
        if adapter is not None:
            modules = adapter.modules.items()
            of_adapter = {
                "adapter_digest": own,
                "base_digest": adapter.base_digest,
                "lora": {path: [each.rank, each.alpha, each.rslora] for path, each in modules},
                "quantize_base": adapter.quantize_base,
            }
        return cls(
            parameters_digest=own if adapter is None else adapter.policy_digest(own),
            tokenizer_digest=tokenizer.tokenizer_digest,
            chat_template_digest=tokenizer.chat_template_digest,
            step=int(state.step),
            critic_digest=None if state.critic is None else digest_of(state.critic.parameters),
            **of_adapter,
        )

    @property
    def adapter(self) -> AdapterOf | None:
        if self.base_digest is None or self.lora is None:
            return None
        modules = {
            str(path): LoraModule(rank=int(rank), alpha=float(alpha), rslora=bool(rslora))
            for path, (rank, alpha, rslora) in self.lora.items()
        }
        return AdapterOf(
            base_digest=self.base_digest, modules=modules, quantize_base=self.quantize_base
        )

    def as_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        # Left out rather than null: manifests of runs without a critic have no such field.
        return {name: value for name, value in fields.items() if value is not None}


def identity_of(run: Run, ref: SlotRef) -> Identity:
    """The identity that a committed checkpoint carries."""
    extra = manifest_of(run.store, ref).extra
    fields = {field.name: field.default for field in dataclasses.fields(Identity)}
    # Fields without a default must be there.
    present: dict[str, Any] = {
        name: extra.get(name) if default is None else extra[name]
        for name, default in fields.items()
    }
    return Identity(**present)


def restore_state(
    run: Run, ref: SlotRef, like: TrainState, tokenizer: TokenizerIdentity
) -> TrainState:
    """The state of a whole checkpoint, on the devices that `like` has shardings of.

    Raises InputError if it belongs to another tokenizer, CorruptObject where files are damaged, or
    where the arrays are those of another model.
    """
    # By the manifest, before gigabytes of arrays are read.
    check_restored(run, ref, tokenizer)
    return state_of(restore_checkpoint(run, ref, tree_of(like)), like)


def check_restored(run: Run, ref: SlotRef, tokenizer: TokenizerIdentity) -> None:
    """Raise InputError for a checkpoint that was trained with another tokenizer."""
    digest, expected = identity_of(run, ref).tokenizer_digest, tokenizer.tokenizer_digest
    if digest != expected:
        raise InputError(
            f"{run.store.url_of(ref.slot)} was trained with another tokenizer: expected digest "
            f"{expected[:12]}, found {digest[:12]}; set policy.tokenizer to the one it was trained "
            "with"
        )


def restore_parameters(
    run: Run, ref: SlotRef, like: TrainState, tokenizer: TokenizerIdentity
) -> Parameters:
    """Only the trained parameters of a checkpoint. Raises as `restore_state` does."""
    check_restored(run, ref, tokenizer)
    arrays = read_parameters(run, ref, like.parameters)
    return {name: _taken(array) for name, array in arrays.items()}


def read_parameters(run: Run, ref: SlotRef, like: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a checkpoint, whatever else it holds: see `restore_checkpoint`."""
    like = {"parameters": dict(like)}
    return restore_checkpoint(run, ref, like, unasked=BESIDE_PARAMETERS)["parameters"]


def sft_result(run: Run) -> SlotRef:
    """The last checkpoint of the run's warm start. Raises ConfigError until it is committed."""
    ref = committed(run, sft_slot(run.config.sft.steps))
    if ref is None:
        raise ConfigError(
            f"policy.init is 'sft', but {run.store.url_of(sft_slot(run.config.sft.steps))} is not "
            "committed: run the warm start first (flow 'sft')"
        )
    return ref


def other_run(config: Config) -> tuple[Run, SlotRef]:
    """The run and checkpoint that policy.checkpoint names: ROOT/RUN_ID/checkpoints/round-00012."""
    text = config.policy.checkpoint or ""
    return checkpoint_named(text, POLICY_SLOTS, "policy.checkpoint", config.storage_options)


@dataclass(frozen=True, kw_only=True)
class CheckpointSlot:
    """A slot of a run that a training state is committed as.

    `content` is what decides the state besides the `parents`. `tokenizer` goes into the identity,
    and so does `adapter`, where the state is one. With `optimizer_round`, the policy's parameters
    and the counters are all that is written: see `marin_rl.storage.run_progress`. `facts` are those
    of the layout of devices. `behind`: what is committed is written later: see `commit_checkpoint`.
    """

    run: Run
    slot: str
    tokenizer: TokenizerIdentity
    content: Mapping[str, Any]
    parents: Sequence[SlotRef] = ()
    adapter: AdapterOf | None = None
    optimizer_round: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    behind: bool = False

    def find(self) -> SlotRef | None:
        """Return the slot if it is committed. Raises CommitConflict if it holds something else."""
        decided = checkpoint_fingerprint(self.content, self.parents)
        return by_first(lambda: find_commit(self.run.store, self.slot, decided))

    def commit(
        self,
        state: TrainState,
        totals: Mapping[str, float],
        extra: Mapping[str, Any] | None = None,
        extra_parts: ExtraParts | None = None,
    ) -> SlotRef:
        """Commit a state; totals that are not finite are left out.

        With several processes all of them call it, and each writes its part. Raises CommitConflict,
        and StorageError of the store.
        """
        whole = self.optimizer_round is None
        earlier = {} if whole else {OPTIMIZER_ROUND: self.optimizer_round}
        identity = Identity.of(state, self.tokenizer, self.adapter).as_dict()
        return commit_checkpoint(
            self.run,
            self.slot,
            tree_of(state, whole=whole),
            content=self.content,
            parents=self.parents,
            # A manifest is strict JSON, which has neither NaN nor infinities.
            totals={name: value for name, value in totals.items() if math.isfinite(value)},
            extra={**identity, **earlier, **(extra or {})},
            facts=self.facts,
            extra_parts=extra_parts,
            behind=self.behind,
        )
