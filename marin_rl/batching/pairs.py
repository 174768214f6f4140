"""Preference pairs as rows of tokens: split, order of steps, layout.

Pure NumPy. For a reward model the two answers of a pair are neighbouring rows, the chosen one
first; for a policy a pair is one row, in which both continue one copy of the prompt, and so is an
answer with a label, with an answer to another prompt in the place of the second. The pairs of a
step are a function of the seed and the step alone; the split, of the prompt alone, so that no
prompt is on both sides.
"""

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from jaxtyping import Bool, Float32, Int8, Int32, Int64
from transformers import PreTrainedTokenizerBase

from marin_rl.batching.sequences import chat_tokens
from marin_rl.errors import InputError
from marin_rl.types import Message, PreferencePair, TrainingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """P pairs as B = 2P rows: row 2i is the chosen answer of pair i, row 2i + 1 the rejected one.

    `inside` is True on tokens and False on the padding after them.
    """

    token_ids: Int32[np.ndarray, "B T"]
    inside: Bool[np.ndarray, "B T"]
    margins: Float32[np.ndarray, " P"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTokenizer:
    """Tokenizer of pairs, with the digests of its identity.

    `section` of the configuration names them in messages. `ends` are the ids that end an answer,
    and with it a row; None: see `chat_tokens`; none at all: rows end with what the template writes.
    """

    tokenizer: PreTrainedTokenizerBase
    section: str
    tokenizer_digest: str
    chat_template_digest: str
    vocab_size: int
    context_length: int
    ends: Collection[int] | None = None

    def tokenized(
        self, pairs: Sequence[PreferencePair], held_out_fraction: float
    ) -> list[PreferencePair]:
        """The pairs with tokens, masks and split filled in; tokens that are there are kept.

        Raises InputError naming pair and field for tokens of another tokenizer, ids beyond the
        vocabulary, answers longer than the context, and where no pair is left to train on.
        """
        filled = [self._filled(pair, held_out_fraction) for pair in pairs]
        if filled[0].label is not None:
            filled = mismatched(filled, self.context_length)
        # After all are filled: a pair's own split counts before the fraction.
        if all(pair.split == "eval" for pair in filled):
            raise InputError(
                f"all {len(filled)} pairs are held out: expected some to train on; lower "
                f"{self.section}.held_out_fraction, or give pairs of more prompts"
            )
        return filled

    def _filled(self, pair: PreferencePair, held_out_fraction: float) -> PreferencePair:
        check_identity(pair, self.tokenizer_digest, self.chat_template_digest)
        held_out = is_held_out(pair.messages, held_out_fraction)
        chosen, chosen_mask = self._tokens(pair, "chosen")
        rejected, rejected_mask = None, None
        if pair.label is None:
            rejected, rejected_mask = self._tokens(pair, "rejected")
        return dataclasses.replace(
            pair,
            split=pair.split or ("eval" if held_out else "train"),
            chosen_token_ids=chosen,
            rejected_token_ids=rejected,
            chosen_loss_mask=chosen_mask,
            rejected_loss_mask=rejected_mask,
            tokenizer_digest=self.tokenizer_digest,
            chat_template_digest=self.chat_template_digest,
        )

    def _tokens(
        self, pair: PreferencePair, field: str
    ) -> tuple[Int32[np.ndarray, " T"], Int8[np.ndarray, " T"] | None]:
        """Ids of an answer and its prompt, and the mask of what is trained on, if it is known."""
        where = f"pair {pair.id}, field {field}"
        token_ids: Int32[np.ndarray, " T"] | None = getattr(pair, f"{field}_token_ids")
        loss_mask: Int8[np.ndarray, " T"] | None = getattr(pair, f"{field}_loss_mask")
        if token_ids is None:
            try:
                answer = pair.chosen if field == "chosen" else pair.rejected
                ids, mask = chat_tokens(self.tokenizer, pair.messages, answer, self.ends)
                # The reward is read at the token that a sampled answer ends with.
                length = int(np.flatnonzero(mask)[-1]) + 1 if self.ends != () else len(ids)
                token_ids, loss_mask = ids[:length], mask[:length].astype(np.int8)
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
        elif int(token_ids.min()) < 0 or int(token_ids.max()) >= self.vocab_size:
            raise InputError(
                f"{where}_token_ids: expected ids from 0 to {self.vocab_size - 1}, found "
                f"{int(token_ids.min())} to {int(token_ids.max())}"
            )
        if len(token_ids) > self.context_length:
            raise InputError(
                f"{where}: prompt and answer have {len(token_ids)} tokens, but "
                f"policy.context_length is {self.context_length}: raise it, or leave the pair out"
            )
        return token_ids, loss_mask


def check_identity(pair: PreferencePair, tokenizer_digest: str, chat_template_digest: str) -> None:
    """Raise InputError for a pair whose token ids are another tokenizer's."""
    expected = {"tokenizer_digest": tokenizer_digest, "chat_template_digest": chat_template_digest}
    for field, wanted in expected.items():
        # Ids mean other texts to another tokenizer, and nothing else would show it.
        if (digest := getattr(pair, field)) not in (None, wanted):
            raise InputError(
                f"pair {pair.id}, field {field}: expected {wanted[:12]}, found {digest[:12]}: its "
                "token ids are another tokenizer's; set policy.tokenizer to that one, or leave "
                "tokens and digests out, so that the texts count"
            )


def is_held_out(messages: Sequence[Message], fraction: float) -> bool:
    """True if a prompt's pairs are for evaluation: by a hash of it, so that new pairs move none."""
    # Of the prompt alone: all pairs of a prompt are on one side of the split.
    text = orjson.dumps([[message.role, message.content] for message in messages])
    part = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64  # in [0, 1]
    return part < fraction


def pairs_of_step(count: int, per_step: int, seed: int, step: int) -> Int64[np.ndarray, " P"]:
    """Indices of the pairs, of `count`, that step `step` takes: each once before any is taken
    again.
    """
    numbers = np.arange(step * per_step, (step + 1) * per_step)
    epochs, places = np.divmod(numbers, count)
    indices = np.empty(per_step, np.int64)
    for epoch in np.unique(epochs):
        # A permutation by seed and epoch alone: step n needs none of the steps before it.
        order = np.random.default_rng((seed, int(epoch))).permutation(count)
        indices[epochs == epoch] = order[places[epochs == epoch]]
    return indices


def longest(pairs: Sequence[PreferencePair]) -> int:
    return max(len(ids) for pair in pairs for ids in _both(pair))


def pair_batch(pairs: Sequence[PreferencePair], margin: float, length: int) -> PairBatch:
    """Pairs with tokens as rows of `length`; pairs without a margin get `margin`."""
    # Chosen and rejected side by side: the loss takes row 2i against row 2i + 1.
    rows = [ids for pair in pairs for ids in _both(pair)]
    token_ids, inside = padded(rows, len(rows), length)
    margins = [margin if pair.margin is None else pair.margin for pair in pairs]
    return PairBatch(token_ids=token_ids, inside=inside, margins=np.array(margins, np.float32))


def mismatched(rows: Sequence[PreferencePair], context_length: int) -> list[PreferencePair]:
    """Labelled answers, each with the answer of the next row that has another prompt.

    That answer stands behind the own prompt, and is cut off where the context ends. Raises
    InputError where all rows have one prompt, and as `shared_prompt`.
    """
    paired = list[PreferencePair]()
    for place, row in enumerate(rows):
        following = (rows[(place + step) % len(rows)] for step in range(1, len(rows)))
        other = next((each for each in following if each.messages != row.messages), None)
        if other is None:
            raise InputError(
                f"all {len(rows)} answers are to the prompt of row {row.id}: expected several "
                "prompts, for kto measures the KL by answers to other ones"
            )
        prompt, ids, mask = _answer(row, "chosen")
        start, other_ids, other_mask = _answer(other, "chosen")
        behind = slice(context_length)
        paired.append(
            dataclasses.replace(
                row,
                rejected=other.chosen,
                rejected_token_ids=np.concatenate([ids[:prompt], other_ids[start:]])[behind],
                rejected_loss_mask=np.concatenate([mask[:prompt], other_mask[start:]])[behind],
            )
        )
    return paired


def _answer(
    pair: PreferencePair, field: str
) -> tuple[int, Int32[np.ndarray, " T"], Int8[np.ndarray, " T"]]:
    """Tokens of the prompt, ids of prompt and answer, and the mask of what is learned."""
    ids, mask = getattr(pair, f"{field}_token_ids"), getattr(pair, f"{field}_loss_mask")
    if mask is None:
        raise InputError(
            f"pair {pair.id}, field chosen_loss_mask: expected which tokens the answers have, "
            "found none; write the pairs again with `marin-rl pairs`, or leave token ids and "
            "digests out, so that the texts count"
        )
    if not mask.any() or mask[0]:
        raise InputError(
            f"pair {pair.id}: expected a prompt, and an answer with a token to learn, found a "
            f"loss mask with {int(mask.sum())} of {len(mask)} tokens, the first {int(mask[0])}"
        )
    return int(mask.argmax()), ids, mask


def shared_prompt(pair: PreferencePair) -> int:
    """Tokens of the prompt that both answers of a pair with tokens continue.

    Raises InputError naming the pair for two prompts, and for tokens without masks.
    """
    prompts = []
    for field in ("chosen", "rejected"):
        prompt, ids, _ = _answer(pair, field)
        prompts.append(ids[:prompt])
    if not np.array_equal(*prompts):
        raise InputError(
            f"pair {pair.id}: expected two answers to one prompt, found prompts of "
            f"{len(prompts[0])} and {len(prompts[1])} tokens that differ; leave the pair out"
        )
    return len(prompts[0])


def pair_row_tokens(pair: PreferencePair) -> int:
    """Length of a pair's row in `preference_batch`."""
    return sum(len(ids) for ids in _both(pair)) - shared_prompt(pair)


def preference_batch(pairs: Sequence[PreferencePair], length: int) -> TrainingBatch:
    """Pairs as rows of `length`: the prompt, and both answers behind it.

    Segments are numbered as where prompts are shared (packing.py): 1 the chosen answer, 2 the
    rejected one, 3 the prompt. Advantages are 1 on the chosen answer's trained tokens and -1 on the
    rejected one's, `policy_logprobs` those of the reference, 0 without one. With a label, they are
    1 or -1 on those of the labelled answer and 0 on the mismatched one's.
    """
    shape = len(pairs), length
    token_ids, loss_mask, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(4))
    references, advantages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, pair in enumerate(pairs):
        prompt = end = shared_prompt(pair)
        token_ids[row, :prompt] = pair.chosen_token_ids[:prompt]  # pyright: ignore[reportOptionalSubscript]
        positions[row, :prompt] = np.arange(prompt)
        segment_ids[row, :prompt] = 3
        logprobs = pair.chosen_reference_logprobs, pair.rejected_reference_logprobs
        signs = (1, -1) if pair.label is None else (1 if pair.label else -1, 0)
        answers = zip((1, 2), signs, ("chosen", "rejected"), logprobs, strict=True)
        for segment, sign, field, reference in answers:
            _, ids, mask = _answer(pair, field)
            start, end = end, end + len(ids) - prompt
            token_ids[row, start:end] = ids[prompt:]
            positions[row, start:end] = np.arange(prompt, len(ids))
            segment_ids[row, start:end] = segment
            loss_mask[row, start:end] = mask[prompt:]
            advantages[row, start:end] = sign * mask[prompt:]
            if reference is not None:
                references[row, start:end] = reference[prompt:]
    return TrainingBatch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        segment_ids=segment_ids,
        positions=positions,
        policy_logprobs=references,
        advantages=advantages,
        returns=np.zeros(shape, np.float32),
    )


def with_reference(pair: PreferencePair, logprobs_T: Float32[np.ndarray, " T"]) -> PreferencePair:
    """A pair with the reference's log-probabilities, which are given in the places of its row."""
    prompt = start = shared_prompt(pair)
    found = []
    for ids in _both(pair):
        end = start + len(ids) - prompt
        found.append(np.concatenate([np.zeros(prompt, np.float32), logprobs_T[start:end]]))
        start = end
    return dataclasses.replace(
        pair, chosen_reference_logprobs=found[0], rejected_reference_logprobs=found[1]
    )


def padded(
    sequences: Sequence[Int32[np.ndarray, " _"]], rows: int, length: int
) -> tuple[Int32[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Sequences as `rows` rows of `length` tokens, and where their tokens are; the rest is 0."""
    lengths = np.zeros(rows, np.int64)
    lengths[: len(sequences)] = [len(ids) for ids in sequences]
    inside = np.arange(length) < lengths[:, None]
    token_ids = np.zeros(inside.shape, np.int32)
    # Boolean indexing goes row by row, in the order that the sequences are joined in.
    token_ids[inside] = np.concatenate(sequences)
    return token_ids, inside


def _both(pair: PreferencePair) -> Iterator[Int32[np.ndarray, " _"]]:
    assert pair.chosen_token_ids is not None, f"pair {pair.id} has no tokens yet"
    assert pair.rejected_token_ids is not None, f"pair {pair.id} has no tokens yet"
    yield pair.chosen_token_ids
    yield pair.rejected_token_ids
