"""Counts of an engine: requests, tokens, prompts, seconds."""

from dataclasses import dataclass, replace


@dataclass(slots=True)
class EngineStats:
    """Counts since the start; durations in seconds.

    `tokens` were sampled and kept, `slot_steps` are the steps of all sequence slots, empty ones
    too, and `busy_slot_steps` those that sampled. `failed` requests ended with an error. Of
    prompts, `prefilled_tokens` were computed and `cached_tokens` read from what earlier requests
    left, by `continued_prompts`; `evicted_prefixes` were left, and lost to other requests. After
    swaps, `recomputed_tokens` of `recomputed_sequences` that were running were computed again.
    """

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    chunks: int = 0
    slot_steps: int = 0
    busy_slot_steps: int = 0
    prefilled_prompts: int = 0
    copied_prompts: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    continued_prompts: int = 0
    evicted_prefixes: int = 0
    recomputed_sequences: int = 0
    recomputed_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    swaps: int = 0
    cancelled: int = 0
    failed: int = 0

    def snapshot(self) -> "EngineStats":
        """The counts as they are now; safe from any thread."""
        return replace(self)
