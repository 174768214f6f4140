"""The tokenizer of a policy, read on first use: ids and texts of what dialogues are made of.

transformers takes seconds to import, and episodes of one turn need none of it. Leaves out what a
chat template writes (`bridge`), and tool calls in texts (`tool_turns`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from marin_rl.config import EnvironmentConfig, PolicyConfig
from marin_rl.tokenizer_files import FileTokenizer, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def light_tokenizer(policy: PolicyConfig) -> "FileTokenizer | PreTrainedTokenizerBase":
    """The tokenizer of a policy, by its files alone where they say how it is built.

    Raises InputError.
    """
    built = read_tokenizer(policy)
    if built is not None:
        return built
    from marin_rl.tokenizers import tokenizer_for

    return tokenizer_for(policy)


def end_ids_in(tokenizer: "FileTokenizer | PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Ids that end completions, by a tokenizer of `light_tokenizer`. Raises InputError."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.end_ids
    from marin_rl.tokenizers import end_token_ids

    return end_token_ids(tokenizer)


def unlisted_end_ids(policy: PolicyConfig) -> tuple[int, ...]:
    """Ids of `policy.end_tokens` that no file of the tokenizer lists: servers do not know them.

    Raises InputError.
    """
    if policy.end_tokens is None:
        return ()
    alone = policy.model_copy(update={"end_tokens": None})
    listed = end_ids_in(light_tokenizer(alone))
    return tuple(end for end in end_ids_in(light_tokenizer(policy)) if end not in listed)


def template_options(policy: PolicyConfig, environment: EnvironmentConfig) -> dict[str, Any]:
    """Options of the chat template for an environment's prompts; the day is the policy's alone."""
    own = environment.chat_template_options or {}
    options = {**(policy.chat_template_options or {}), **own}
    return {name: value for name, value in options.items() if name != "date"}


class PolicyTokenizer:
    """Tokenizer of a policy. All of it raises InputError for one that cannot be read."""

    def __init__(self, policy: PolicyConfig) -> None:
        self._policy = policy

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer itself, as transformers has it."""
        from marin_rl.tokenizers import tokenizer_for

        return tokenizer_for(self._policy)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of the model."""
        from marin_rl.tokenizers import end_token_ids

        return end_token_ids(self.tokenizer)

    def encoded(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that has all of its special tokens."""
        from marin_rl.tokenizers import encoder_of

        return tuple(encoder_of(self.tokenizer)(text, False))

    def decoded(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids, without special tokens unless `special`."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "the ids of one text"
        return text
