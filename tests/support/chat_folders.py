"""Tokenizer and model folders with the control tokens and chat templates of model families."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]")
MERGES = (("Ċ", "Ċ"), ("Ġ", "w"), ("n", "g"))

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's, as far as its option goes: without thinking, the prompt has an empty thought.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# DeepSeek's, in ChatML's tokens: reasoning is removed from every turn.
WITHOUT_REASONING = CHATML.replace(
    "m.content }}", "m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
)
TRIMMED = CHATML.replace("m.content }}", "m.content | trim }}")
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'system' %}{{ '<<SYS>>\\n' + m.content.strip() + '\\n<</SYS>>\\n\\n' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Llama 3.2's, in ChatML's tokens: today stands in the system message.
DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<|im_start|>system\nToday Date: {{ date_string }}<|im_end|>\n" + CHATML
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
NO_END = CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }}")
TWO_ENDS = CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }}<|im_end|></s>")


def chat_tokenizer(
    template: str, eos: str = "<|endoftext|>", *, more: Sequence[str] = (), nfc: bool = False
) -> PreTrainedTokenizerFast:
    """A BPE over bytes in which two line breaks are one token; `eos` is the end by its files."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["".join(pair) for pair in MERGES]
    vocabulary = [*CONTROL, *more, *letters, *merged]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=list(MERGES))
    )
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=eos,
        pad_token="<|endoftext|>",
        additional_special_tokens=[*CONTROL, *more],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_folder(
    folder: Path,
    template: str,
    eos: str = "<|endoftext|>",
    listed: Sequence[int] = (),
    **more: bool,
) -> Path:
    """Write a tokenizer folder; `listed` are the ids that its generation_config.json ends with."""
    chat_tokenizer(template, eos, **more).save_pretrained(folder)
    if listed:
        config = {"eos_token_id": list(listed)}
        (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
