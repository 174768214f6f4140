"""Small tokenizers whose tokens are bytes: a character may take several, as real models' do."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from marin_rl.serving.text.detokenizer import BYTE_LETTERS
from marin_rl.tokenizers import CHAT_TEMPLATE, EOS, PAD, ROLES, UNKNOWN

SPECIAL = [PAD, EOS, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
# é ñ 中 文 😀 and ASCII can be written with these
BYTES = sorted({*b"abcdefghijklmnopqrstuvwxyz .,0123", *"éñ中文😀".encode()})
FALLBACK_BYTES = sorted({*"中文😀".encode()})


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's kind: every token is bytes, a few are two or three of them; fits 103 rows."""
    letters = [BYTE_LETTERS[byte] for byte in BYTES]
    merges = [("a", "b"), ("c", "d"), (BYTE_LETTERS[0xC3], BYTE_LETTERS[0xA9])]
    merged = [left + right for left, right in merges]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters, *merged])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _chatting(backend)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's kind: words with their space, and bytes for what is no word."""
    words = ["▁", *"abcdefghij", "▁a", "▁b", "▁the", "é"]
    names = [f"<0x{byte:02X}>" for byte in FALLBACK_BYTES]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *words, *names])}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=UNKNOWN)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _chatting(backend)


def _chatting(backend: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
