"""The frozen parameters of a run's policy on its devices: the base of an adapter, read once."""

from levanter.models.lm_model import LmHeadModel
from transformers import PreTrainedTokenizerBase

from marin_rl.lora import Adapter
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import TokenizerIdentity
from marin_rl.training.adapters import merged_parameters
from marin_rl.training.compiled_step import CompiledStep
from marin_rl.training.model import with_parameters
from marin_rl.training.policy_source import adapter_of_run, commit_base, read_base
from marin_rl.training.state import AdapterOf
from marin_rl.training.step_types import Parameters
from marin_rl.types import SlotRef


class FrozenBase:
    """The base of a run's adapter, by its committed slot; nothing for a run that has no adapter."""

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase, program: CompiledStep) -> None:
        self._run, self._tokenizer, self._program = run, tokenizer, program
        self._parameters: Parameters | None = None
        self._adapter: AdapterOf | None = None

    def commit(self) -> tuple[SlotRef, ...]:
        """Commit the base, or find it committed; the parents that the first checkpoint has by it.

        Raises as `commit_base` does.
        """
        if not self._program.modules:
            return ()
        names = TokenizerIdentity.of(self._tokenizer)
        template = self._program.base_template
        return (commit_base(self._run, names, self._tokenizer, template),)

    @property
    def adapter(self) -> AdapterOf | None:
        """Base and modules of the adapter; None without one. Raises ObjectMissing."""
        if self._adapter is None:
            self._adapter = adapter_of_run(self._run, self._program.modules)
        return self._adapter

    @property
    def parameters(self) -> Parameters:
        """The base's parameters on the devices, none without an adapter. Raises as `read_base`."""
        # Read on first use and kept: no update changes the base, and every round needs it.
        if self._parameters is None:
            adapter, program = self.adapter, self._program
            base = {}
            if adapter is not None:
                base = read_base(self._run, adapter.base_digest, program.base_template)
            self._parameters = program.place_frozen(base)
        return self._parameters

    def apart(self, trained: Parameters) -> tuple[LmHeadModel, Adapter]:
        """The base, and the adapter next to it, for engines that decode with both."""
        return base_and_adapter(self._program, self.parameters, trained)

    def served(self, trained: Parameters) -> LmHeadModel:
        """The model that engines decode: the adapter merged into the base, where there is one."""
        return served_model(self._program, self.parameters, trained)


def base_and_adapter(
    program: CompiledStep, frozen: Parameters, trained: Parameters
) -> tuple[LmHeadModel, Adapter]:
    """The base of these frozen parameters, and the adapter that is trained."""
    with program.layout.active():
        base = with_parameters(program.base_template, frozen)
    return base, Adapter(modules=program.modules, arrays=trained)


def served_model(program: CompiledStep, frozen: Parameters, trained: Parameters) -> LmHeadModel:
    """The model that an engine decodes: the adapter merged into the base, where there is one."""
    if not program.modules:
        return with_parameters(program.template, trained)
    if program.quantize_base is not None:
        # Merged weights could not lie quantised as the base does: engines decode both apart.
        return with_parameters(program.template, {**frozen, **trained})
    adapter = Adapter(modules=program.modules, arrays=trained)
    with program.layout.active():
        return with_parameters(program.base_template, merged_parameters(frozen, adapter))
