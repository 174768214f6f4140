"""Tokenizers as far as checks before a run need them: read from their files, without transformers.

Importing transformers takes more time than all other checks together. What a run trains and serves
with is built by `tokenizers`; this module owns the built-in vocabulary of characters and the
reading of tokenizer.json, of the special tokens and of the chat template.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import AddedToken, Encoding, Regex, Tokenizer, decoders, models, pre_tokenizers

from marin_rl.chat_templates import CHAT_TEMPLATE, check_options, with_options
from marin_rl.config import PolicyConfig
from marin_rl.end_tokens import listed_end_ids, named_end_ids
from marin_rl.errors import InputError
from marin_rl.model_folders import check_model_folder
from marin_rl.plain_files import read_object

CHARACTERS = "characters"
OPTIONS_KEY = "policy.chat_template_options"
PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, EOS, UNKNOWN, *(f"<|{role}|>" for role in ROLES))
PRINTABLE = "\n" + "".join(chr(code) for code in range(32, 127))


@runtime_checkable
class HasVocabulary(Protocol):
    """A tokenizer, as far as its vocabulary is compared with a model's."""

    def get_vocab(self) -> dict[str, int]:
        """Return ids by token."""
        ...


@runtime_checkable
class HasBackend(Protocol):
    """A tokenizer with a `tokenizers.Tokenizer` behind it, as the fast ones of transformers."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Named special tokens."""
        ...

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of the library `tokenizers`."""
        ...


class EncodedText(dict[str, list[int]]):
    """Ids of a text under `input_ids`, with transformers' way to ask for a character's token."""

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(input_ids=encoding.ids)
        self._encoding = encoding

    def char_to_token(self, batch: int, character: int) -> int | None:
        """Return the index of the token that a character is in; `batch` is always 0."""
        del batch
        return self._encoding.char_to_token(character)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTokenizer:
    """A tokenizer with what prompts and texts need: its backend, special tokens, chat template.

    `end_ids` end completions: first those that its folder lists, then those of the policy.
    """

    backend_tokenizer: Tokenizer  # transformers' name for it
    special_tokens_map: Mapping[str, Any]
    chat_template: str | Mapping[str, str]
    end_ids: tuple[int, ...]

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Tokens that are no pieces of words, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens that have a name, and of the additional ones."""
        values = self.special_tokens_map.values()
        tokens = [token for v in values for token in ([v] if isinstance(v, str) else v)]
        ids = map(self.backend_tokenizer.token_to_id, dict.fromkeys(tokens))
        return [index for index in ids if index is not None]

    def get_chat_template(self, chat_template: Any = None, tools: Any = None) -> str:
        """Return the template for conversations with or without tools."""
        del chat_template  # as transformers names it; templates of others are not rendered here
        if isinstance(self.chat_template, str):
            return self.chat_template
        several = self.chat_template
        return several["tool_use" if tools and "tool_use" in several else "default"]

    def __call__(self, text: str, **_: Any) -> "EncodedText":
        """Tokenize a rendered conversation, without special tokens of its own."""
        return EncodedText(self.backend_tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:  # noqa: FBT001, FBT002 - transformers' signature
        """Return the text of ids."""
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def __len__(self) -> int:
        """Return the number of token ids."""
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        """Return ids by token."""
        return self.backend_tokenizer.get_vocab()


def backend_digest(tokenizer: HasBackend) -> str:
    """SHA-256 of everything that decides which ids a text becomes, as hex."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    # A call that pads or truncates leaves its setting behind in the backend.
    return rules_digest(rules | {"padding": None, "truncation": None}, tokenizer.special_tokens_map)


def rules_digest(rules: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> str:
    """SHA-256 of a tokenizer's rules and of its named special tokens, as hex."""
    special = {name: str(token) for name, token in sorted(special_tokens.items())}
    return hashlib.sha256(json.dumps([rules, special], sort_keys=True).encode()).hexdigest()


def characters_backend() -> Tokenizer:
    """Return the built-in vocabulary: a token per printable ASCII character, newline and role."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *PRINTABLE])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def tokenizer_folder(policy: PolicyConfig) -> str | None:
    """Return the folder of a policy's tokenizer; None for the built-in one."""
    if policy.tokenizer != CHARACTERS:
        return policy.tokenizer
    return policy.hf_path if policy.init == "hf" else None


def read_tokenizer(policy: PolicyConfig) -> FileTokenizer | None:
    """Read the tokenizer of a policy; None where only transformers knows how it is built.

    Raises InputError where the folder or its chat template is missing, a file cannot be read, or
    the template does not read one of the policy's options.
    """
    read = _read_plain(policy)
    options = policy.chat_template_options
    if read is None or not options:
        return read
    check_options(read, options, OPTIONS_KEY)
    return replace(read, chat_template=with_policy(read.chat_template, policy))


def _read_plain(policy: PolicyConfig) -> FileTokenizer | None:
    """Read the tokenizer of a policy with its chat template as the folder has it."""
    folder = tokenizer_folder(policy)
    if folder is None:
        backend = characters_backend()
        backend.add_special_tokens(list(SPECIAL))
        tokens: dict[str, Any] = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNKNOWN}
        tokens["additional_special_tokens"] = list(SPECIAL[3:])
        return FileTokenizer(
            backend_tokenizer=backend,
            special_tokens_map=tokens,
            chat_template=CHAT_TEMPLATE,
            end_ids=end_ids_of(policy, "", backend.token_to_id(EOS), backend.token_to_id),
        )
    path = Path(folder)
    check_tokenizer_folder(path)
    settings = _object_in(path / "tokenizer_config.json")
    listed = _object_in(path / "special_tokens_map.json")
    # Classes that are code of transformers may have tokens that no file names.
    if not (path / "tokenizer.json").is_file() or "eos_token" not in (settings | listed):
        return None
    template = _template_of(path, settings)
    if not template:
        raise no_chat_template(folder)
    backend = _backend_of(path / "tokenizer.json")
    tokens = _special_tokens(listed) | _special_tokens(settings)
    end = backend.token_to_id(str(tokens.get("eos_token")))
    if end is None:
        return None
    return FileTokenizer(
        backend_tokenizer=backend,
        special_tokens_map=tokens,
        chat_template=template,
        end_ids=end_ids_of(policy, folder, end, backend.token_to_id),
    )


def with_policy(template: str | Mapping[str, str], policy: PolicyConfig) -> str | dict[str, str]:
    """Return a chat template, or several by name, with a policy's `chat_template_options`."""
    options = policy.chat_template_options or {}
    if isinstance(template, str):
        return with_options(template, options)
    return {name: with_options(source, options) for name, source in template.items()}


def end_ids_of(
    policy: PolicyConfig, folder: str, end: int, id_of: Callable[[str], int | None]
) -> tuple[int, ...]:
    """Return the ids that end completions of a policy; `end` is the tokenizer's own.

    Raises InputError as `listed_end_ids` and `named_end_ids` do.
    """
    named = named_end_ids(policy.end_tokens or (), id_of)
    return tuple(dict.fromkeys((*listed_end_ids(folder, end), *named)))


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


def check_vocabulary(tokenizer: HasVocabulary, vocab_size: int) -> None:
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


def no_chat_template(source: str) -> InputError:
    """Return the error for a tokenizer without a chat template."""
    return InputError(
        f"the tokenizer of {source} has no chat template: expected `chat_template` in "
        "tokenizer_config.json or a file chat_template.jinja; add the one the model was "
        "trained with"
    )


def _backend_of(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(
            f"cannot read a tokenizer from {file.parent}: {error}; expected tokenizer.json as "
            "transformers writes it"
        ) from error


def _object_in(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty where there is no such file. Raises InputError."""
    return read_object(file) if file.is_file() else {}


def _special_tokens(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named special tokens, which files write as text or as an object."""
    named = {key: value for key, value in tree.items() if key.endswith("_token")}
    texts = {key: _text_of(value) for key, value in named.items()}
    tokens: dict[str, Any] = {key: text for key, text in texts.items() if isinstance(text, str)}
    if additional := tree.get("additional_special_tokens"):
        tokens["additional_special_tokens"] = [_text_of(value) for value in additional]
    return tokens


def _text_of(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token


def _template_of(path: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name, where transformers looks for them."""
    file = path / "chat_template.jinja"
    template = (
        file.read_text(encoding="utf-8")
        if file.is_file()
        else settings.get("chat_template")
        or _object_in(path / "chat_template.json").get("chat_template")
    )
    if isinstance(template, list):
        return {item["name"]: item["template"] for item in template}
    return template
