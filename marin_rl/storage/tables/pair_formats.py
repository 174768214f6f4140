"""Rows of preference pairs as others publish them, turned into rows of ours.

pair            `prompt` (a text or messages) or `messages`, and `chosen` and `rejected`, each a
                text or a list of one message: ours, and TRL's explicit one
conversations   `chosen` and `rejected` are whole conversations, whose common beginning is the
                prompt: TRL's implicit one, and UltraFeedback's, which has `prompt` besides
ranked          `context`, and two `completions` with `rank`, of which the lowest is best: NeMo's
dialogues       `chosen` and `rejected` are texts of "Human: " and "Assistant: ": HH-RLHF's

Nothing else is converted: what a row has besides is refused with it. Roles and texts are checked
with the rows of ours (pairs.py).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]

_RENAMED = {"score_chosen": "chosen_reward", "score_rejected": "rejected_reward"}
_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def row_of_ours(raw: Mapping[str, Any]) -> tuple[str, Row]:
    """The kind of a row, and what it says in our fields. Raises ValueError."""
    row = {_RENAMED.get(name, name): value for name, value in raw.items()}
    if "context" in row and "completions" in row:
        return "ranked", _ranked(row)
    answers: tuple[Any, Any] = row.get("chosen"), row.get("rejected")
    asked = row.get("prompt") is not None or row.get("messages") is not None
    if all(isinstance(answer, list) for answer in answers):
        return _of_messages(row, *answers)
    if not asked and all(isinstance(a, str) and "\n\nAssistant:" in a for a in answers):
        rest = {k: v for k, v in row.items() if k not in ("chosen", "rejected")}
        return "dialogues", rest | _split(*(_spoken(str(answer)) for answer in answers))
    if isinstance(row.get("prompt"), list):
        row["messages"] = row.pop("prompt")
    return "pair", row


def _of_messages(row: Row, chosen: Sequence[Any], rejected: Sequence[Any]) -> tuple[str, Row]:
    """A row whose answers are lists of messages, which may begin with the prompt."""
    rest = {k: v for k, v in row.items() if k not in ("chosen", "rejected", "prompt", "messages")}
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list | None):
        raise ValueError(f"field prompt: expected a text or messages, found {prompt!r:.80}")
    if prompt is None and len(chosen) == len(rejected) == 1:
        prompt = row.get("messages")
    repeated = prompt is None or all(each[: len(prompt)] == prompt for each in (chosen, rejected))
    if not repeated:
        both = {"chosen": _answer(chosen, "chosen"), "rejected": _answer(rejected, "rejected")}
        return "pair", rest | {"messages": prompt} | both
    # UltraFeedback's id names a prompt and no pair; its `messages` are the chosen conversation.
    rest.pop("prompt_id", None)
    return "conversations", rest | _split(chosen, rejected)


def _split(chosen: Sequence[Any], rejected: Sequence[Any]) -> Row:
    """Common beginning of two conversations, and the answers that follow it."""
    # The last message of either is an answer, even where both gave the same one.
    most = min(len(chosen), len(rejected)) - 1
    same = next((n for n in range(most) if chosen[n] != rejected[n]), max(most, 0))
    return {
        "messages": list(chosen[:same]),
        "chosen": _answer(chosen[same:], "chosen"),
        "rejected": _answer(rejected[same:], "rejected"),
    }


def _answer(messages: Sequence[Any], field: str) -> Any:
    """Text of the one message that an answer is."""
    roles = [each.get("role") if isinstance(each, Mapping) else each for each in messages]
    if roles != ["assistant"]:
        raise ValueError(
            f"field {field}: expected one message of the assistant after the prompt, found "
            f"messages of {roles!r:.100}"
        )
    extra = set(messages[0]) - {"role", "content"}
    if extra:
        raise ValueError(
            f"field {field}: expected role and content in a message, found {sorted(extra)}"
        )
    return messages[0].get("content")


def _ranked(row: Row) -> Row:
    context, completions = row.pop("context"), row.pop("completions")
    try:
        best, worst = sorted(completions, key=lambda each: each["rank"])
        if best["rank"] == worst["rank"]:
            raise ValueError("of one rank")
        answers = {
            "chosen": _answer(best["completion"], "completions"),
            "rejected": _answer(worst["completion"], "completions"),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "field completions: expected two of different rank, each with rank and completion, a "
            f"list of messages, found {completions!r:.100} ({error})"
        ) from None
    return {**row, "messages": context, **answers}


def _spoken(text: str) -> list[dict[str, str]]:
    """Messages of an HH-RLHF dialogue."""
    opening, *parts = _SPEAKER.split(text)
    if opening.strip():
        raise ValueError(
            f"expected a dialogue that begins with Human, found {opening.strip()!r:.80} before it"
        )
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[speaker], "content": said.strip()} for speaker, said in pairs]
