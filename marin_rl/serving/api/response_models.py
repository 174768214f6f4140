"""Models of the responses, as the API description shows them.

Routes that sample write these shapes by hand, as bytes (`dialect`); tests hold every response to
its model.
"""

from typing import Literal

from pydantic import BaseModel, JsonValue, RootModel

from marin_rl.inference.client.answers import ServerTimings
from marin_rl.serving.api.messages import ToolCallBody

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorBody(BaseModel):
    """Error; `param` is the field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every response that is no 2xx."""

    error: ErrorBody


class Status(BaseModel):
    status: Literal["ok", "ready", "not ready"]


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class PromptTokens(BaseModel):
    """Tokens of the prompts that were not computed again."""

    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Likely(BaseModel):
    """A token and its log-probability (nats)."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class Scored(Likely):
    """A sampled token, and the likeliest in its place."""

    top_logprobs: list[Likely]


class ChatLogprobs(BaseModel):
    content: list[Scored]
    refusal: None = None


class AnsweredMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallBody] | None = None


class Sampled(BaseModel):
    index: int
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    policy_versions: list[int] | None = None


class ChatChoice(Sampled):
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    token_logprobs: list[float] | None = None


class SampledResponse(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    weight_version: int
    parameters_digest: str


class ChatCompletion(SampledResponse):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    timings: ServerTimings
    prompt_token_ids: list[int] | None = None


class ResponseObject(BaseModel):
    """Response of OpenAI's Responses; items are messages, reasoning and calls of functions."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, JsonValue]]
    incomplete_details: dict[str, str] | None
    usage: dict[str, JsonValue]


class MessageObject(BaseModel):
    """Response of Anthropic's Messages; blocks are text, thinking and uses of tools."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, JsonValue]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class CountedTokens(BaseModel):
    input_tokens: int


class MessagesErrorResponse(BaseModel):
    """Every response of Anthropic's routes that is no 2xx: an error's type and message."""

    type: Literal["error"]
    error: dict[str, str]


class PlainLogprobs(BaseModel):
    """Lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(BaseModel):
    """A token at a place of the prompt; its rank is the next beyond those asked for."""

    logprob: float
    rank: int
    decoded_token: str


class PlainChoice(Sampled):
    text: str
    logprobs: PlainLogprobs | None
    prompt_token_ids: list[int] | None = None
    token_logprobs: list[float] | None = None
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None
    timings: ServerTimings | None = None


class TextCompletion(SampledResponse):
    object: Literal["text_completion"]
    choices: list[PlainChoice]


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class GeneratedLikely(Likely):
    """A token by its id, also as the text `token_id:<id>`."""

    token_id: int


class GeneratedScored(GeneratedLikely):
    top_logprobs: list[GeneratedLikely]


class WeightVersionSpan(BaseModel):
    """Tokens `[start, end)` of a sample were sampled by weights of this version."""

    version: str
    start: int
    end: int


class GeneratedLogprobs(BaseModel):
    content: list[GeneratedScored]


class GeneratedChoice(BaseModel):
    index: int
    finish_reason: FinishReason
    token_ids: list[int]
    policy_versions: list[int] | None = None
    weight_versions: list[WeightVersionSpan]
    logprobs: GeneratedLogprobs | None


class Generated(BaseModel):
    """Response of vLLM's generation from ids to ids."""

    request_id: str
    model: str
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None
    weight_version: int
    parameters_digest: str


class SGLangFinishReason(BaseModel):
    """Reason for which a sample ended: length, or the stop token that matched."""

    type: FinishReason
    length: int | None = None
    matched: int | None = None


class SGLangMeta(BaseModel):
    """Facts of one sample; logprobs are (logprob, token id, null)."""

    id: str
    finish_reason: SGLangFinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    output_token_logprobs: list[tuple[float, int, None]] | None = None
    input_token_logprobs: list[tuple[float | None, int, None]] | None = None
    policy_versions: list[int] | None = None


class SGLangSample(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: SGLangMeta


class SGLangGenerated(RootModel[SGLangSample | list[SGLangSample]]):
    """Response of SGLang's generation: one sample, or a list for n above 1."""


class SGLangAdapters(BaseModel):
    success: bool
    loaded_adapters: dict[str, str]
