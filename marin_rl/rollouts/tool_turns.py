"""Tool calls in sampled turns, by the chat template of the policy.

Owns the check that a template can carry tools at all, the reading of calls from sampled ids, and
the limit of what a tool's result may add to a dialogue. Calls are read as the server reads them
(`marin_rl.tool_calls`), but from the ids and with ids of their own that follow from the turn, so
that a rollout depends on nothing that an endpoint draws. Leaves out what is done with a call
(`environments`), and the ids that lead to the next turn (`bridge`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.config import EnvironmentConfig, PolicyConfig
from marin_rl.environments.episode import Tool
from marin_rl.environments.scoring import Score, Scorer
from marin_rl.errors import BadResponse, InputError, TemplateRefusal
from marin_rl.inference.client.answers import Completion
from marin_rl.inference.stops import first_stop
from marin_rl.tokenizers import PolicyTokenizer
from marin_rl.tool_calls import (
    ToolFormat,
    called_tools,
    malformed_call,
    parameters_of,
    parse_tool_calls,
    tool_format,
)
from marin_rl.types import Example, Message, Rollout, Turn

OUTPUT_CHARACTERS_MAX = 16_384
# OpenAI's word for a turn that ends with calls; it is the model's own end like any other.
_CALLED = ("tool_calls", "function_call")
_SHOWN = 120


class ToolTurns:
    """Tool calls and results of a policy's dialogues; its tokenizer is read on first use."""

    def __init__(self, policy: PolicyConfig, environment: EnvironmentConfig) -> None:
        self._tokenizer = PolicyTokenizer(policy)
        self._characters_max = environment.tool_output_characters_max or OUTPUT_CHARACTERS_MAX
        self._tokens_max = environment.tool_output_tokens_max

    def check(self, tools: Sequence[Tool]) -> None:
        """Raise InputError unless the chat template renders these tools and calls of them."""
        if not tools:
            return
        names = _names(tools)
        form, fix = self._form, "choose a model whose template has tools, or an episode without"
        if form is None:
            raise InputError(
                f"the episode offers the tools {', '.join(names)}, but the policy's chat template "
                "writes no tool calls in a form that is known (Hermes and Qwen, Llama 3.1, "
                f"Mistral): {fix}"
            )
        messages = [{"role": "user", "content": "question"}]
        template = ChatTemplate.of(self._tokenizer.tokenizer, tools=True)
        try:
            text = template.render(Conversation(messages=messages, tools=[*map(dict, tools)])).text
        except TemplateRefusal as error:
            raise InputError(f"the policy's chat template refuses the tools: {error}") from None
        if missing := [name for name in names if name not in text]:
            raise InputError(
                f"the policy's chat template leaves out the tools {', '.join(missing)}: {fix}"
            )

    def check_prompt(self, prompt_ids: np.ndarray, tools: Sequence[Tool]) -> None:
        """Raise BadResponse unless an endpoint's prompt names the tools of the request."""
        text = self._tokenizer.decoded(prompt_ids.tolist(), special=True)
        if missing := [name for name in _names(tools) if name not in text]:
            raise BadResponse(
                f"expected a prompt that names the tools {', '.join(missing)}, found "
                f"{text[-_SHOWN:]!r}: the endpoint left the tools of the request out"
            )

    def read(
        self, completion: Completion, stop: Sequence[str], tools: Sequence[Tool], turn: int
    ) -> Completion:
        """Return a completion with its calls apart from its text; `turn` numbers their ids.

        An endpoint of texts has read them itself. A turn that was cut makes no calls.
        """
        finish_reason = completion.finish_reason
        if finish_reason in _CALLED:
            finish_reason = "stop"
        form = self._form if len(completion.token_ids) else None
        if form is None:
            return replace(completion, finish_reason=finish_reason)
        text = self._text(completion.token_ids.tolist(), stop, form)
        if finish_reason != "stop":
            return replace(completion, text=text)
        ids = (f"c{turn:04d}{number:04d}" for number in itertools.count())
        parsed = parse_tool_calls(form, text, parameters_of(tools), new_id=ids.__next__)
        content = parsed.content or ""
        return replace(
            completion,
            text=content,
            finish_reason=finish_reason,
            tool_calls=parsed.calls,
            malformed=malformed_call(form, content),
            sampled_text=text,
        )

    def recorded(self, rollout: Rollout, turn: Turn, tools: Sequence[Tool], number: int) -> Turn:
        """A recorded turn with its calls read from its ids again. InputError without ids."""
        if not tools:
            return turn
        if turn.start is None or not len(rollout.token_ids):
            if turn.tool_calls or turn.tool_name is None:
                return turn
            raise InputError("calls of tools cannot be read again: the rollout has no token ids")
        source = turn.inference_metadata
        assert turn.logprobs is not None, "sampled turns have them"
        assert source is not None, "sampled turns have it"
        completion = Completion(
            text=turn.content,
            token_ids=rollout.token_ids[turn.start : turn.end],
            logprobs=turn.logprobs,
            finish_reason=source.finish_reason,
        )
        read = self.read(completion, source.sampling.stop, tools, number)
        return replace(
            turn, content=read.text, tool_calls=read.tool_calls, malformed=read.malformed
        )

    def dialogue(self, rollout: Rollout) -> tuple[Message, ...]:
        """Return a recorded rollout's messages from the model's first turn to its last."""
        turns = list(rollout.turns)
        while turns and turns[0].inference_metadata is None:
            del turns[0]
        while turns and turns[-1].inference_metadata is None:
            del turns[-1]
        return tuple(
            self.recorded(rollout, turn, called_tools(turn.tool_calls), number).message
            for number, turn in enumerate(turns)
        )

    def limited(self, message: Message) -> Message:
        """Return a tool's result within the limits, cut after a whole token and marked if so.

        Messages of other roles are returned as they are.
        """
        if message.role != "tool":
            return message
        text = message.content[: self._characters_max]
        cut = message.cut or len(text) < len(message.content)
        if not cut and self._tokens_max is None:
            return message
        tokenizer = self._tokenizer.tokenizer
        # Where each token ends, in characters; without offsets every character ends one, at worst.
        ends = list(range(1, len(text) + 1))
        if tokenizer.is_fast:
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets: Any = encoded["offset_mapping"]
            ends = [end for _, end in offsets]
        kept = len(ends) - cut  # the last token of a text that was cut may be a part of one
        if self._tokens_max is not None and kept > self._tokens_max:
            kept, cut = self._tokens_max, True
        if not cut:
            return message
        return replace(message, content=text[: ends[kept - 1]] if kept > 0 else "", cut=True)

    @cached_property
    def _form(self) -> ToolFormat | None:
        return tool_format(self._tokenizer.tokenizer)

    def _text(self, ids: list[int], stop: Sequence[str], form: ToolFormat) -> str:
        """Return the text of a turn without its end token, or cut before a stop string."""
        if ids[-1] in self._tokenizer.end_ids:
            return self._tokenizer.decoded(ids[:-1], special=form.special)
        text = self._tokenizer.decoded(ids, special=form.special)
        return text[: first_stop(text, stop)]


async def score_recorded(
    scorer: Scorer, example: Example, rollouts: Sequence[Rollout], tool_turns: ToolTurns
) -> dict[str, Score]:
    """Score the last answers of recorded rollouts of one example; by their ids."""
    if not rollouts:
        return {}
    lasts = [[turn for turn in r.turns if turn.role == "assistant"][-1] for r in rollouts]
    texts = [turn.content for turn in lasts]
    # None where the endpoint gave none.
    ids = [
        r.token_ids[turn.start : turn.end] if turn.end is not None else np.zeros(0, np.int32)
        for r, turn in zip(rollouts, lasts, strict=True)
    ]
    sampled = [sum(t.inference_metadata is not None for t in r.turns) for r in rollouts]
    dialogues = [tool_turns.dialogue(r) for r in rollouts] if max(sampled) > 1 else []
    scores = await scorer.score(example, texts, ids, dialogues)
    return {r.rollout_id: score for r, score in zip(rollouts, scores, strict=True)}


def _names(tools: Sequence[Tool]) -> list[str]:
    try:
        return [str(tool["function"]["name"]) for tool in tools]
    except (TypeError, KeyError):
        raise InputError(
            'expected tools of the form {"type": "function", "function": {"name": …}}, found '
            f"{list(tools)!r:.200}"
        ) from None
