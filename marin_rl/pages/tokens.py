"""Tokens of a rollout as a page shows them: their texts, and their numbers side by side.

Texts never split a character: a token whose bytes are only a part of one reads as nothing, and the
token that completes it as the whole. Without the tokenizer, tokens are shown by their ids.
"""

import codecs
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from marin_rl.config import PolicyConfig
from marin_rl.errors import InputError
from marin_rl.pages.records import Number, Tokens

DIGITS = 4


class TokenTexts:
    """Texts of a run's tokens; `digest` is that of the tokenizer, empty without one."""

    def __init__(self, policy: PolicyConfig) -> None:
        from marin_rl.serving.text.detokenizer import Detokenizer
        from marin_rl.tokenizers import tokenizer_digest, tokenizer_for

        self.digest, self.problem = "", ""
        self._texts: Detokenizer | None = None
        try:
            tokenizer = tokenizer_for(policy)
        except InputError as error:
            self.problem = str(error)
            return
        self.digest = tokenizer_digest(tokenizer)
        self._texts = Detokenizer(tokenizer)

    def is_of(self, digests: Set[str]) -> bool:
        """Return True unless rollouts with these digests had another tokenizer."""
        return not digests - {self.digest}

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; special tokens by their names."""
        if self._texts is None:
            return [f"⟨{token}⟩" for token in ids]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = []
        for token in ids:
            piece = self._texts.piece(token)
            text = self._texts.name(token) if piece.special else decoder.decode(bytes(piece.data))
            texts.append(text)
        return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Per-token numbers of the trainer by position in the rollout."""

    trainer: Mapping[int, float]
    entropies: Mapping[int, float]
    clipped: frozenset[int]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Scores":
        """The scores of a row of `schemas.tables`."""
        places = row["positions"]
        return cls(
            trainer=dict(zip(places, row["trainer_logprobs"], strict=True)),
            entropies=dict(zip(places, row["entropies"], strict=True)),
            clipped=frozenset(p for p, hit in zip(places, row["clipped"], strict=True) if hit),
        )


def tokens_of(
    row: Mapping[str, Any], scores: Scores | None, texts: TokenTexts, tokens_max: int
) -> Tokens:
    """The last `tokens_max` tokens of a rollout: the end of a completion decides most rewards."""
    ids, trained, sampler = row["token_ids"], row["loss_mask"], row["logprobs"]
    start = max(0, len(ids) - tokens_max)
    places = range(start, len(ids))
    known = scores if scores is not None and scores.trainer else None
    return Tokens(
        left_out=start,
        ids=ids[start:],
        texts=texts.of(ids[start:]),
        trained=trained[start:],
        sampler=[_short(sampler[p]) if trained[p] else None for p in places],
        trainer=None if known is None else [_short(known.trainer.get(p)) for p in places],
        entropies=None if known is None else [_short(known.entropies.get(p)) for p in places],
        clipped=None if known is None else [int(p in known.clipped) for p in places],
    )


def _short(value: Number) -> Number:
    return None if value is None else round(value, DIGITS)
