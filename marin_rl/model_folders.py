"""Model folders: only regular files of a bounded size are read.

A folder may come from anywhere, and the libraries that read it open whatever has the right name. A
FIFO called `config.json` would block them for good, a device would never end, and a sparse file of
a terabyte would fill the memory. So every file is looked at before any is opened.
"""

import os
import stat
from pathlib import Path

from marin_rl.errors import InputError

ENTRIES_MAX = 10_000
# tokenizer.json of a vocabulary of 262,144 tokens has 33 MB.
VOCABULARY_BYTES_MAX = 2**28
SETTINGS_BYTES_MAX = 2**24

_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
)
# The folder of named templates, the only one below a model folder that transformers looks into.
_TEMPLATES = "additional_chat_templates"
# Their sizes are compared with the configuration before their data are read.
_WEIGHTS = ".safetensors"
_READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".bpe")


def check_model_folder(folder: Path) -> None:
    """Raise InputError for a folder in which something would be read that is no ordinary file.

    Symbolic links count as what they lead to: the Hugging Face cache is made of them.
    """
    for path in (folder, folder / _TEMPLATES):
        if path.is_dir():
            _check_entries(path)


def _check_entries(folder: Path) -> None:
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= ENTRIES_MAX:
                raise InputError(
                    f"{folder}: expected a model folder, found more than {ENTRIES_MAX} entries"
                )
            try:
                status = entry.stat()
            except OSError:
                continue  # a link that leads nowhere can be opened by none
            _check_entry(Path(entry.path), status)


def _check_entry(path: Path, status: os.stat_result) -> None:
    mode = status.st_mode
    if stat.S_ISDIR(mode) and path.suffix not in (_WEIGHTS, *_READ):
        return
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: expected a regular file, found {_kind(mode)}; remove it")
    bytes_max = SETTINGS_BYTES_MAX if path.name in _SETTINGS else VOCABULARY_BYTES_MAX
    if path.suffix in _READ and status.st_size > bytes_max:
        raise InputError(
            f"{path}: expected at most {bytes_max} bytes, found {status.st_size}; copy the model "
            "folder again"
        )


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
