"""Folders of weights for others: exports of a run, Hugging Face's and PEFT's, and merged models."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from marin_rl.errors import ConfigError, InputError, StalePolicy, StoreUnavailable
from marin_rl.lora.adapter import Adapter, merged
from marin_rl.lora.peft import read_peft, write_peft
from marin_rl.models.families import check_peft_names
from marin_rl.serving.weights.checkpoint_loader import Loaded, read_folder, read_slot
from marin_rl.storage.runs import Run, policy_at, round_of
from marin_rl.storage.stores.local import check_way
from marin_rl.tokenizers import load_tokenizer, tokenizer_for
from marin_rl.training.adapters import merged_model
from marin_rl.training.hf_folders import load_hf, save_hf
from marin_rl.training.model import (
    digest_of,
    named_parameters,
    parameter_shapes,
    parameters_digest,
    with_parameters,
)
from marin_rl.training.policy_source import read_trained
from marin_rl.training.state import Identity, identity_of, template_of


def exports_of(run: Run) -> Path:
    """The folder of a run's exports, which its endpoints read. Raises ConfigError without one."""
    root = run.config.inference.publish_root
    if root is not None:
        return Path(root, run.run_id)
    local = run.store.local_path("exports")
    if local is None:
        raise ConfigError(
            f"inference.publish needs a folder that the endpoints can read, and {run.store.url} is "
            "an object store: set inference.publish_root to a shared folder"
        )
    check_way(local / "below", "exports/below")
    return local.resolve()


def export(folder: Path, save: Callable[[Path], None], is_complete: Callable[[Path], bool]) -> None:
    """Have `save` write a folder unless it is complete; all but the newest older one are removed.

    Folders next to it sort by age. Safe where other processes export the same.
    """
    if not is_complete(folder):
        # hidden until it is complete, and of this process alone
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        save(partial)
        try:
            partial.rename(folder)  # fails where there is a folder with anything in it
        except OSError:
            if not folder.exists():
                raise
            # another process has taken the name
            if is_complete(folder):  # endpoints may read it by now
                shutil.rmtree(partial)
            else:  # cut short: the new one takes its place in two renames
                old = partial.with_suffix(".old")
                folder.rename(old)
                partial.rename(folder)
                shutil.rmtree(old, ignore_errors=True)
    names = sorted(path.name for path in folder.parent.iterdir())
    older = [name for name in names if not name.startswith(".") and name < folder.name]
    # of processes that ended amid an older version: of this one another may be at work
    cut_short = [name for name in names if name.startswith(".") and name[1:] < folder.name]
    for name in (*older[:-1], *cut_short):  # an endpoint may still be reading the last one
        with suppress(FileNotFoundError):  # another process removes them too
            shutil.rmtree(folder.with_name(name))


def check_new_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        kind = "is not empty" if folder.is_dir() else "is a file"
        raise InputError(f"{folder} {kind}: expected a new folder; nothing is overwritten")


def export_hf(run: Run, round: int | None, folder: Path) -> Loaded:
    """Write a committed checkpoint as a Hugging Face folder, and read it back to be sure.

    The folder has weights, config.json and the tokenizer. Raises as `read_slot` does; InputError
    where the folder has something in it, StalePolicy where it reads back as other parameters.
    """
    check_new_folder(folder)
    loaded = read_slot(run, policy_at(run, round))
    model = merged_model(loaded.model)
    save_hf(model, tokenizer_for(run.config.policy), folder)
    # Of all parameters: an adapter's policy has another identity, but is written merged.
    read_folder(str(folder), digest_of(named_parameters(model)))
    return loaded


def export_peft(run: Run, round: int | None, folder: Path) -> tuple[Identity, int | None]:
    """Write the adapter of a checkpoint (None: the latest) as a PEFT folder, and read it back.

    Returns its policy, and its round: None where pairs or examples taught it. Raises ObjectMissing
    where it is not committed, InputError for a run without an adapter, a family that PEFT names
    otherwise or a folder that exists, StalePolicy where it reads back as another adapter.
    """
    ref = policy_at(run, round)
    identity = identity_of(run, ref)
    if identity.adapter is None or identity.adapter_digest is None:
        raise InputError(
            f"run {run.run_id!r} trains all parameters: expected one with policy.lora; "
            "`marin-rl export RUN --hf FOLDER` writes its model"
        )
    template = template_of(run.config.policy, tokenizer_for(run.config.policy))
    check_peft_names(template.spec)
    arrays = read_trained(run, ref, template)
    base = run.config.policy.hf_path
    # PEFT looks for a relative path in the folder of whoever loads the adapter.
    base_path = str(Path(base).absolute()) if base is not None and Path(base).is_dir() else base
    write_peft(folder, Adapter(modules=identity.adapter.modules, arrays=arrays), base_path)
    again = read_peft(folder, parameter_shapes(template))
    # An adapter of another dtype than float32 is written as float32.
    same = all((again.arrays[name] == arrays[name].astype("float32")).all() for name in arrays)
    if not same or again.modules != identity.adapter.modules:
        raise StalePolicy(f"{folder} reads back as another adapter: delete it, and export again")
    return identity, round_of(ref.slot.rpartition("/")[2])


def merge(base: Path, adapter: Path, output: Path, dtype: str = "float32") -> str:
    """Write the model that an adapter makes of its base, and return the digest of its parameters.

    The digest is that of the float32 parameters. Raises InputError for folders that are unfit, an
    adapter of another base, or an `output` that has something in it; then nothing is written.
    """
    check_new_folder(output)  # before anything is read: to load two models may take minutes
    tokenizer, model = load_tokenizer(str(base)), load_hf(base)
    change = read_peft(adapter, parameter_shapes(model))
    whole = with_parameters(model, merged(named_parameters(model), change))
    save_hf(whole, tokenizer, output, dtype)
    return parameters_digest(whole)


def check_hub_name(name: str) -> None:
    """Raise ConfigError unless `name` may name a repository: NAME or USER/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # pyright: ignore[reportPrivateImportUsage] - documented, not exported

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub: expected NAME or USER/NAME: {error}") from None


def push_folder(folder: Path, name: str) -> None:
    """Upload a folder as the model repository `name`, which is created unless it exists.

    The address and the token are those of the library: HF_ENDPOINT, HF_TOKEN, `hf auth login`.
    Raises StoreUnavailable where that fails; the folder stays as it is.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    from requests import RequestException

    try:
        api = HfApi()
        repository = api.create_repo(name, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except (HfHubHTTPError, LocalTokenNotFoundError, HTTPError, RequestException, OSError) as error:
        raise StoreUnavailable(
            f"{folder} is written, but could not be uploaded as {name}: {error}. Check the network "
            f"and HF_TOKEN, then upload it by `hf upload {name} {folder}`"
        ) from error
