"""Facts of tokenizers that need no transformers: their folders, and the built-in vocabulary.

Tokenizers themselves are read by `tokenizers`, whose library takes seconds to import.
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from marin_rl.config import PolicyConfig
from marin_rl.errors import InputError
from marin_rl.plain_files import check_model_folder

CHARACTERS = "characters"
PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, EOS, UNKNOWN, *(f"<|{role}|>" for role in ROLES))
PRINTABLE = "\n" + "".join(chr(code) for code in range(32, 127))


def characters_backend() -> Tokenizer:
    """Return the built-in vocabulary: a token per printable ASCII character, newline and role."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *PRINTABLE])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def tokenizer_folder(policy: PolicyConfig) -> str | None:
    """Folder of a policy's tokenizer: the named one, else its model's; None: the built-in one."""
    return policy.hf_path if policy.tokenizer == CHARACTERS else policy.tokenizer


def check_tokenizer_folder(path: Path) -> None:
    """Raise InputError unless there is a folder with regular files."""
    if not path.is_dir():
        raise InputError(
            f"no tokenizer folder at {path}: expected a local folder with tokenizer.json and "
            f"tokenizer_config.json, or the word '{CHARACTERS}'"
        )
    check_model_folder(path)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise InputError(
            f"cannot read a tokenizer from {path}: expected tokenizer.json and "
            "tokenizer_config.json, found neither; copy both from the model's folder"
        )
