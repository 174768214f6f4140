"""Model folders to the Hugging Face Hub: the name is checked before work, the folder stays."""

from pathlib import Path

from marin_rl.errors import ConfigError, StoreUnavailable


def check_hub_name(name: str) -> None:
    """Raise ConfigError unless `name` may name a repository: NAME or USER/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import (
        validate_repo_id,  # pyright: ignore[reportPrivateImportUsage] - documented, not exported
    )

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
