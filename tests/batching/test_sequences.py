"""Messages to tokens: which are trained on, and which templates are refused."""

from typing import Any

import pytest

from marin_rl.batching.sequences import chat_tokens, rendered_prompts
from marin_rl.errors import InputError
from marin_rl.tokenizers import character_tokenizer
from marin_rl.types import Message

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "A:{% generation %}{{ m.content }};{% endgeneration %}|"
    "{% else %}U:{{ m.content }}|{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
QUESTION = (Message(role="user", content="2+2"),)


def _tokenizer(template: str | None) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def _trained(tokenizer: Any, messages: tuple[Message, ...], answer: str) -> tuple[str, str]:
    ids, mask = chat_tokens(tokenizer, messages, answer)
    assert len(ids) == len(mask)
    return tokenizer.decode(ids), tokenizer.decode(ids[mask == 1])


def test_the_generation_block_is_what_is_trained_on() -> None:
    assert _trained(_tokenizer(MARKED), QUESTION, "4") == ("U:2+2|A:4;|", "4;")


def test_without_a_block_everything_after_the_prompt_is() -> None:
    assert _trained(_tokenizer(PLAIN), QUESTION, "4") == ("U:2+2|A:4;|", "4;|")


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_earlier_answers_are_not_trained_on(template: str) -> None:
    shots = (Message(role="user", content="1+1"), Message(role="assistant", content="2"), *QUESTION)
    whole, trained = _trained(_tokenizer(template), shots, "4")
    assert whole == "U:1+1|A:2;|U:2+2|A:4;|"
    assert trained.startswith("4;")


def test_the_prompt_ends_with_the_assistants_opening() -> None:
    assert rendered_prompts(_tokenizer(MARKED), [QUESTION]) == [("U:2+2|A:", 8)]


def test_the_built_in_tokenizer_trains_on_the_answer_and_its_end() -> None:
    tokenizer = character_tokenizer()
    ids, mask = chat_tokens(tokenizer, QUESTION, "four")
    ((prompt, length),) = rendered_prompts(tokenizer, [QUESTION])
    assert ids[:length].tolist() == tokenizer.encode(prompt, add_special_tokens=False)
    trained = ids[mask == 1]
    assert tokenizer.decode(trained[:-1]) == "four"
    assert trained[-1] == tokenizer.eos_token_id
    assert not mask[:length].any()


def test_a_prompt_that_is_no_prefix_is_refused() -> None:
    template = PLAIN.replace("{% if add_generation_prompt %}A:", "{% if add_generation_prompt %}B:")
    with pytest.raises(InputError, match="part at token 6 of 8"):
        chat_tokens(_tokenizer(template), QUESTION, "4")


def test_nothing_to_train_on_is_refused() -> None:
    empty = MARKED.replace("{{ m.content }};{% endgeneration %}", "{% endgeneration %}x")
    with pytest.raises(InputError, match="nothing to train on in the answer '4'"):
        chat_tokens(_tokenizer(empty), QUESTION, "4")


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(InputError, match="no chat template"):
        rendered_prompts(_tokenizer(None), [QUESTION])


@pytest.mark.parametrize("template", ["{{ raise_exception('no system role') }}", "{% broken"])
def test_errors_of_the_template_are_passed_on(template: str) -> None:
    with pytest.raises(InputError, match="does not render these messages"):
        rendered_prompts(_tokenizer(template), [QUESTION])
