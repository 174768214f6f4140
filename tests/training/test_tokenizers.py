"""The built-in tokenizer, folders, and what makes a tokenizer unfit."""

import json

import pytest

from marin_rl.config import PolicyConfig
from marin_rl.errors import InputError
from marin_rl.tokenizer_files import PRINTABLE
from marin_rl.tokenizers import (
    TokenizerIdentity,
    character_tokenizer,
    check_vocabulary,
    end_token_ids,
    load_tokenizer,
    tokenizer_for,
)

DIALOGUE = [
    {"role": "user", "content": "Hello,  <|world|> .\n?"},
    {"role": "assistant", "content": "dlrow"},
]


def test_every_printable_character_is_one_token_and_comes_back():
    tokenizer = character_tokenizer()
    ids = tokenizer.encode(PRINTABLE, add_special_tokens=False)
    assert len(ids) == len(PRINTABLE) == 96
    assert tokenizer.decode(ids) == PRINTABLE
    assert len(tokenizer) == 103
    assert tokenizer.decode(tokenizer.encode("é")) == "<|unknown|>"


def test_the_template_marks_what_the_assistant_says_and_its_end():
    tokenizer = character_tokenizer()
    found = tokenizer.apply_chat_template(
        DIALOGUE, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = found["input_ids"], found["assistant_masks"]
    said = [token for token, mine in zip(ids, mask, strict=True) if mine]
    assert tokenizer.decode(said) == "dlrow<|end|>"
    prompt = tokenizer.apply_chat_template(DIALOGUE[:1], add_generation_prompt=True)
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(prompt) == "<|user|>Hello,  <|world|> .\n?<|assistant|>"


def test_a_saved_tokenizer_is_the_same_tokenizer(tmp_path):
    tokenizer = character_tokenizer()
    before = TokenizerIdentity.of(tokenizer)
    tokenizer(["a", "bb"], padding=True, truncation=True, max_length=1)  # leaves settings behind
    tokenizer.save_pretrained(tmp_path)
    assert TokenizerIdentity.of(load_tokenizer(tmp_path)) == before
    assert TokenizerIdentity.of(tokenizer) == before


@pytest.mark.parametrize(
    ("listed", "ends"),
    [
        ("{}", (1,)),
        ('{"eos_token_id": null}', (1,)),
        ('{"eos_token_id": 6}', (1, 6)),
        ('{"eos_token_id": [6, 1, 4]}', (1, 6, 4)),
    ],
)
def test_the_folder_of_a_tokenizer_may_list_more_end_tokens(tmp_path, listed, ends):
    character_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert end_token_ids(character_tokenizer()) == end_token_ids(tokenizer) == (1,)
    (tmp_path / "generation_config.json").write_text(listed)
    assert end_token_ids(tokenizer) == ends


@pytest.mark.parametrize("listed", ["[1]", "{", '{"eos_token_id": "1"}', '{"eos_token_id": [-1]}'])
def test_a_wrong_list_of_end_tokens_is_refused(tmp_path, listed):
    character_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(listed)
    with pytest.raises(InputError, match=r"generation_config\.json.* expected"):
        end_token_ids(load_tokenizer(tmp_path))


def test_another_template_or_another_token_is_another_identity():
    one, other = character_tokenizer(), character_tokenizer()
    other.chat_template = (other.chat_template or "") + " "
    first, second = TokenizerIdentity.of(one), TokenizerIdentity.of(other)
    assert first.tokenizer_digest == second.tokenizer_digest
    assert first.chat_template_digest != second.chat_template_digest
    other.add_tokens(["<|more|>"])
    assert TokenizerIdentity.of(other).tokenizer_digest != first.tokenizer_digest


def test_a_model_folder_brings_its_own_tokenizer(tmp_path):
    character_tokenizer().save_pretrained(tmp_path)
    policy = PolicyConfig(init="hf", hf_path=str(tmp_path))
    assert tokenizer_for(policy).name_or_path == str(tmp_path)
    assert tokenizer_for(PolicyConfig()).name_or_path == ""


def test_unfit_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match="no tokenizer folder at"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot read a tokenizer from"):
        load_tokenizer(tmp_path / "empty")


@pytest.mark.parametrize(
    ("lost", "named"), [("chat_template", "chat template"), ("eos", "end token")]
)
def test_a_tokenizer_that_cannot_chat_is_refused(tmp_path, lost, named):
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    if lost == "chat_template":
        (tmp_path / "chat_template.jinja").unlink()
    else:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            tree = json.loads((tmp_path / name).read_text())
            tree.pop("eos_token")
            (tmp_path / name).write_text(json.dumps(tree))
    with pytest.raises(InputError, match=f"has no {named}"):
        load_tokenizer(tmp_path)


def test_ids_outside_the_vocabulary_are_refused():
    tokenizer = character_tokenizer()
    check_vocabulary(tokenizer, 103)
    with pytest.raises(InputError, match=r"ids up to 102 \('~'\).*at least 103"):
        check_vocabulary(tokenizer, 102)
