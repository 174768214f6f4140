"""Request bodies of the routes that sample, score and tokenize.

Owns their fields, the static limits of each, and how they become the engine's request. Null means
the default wherever OpenAI's clients may send it. Limits that follow from the model or from the
configuration are the `service`'s.

OpenAI's fields that change nothing here are taken where leaving them out changes nothing for the
caller either: `user`, `safety_identifier`, `metadata` and `prompt_cache_key` are labels, and
`service_tier` and `store` may ask for what is done anyway. All others are refused by name.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Int32
from pydantic import Field, JsonValue, field_validator, model_validator

from marin_rl.inference.generation import (
    LOGIT_BIAS_MAX,
    STOP_TOKENS_MAX,
    TOP_LOGPROBS_MAX,
    GenerationRequest,
)
from marin_rl.serving.api.messages import (
    TOOLS_MAX,
    ChatMessage,
    JsonObject,
    Label,
    NamedTool,
    ResponseFormat,
    ToolBody,
    ToolChoice,
)
from marin_rl.serving.http.errors import VALUES_MAX, Body
from marin_rl.types import Sampling

MESSAGES_MAX = 4096
PROMPTS_MAX = 2**16
TOKENS_MAX = VALUES_MAX
SAMPLES_MAX = 2**20
STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 256
METADATA_MAX = 16
PROBE_TOKENS_MAX = 16

# Less would divide logits beyond what float32 holds.
TEMPERATURE_MIN = 1e-3
PENALTY_MIN = 1e-2

Token = Annotated[int, Field(ge=0, lt=2**31)]
# A list ends at its first wrong item: a million errors of which one is reported take gigabytes.
Tokens = Annotated[list[Token], Field(fail_fast=True, max_length=TOKENS_MAX)]
SomeTokens = Annotated[list[Token], Field(fail_fast=True, min_length=1, max_length=TOKENS_MAX)]
Messages = Annotated[
    list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MESSAGES_MAX)
]
Tools = Annotated[list[ToolBody], Field(fail_fast=True, max_length=TOOLS_MAX)]
PromptText = Annotated[str, Field(min_length=1)]
PromptTexts = Annotated[
    list[PromptText], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)
]
ManyTokens = Annotated[
    list[SomeTokens], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)
]
StopString = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS_MAX)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=STOP_STRINGS_MAX)]
StopTokens = Annotated[list[Token], Field(fail_fast=True, max_length=STOP_TOKENS_MAX)]
TokenText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seeds = Annotated[list[Seed], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)]
LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
# Values of variables that the chat template reads; which there are, the service knows.
TemplateKwargs = Annotated[
    dict[Annotated[str, Field(max_length=64)], JsonValue], Field(max_length=64)
]


class WithTools(Body):
    """A body that may offer tools."""

    tools: Tools | None = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or []]


class StreamOptions(Body):
    """Stream options; `include_obfuscation` may only be false."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(Body):
    """Sampling parameters that all sampling routes have in common."""

    n: int | None = Field(default=None, ge=1, le=SAMPLES_MAX)
    temperature: float | None = Field(default=None, ge=0, le=10)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopTokens | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=PENALTY_MIN, le=10)
    logit_bias: Annotated[dict[TokenText, Bias], Field(max_length=LOGIT_BIAS_MAX)] | None = None

    @field_validator("temperature")
    @classmethod
    def _divides_logits(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < TEMPERATURE_MIN:
            raise ValueError(
                f"expected 0 (greedy) or at least {TEMPERATURE_MIN:g}, found {value:g}"
            )
        return value

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def prompts_count(self) -> int:
        return 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token), float(bias)) for token, bias in (self.logit_bias or {}).items())

    def seed_of(self, prompt: int) -> int | None:
        """Seed of a prompt's first sample: prompts are `n` seeds apart."""
        return None if self.seed is None else (self.seed + prompt * self.samples) % 2**64

    def request(
        self, prompt: Int32[np.ndarray, " P"], max_tokens: int, *, number: int = 0, **more: Any
    ) -> GenerationRequest:
        """The engine's request for prompt `number`; its seeds begin at `seed_of(number)`.

        `more` are fields of the request that not all routes have.
        """
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            max_tokens=max_tokens,
            stop=self.stop_strings,
            seed=self.seed_of(number),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )
        return GenerationRequest(
            prompt_ids=prompt,
            n=self.samples,
            sampling=sampling,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=self.biases,
            presence_penalty=float(self.presence_penalty or 0),
            frequency_penalty=float(self.frequency_penalty or 0),
            **more,
        )


class SamplingBody(SamplingFields):
    """Fields that chat and plain completions have in common."""

    model: Annotated[str, Field(max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    logprobs_mode: LogprobsMode | None = None
    user: Label | None = None
    cache_salt: Label | None = None  # prompts share no cache across requests here
    priority: int | None = None  # requests are served in the order in which they came, but probes

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: expected with stream: true only")
        return self

    @property
    def raw(self) -> bool:
        """Logprobs of the model's own distribution, before temperature and filters."""
        return self.logprobs_mode == "raw_logprobs"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(SamplingBody, WithTools):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    compact_logprobs: bool | None = None
    probe: bool | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    metadata: Annotated[dict[str, Label], Field(max_length=METADATA_MAX)] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatBody":
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens: give either max_tokens or max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected with logprobs: true only")
        if self.top_logprobs and self.compact_logprobs:
            raise ValueError("top_logprobs: they have no compact form")
        if self.compact_logprobs and self.stream:
            raise ValueError("compact_logprobs: a stream has no compact form")
        size = self.new_tokens_max
        if self.probe and (self.samples > 1 or size is None or size > PROBE_TOKENS_MAX):
            raise ValueError(
                "probe: it goes before all that wait, so expected n 1 and max_tokens of at most "
                f"{PROBE_TOKENS_MAX}"
            )
        choice, names = self.tool_choice, [tool.function.name for tool in self.tools or []]
        if not names and choice not in (None, "none"):
            raise ValueError("tool_choice: expected with tools only")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice: expected one of the tools, {', '.join(names)}")
        return self

    @property
    def new_tokens_max(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def form(self) -> dict[str, Any] | None:
        if self.response_format is None:
            return None
        return self.response_format.model_dump(by_alias=True, exclude_none=True)


class TranslatedBody(Body):
    """Fields that the APIs which are translated into chat have in common.

    Messages and tools are read by the translation; `seed` is ours.
    """

    model: Annotated[str, Field(max_length=1024)]
    tools: Annotated[list[JsonObject], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: JsonValue = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=10)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: Seed | None = None
    metadata: JsonValue = None
    service_tier: Literal["auto", "default", "standard_only"] | None = None


class ResponsesBody(TranslatedBody):
    """POST /v1/responses; nothing is stored, so `input` has all items."""

    input: PromptText | Annotated[list[JsonObject], Field(min_length=1, max_length=MESSAGES_MAX)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    parallel_tool_calls: bool | None = None
    text: JsonObject | None = None
    previous_response_id: str | None = None
    store: Literal[False] | None = None
    stream_options: StreamOptions | None = None
    # labels
    include: list[str] | None = None
    reasoning: JsonValue = None
    truncation: Literal["disabled", "auto"] | None = None
    client_metadata: JsonValue = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None
    user: Label | None = None


class CountTokensBody(TranslatedBody):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[JsonObject], Field(min_length=1, max_length=MESSAGES_MAX)]
    system: str | list[JsonObject] | None = None
    # labels
    thinking: JsonValue = None
    output_config: JsonObject | None = None
    context_management: JsonValue = None


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StopStrings | None = None
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)


class ChatTokensBody(ChatBody):
    """POST /v1/chat/completions/tokens: chat, with the prompt's exact ids next to the messages."""

    tokens: SomeTokens


class CompletionBody(SamplingBody):
    """POST /v1/completions: one prompt or a list of them, as text or as token ids.

    `prompt_logprobs` scores prompts as vLLM has it, which TRL asks a teacher for.
    """

    prompt: PromptText | PromptTexts | SomeTokens | ManyTokens
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1)
    suffix: None = None
    compact_logprobs: bool | None = None
    seeds: Seeds | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionBody":
        if self.compact_logprobs and (self.stream or self.logprobs or self.echo):
            raise ValueError(
                "compact_logprobs: the sampled tokens' own, for answers that come as a whole; "
                "expected logprobs of 0 or null, and neither stream nor echo"
            )
        if self.seeds is not None and self.seed is not None:
            raise ValueError("seeds: give either seed or seeds")
        if self.seeds is not None and len(self.seeds) != len(self.prompts):
            expected = f"expected one per prompt, {len(self.prompts)}, found {len(self.seeds)}"
            raise ValueError(f"seeds: {expected}")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: expected stream false, found true")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens: expected at least 1 without echo, found 0")
        if self.best_of not in (None, self.samples):
            raise ValueError("best_of: expected the same as n: all samples are returned")
        return self

    def seed_of(self, prompt: int) -> int | None:
        return super().seed_of(prompt) if self.seeds is None else self.seeds[prompt] % 2**64

    @property
    def prompts_count(self) -> int:
        return len(self.prompts)

    @cached_property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class GenerateParameters(SamplingFields):
    """`sampling_params` of /inference/v1/generate, as vLLM names them.

    `skip_special_tokens` concerns text, and `routed_experts_prompt_start` concerns experts: the
    response has neither. verifiers sends `cache_salt` and `priority` here too. With
    `prompt_logprobs` `max_tokens` may be 0: the prompt is scored, and nothing is sampled.
    """

    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    skip_special_tokens: bool | None = None
    routed_experts_prompt_start: int | None = Field(default=None, ge=0)
    cache_salt: Label | None = None
    priority: int | None = None
    min_tokens: Literal[0] | None = None
    ignore_eos: Literal[False] | None = None

    @model_validator(mode="after")
    def _scores_or_samples(self) -> "GenerateParameters":
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens: expected at least 1 without prompt_logprobs, found 0")
        return self


class GenerateBody(Body):
    """POST /inference/v1/generate: token ids in and out."""

    model: Annotated[str, Field(max_length=1024)]
    token_ids: SomeTokens
    sampling_params: GenerateParameters | None = None
    stream: Literal[False] | None = None
    cache_salt: Label | None = None
    priority: int | None = None


class SGLangParameters(SamplingFields):
    """`sampling_params` of /generate, as SGLang names them.

    `sampling_seed` is another name of `seed`.
    """

    max_new_tokens: int | None = Field(default=None, ge=0)
    min_new_tokens: Literal[0] | None = None
    sampling_seed: Seed | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    no_stop_trim: Literal[False] | None = None
    ignore_eos: Literal[False] | None = None

    def seed_of(self, prompt: int) -> int | None:
        if self.sampling_seed is not None:
            return self.sampling_seed % 2**64
        return super().seed_of(prompt)


class SGLangBody(Body):
    """POST /generate: one prompt, as token ids or as text; `lora_path` is an adapter's name.

    With `return_logprob`, `logprob_start_len` n scores the prompt's tokens from n on (-1: none);
    then `max_new_tokens` may be 0.
    """

    input_ids: SomeTokens | None = None
    text: PromptText | None = None
    sampling_params: SGLangParameters | None = None
    rid: Annotated[str, Field(max_length=1024)] | None = None
    lora_path: Annotated[str, Field(max_length=1024)] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(default=None, ge=-1)
    top_logprobs_num: Literal[0] | None = None
    return_text_in_logprobs: Literal[False] | None = None
    stream: Literal[False] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "SGLangBody":
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("input_ids: give either input_ids or text")
        sampled = self.sampling_params is None or self.sampling_params.max_new_tokens != 0
        if not sampled and not self.scores_prompt:
            raise ValueError(
                "max_new_tokens: expected at least 1 without return_logprob and logprob_start_len "
                "from 0 on, found 0"
            )
        return self

    @property
    def scores_prompt(self) -> bool:
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)


class TokenizeBody(WithTools):
    """POST /tokenize: messages through the chat template, or plain text."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    messages: Messages | None = None
    prompt: str | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "TokenizeBody":
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("messages: give either messages or prompt")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: the template adds what a conversation needs")
        if self.prompt is not None and self.tools:
            raise ValueError("tools: expected with messages only")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    tokens: Tokens
