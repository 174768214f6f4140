"""Sources of a policy's parameters: first weights, other checkpoints, and an adapter's base.

The base of a run's adapter is committed once, in its own slot: its parameters, or the digest
of a Hugging Face folder that has them. Checkpoints of the run hold the adapter and that digest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from marin_rl.compilation import device_array
from marin_rl.config import fingerprint_fields
from marin_rl.errors import CorruptObject, InputError, MarinRLError, ObjectMissing
from marin_rl.lora.adapter import Adapter
from marin_rl.lora.quantization import dequantize_base, quantize_base
from marin_rl.models.module import LanguageModel
from marin_rl.processes import by_first
from marin_rl.storage.checkpoints import (
    checkpoint_fingerprint,
    commit_checkpoint,
)
from marin_rl.storage.commits import find_commit, manifest_of
from marin_rl.storage.runs import Run, base_slot, checkpoint_slot, committed
from marin_rl.storage.tables.tombstones import array_parts
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.adapters import (
    Modules,
    first_adapter,
    merged_parameters,
    trained_shapes,
    with_adapter,
    with_quantized,
    without_lora,
)
from marin_rl.training.compiled_step import Program
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.mesh import SINGLE_DEVICE, Layout
from marin_rl.training.model import digest_of, named_parameters, with_parameters
from marin_rl.training.state import (
    AdapterOf,
    Identity,
    check_restored,
    first_parameters,
    identity_of,
    other_run,
    read_parameters,
    sft_result,
)
from marin_rl.training.step_types import Parameters
from marin_rl.types import SlotRef

# Counts up when the same configuration would commit another base.
PROGRAM_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CommittedPolicy:
    """The policy of a committed checkpoint, on the host.

    `trained` are all parameters, or an adapter's arrays; then `base` are those of its base.
    """

    identity: Identity
    trained: Mapping[str, Any]
    base: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Identity of the policy that these arrays are: see `Identity`."""
        adapter, own = self.identity.adapter, digest_of(self.trained)
        return own if adapter is None else adapter.policy_digest(own)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter; None where all parameters were trained."""
        adapter = self.identity.adapter
        return adapter and Adapter(modules=adapter.modules, arrays=self.trained)

    def parameters(self) -> Parameters:
        """All parameters of the policy, an adapter merged into its base.

        A base that was quantised is taken as it was trained with, dequantised.
        """
        adapter, scheme = self.adapter, self.identity.quantize_base
        if adapter is None:
            return {name: device_array(array) for name, array in self.trained.items()}
        base = self.base
        if scheme is not None:
            shapes = {name: tuple(array.shape) for name, array in base.items()}
            # Rounded as it was in training: the adapter has learned to correct those weights, not
            # the original ones.
            base = dequantize_base(quantize_base(base, scheme), shapes)
        return merged_parameters({name: device_array(a) for name, a in base.items()}, adapter)

    def served(self, template: LanguageModel, dtype: str) -> LanguageModel:
        """The model that engines decode: an adapter merged, or next to a base that is quantised.

        `template` is the model's, without an adapter.
        """
        scheme = self.identity.quantize_base
        if scheme is None:
            own = self.parameters() if self.adapter else self.trained
            return with_parameters(template, own)
        whole = served_template(self.identity, template, dtype)
        return with_parameters(whole, {**quantize_base(self.base, scheme), **self.trained})


def served_template(identity: Identity, template: LanguageModel, dtype: str) -> LanguageModel:
    """The template of `CommittedPolicy.served`; `dtype` is the adapter's."""
    adapter = identity.adapter
    if adapter is None or adapter.quantize_base is None:
        return template
    return with_quantized(with_adapter(template, adapter.modules, dtype), adapter.quantize_base)


def read_policy(run: Run, ref: SlotRef, template: LanguageModel) -> CommittedPolicy:
    """Read a committed checkpoint of a run; `template` is the model's, without an adapter.

    Optimizer, average and critic are dropped. Raises CorruptObject, ObjectMissing, InputError for a
    folder that is another base than the adapter's.
    """
    identity = identity_of(run, ref)
    adapter, base = identity.adapter, dict[str, Any]()
    if adapter is not None:
        base = read_base(run, adapter.base_digest, template)
    trained = read_trained(run, ref, template)
    return CommittedPolicy(identity=identity, trained=trained, base=base)


def dtype_of(run: Run) -> str:
    lora = run.config.policy.lora
    return "float32" if lora is None else lora.dtype


def read_trained(
    run: Run, ref: SlotRef, template: LanguageModel, layout: Layout = SINGLE_DEVICE
) -> Mapping[str, Any]:
    """Trained parameters of a checkpoint; of an adapter run, the adapter's arrays.

    They are NumPy's, but with a mesh they are on its devices: see `restore_checkpoint`. Raises as
    `read_policy` does, but that it reads no base.
    """
    identity = identity_of(run, ref)
    if identity.adapter is not None:
        template = with_adapter(template, identity.adapter.modules, dtype_of(run))
    try:
        return read_parameters(run, ref, _like(template, layout))
    except MarinRLError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise CorruptObject(f"cannot read {run.store.url_of(ref.slot)}: {error}") from error


def _like(template: LanguageModel, layout: Layout) -> Mapping[str, Any]:
    return layout.parameters_like(trained_shapes(template), template)


def base_of(run: Run) -> tuple[SlotRef, str]:
    """The committed base of a run's adapter, and its digest. Raises ObjectMissing."""
    ref = committed(run, base_slot())
    if ref is None:
        raise ObjectMissing(
            f"{run.store.url_of(base_slot())} is not committed: expected the base that the run's "
            "adapter is of; restore that folder from a copy"
        )
    return ref, str(manifest_of(run.store, ref).extra["parameters_digest"])


def read_base(
    run: Run, digest: str, template: LanguageModel, layout: Layout = SINGLE_DEVICE
) -> dict[str, Any]:
    """Parameters of the base with this digest, in float32; as `read_trained` where they are.

    Raises ObjectMissing, CorruptObject, and InputError where a model folder has other weights.
    """
    ref, recorded = base_of(run)
    manifest = manifest_of(run.store, ref)
    if recorded != digest:
        raise CorruptObject(
            f"{run.store.url_of(ref.slot)} has the digest {recorded}, expected that of the "
            f"adapter's base, {digest}: run fsck, and restore the folder from a copy"
        )
    # A base without arrays is in a folder, which anyone may have changed since: the digest
    # decides.
    if array_parts(manifest):
        return read_parameters(run, ref, _like(template, layout))
    folder = run.config.policy.hf_path or ""
    parameters: dict[str, Any] = named_parameters(load_hf(folder, _like(template, layout)))
    if layout.mesh is None:
        parameters = {name: np.asarray(array) for name, array in parameters.items()}
    if (found := digest_of(parameters)) != digest:
        raise InputError(
            f"{folder} has other weights than the base of this run's adapter: expected the digest "
            f"{digest}, found {found}; restore the folder that the run began with"
        )
    return parameters


def recorded_modules(run: Run, ref: SlotRef | None = None) -> Modules | None:
    """Modules of a run's adapter by a checkpoint, or the first one; None until there is one.

    The folder that an adapter began from need not exist any longer.
    """
    ref = ref or committed(run, checkpoint_slot(0))
    adapter = identity_of(run, ref).adapter if ref else None
    return adapter and adapter.modules


class PolicySource:
    """The parameters that a run's policy begins with, and the base of its adapter."""

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase, program: Program) -> None:
        self._run, self._tokenizer, self._program = run, tokenizer, program

    def policy_parameters(self, *, warm_start: bool = True) -> Parameters:
        """All parameters that `policy.init` names: another checkpoint's, or the first weights.

        A checkpoint's adapter is merged. Without `warm_start`, the ones that a warm start begins
        at. Raises ConfigError until the warm start is committed, InputError for another tokenizer's
        checkpoint, and as `read_policy` does.
        """
        config = self._run.config
        if config.policy.init == "sft" and warm_start:
            source = self._run, sft_result(self._run)
        elif config.policy.init == "checkpoint":
            source = other_run(config)
        else:
            like = _like(self._program.base_template, self._program.layout)
            return first_parameters(config, self._tokenizer, like)
        # By the manifest, before gigabytes of arrays are read.
        check_restored(*source, TokenizerIdentity.of(self._tokenizer))
        template = self._program.base_template
        if identity_of(*source).adapter is not None:
            return read_policy(*source, template).parameters()
        arrays = read_trained(*source, template, self._program.layout)
        return {name: device_array(array, copy=False) for name, array in arrays.items()}

    def parameters_before_training(self) -> Parameters:
        """The trained parameters that the phase after the warm start begins with.

        An adapter's are the warm start's, or the first. Raises as `policy_parameters`,
        `first_adapter` and `read_trained` do.
        """
        run, program, policy = self._run, self._program, self._run.config.policy
        if not program.modules:
            return self.policy_parameters()
        assert policy.lora is not None, "the run has an adapter"
        if policy.init != "sft" or policy.lora.begins != "sft":
            return first_adapter(run.config, program.modules, program.base_template)
        warm = sft_result(run)
        check_restored(run, warm, TokenizerIdentity.of(self._tokenizer))
        arrays = read_trained(run, warm, program.base_template, program.layout)
        return {name: device_array(array, copy=False) for name, array in arrays.items()}

    def commit_base(self) -> tuple[SlotRef, ...]:
        """Commit the adapter's base, or find it committed; nothing for a run without an adapter.

        Returns the parents that the first checkpoint has by it. Its arrays are written unless a
        Hugging Face folder has them. Raises as `policy_parameters` does and CommitConflict.
        """
        if not self._program.modules:
            return ()
        return (self._committed_base(),)

    def _committed_base(self) -> SlotRef:
        run, config, lora = self._run, self._run.config, self._run.config.policy.lora
        assert lora is not None, "only adapters have a base"
        from_warm_start = config.policy.init == "sft" and lora.begins == "training"
        parents = [sft_result(run)] if from_warm_start else []
        content = {
            "program": PROGRAM_VERSION,
            "policy": fingerprint_fields(without_lora(config).policy),
            "seed": config.seed,
        }
        decided = checkpoint_fingerprint(content, parents)
        existing = by_first(lambda: find_commit(run.store, base_slot(), decided))
        if existing is not None:
            return existing
        parameters = self.policy_parameters(warm_start=from_warm_start)
        # A folder of the user's has these weights already: they are named by their digest, and not
        # copied.
        trained_here = from_warm_start or config.policy.init == "checkpoint"
        folder = None if trained_here else config.policy.hf_path
        extra = {"parameters_digest": digest_of(parameters)}
        return commit_checkpoint(
            run,
            base_slot(),
            {"parameters": parameters} if folder is None else {},
            content=content,
            parents=parents,
            totals={"parameters": float(sum(array.size for array in parameters.values()))},
            extra=extra | ({"folder": folder} if folder else {}),
        )

    @cached_property
    def adapter(self) -> AdapterOf | None:
        """Base and modules of the adapter; None without one. Raises ObjectMissing."""
        if not self._program.modules:
            return None
        scheme, modules = self._run.config.policy.quantize_base, self._program.modules
        return AdapterOf(base_digest=base_of(self._run)[1], modules=modules, quantize_base=scheme)

    # Read on first use and kept: no update changes the base, and every round needs it.
    @cached_property
    def frozen(self) -> Parameters:
        """The base's parameters on the devices, none without an adapter. Raises as `read_base`."""
        if self.adapter is None:
            return {}
        program = self._program
        base = read_base(self._run, self.adapter.base_digest, program.base_template, program.layout)
        return program.place_frozen(base)
