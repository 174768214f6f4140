"""From messages to token ids, and from samples to the JSON that OpenAI's clients read.

Owns the use of the tokenizer: templates, encoding, decoding. Pure functions, run off the event
loop. Leaves out routes (`app`) and the compact form that `protocol` owns.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
import orjson
from jaxtyping import Int32
from transformers import PreTrainedTokenizerBase

from marin_rl.inference.bodies import ApiError, ChatMessage, CompletionBody
from marin_rl.inference.protocol import ChatAnswer, Completion, ServerTimings, encode_answer
from marin_rl.inference.slots import GenerationResult, Sample


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[ChatMessage], *, opening: bool = True
) -> Int32[np.ndarray, " P"]:
    """Token ids of a conversation, by the tokenizer's own template.

    `opening` ends them with the assistant's opening. ApiError 400 if the template refuses them.
    """
    conversation = [{"role": message.role, "content": message.text} for message in messages]
    try:
        ids = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=opening, tokenize=True
        )
    except jinja2.TemplateError as error:
        raise ApiError(
            400, f"the chat template refuses these messages: {error}", param="messages"
        ) from None
    return np.asarray(ids, np.int32)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Int32[np.ndarray, " P"]:
    """Token ids of plain text, as the tokenizer opens it."""
    return np.asarray(tokenizer.encode(text), np.int32)


def text_of(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    """The completion without its stop token."""
    if sample.text is not None:
        return sample.text
    ids = sample.token_ids
    if sample.finish_reason == "stop":
        ids = ids[:-1]
    return tokenizer.decode(
        ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def token_texts(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[str]:
    """The text of each token by itself."""
    decoded = tokenizer.batch_decode(
        [[token] for token in sample.token_ids.tolist()], clean_up_tokenization_spaces=False
    )
    return list(decoded)


def chat_answer(
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    prompt: Int32[np.ndarray, " P"],
    result: GenerationResult,
    *,
    compact: bool,
) -> bytes:
    """The JSON of a chat completion; `compact` gives logprobs as one flat list per choice."""
    answer = ChatAnswer(
        model=model,
        prompt_token_ids=prompt,
        completions=tuple(
            Completion(
                text=text_of(tokenizer, sample),
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                finish_reason=sample.finish_reason,
                policy_versions=sample.policy_versions,
            )
            for sample in result.samples
        ),
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        weight_version=result.weight_version,
        parameters_digest=result.parameters_digest,
        timings=ServerTimings(
            queue_s=result.queue_s, prefill_s=result.prefill_s, decode_s=result.decode_s
        ),
    )
    texts = None if compact else [token_texts(tokenizer, sample) for sample in result.samples]
    return encode_answer(answer, created=int(time.time()), token_texts=texts)


def completions_answer(
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    body: CompletionBody,
    prompts: Sequence[Int32[np.ndarray, " _"]],
    results: Sequence[GenerationResult],
) -> bytes:
    """The JSON of a plain completion; prompt p's choices have the indices p * n + i."""
    choices = []
    for prompt, result in zip(prompts, results, strict=True):
        for sample in result.samples:
            choice = _plain_choice(tokenizer, body, sample) | {"index": len(choices)}
            if body.return_token_ids:
                choice |= {"prompt_token_ids": prompt, "token_ids": sample.token_ids}
            choices.append(choice)
    prompted = sum(map(len, prompts))
    sampled = sum(len(sample.token_ids) for result in results for sample in result.samples)
    answer = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompted,
            "completion_tokens": sampled,
            "total_tokens": prompted + sampled,
        },
        "weight_version": results[-1].weight_version,
        "parameters_digest": results[-1].parameters_digest,
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain_choice(
    tokenizer: PreTrainedTokenizerBase, body: CompletionBody, sample: Sample
) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None:
        texts = token_texts(tokenizer, sample)
        starts = np.cumsum([0, *map(len, texts[:-1])])
        logprobs = {
            "tokens": texts,
            "token_logprobs": sample.logprobs,
            "top_logprobs": None,
            "text_offset": starts,
        }
    return {
        "text": text_of(tokenizer, sample),
        "finish_reason": sample.finish_reason,
        "policy_versions": sample.policy_versions,
        "logprobs": logprobs,
    }
