"""Sample text from a model folder or a checkpoint: `LLM`.

A front of the embedded engine (inference/engine.py) for scripts and notebooks: it loads weights and
tokenizer, renders chat templates, and turns tokens back into text. For other processes and
languages there is the server (`marin-rl serve`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.compilation import enable_compilation_cache
from marin_rl.config import Config, Overrides, as_overrides, override, parse_config
from marin_rl.errors import InputError
from marin_rl.inference.generation import GenerationRequest
from marin_rl.planning import CONTEXT_TOKENS_MAX, within_memory
from marin_rl.serving.launch import folder_tokenizer, proven_server
from marin_rl.serving.text.detokenizer import Detokenizer, TextDecoding
from marin_rl.serving.text.templates import conversation_of
from marin_rl.serving.weights.checkpoint_loader import Loaded, read_folder, read_slot
from marin_rl.storage.layout import POLICY_SLOTS
from marin_rl.storage.runs import Run, checkpoint_named, policy_at
from marin_rl.tokenizers import encoder_of, tokenizer_for
from marin_rl.trust import Consent, trusted_config
from marin_rl.types import Sampling

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A completion of one prompt.

    `text` is without the end token and cut before a stop string. `token_ids` are all that were
    sampled, the end token included, and `logprobs` (nats) are parallel to them: of the distribution
    that each was drawn from, for greedy ones at temperature 1. `finish_reason` is "stop" or
    "length". `prompt` is the index of its prompt, and `prompt_token_ids` what the model read.
    """

    prompt: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    prompt_token_ids: tuple[int, ...]


class LLM:
    """A model in this process that completes prompts, batched. Use it as a context manager.

    Args:
        source: a Hugging Face folder, the folder of a run (its latest checkpoint), or one
            checkpoint of it such as `runs/demo/checkpoints/round-00012`.
        round: the round of the checkpoint, for the folder of a run.
        overrides: settings of the configuration that the engine goes by, such as
            `{"policy.context_length": 2048, "inference.engine.slots": 8}`. A folder without a
            context length gets that of the model, up to 4,096 tokens.
        trust: accept the places that the folder of another user's run names.

    Raises:
        InputError: for a folder that cannot be decoded exactly, by what is not supported.
        ObjectMissing: for a checkpoint that is not committed.
        ConfigError: for wrong settings.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        round: int | None = None,
        overrides: Overrides = (),
        trust: bool = False,
    ) -> None:
        enable_compilation_cache()
        loaded, self._tokenizer, self.config = _opened(
            Path(source), round, as_overrides(overrides), trust=trust
        )
        self._server = proven_server(loaded, self._tokenizer, self.config)  # its port stays closed
        self._engine = self._server.engine
        self._detokenizer = Detokenizer(self._tokenizer)
        self._template = ChatTemplate.of(self._tokenizer)
        self._encode = encoder_of(self._tokenizer)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and free its caches. Requests that have not ended get InferenceError."""
        self._server.stop()

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return self._engine.context_length

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int = 1,
        max_tokens: int = 64,
        temperature: float | int = 1.0,
        top_p: float | int = 1.0,
        top_k: int = 0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Completion]:
        """Complete prompts; `n` completions of each, in the order of the prompts.

        Args:
            prompts: one prompt or a list of them. A text is read as it is; a list of messages
                (`[{"role": "user", "content": "2+2="}]`) goes through the chat template; a list of
                token ids is not changed.
            n: completions of each prompt.
            max_tokens: tokens of a completion, at most.
            temperature: 0 takes the likeliest token.
            top_p: likeliest tokens that are drawn from, by their probabilities' sum; 1: all.
            top_k: likeliest tokens that are drawn from, by number; 0: all.
            stop: strings that end a completion.
            seed: the same seed gives the same completions on the same machine; sample i of a prompt
                draws with `seed + i`. None draws one.

        Raises:
            InputError: for a prompt without tokens, or one that with `max_tokens` exceeds
                `context_length`, and for a template that refuses the messages.
        """
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=top_k,
            stop=stops,
            seed=seed,
        )
        ids = [self._ids_of(prompt) for prompt in _as_list(prompts)]
        requests = [GenerationRequest(prompt_ids=each, n=n, sampling=sampling) for each in ids]
        futures = [self._engine.submit(request) for request in requests]
        ends = frozenset(self._engine.stop_token_ids)
        decoding = TextDecoding(detokenizer=self._detokenizer, stop_token_ids=ends, stop=stops)
        completions = []
        for index, future in enumerate(futures):
            for sample in future.result().samples:
                sampled = sample.token_ids.tolist()
                completion = Completion(
                    prompt=index,
                    text=decoding.text(sampled, sample.finish_reason),
                    token_ids=tuple(sampled),
                    logprobs=tuple(sample.logprobs.tolist()),
                    finish_reason=sample.finish_reason,
                    prompt_token_ids=tuple(ids[index].tolist()),
                )
                completions.append(completion)
        return completions

    def _ids_of(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, str):
            return np.asarray(self._encode(prompt, True), np.int32)
        if prompt and isinstance(prompt[0], Mapping):
            messages: Any = prompt
            conversation = Conversation(messages=conversation_of(messages), opening=True)
            text = self._template.render(conversation).text
            return np.asarray(self._encode(text, False), np.int32)
        return np.asarray(prompt, np.int32)


Engine = LLM  # its name before


def _as_list(prompts: Any) -> list[Prompt]:
    single = isinstance(prompts, str) or (
        len(prompts) > 0 and isinstance(prompts[0], Mapping | int | np.integer)
    )
    listed: list[Any] = [prompts] if single else list(prompts)
    for prompt in listed:
        if not isinstance(prompt, str | Sequence | np.ndarray):
            raise InputError(
                f"expected a prompt as a text, messages or token ids, found {prompt!r:.80}"
            )
    return listed


def _opened(
    source: Path, round: int | None, changes: Sequence[str], *, trust: bool
) -> tuple[Loaded, Any, Config]:
    """Weights, tokenizer and configuration of a model folder, a run or one checkpoint."""
    place = source.absolute()
    is_run = (place / "run.json").is_file()
    if not is_run and round is not None:
        raise InputError(f"round={round}: expected the folder of a run, found {source}")
    if is_run:
        run = Run.open(str(place.parent), place.name)
        ref = None
    elif place.parent.name in POLICY_SLOTS:
        run, ref = checkpoint_named(str(place), POLICY_SLOTS, "the source of an engine", {})
    else:
        return _of_folder(source, changes)
    consent = Consent(overrides=tuple(changes), trust=trust)
    config = trusted_config(run, consent, ("inference.engine",), ("policy",))
    loaded = read_slot(run, ref or policy_at(run, round))
    return loaded, tokenizer_for(config.policy), config


def _of_folder(source: Path, changes: Sequence[str]) -> tuple[Loaded, Any, Config]:
    loaded = read_folder(str(source))
    longest = min(loaded.model.spec.context_length, CONTEXT_TOKENS_MAX)
    named = {"init": "hf", "hf_path": str(source), "context_length": longest}
    tree = override({"policy": named, "sampling": {}}, changes)
    context = tree["policy"]["context_length"] if isinstance(tree["policy"], dict) else longest
    if isinstance(tree["sampling"], dict) and isinstance(context, int):  # others are refused below
        tree["sampling"].setdefault("max_tokens", max(context // 2, 1))
    config = parse_config(tree, "overrides")
    return loaded, folder_tokenizer(source, config.policy), within_memory(config)
