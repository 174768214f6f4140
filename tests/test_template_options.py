"""Options of chat templates: one value in training, sampling, serving and exports; days too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_folders import CHATML, DATED, QWEN3, chat_folder, chat_tokenizer
from transformers import AutoTokenizer

from marin_rl.chat_templates import ChatTemplate, Conversation, with_options
from marin_rl.config import Config, EnvironmentConfig, PolicyConfig, load_config, value_at
from marin_rl.errors import ConfigError, InputError
from marin_rl.inference.client.dialects import SGLangDialect, VllmDialect
from marin_rl.inference.client.protocol import ChatRequest, TurnsRequest
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.rollouts.pinned import as_begun
from marin_rl.serving.http.errors import ApiError
from marin_rl.serving.text.templates import ChatPrompts
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import (
    chat_template_digest,
    template_options,
    tokenizer_for,
    unlisted_end_ids,
)
from marin_rl.types import Message, Sampling

HI = [{"role": "user", "content": "hi"}]
SAID = (Message(role="user", content="hi"),)
OPENED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "<think>\n\n</think>\n\n"
OFF = {"enable_thinking": False}


def opened(tokenizer: Any, **options: Any) -> str:
    conversation = Conversation(messages=HI, opening=True, options=options)
    return ChatTemplate.of(tokenizer).render(conversation).text


def policy_of(folder: Path, template: str, **more: Any) -> PolicyConfig:
    return PolicyConfig(tokenizer=str(chat_folder(folder / "folder", template)), **more)


def test_options_reach_every_reader_of_a_template(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, QWEN3, chat_template_options=OFF)
    built = tokenizer_for(policy)
    assert opened(built) == OPENED + THOUGHT
    assert opened(built, enable_thinking=True) == OPENED
    bridge = TemplateBridge(policy)
    assert built.decode(bridge.prompt(SAID)) == OPENED + THOUGHT
    assert built.decode(bridge.prompt(SAID, (), {"enable_thinking": True})) == OPENED
    assert built.decode(TemplateBridge(policy, {"enable_thinking": True}).prompt(SAID)) == OPENED
    plain = tokenizer_for(policy.model_copy(update={"chat_template_options": None}))
    assert chat_template_digest(built) != chat_template_digest(plain)
    built.save_pretrained(tmp_path / "exported")
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = exported.apply_chat_template(HI, add_generation_prompt=True, tokenize=False)
    assert text == OPENED + THOUGHT


@pytest.mark.parametrize("value", [None, True, 3, -1e-7, 'a"%}{{\n\\é😀', [1, {"k": [None]}], {}])
@pytest.mark.parametrize(
    "source", ["{{ x }}{{ 'a' }}", "\n {{ x }}", "{%- if true %} {{ x }}{% endif %}"]
)
def test_an_option_is_the_variable_that_the_template_reads(source: str, value: Any) -> None:
    conversation = Conversation(messages=HI, options={"x": value})
    expected = ChatTemplate(source, {}).render(conversation)
    folded = ChatTemplate(with_options(source, {"x": value}), {})
    assert folded.render(Conversation(messages=HI)) == expected
    assert folded.variables() == {"x"}


def test_options_that_the_template_does_not_read_are_refused(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, QWEN3, chat_template_options={"enable_thinkin": False})
    with pytest.raises(InputError, match=r"options.enable_thinkin: .*reads enable_thinking"):
        tokenizer_for(policy)


def test_a_request_chooses_among_the_options_of_the_template() -> None:
    prompts = ChatPrompts(chat_tokenizer(with_options(QWEN3, OFF)))
    assert prompts.text(HI) == OPENED + THOUGHT
    assert prompts.text(HI, options={"enable_thinking": True}) == OPENED
    for name in ("thinking", "messages", "strftime_now", "date", "bos_token"):
        with pytest.raises(ApiError, match=f"does not read '{name}': expected enable_thinking"):
            prompts.text(HI, options={name: 1})


def test_options_of_an_environment_win_over_the_policys(tmp_path: Path) -> None:
    policy = PolicyConfig(chat_template_options={**OFF, "date": "2026-01-31", "a": 1})
    assert template_options(policy, EnvironmentConfig()) == {**OFF, "a": 1}
    own = EnvironmentConfig(chat_template_options={"a": 2})
    assert template_options(policy, own) == {**OFF, "a": 2}


IDS = np.array([1, 2], np.int32)
ASKED = ChatRequest(model="m", messages=(), n=1, sampling=Sampling(), stop_token_ids=(2,))


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (
            TurnsRequest(model="m", prompts=[IDS], sampling=Sampling(), stop_token_ids=(2,)).body(),
            (),
        ),
        (
            TurnsRequest(
                model="m", prompts=[IDS], seeds=[1], sampling=Sampling(), stop_token_ids=(2,)
            ).body(),
            (),
        ),
        (SGLangDialect(TemplateBridge(PolicyConfig())).body(ASKED, IDS), ("sampling_params",)),
        (VllmDialect(TemplateBridge(PolicyConfig())).body(ASKED, IDS), ("sampling_params",)),
    ],
)
def test_endpoints_are_asked_to_end_at_the_templates_token(body: Any, where: Any) -> None:
    for key in where:
        body = body[key]
    assert body["stop_token_ids"] == [2]


def test_a_chat_request_carries_options_and_end_tokens() -> None:
    request = ChatRequest(
        model="m",
        messages=SAID,
        n=1,
        sampling=Sampling(),
        template_options=OFF,
        stop_token_ids=(2,),
    )
    assert request.body()["chat_template_kwargs"] == OFF
    assert request.body()["stop_token_ids"] == [2]
    bare = ChatRequest(model="m", messages=SAID, n=1, sampling=Sampling()).body()
    assert not {"chat_template_kwargs", "stop_token_ids"} & bare.keys()


def test_only_ends_that_no_file_lists_are_asked_for(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, CHATML, end_tokens=("<|im_end|>",))
    assert unlisted_end_ids(policy) == (2,)
    assert unlisted_end_ids(policy.model_copy(update={"end_tokens": None})) == ()
    assert unlisted_end_ids(policy.model_copy(update={"end_tokens": ("<|endoftext|>",)})) == ()


def debug(root: Path, folder: Path, *overrides: str) -> Config:
    settings = (f"root={root}", f"policy.tokenizer={folder}", *overrides)
    return load_config(Path(__file__).parent.parent / "configs/debug.yaml", settings)


# What another process, on another day and in another zone, makes of the run's template.
OTHER_PROCESS = """
import sys, time
from datetime import datetime
import marin_rl.isolated.templates as templates
class Later(datetime):
    @classmethod
    def now(cls, zone=None):
        return cls(2031, 5, 6, 7, tzinfo=zone)
templates.datetime = Later
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import tokenizer_for
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.types import Message
policy = Run.open(sys.argv[1], sys.argv[2]).config.policy
ids = TemplateBridge(policy).prompt([Message(role="user", content="hi")])
print(*ids)
"""


def test_a_run_keeps_the_day_on_which_it_began(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "folder", DATED)
    config = debug(tmp_path, folder, "run_id=dated")
    run = Run.create_or_open(config, as_begun)
    record = json.loads((tmp_path / "dated/run.json").read_text())
    day = record["config"]["policy"]["chat_template_options"]["date"]
    assert value_at(run.config, "policy.chat_template_options") == {"date": day}
    assert Run.create_or_open(config, as_begun).config.policy == run.config.policy
    here = TemplateBridge(run.config.policy).prompt(SAID)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(tmp_path), "dated"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TZ": "Pacific/Kiritimati", "LC_ALL": "C"},
    )
    assert done.stdout.split() == [str(token) for token in here]
    other = debug(tmp_path, folder, "run_id=dated", "policy.chat_template_options.date=2026-01-31")
    with pytest.raises(ConfigError, match=r"chat_template_options.date: .* -> \"2026-01-31\""):
        Run.create_or_open(other, as_begun)


def test_a_given_day_is_the_templates(tmp_path: Path) -> None:
    named = policy_of(tmp_path, DATED, chat_template_options={"date": "2026-01-31"})
    tokenizer = tokenizer_for(named)
    assert opened(tokenizer).startswith("<|im_start|>system\nToday Date: 31 Jan 2026<|im_end|>\n")
    assert opened(tokenizer, date_string="May").startswith("<|im_start|>system\nToday Date: May<")
    other = tokenizer_for(
        named.model_copy(update={"chat_template_options": {"date": "2027-01-01"}})
    )
    # the day is no part of a template's identity: a reward model of another day fits
    plain = tokenizer_for(named.model_copy(update={"chat_template_options": None}))
    digests = {chat_template_digest(each) for each in (tokenizer, other, plain)}
    assert len(digests) == 1


def test_a_template_without_a_clock_records_no_day(tmp_path: Path) -> None:
    config = debug(tmp_path, chat_folder(tmp_path / "folder", CHATML))
    begun = as_begun(config).policy
    assert (begun.chat_template_options, begun.end_tokens) == (None, ("<|im_end|>",))
    plain = load_config(Path(__file__).parent.parent / "configs/debug.yaml", [])
    assert as_begun(plain).policy == plain.policy
