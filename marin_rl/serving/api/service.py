"""State that all routes share: the engine, its tokenizer, its names and its limits.

Owns the served names, the limits that follow from model and configuration, and the threads that
parse and tokenize. Leaves out the way of a request (`request_handler`), who may call (`auth`), what
is accepted (`requests`) and how responses look (`dialect`).
"""

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32
from transformers import PreTrainedTokenizerBase

import marin_rl
from marin_rl.chat_templates import WORKERS_MAX
from marin_rl.config import ServerConfig
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.inference.engine import Engine, Policy
from marin_rl.inference.generation import STOP_TOKENS_MAX, Delta, GenerationResult
from marin_rl.serving.api.messages import ChatMessage
from marin_rl.serving.api.requests import SamplingFields
from marin_rl.serving.api.worker_threads import ResponseWriter, TokenizeWorker
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.http.guard import check_limits, overloaded
from marin_rl.serving.text.constraints import Constraints
from marin_rl.serving.text.detokenizer import Detokenizer, TextDecoding
from marin_rl.serving.text.templates import ChatPrompts, ReasoningFormat, reasoning_format
from marin_rl.serving.weights.adapters import ServedAdapters
from marin_rl.serving.weights.weight_updates import WeightUpdater
from marin_rl.tokenizers import encoder_of, is_direct
from marin_rl.tool_calls import ToolFormat, tool_format

# More characters than any tokenizer's tokens have on average.
TOKEN_CHARACTERS_MAX = 256
# More than there are processes that check grammars: some may wait, others are known already.
FORM_THREADS = 4
# Limit of a text, in contexts of tokens: `/tokenize` says by how much it is too long.
CONTEXTS_MAX = 2
# Characters of a long text that are tokenized first, for each token of the context.
PROBE_CHARACTERS = 4

Prompt = Int32[np.ndarray, " _"]
F = TypeVar("F", bound=SamplingFields)


@dataclass
class Service:
    """State that the routes share. `draining` may be taken back, `stopping` may not."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    detokenizer: Detokenizer
    name: str
    updater: WeightUpdater
    adapters: ServedAdapters
    limits: ServerConfig
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    stopping: bool = False
    running: int = 0
    writer: ResponseWriter = field(default_factory=ResponseWriter)

    def __post_init__(self) -> None:
        engine, tokenizer = self.engine, self.tokenizer
        self.chat_prompts = ChatPrompts(tokenizer)
        self.constraints = Constraints(
            tokenizer, vocabulary=engine.spec.vocabulary, stop_tokens=engine.stop_token_ids
        )
        self._encode = encoder_of(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: id for id, token in added if token.special}
        self._architecture = repr(engine.spec)
        self.worker = ThreadPoolExecutor(1, "tokenizer")
        # these wait for other processes: for a grammar's check, for a template's rendering
        self.forms = ThreadPoolExecutor(FORM_THREADS, "forms")
        self.chats = ThreadPoolExecutor(WORKERS_MAX, "chats")
        self.preparer = TokenizeWorker(
            self.worker,
            alone=not is_direct(tokenizer),
            forms=self.forms,
            chats=self.chats if self.chat_prompts.waits else None,
        )

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        return tool_format(self.tokenizer)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        return reasoning_format(self.tokenizer)

    def close(self) -> None:
        for executor in (self.worker, self.forms, self.chats):
            executor.shutdown(wait=False, cancel_futures=True)
        self.writer.close()

    @property
    def model_id(self) -> str:
        current = self.adapters.current
        return self.base_id if current is None else current.name

    @property
    def base_id(self) -> str:
        return self.id_of(self.engine.policy)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def known(self) -> list[str]:
        return [self.base_id, *self.names, *self.adapters.names]

    def id_of(self, policy: Policy | GenerationResult | Delta) -> str:
        if policy.adapter_name:
            return policy.adapter_name
        return served_model_id(self.name, policy.weight_version, policy.parameters_digest)

    def parent_of(self, model: str) -> str | None:
        if model in self.names:
            return None
        return self.base_id if model in self.adapters.names else self.name

    def target(self, model: str, param: str = "model") -> tuple[str, int]:
        """The model of a request and its adapter's number in the engine, 0 for the base.

        `base:adapter` is SGLang's way to name an adapter. ApiError 404, with the known ids, for a
        model that is not served.
        """
        base, _, name = model.partition(":")
        if model in self.names:
            current = self.adapters.current
            return model, 0 if current is None else current.number
        if model == self.base_id:
            return model, 0
        bases = (*self.names, self.base_id)
        adapter = self.adapters.get(name if name and base in bases else model)
        if adapter is None:
            raise _unknown(model, self.known, param)
        return adapter.name, adapter.number

    def check_answers(self, policy: Policy, model: str) -> None:
        """ApiError 404, with the known ids, where a policy is not the model that was asked for."""
        known = [self.id_of(policy), *self.names]
        if model not in known:
            raise _unknown(model, known)

    def fingerprint(self, parameters_digest: str) -> str:
        text = "\n".join((marin_rl.__version__, self._architecture, parameters_digest))
        return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def decoding(self, body: SamplingFields, *, special: bool = False) -> TextDecoding:
        return TextDecoding(
            detokenizer=self.detokenizer,
            stop_token_ids=frozenset(self.engine.stop_token_ids).union(body.stop_token_ids or ()),
            stop=body.stop_strings,
            special=special,
        )

    def checked(self, body: F, model: str, *, param: str = "model") -> tuple[F, tuple[str, int]]:
        """The body with its stop strings as ids where they are tokens, and the model it names.

        ApiError 404 for a model that is not served, 400 for unknown ids and too many samples, 503
        for a full queue.
        """
        strings, asked = body.stop_strings, body.stop_token_ids or ()
        own = self.engine.stop_token_ids
        # Texts leave special tokens out, so a stop string that is one would never match.
        ids = [self._special[string] for string in strings if string in self._special]
        if ids or set(asked) & set(own):
            update = {
                "stop": [string for string in strings if string not in self._special],
                "stop_token_ids": [id for id in (*asked, *ids) if id not in own],
            }
            body = body.model_copy(update=update)
        target = self.target(model, param)
        stops = body.stop_token_ids or ()
        self.check_ids(stops, "stop_token_ids")
        most = STOP_TOKENS_MAX - len(own)
        if len(stops) > most:
            raise ApiError(
                400,
                f"stop_token_ids: expected at most {most} in addition to the model's own, found "
                f"{len(stops)}",
                code="limit_exceeded",
                param="stop_token_ids",
            )
        self.check_ids([token for token, _ in body.biases], "logit_bias")
        n, prompts, waiting_max = body.samples, body.prompts_count, self.limits.samples_queued_max
        check_limits(
            ("n", "samples", n, self.limits.samples_max),
            ("prompt", "prompts", prompts, self.limits.prompts_max),
            ("n", "samples of all prompts", n * prompts, waiting_max),
        )
        if self.engine.queued + n * prompts > waiting_max:
            raise overloaded(f"more than {waiting_max} samples would wait")
        return body, target

    def prompt(self, text_or_ids: str | list[int], param: str) -> Prompt:
        """Ids of a prompt. ApiError 400 for a text too long, or ids outside the vocabulary."""
        if isinstance(text_or_ids, str):
            return self.encode(text_or_ids, param=param)
        self.check_ids(text_or_ids, param)
        return np.asarray(text_or_ids, np.int32)

    def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> Prompt:
        """Ids of plain text; `special` opens and ends it as the tokenizer does.

        ApiError 400 for a text of more than CONTEXTS_MAX contexts. Tokenizing takes 0.4 s and
        130 MB for a million characters, so a long text is refused by its beginning.
        """
        self._check_characters(len(text), param)
        # Doubled each time, so all probes together cost no more than tokenizing the text once more.
        characters = PROBE_CHARACTERS * self.engine.context_length
        while characters < len(text):
            self.check_length(len(self._encode(text[:characters], False)), param)
            characters *= 2
        ids = self._encode(text, special)
        self.check_length(len(ids), param)
        return np.asarray(ids, np.int32)

    def chat_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: list[dict[str, Any]],
        opening: bool = True,
        options: dict[str, Any] | None = None,
    ) -> Prompt:
        """Ids of a conversation by the chat template; ApiError as `ChatPrompts.text` and `encode`.

        `opening` ends the ids with the assistant's opening; `options` are the template's.
        """
        rendered = [message.as_template_message() for message in messages]
        self._check_characters(sum(len(m["content"] or "") for m in rendered), "messages")
        # Without further special tokens: the template writes them.
        text = self.chat_prompts.text(
            rendered, tools=tools or None, opening=opening, options=options
        )
        return self.encode(text, special=False, param="messages")

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        vocabulary, largest = self.engine.spec.vocabulary, max(tokens, default=0)
        if largest >= vocabulary:
            message = f"expected token ids below {vocabulary}, found {largest}"
            raise ApiError(400, message, param=param)

    def _check_characters(self, count: int, param: str) -> None:
        """ApiError 400 for a text that no tokenizer could fit into the context: it is not tried."""
        most = self.engine.context_length * TOKEN_CHARACTERS_MAX
        if count > most:
            words = f": expected at most {most} characters, found {count}"
            raise self._too_long(words, param, count // TOKEN_CHARACTERS_MAX)

    def check_length(self, count: int, param: str) -> None:
        """ApiError 400 for ids that more than fill CONTEXTS_MAX contexts."""
        most = CONTEXTS_MAX * self.engine.context_length
        if count > most:
            raise self._too_long(f", but the text has more than {most}: shorten it", param, count)

    def new_tokens(
        self, prompt: Prompt, max_tokens: int | None, *, param: str, default: int | None = None
    ) -> int:
        """Limit of new tokens of a prompt: the requested one, else `default` or the room left.

        ApiError 400 for a prompt, or a number, beyond what the model or the configuration allows.
        """
        length = len(prompt)
        check_limits(
            (param, "prompt tokens", length, self.limits.prompt_tokens_max),
            ("max_tokens", "new tokens", max_tokens, self.limits.new_tokens_max),
        )
        # Checked here although the engine would refuse it: this error names the parameter.
        room = self.engine.context_length - length
        least = 1 if max_tokens is None else max_tokens
        if room < least:
            words = f", but the prompt has {length} and {least} new ones were asked for: "
            raise self._too_long(f"{words}shorten the prompt or lower max_tokens", param, length)
        if max_tokens is not None:
            return max_tokens
        return min(room, self.limits.new_tokens_max or room, default or room)

    def _too_long(self, words: str, param: str, count: int) -> ApiError:
        most = self.engine.context_length
        context = f"this model's maximum context length is {most} tokens"
        return ApiError(
            400,
            context + words,
            code="context_length_exceeded",
            param=param,
            too_long=(count, most),
        )


def _unknown(model: str, known: list[str], param: str = "model") -> ApiError:
    return ApiError(
        404,
        f"the model {model[:200]!r} is not served here; known: {', '.join(known)}",
        code="model_not_found",
        param=param,
    )
