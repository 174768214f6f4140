"""Between a training state in memory and the tree that a checkpoint holds.

A checkpoint has `parameters` by path in the model, `optimizer` by path in optax's own state, and
the counters. Also here: a run's architecture, and where its first parameters come from.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from levanter.models.lm_model import LmHeadModel
from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config, PolicyConfig
from marin_rl.errors import ConfigError, InputError
from marin_rl.storage.checkpoints import restore_checkpoint
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, checkpoint_named, committed, sft_slot
from marin_rl.tokenizers import TokenizerIdentity, check_vocabulary
from marin_rl.training.critic import Critic, CriticState
from marin_rl.training.model import (
    build_model,
    digest_of,
    hf_template,
    load_hf,
    model_template,
    named_parameters,
    parameter_shapes,
)
from marin_rl.training.step import Parameters, TrainState
from marin_rl.types import SlotRef

# Branches of a checkpoint that only the trainer reads, and that not every run has.
UNSERVED = ("average", "critic")


def vocabulary_of(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of the embedding of a model that is built here. Raises InputError if ids do not fit."""
    size = policy.model.vocab_size or len(tokenizer)
    check_vocabulary(tokenizer, size)
    return size


def template_of(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> LmHeadModel:
    """The architecture of a run's model, with shapes in place of arrays; no weight is read.

    Raises InputError when the model folder is unfit, or ends before the context does.
    """
    if policy.hf_path is None:
        return model_template(policy, vocabulary_of(policy, tokenizer))
    template = hf_template(policy.hf_path)
    check_vocabulary(tokenizer, template.Vocab.size)
    longest = template.config.max_seq_len
    if longest < policy.context_length:
        raise InputError(
            f"{policy.hf_path} was made for {longest} positions, but policy.context_length is "
            f"{policy.context_length}: expected at most {longest}; lower it"
        )
    return template


def first_parameters(config: Config, tokenizer: PreTrainedTokenizerBase) -> Parameters:
    """The weights a model has before any training: from its folder, or random by the run's seed."""
    policy = config.policy
    if policy.hf_path is not None:
        return named_parameters(load_hf(policy.hf_path))
    return named_parameters(build_model(policy, vocabulary_of(policy, tokenizer), config.seed))


def fresh_state(
    parameters: Parameters,
    optimizer: optax.GradientTransformationExtraArgs,
    seed: int,
    *,
    averaged: bool = False,
    critic: CriticState | None = None,
) -> TrainState:
    """A state before its first step; the moments are zero, the average begins at the parameters."""
    return TrainState(
        parameters=parameters,
        optimizer=optimizer.init(parameters),
        step=jnp.zeros((), jnp.int32),
        rng=jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32),
        refused=jnp.zeros((), jnp.int32),
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
    """A state with shapes in place of arrays."""
    shapes = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in parameter_shapes(template).items()
    }
    like = jax.eval_shape(
        lambda parameters: fresh_state(parameters, optimizer, 0, averaged=averaged), shapes
    )
    return like._replace(critic=None if critic is None else critic.state_like())


def tree_of(state: TrainState) -> dict[str, Any]:
    """The state as nested dicts of arrays: what a checkpoint holds."""
    average = {} if state.average is None else {"average": dict(state.average)}
    critic = {} if state.critic is None else {"critic": _critic_tree(state.critic)}
    return {
        **average,
        **critic,
        "parameters": dict(state.parameters),
        "optimizer": dict(_optimizer_leaves(state.optimizer)),
        "step": state.step,
        "rng": state.rng,
        "refused": state.refused,
    }


def state_of(tree: Mapping[str, Any], like: TrainState) -> TrainState:
    """The state that `tree_of` described, with the structure of `like`."""
    return TrainState(
        parameters={name: jnp.asarray(tree["parameters"][name]) for name in like.parameters},
        optimizer=_optimizer_of(tree["optimizer"], like.optimizer),
        step=jnp.asarray(tree["step"]),
        rng=jnp.asarray(tree["rng"]),
        refused=jnp.asarray(tree["refused"]),
        average=None
        if like.average is None
        else {name: jnp.asarray(tree["average"][name]) for name in like.average},
        critic=None if like.critic is None else _critic_of(tree["critic"], like.critic),
    )


def _critic_tree(critic: CriticState) -> dict[str, Any]:
    return {
        "parameters": dict(critic.parameters),
        "optimizer": dict(_optimizer_leaves(critic.optimizer)),
        "step": critic.step,
    }


def _critic_of(tree: Mapping[str, Any], like: CriticState) -> CriticState:
    return CriticState(
        parameters={name: jnp.asarray(tree["parameters"][name]) for name in like.parameters},
        optimizer=_optimizer_of(tree["optimizer"], like.optimizer),
        step=jnp.asarray(tree["step"]),
    )


def _optimizer_of(tree: Mapping[str, Any], like: Any) -> Any:
    leaves = [jnp.asarray(tree[name]) for name, _ in _optimizer_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _optimizer_leaves(optimizer: Any) -> list[tuple[str, Any]]:
    """Leaves of optax's state by names such as `1.0.mu.transformer/norm/weight`."""
    leaves = jax.tree_util.tree_flatten_with_path(optimizer)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a checkpoint in its manifest; the critic's fields are None where it has none."""

    parameters_digest: str
    tokenizer_digest: str
    chat_template_digest: str
    step: int
    critic_digest: str | None = None

    @classmethod
    def of(cls, state: TrainState, tokenizer: TokenizerIdentity) -> "Identity":
        """The identity of a state that is trained and served with a tokenizer."""
        return cls(
            parameters_digest=digest_of(state.parameters),
            tokenizer_digest=tokenizer.tokenizer_digest,
            chat_template_digest=tokenizer.chat_template_digest,
            step=int(state.step),
            critic_digest=None if state.critic is None else digest_of(state.critic.parameters),
        )

    def as_dict(self) -> dict[str, Any]:
        """As it is kept in a manifest's `extra`."""
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if value is not None}


def identity_of(run: Run, ref: SlotRef) -> Identity:
    """The identity that a committed checkpoint carries."""
    extra = manifest_of(run.store, ref).extra
    names = (field.name for field in dataclasses.fields(Identity) if field.name != "critic_digest")
    critic_digest = extra.get("critic_digest")
    return Identity(**{name: extra[name] for name in names}, critic_digest=critic_digest)


def restore_state(
    run: Run,
    ref: SlotRef,
    like: TrainState,
    tokenizer: TokenizerIdentity,
    *,
    unasked: Sequence[str] = (),
) -> TrainState:
    """The state of a checkpoint. Raises InputError if it belongs to another tokenizer.

    Raises CorruptObject where files are damaged, or where the arrays are those of another model.
    """
    found, expected = identity_of(run, ref).tokenizer_digest, tokenizer.tokenizer_digest
    if found != expected:
        raise InputError(
            f"{run.store.url_of(ref.slot)} was trained with another tokenizer: expected digest "
            f"{expected[:12]}, found {found[:12]}; set policy.tokenizer to the one it was trained "
            "with"
        )
    return state_of(restore_checkpoint(run, ref, tree_of(like), unasked=unasked), like)


def restore_parameters(
    run: Run, ref: SlotRef, like: TrainState, tokenizer: TokenizerIdentity
) -> Parameters:
    """The parameters of a checkpoint alone. Raises as `restore_state` does."""
    alone = like._replace(average=None, critic=None)
    return restore_state(run, ref, alone, tokenizer, unasked=UNSERVED).parameters


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
    kinds = {"checkpoints": "round-00012", "sft": "step-00500"}
    text = config.policy.checkpoint or ""
    return checkpoint_named(text, kinds, "policy.checkpoint", config.storage_options)
