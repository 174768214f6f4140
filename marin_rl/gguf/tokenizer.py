"""The tokenizer of a GGUF file as transformers has it, and the other way for byte-level BPE.

A file names its pre-tokenizer by a word of llama.cpp, whose rule is code there; `RULES` has those
of the families that are converted, as their tokenizer.json has them. Other words are refused: a
wrong rule gives other ids without an error.
"""

import json
from typing import Any, NamedTuple

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from marin_rl.errors import InputError
from marin_rl.gguf.settings import Metadata
from marin_rl.tokenizers import end_token_ids

_ENDS_OF_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_ENDS_OF_LINES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_ENDS_OF_LINES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS_OF_LINES}"
)


class Rule(NamedTuple):
    """Way of cutting a text before its parts are merged; GPT-2's without an expression."""

    expression: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is not merged
    begins: bool = False  # with the token that begins a text, where the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.expression)
        if self.expression is not None:
            cut = pre_tokenizers.Split(Regex(self.expression), "isolated")
            return pre_tokenizers.Sequence([cut, plain])
        if self.digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
        return plain


RULES = {
    "llama-bpe": Rule(_LLAMA3, whole_words=True, begins=True),
    "qwen2": Rule(_QWEN2, nfc=True),
    "smollm": Rule(digits=True),
    "refact": Rule(digits=True),
    "gpt-2": Rule(),
    "dbrx": Rule(_LLAMA3),
    "tekken": Rule(_TEKKEN, whole_words=True, begins=True),
}
RULES |= {"deepseek-r1-qwen": RULES["qwen2"]}
RULES |= dict.fromkeys(("llama3", "llama-v3"), RULES["llama-bpe"])
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS = ("eos", "eot", "eom")


def read_tokenizer(metadata: Metadata) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The tokenizer of a file, and the ids that end a completion. Raises InputError."""
    tokens = metadata.list("tokenizer.ggml.tokens", str)
    kinds = metadata.list("tokenizer.ggml.token_type", int)
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise metadata.refusal("each token once, with its type", f"{len(kinds)} types")
    kind = metadata.value("tokenizer.ggml.model", str)
    if kind not in ("gpt2", "llama"):
        raise metadata.refusal("tokenizer.ggml.model gpt2 or llama", repr(kind))
    read = _read_pairs if kind == "gpt2" else _read_pieces
    backend, begins = read(metadata, tokens, kinds)
    ids = _token_ids(metadata, tokens)
    if "eos" not in ids:
        raise metadata.refusal("tokenizer.ggml.eos_token_id", "none: completions would never end")
    ends = list(dict.fromkeys(ids[name] for name in _ENDS if name in ids))
    words = {name: tokens[ids[key]] for name, key in _SPECIAL.items() if key in ids}
    begins = metadata.value("tokenizer.ggml.add_bos_token", bool, begins)
    ended = metadata.value("tokenizer.ggml.add_eos_token", bool, False)
    first, last = begins and words.get("bos"), ended and words.get("eos")
    if added := [(word, tokens.index(word)) for word in (first, last) if word]:
        single = [word for word in (first, "$A", last) if word]
        pair = [*single, *(word for word in (first, "$B", last) if word)]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=added
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": word for name, word in words.items()},
    )
    if "tokenizer.chat_template" in metadata.values:
        tokenizer.chat_template = metadata.value("tokenizer.chat_template", str)
    return tokenizer, ends


def _token_ids(metadata: Metadata, tokens: list[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for name in (*_SPECIAL.values(), *_ENDS):
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata.values:
            ids[name] = metadata.value(key, int)
            if not 0 <= ids[name] < len(tokens):
                raise metadata.refusal(f"{name}_token_id below {len(tokens)}", str(ids[name]))
    return ids


def _read_pairs(metadata: Metadata, tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, by its merges."""
    name = metadata.value("tokenizer.ggml.pre", str, "")
    rule = RULES.get(name)
    if rule is None:
        raise metadata.refusal(
            f"tokenizer.ggml.pre as one of {', '.join(RULES)}",
            f"{name!r}: take tokenizer.json from the model's own folder",
        )
    # Rows that only fill the vocabulary up are no tokens.
    vocabulary = {t: i for i, t in enumerate(tokens) if kinds[i] != TokenType.UNUSED}
    pairs = [tuple(merge.split(" ")) for merge in metadata.list("tokenizer.ggml.merges", str)]
    if wrong := [p for p in pairs if len(p) != 2 or not vocabulary.keys() >= {*p, "".join(p)}]:
        raise metadata.refusal("merges of two tokens to a third", f"{wrong[0]!r:.80}")
    model = models.BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=rule.whole_words)
    backend = Tokenizer(model)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    _add(backend, tokens, kinds)
    return backend, rule.begins


def _read_pieces(metadata: Metadata, tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: merges in the order of scores, as transformers finds them."""
    scores = metadata.list("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise metadata.refusal(f"{len(tokens)} scores of tokens", str(len(scores)))
    # A file has spaces of the user's own tokens as spaces, and scores them last.
    pieces = [token if token.strip(" ") else token.replace(" ", "▁") for token in tokens]
    if "\t\t" in pieces and "\t" not in pieces and "<0x09>" in pieces:
        pieces[pieces.index("<0x09>")] = "\t"  # as in Gemma's vocabulary, which merges tabs
    own = (TokenType.NORMAL, TokenType.USER_DEFINED)
    ranked = [
        (piece, 0.0 if kind == TokenType.USER_DEFINED else score)
        for piece, score, kind in zip(pieces, scores, kinds, strict=True)
        if kind in own
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    unknown = _token_ids(metadata, tokens).get("unknown")
    model = models.BPE(
        vocabulary,
        generate_merges(vocabulary, ranked),
        unk_token=None if unknown is None else pieces[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prefix = metadata.value("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", "▁")
    before = [normalizers.Prepend("▁"), spaces]
    backend.normalizer = normalizers.Sequence(before) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _add(backend, pieces, kinds)
    return backend, True


def _add(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Add control tokens and the user's own, which are matched verbatim."""
    pairs = [*zip(tokens, kinds, strict=True)]
    control = [token for token, kind in pairs if kind == TokenType.CONTROL]
    own = [token for token, kind in pairs if kind == TokenType.USER_DEFINED and token.strip("▁")]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in own])


def tokenizer_metadata(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> dict[str, Any]:
    """Keys and values of a byte-level BPE tokenizer; the inverse of `read_tokenizer`."""
    assert isinstance(tokenizer, PreTrainedTokenizerFast), "transformers' slow ones are no folder's"
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    rule = next((name for name, each in RULES.items() if _is_of(state, each)), None)
    ids = end_token_ids(tokenizer)
    if model["type"] != "BPE" or model.get("byte_fallback") or rule is None or len(ids) > 3:
        raise InputError(
            "this tokenizer cannot be written to a GGUF file: expected byte-level BPE with a rule "
            f"of {', '.join(RULES)} and at most three end tokens, found {model['type']} with "
            f"{json.dumps(state['pre_tokenizer'])[:200]}; `marin-rl export RUN --hf FOLDER` and "
            "convert_hf_to_gguf.py of llama.cpp write others"
        )
    tokens = [f"[PAD{index}]" for index in range(vocabulary)]
    kinds = [int(TokenType.UNUSED)] * vocabulary
    for token, index in model["vocab"].items():
        tokens[index], kinds[index] = token, int(TokenType.NORMAL)
    for index, token in tokenizer.added_tokens_decoder.items():
        kind = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        tokens[index], kinds[index] = token.content, int(kind)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    begins = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    special = {key: getattr(tokenizer, f"{name}_token_id") for name, key in _SPECIAL.items()}
    special |= dict(zip(_ENDS, ids, strict=False))
    values: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": rule,
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.merges": merges,
        "ggml.add_bos_token": begins,
        **{f"ggml.{name}_token_id": id for name, id in special.items() if id is not None},
    }
    if isinstance(tokenizer.chat_template, str):
        values["chat_template"] = tokenizer.chat_template
    return {f"tokenizer.{key}": value for key, value in values.items()}


def _is_of(state: dict[str, Any], rule: Rule) -> bool:
    """True if a tokenizer.json cuts texts by this rule."""
    plain = Tokenizer(models.BPE(ignore_merges=rule.whole_words))
    plain.pre_tokenizer = rule.pre_tokenizer()
    expected = json.loads(plain.to_str())["pre_tokenizer"]
    nfc = {"type": "NFC"} if rule.nfc else None
    return (
        _essence(state["pre_tokenizer"]) == _essence(expected)
        and state["normalizer"] == nfc
        and bool(state["model"].get("ignore_merges")) == rule.whole_words
    )


def _essence(cut: Any) -> Any:
    """A pre-tokenizer without what changes no token."""
    if not isinstance(cut, dict):
        return cut
    if "pretokenizers" in cut:
        return [_essence(each) for each in cut["pretokenizers"]]
    return {key: value for key, value in cut.items() if key != "trim_offsets"}
