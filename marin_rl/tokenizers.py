"""Tokenizers: the built-in character one, or a local Hugging Face folder; never a download.

A tokenizer is fit for use when it has a chat template and an end token, and when no id of it lies
outside the policy's vocabulary. Everything else takes the tokenizer as an object.

A base model's folder may list one end token while its chat template closes turns with another. A
model that learns from such a template writes the template's, so that one must end completions too.
"""

import hashlib
import json
import logging
import re
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
from transformers import AddedToken, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from marin_rl.chat_templates import (
    CHAT_TEMPLATE,
    ChatTemplate,
    Conversation,
    check_options,
    prove,
    reads_clock,
    start_worker,
    with_options,
    without_date,
)
from marin_rl.config import EnvironmentConfig, PolicyConfig
from marin_rl.errors import InputError, TemplateRefusal
from marin_rl.plain_files import read_object
from marin_rl.tokenizer_files import (
    EOS,
    PAD,
    SPECIAL,
    UNKNOWN,
    characters_backend,
    check_tokenizer_folder,
    tokenizer_folder,
)

# The class of transformers 5 that is defined by tokenizer.json alone, and its name in 4.
TOKENIZERS_BACKEND = "TokenizersBackend"
PLAIN_CLASSES = (TOKENIZERS_BACKEND, PreTrainedTokenizerFast.__name__)
# transformers 4 warns that the folder names another class, on which nothing depends.
logging.getLogger("transformers.tokenization_utils_base").addFilter(
    lambda record: TOKENIZERS_BACKEND not in record.getMessage()
)


def tokenizer_for(policy: PolicyConfig) -> PreTrainedTokenizerBase:
    """The tokenizer a policy is trained and served with.

    A policy whose model is a Hugging Face folder and which names no tokenizer has the folder's.
    Its chat template has the policy's options, and `end_token_ids` the policy's end tokens. Raises
    InputError when a folder is missing, its tokenizer cannot be used for chat, or its template does
    not read one of the options.
    """
    folder = tokenizer_folder(policy)
    tokenizer = character_tokenizer() if folder is None else load_tokenizer(folder)
    if options := policy.chat_template_options:
        check_options(tokenizer, options, "policy.chat_template_options")
        template = tokenizer.chat_template
        tokenizer.chat_template = (
            with_options(template, options)
            if isinstance(template, str)
            else {name: with_options(source, options) for name, source in template.items()}
        )
    end = tokenizer.eos_token_id
    assert isinstance(end, int), "checked when it was read"
    _ends[tokenizer] = listed_end_ids(folder or "", end)
    add_ends(tokenizer, policy.end_tokens or ())
    return tokenizer


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of characters: a token per printable ASCII one, newline, role, padding and end.

    103 ids, the special ones first; any other character becomes `<|unknown|>`.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters_backend(),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=list(SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Read a tokenizer from a local folder, and check that it can be used for chat.

    Folders of transformers 4 and of transformers 5 are read alike. Raises InputError when the
    folder or its files are missing or no ordinary files, or when it has no chat template or no end
    token.
    """
    path = Path(folder)
    check_tokenizer_folder(path)
    try:
        tokenizer = _from_folder(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"cannot read a tokenizer from {path}: {error}; expected tokenizer.json and "
            "tokenizer_config.json as transformers 4 or 5 writes them"
        ) from error
    if not tokenizer.chat_template:
        raise InputError(
            f"the tokenizer of {path} has no chat template: expected `chat_template` in "
            "tokenizer_config.json or a file chat_template.jinja; add the one the model was "
            "trained with"
        )
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer of {path} has no end token: set `eos_token` in tokenizer_config.json"
        )
    start_worker()  # its template will be rendered soon
    return tokenizer


def _from_folder(path: Path) -> PreTrainedTokenizerBase:
    """Read a folder of transformers 4 or 5 with transformers 4; raises what that raises.

    transformers 5 names its class of plain tokenizer.json files TokenizersBackend, which is
    PreTrainedTokenizerFast in transformers 4, and lists under `extra_special_tokens` what is called
    `additional_special_tokens` in transformers 4, where that key is a mapping of named tokens.
    """
    file = path / "tokenizer_config.json"
    settings = read_object(file) if file.is_file() else {}
    plain = settings.get("tokenizer_class") in PLAIN_CLASSES
    renamed: dict[str, Any] = {}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, list):
        tokens: list[Any] = []
        for token in (*(settings.get("additional_special_tokens") or ()), *extra):
            if isinstance(token, dict):
                token = AddedToken(**{n: value for n, value in token.items() if n != "__type"})
            tokens.append(token)
        named = settings.get("model_specific_special_tokens") or {}
        renamed = {"extra_special_tokens": named, "additional_special_tokens": tokens}
    # Its own classes of models take a second to import, which plain files do not need.
    reader = PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
    return reader.from_pretrained(str(path), local_files_only=True, **renamed)


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


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Token ids that end a completion: the tokenizer's end token, then others that its folder
    lists, then those of the policy that it was made for (`tokenizer_for`).

    Chat models have several, in the folder's `generation_config.json`, and
    transformers and vLLM stop at each of them. Raises InputError for a tokenizer without an end
    token, and for a file that is no such list.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise InputError("the tokenizer has no end token: completions would never end")
    if tokenizer in _ends:
        return _ends[tokenizer]
    return listed_end_ids(tokenizer.name_or_path, end)


def trained_ends(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids after which nothing of a demonstration is trained on; none where the run names none.

    Those are runs from before `policy.end_tokens`, and runs by the built-in template, which writes
    nothing after an end.
    """
    return end_token_ids(tokenizer) if policy.end_tokens is not None else ()


# Ends of the tokenizers that were made for a policy, which may have some of its own.
_ends: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, ...]]" = (
    weakref.WeakKeyDictionary()
)


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[str, bool], list[int]]:
    """Return `encode(text, special) -> ids`, equal to the tokenizer's own encoding.

    `special` opens and ends the ids as the tokenizer would. Where transformers' own layers add
    nothing but time, they are left out (see `is_direct`); what they would set for each text is set
    once, so that several threads may encode.
    """
    if not is_direct(tokenizer):
        lock = _locks.setdefault(tokenizer, threading.Lock())  # shared by all its encoders

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
        return cls(
            tokenizer_digest=tokenizer_digest(tokenizer),
            chat_template_digest=chat_template_digest(tokenizer),
        )


def export_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer so that transformers 4 and 5 give the same ids.

    transformers 5 rebuilds pre-tokenizers of classes that it knows by name, such as GPT2Tokenizer,
    and leaves out what tokenizer.json has more. Of the plain class it takes tokenizer.json as it
    is; what the named class had by default is written out.
    """
    tokenizer.save_pretrained(str(folder))
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return
    file = folder / "tokenizer_config.json"
    settings = read_object(file) | {
        "tokenizer_class": PreTrainedTokenizerFast.__name__,
        "model_input_names": tokenizer.model_input_names,
        "padding_side": tokenizer.padding_side,
        "clean_up_tokenization_spaces": tokenizer.clean_up_tokenization_spaces,
    }
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", "utf-8")


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that decides which ids a text becomes, as hex."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # A call that pads or truncates leaves its setting behind in the backend.
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules |= {"padding": None, "truncation": None}
    else:
        rules = tokenizer.get_vocab()
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    return hashlib.sha256(json.dumps([rules, special], sort_keys=True).encode()).hexdigest()


def chat_template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the chat template with the policy's options but for the date, as hex."""
    template = tokenizer.chat_template
    if isinstance(template, str):
        text = without_date(template)
    else:
        dateless = {name: without_date(source) for name, source in template.items()}
        text = json.dumps(dateless, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def unlisted_end_ids(policy: PolicyConfig) -> tuple[int, ...]:
    """Ids of `policy.end_tokens` that no file of the tokenizer lists: servers do not know them.

    Raises InputError.
    """
    if policy.end_tokens is None:
        return ()
    listed = end_token_ids(tokenizer_for(policy.model_copy(update={"end_tokens": None})))
    return tuple(end for end in end_token_ids(tokenizer_for(policy)) if end not in listed)


def template_options(policy: PolicyConfig, environment: EnvironmentConfig) -> dict[str, Any]:
    """Options of the chat template for an environment's prompts; the day is the policy's alone."""
    own = environment.chat_template_options or {}
    options = {**(policy.chat_template_options or {}), **own}
    return {name: value for name, value in options.items() if name != "date"}


class PolicyTokenizer:
    """Tokenizer of a policy, read on first use: InputError is raised where it cannot be read."""

    def __init__(self, policy: PolicyConfig) -> None:
        self._policy = policy

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_for(self._policy)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        return end_token_ids(self.tokenizer)

    def encoded(self, text: str) -> tuple[int, ...]:
        return tuple(encoder_of(self.tokenizer)(text, False))

    def decoded(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids, without special tokens unless `special`."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "the ids of one text"
        return text


_QUESTION = {"role": "user", "content": "question"}
_REPLY = "reply"


def control_tokens(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> set[str]:
    tokens = tokenizer.added_tokens_decoder.items()
    return {str(token.content) for id, token in tokens if token.special or id in ends}


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    # The longest first, as the tokenizer reads them; never the empty text.
    ordered = sorted({*texts} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "$^")


def listed_end_ids(folder: str, end: int) -> tuple[int, ...]:
    """Return the tokenizer's end token, then others that generation_config.json lists.

    Raises InputError for a file that has no such list.
    """
    file = Path(folder, "generation_config.json")
    if not folder or not file.is_file():
        return (end,)
    listed = read_object(file).get("eos_token_id")
    ids = listed if isinstance(listed, list) else [end if listed is None else listed]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"{file}: expected eos_token_id as one id or a list, found {listed!r:.80}")
    return tuple(dict.fromkeys([end, *ids]))


def end_tokens_of(policy: PolicyConfig) -> tuple[str, ...] | None:
    """The token that ends an answer by the policy's chat template; None where none does.

    Raises InputError as `template_ends` does.
    """
    if tokenizer_folder(policy) is None:
        return None  # its one end token ends everything
    return template_ends(tokenizer_for(policy)) or None


def template_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The token that ends an answer by the chat template, or none.

    None where the template is the built-in one, writes no token after an answer, or refuses a
    conversation that ends with an answer. Raises InputError as `prove` does, and where the template
    writes several tokens of which the files of the tokenizer list none; TemplateFault.
    """
    template = ChatTemplate.of(tokenizer)
    if template.is_built_in:
        return ()
    prove(tokenizer)
    turns = [_QUESTION, {"role": "assistant", "content": _REPLY}]
    try:
        text = template.render(Conversation(messages=turns)).text
    except TemplateRefusal:
        return ()
    _, answered, after = text.rpartition(_REPLY)
    ids = tokenizer.encode(after, add_special_tokens=False) if answered else []
    added = tokenizer.added_tokens_decoder
    closing = [str(added[token].content) for token in ids if token in added]
    listed = [str(tokenizer.decode([end])) for end in end_token_ids(tokenizer)]
    known = [token for token in closing if token in listed]
    if not known and len(set(closing)) > 1:
        raise InputError(
            f"the chat template closes an answer with {' and '.join(map(repr, closing))}, but "
            f"completions end with {' or '.join(map(repr, listed))} by the tokenizer's files: set "
            "policy.end_tokens to the list of those that end a completion"
        )
    return tuple((known or closing)[:1])


def add_ends(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> None:
    """Have `end_token_ids` list these tokens too. Raises InputError for a text that is no token."""
    vocabulary = tokenizer.get_vocab() if texts else {}
    if unknown := [text for text in texts if text not in vocabulary]:
        raise InputError(
            f"policy.end_tokens: {unknown[0]!r} is no token of the policy's tokenizer: "
            "expected the text of one token, as its tokenizer.json has it"
        )
    named = [vocabulary[text] for text in texts]
    _ends[tokenizer] = tuple(dict.fromkeys((*end_token_ids(tokenizer), *named)))


def template_options_of(policy: PolicyConfig) -> dict[str, Any] | None:
    """The day on which the run begins, where the chat template asks for it. Raises InputError."""
    if tokenizer_folder(policy) is None:
        return None
    # The local day, as templates have it from transformers.
    today = datetime.now(UTC).astimezone().date().isoformat()
    return {"date": today} if reads_clock(tokenizer_for(policy)) else None
