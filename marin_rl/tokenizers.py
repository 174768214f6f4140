"""Tokenizers: the built-in character one, or a local Hugging Face folder; never a download.

A tokenizer is fit for use when it has a chat template and an end token, and when no id of it lies
outside the policy's vocabulary. Everything else takes the tokenizer as an object.
"""

import hashlib
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from marin_rl.chat_templates import CHAT_TEMPLATE, start_worker
from marin_rl.config import PolicyConfig
from marin_rl.errors import InputError
from marin_rl.model_folders import check_model_folder

CHARACTERS = "characters"
PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
PRINTABLE = "\n" + "".join(chr(code) for code in range(32, 127))


def tokenizer_for(policy: PolicyConfig) -> PreTrainedTokenizerBase:
    """The tokenizer a policy is trained and served with.

    A policy that starts from a Hugging Face folder and names no tokenizer takes the folder's own.
    Raises InputError when a folder is missing or its tokenizer cannot be used for chat.
    """
    if policy.tokenizer != CHARACTERS:
        return load_tokenizer(policy.tokenizer)
    if policy.init == "hf" and policy.hf_path is not None:
        return load_tokenizer(policy.hf_path)
    return character_tokenizer()


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of characters: a token per printable ASCII one, newline, role, padding and end.

    103 ids, the special ones first; any other character becomes `<|unknown|>`.
    """
    special = [PAD, EOS, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    vocabulary = {token: index for index, token in enumerate([*special, *PRINTABLE])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=special[3:],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Read a tokenizer from a local folder, and check that it can be used for chat.

    Raises InputError when the folder or its files are missing or no ordinary files, or when it has
    no chat template or no end token.
    """
    path = Path(folder)
    if not path.is_dir():
        raise InputError(
            f"no tokenizer folder at {path}: expected a local folder with tokenizer.json and "
            f"tokenizer_config.json, or the word '{CHARACTERS}'"
        )
    check_model_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"cannot read a tokenizer from {path}: {error}; expected tokenizer.json and "
            "tokenizer_config.json as transformers 4 writes them"
        ) from error
    check_tokenizer(tokenizer, str(path))
    start_worker()  # its template will be rendered soon
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raise InputError unless the tokenizer has a chat template and an end token."""
    if not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of {source} has no chat template: expected `chat_template` in "
            "tokenizer_config.json or a file chat_template.jinja; add the one the model was "
            "trained with"
        )
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer of {source} has no end token: set `eos_token` in tokenizer_config.json"
        )


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that end a completion: the tokenizer's end token, then others that its folder
    lists.

    Chat models have several, in the folder's `generation_config.json`, and
    transformers and vLLM stop at each of them. Raises InputError for a tokenizer without an end
    token, and for a file that is no such list.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise InputError("the tokenizer has no end token: completions would never end")
    folder = tokenizer.name_or_path
    file = Path(folder, "generation_config.json")
    if not folder or not file.is_file():
        return (end,)
    try:
        listed = json.loads(file.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"cannot read {file}: {error}; expected a JSON object") from error
    ids = listed if isinstance(listed, list) else [end if listed is None else listed]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"{file}: expected eos_token_id as one id or a list, found {listed!r:.80}")
    return tuple(dict.fromkeys([end, *ids]))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise InputError if the tokenizer can give an id that the model has no row for."""
    vocabulary = tokenizer.get_vocab()
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise InputError(
            f"the tokenizer gives ids up to {largest} ({token!r}), but the model's vocabulary has "
            f"{vocab_size} rows: expected ids below {vocab_size}; use the tokenizer the model was "
            "trained with, or set policy.model.vocab_size to at least "
            f"{largest + 1} for a model built here"
        )


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[str, bool], list[int]]:
    """Return `encode(text, special) -> ids`, equal to the tokenizer's own encoding.

    `special` opens and ends the ids as the tokenizer would. Where transformers' own layers add
    nothing but time, they are left out (see `is_direct`); what they would set for each text is set
    once, so that several threads may encode.
    """
    if not is_direct(tokenizer):
        lock = _lock_of(tokenizer)

        def encode(text: str, special: bool) -> list[int]:  # noqa: FBT001
            with lock:  # not every tokenizer may be used by two threads at a time
                return tokenizer.encode(text, add_special_tokens=special)

        return encode
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return lambda text, special: backend.encode(text, add_special_tokens=special).ids


def _lock_of(tokenizer: PreTrainedTokenizerBase) -> threading.Lock:
    """The lock that all encoders of a tokenizer share."""
    return _locks.setdefault(tokenizer, threading.Lock())


_locks: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, threading.Lock]" = (
    weakref.WeakKeyDictionary()
)


def is_direct(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if texts become ids by the backend alone: no class overrides the encoding."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    kinds = type(tokenizer).__mro__
    derived = kinds[: kinds.index(PreTrainedTokenizerFast)]
    own = {"encode", "_encode_plus", "_batch_encode_plus"}
    return not any(own & vars(one).keys() for one in derived)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerIdentity:
    """Digests that must be equal for two tokenizers to be the same to a policy."""

    tokenizer_digest: str
    chat_template_digest: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TokenizerIdentity":
        """Both digests; a large vocabulary takes a second, so ask once."""
        return cls(
            tokenizer_digest=tokenizer_digest(tokenizer),
            chat_template_digest=chat_template_digest(tokenizer),
        )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that decides which ids a text becomes, as hex."""
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    rules = tokenizer.get_vocab()
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        # A call that pads or truncates leaves its setting behind in the backend.
        rules |= {"padding": None, "truncation": None}
    return hashlib.sha256(json.dumps([rules, special], sort_keys=True).encode()).hexdigest()


def chat_template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the chat template, as hex."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
