"""Adapters out of runs into PEFT folders, and merged into whole models."""

from dataclasses import dataclass
from pathlib import Path

from marin_rl.errors import InputError, StalePolicy
from marin_rl.lora import Adapter, merged, read_peft, write_peft
from marin_rl.storage.runs import Run, checkpoint_at, round_of
from marin_rl.tokenizers import load_tokenizer, tokenizer_for
from marin_rl.training.model import (
    load_hf,
    named_parameters,
    parameter_shapes,
    parameters_digest,
    save_hf,
    with_parameters,
)
from marin_rl.training.policy_source import read_trained
from marin_rl.training.state import identity_of, template_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedAdapter:
    """The adapter of a checkpoint in a PEFT folder: its round, its digest and the policy's."""

    round: int
    adapter_digest: str
    parameters_digest: str


def export_peft(run: Run, round: int | None, folder: Path) -> ExportedAdapter:
    """Write the adapter of a checkpoint (None: the latest) as a PEFT folder, and read it back.

    Raises ObjectMissing where it is not committed, InputError for a run without an adapter or a
    folder that exists, StalePolicy where it reads back as another adapter.
    """
    ref = checkpoint_at(run, round)
    identity = identity_of(run, ref)
    if identity.adapter is None or identity.adapter_digest is None:
        raise InputError(
            f"run {run.run_id!r} trains all parameters: expected one with policy.lora; "
            "`marin-rl export RUN --hf FOLDER` writes its model"
        )
    template = template_of(run.config.policy, tokenizer_for(run.config.policy))
    arrays = read_trained(run, ref, template)
    base = run.config.policy.hf_path
    # PEFT looks for a relative path in the folder of whoever loads the adapter.
    found = str(Path(base).absolute()) if base is not None and Path(base).is_dir() else base
    write_peft(folder, Adapter(modules=identity.adapter.modules, arrays=arrays), found)
    again = read_peft(folder, parameter_shapes(template))
    # An adapter of another dtype than float32 is written as float32.
    same = all((again.arrays[name] == arrays[name].astype("float32")).all() for name in arrays)
    if not same or again.modules != identity.adapter.modules:
        raise StalePolicy(f"{folder} reads back as another adapter: delete it, and export again")
    return ExportedAdapter(
        round=round_of(ref.slot.rpartition("/")[2]) or 0,
        adapter_digest=identity.adapter_digest,
        parameters_digest=identity.parameters_digest,
    )


def merge(base: Path, adapter: Path, output: Path, dtype: str = "float32") -> str:
    """Write the model that an adapter makes of its base, and return the digest of its parameters.

    The digest is that of the float32 parameters. Raises InputError for folders that are unfit, an
    adapter of another base, or an `output` that has something in it; then nothing is written.
    """
    # Before anything is read: to load two models may take minutes.
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} exists: expected a new folder; nothing is overwritten")
    tokenizer, model = load_tokenizer(str(base)), load_hf(base)
    change = read_peft(adapter, parameter_shapes(model))
    whole = with_parameters(model, merged(named_parameters(model), change))
    save_hf(whole, tokenizer, output, dtype)
    return parameters_digest(whole)
