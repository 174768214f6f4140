"""Pairs as rows of tokens: the layout by hand, the order of steps, held-out pairs, refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from marin_rl.batching.pairs import (
    PairTokenizer,
    is_held_out,
    longest,
    pair_batch,
    pairs_of_step,
    preference_batch,
)
from marin_rl.errors import InputError
from marin_rl.tokenizers import TokenizerIdentity, character_tokenizer
from marin_rl.types import Message, PreferencePair


def pair(name: str = "a", **given: Any) -> PreferencePair:
    asked = (Message(role="user", content=f"say {name}"),)
    values: dict[str, Any] = {"id": name, "messages": asked, "chosen": "yes", "rejected": "no"}
    return PreferencePair(**values | given)


def with_tokens(chosen: list[int], rejected: list[int], **given: Any) -> PreferencePair:
    return pair(
        chosen_token_ids=np.array(chosen, np.int32),
        rejected_token_ids=np.array(rejected, np.int32),
        **given,
    )


@pytest.fixture(scope="module")
def characters() -> Callable[..., PairTokenizer]:
    tokenizer = character_tokenizer()
    names = TokenizerIdentity.of(tokenizer)

    def make(context_length: int = 64) -> PairTokenizer:
        return PairTokenizer(
            tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
            section="reward_model",
            tokenizer_digest=names.tokenizer_digest,
            chat_template_digest=names.chat_template_digest,
            vocab_size=len(tokenizer),
            context_length=context_length,
        )

    return make


def test_the_two_answers_of_a_pair_are_neighbours_padded_with_nothing():
    pairs = [with_tokens([5, 6, 7], [5, 9]), with_tokens([8], [9, 9, 9, 9], margin=0.25)]
    assert longest(pairs) == 4
    batch = pair_batch(pairs, 0.5, 5)
    assert batch.token_ids.tolist() == [
        [5, 6, 7, 0, 0], [5, 9, 0, 0, 0], [8, 0, 0, 0, 0], [9, 9, 9, 9, 0],
    ]  # fmt: skip
    assert batch.inside.sum(axis=1).tolist() == [3, 2, 1, 4]
    assert batch.margins.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(("count", "per_step"), [(7, 3), (3, 7), (5, 5), (1, 2)])
def test_every_pair_is_taken_once_before_any_is_taken_again(count, per_step):
    taken = np.concatenate([pairs_of_step(count, per_step, 11, step) for step in range(count * 2)])
    for epoch in np.split(taken, len(taken) // count):
        assert sorted(epoch.tolist()) == list(range(count))
    again = pairs_of_step(count, per_step, 11, 1)
    assert again.tolist() == taken[per_step : 2 * per_step].tolist()


def test_held_out_prompts_depend_on_the_prompt_alone_and_grow_with_the_share():
    prompts = [(Message(role="user", content=f"{number}"),) for number in range(2000)]
    tenth = {number for number, prompt in enumerate(prompts) if is_held_out(prompt, 0.1)}
    fifth = {number for number, prompt in enumerate(prompts) if is_held_out(prompt, 0.2)}
    assert 140 < len(tenth) < 260
    assert tenth < fifth
    assert not any(is_held_out(prompt, 0.0) for prompt in prompts)


def test_texts_become_tokens_of_the_chat_template_and_given_tokens_stay(characters):
    tokenizer = characters()
    plain, given = tokenizer.tokenized(
        [
            pair("a", split="train"),
            with_tokens(
                [7, 8],
                [7, 9],
                split="eval",
                tokenizer_digest=tokenizer.tokenizer_digest,
                chat_template_digest=tokenizer.chat_template_digest,
            ),
        ],
        0.5,
    )
    text = character_tokenizer().decode(plain.chosen_token_ids)
    assert text == "<|user|>say a<|assistant|>yes<|end|>"
    assert character_tokenizer().decode(plain.rejected_token_ids).endswith("no<|end|>")
    assert given.chosen_token_ids.tolist() == [7, 8]
    assert (plain.split, given.split) == ("train", "eval")
    assert plain.tokenizer_digest == tokenizer.tokenizer_digest


def test_a_labelled_answer_stands_beside_the_next_one_to_another_prompt(characters):
    def labelled(name: str, answer: str, /, *, label: bool) -> PreferencePair:
        return pair(name, id=f"{name}{answer}", chosen=answer, rejected="", label=label)

    rows = [
        labelled("a", "x", label=True),
        labelled("a", "yy", label=False),
        labelled("b", "z", label=True),
        labelled("c", "w" * 20, label=False),
    ]
    made = characters(context_length=40).tokenized(rows, 0.0)
    decode = character_tokenizer().decode
    assert [decode(each.rejected_token_ids) for each in made] == [
        "<|user|>say a<|assistant|>z<|end|>",
        "<|user|>say a<|assistant|>z<|end|>",
        "<|user|>say b<|assistant|>" + "w" * 20 + "<|end|>",
        "<|user|>say c<|assistant|>x<|end|>",
    ]
    batch = preference_batch(made, 64)
    for row, (each, sign) in enumerate(zip(made, (1, -1, 1, -1), strict=True)):
        own, other = batch.segment_ids[row] == 1, batch.segment_ids[row] == 2
        assert decode(batch.token_ids[row][own]) == f"{each.chosen}<|end|>"
        assert decode(batch.token_ids[row][other]) == f"{each.rejected}<|end|>"
        assert (batch.advantages[row][own] == sign).all()
        assert (batch.advantages[row][other] == 0).all()
        assert (batch.loss_mask[row][own | other] == 1).all()
    some = [labelled("a", "x" * 7, label=True), labelled("bbbb", "z", label=False)]
    _, cut = characters(context_length=15).tokenized(some, 0.0)
    assert decode(cut.rejected_token_ids) == "<|user|>say bbbb<|assistant|>xxxxx"
    with pytest.raises(InputError, match="all 2 answers are to the prompt of row ax"):
        characters().tokenized(rows[:2], 0.0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (with_tokens([1], [2], tokenizer_digest="f" * 64), "a, field tokenizer_digest: expected"),
        (pair(chosen="x" * 60), r"a, field chosen: prompt and answer have \d+ tokens"),
        (with_tokens([1], [2, 103]), "rejected_token_ids: expected ids from 0 to 102, found 2 to"),
        (with_tokens([1], [-1, 2]), "rejected_token_ids: expected ids from 0 to 102, found -1 to"),
        (pair(split="eval"), "all 1 pairs are held out"),
    ],
)
def test_unfit_pairs_are_refused_by_name_and_field(characters, given, told):
    with pytest.raises(InputError, match=told):
        characters().tokenized([given], 0.0)
