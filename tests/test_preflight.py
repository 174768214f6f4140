"""Errors in files, and locked or finished runs, are raised before an engine is imported."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.chat_folders import CHATML, GEMMA, TWO_ENDS, WITHOUT_REASONING, chat_folder
from support.run_factories import evaluate, whole_run
from support.scripted_policies import write_tokenizer

from marin_rl.commands.serve import check_folder
from marin_rl.config import Config, load_config
from marin_rl.doctor.data import own_reward, reward
from marin_rl.doctor.engines import check_all
from marin_rl.doctor.stages import EVALUATE, RL
from marin_rl.doctor.start import before_engines, check_files, finished, has_passed
from marin_rl.environments.registry import _loaded
from marin_rl.errors import (
    ConfigError,
    EndpointUnavailable,
    InputError,
    MarinRLError,
    ObjectMissing,
    RunLocked,
)
from marin_rl.rollouts.pinned import record_rows
from marin_rl.storage.runs import Run, committed_checkpoint, metrics_key

DEBUG = Path(__file__).parent.parent / "configs/debug.yaml"


def debug(root: Path, *overrides: str) -> Config:
    return load_config(DEBUG, [f"root={json.dumps(str(root))}", *overrides])


def write_prompts(file: Path) -> None:
    rows = ({"prompt": f"{n}+0=", "answer": str(n)} for n in range(20))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("policy.tokenizer=/nowhere", InputError, "no tokenizer folder at /nowhere"),
        ("policy.model.vocab_size=50", InputError, "expected ids below 50"),
        ("policy.lora.rank=33", InputError, "is 33: expected 1 to 32"),
        ("policy.lora={rank: 4, modules: [wq]}", InputError, "no linear layer matches 'wq'"),
        ("policy.lora.init_from=/nowhere", InputError, "no adapter at /nowhere"),
        ("environment.options={letters_min: 90, letters_max: 95}", InputError, "leaves 56"),
        ("environment.name=ecko", ConfigError, "did you mean echo"),
        ("environment.options={lettres: 3}", ConfigError, "letters_min"),
        ("environment.eval_seed=3", ConfigError, "move the seeds further apart"),
        (
            "environment={name: textarena, options: {id: Wordle-v0}}",
            InputError,
            r"no package textarena; install it with: \S+ -m pip install 'textarena>=0\.7,<0\.8'",
        ),
        (
            "environment={name: openenv, options: {url: 'http://127.0.0.1:9'}}",
            InputError,
            r"no OpenEnv server answers at http://127\.0\.0\.1:9 .*start it, or set the URL of one",
        ),
        (
            "environment.reward_model={checkpoint: runs/x/sft/step-00001}",
            ConfigError,
            "expected ROOT/RUN_ID/reward_model/step-00200",
        ),
        ("inference.endpoints=['http://127.0.0.1:9/v1']", EndpointUnavailable, "127.0.0.1:9"),
        ("environment={name: 'envs:Mine'}", InputError, "with its suffix, envs.py:Mine"),
        ("objective.loss=losses:mine", InputError, "with its suffix, losses.py:mine"),
        ("objective.surrogate=mine", ConfigError, "found 'mine'; a loss of your own is objective"),
        (
            "policy={context_length: 64, init: checkpoint, "
            "checkpoint: /nowhere/x/checkpoints/round-00003}",
            ObjectMissing,
            "no run 'x' under /nowhere",
        ),
        (
            "environment.reward_model={checkpoint: /nowhere/x/reward_model/step-00200}",
            ObjectMissing,
            "no run 'x' under /nowhere",
        ),
        (
            "policy={context_length: 64, init: hf, hf_path: /nowhere}",
            InputError,
            "no model at /nowhere",
        ),
    ],
)
def test_missing_files_are_named(tmp_path, override, error, words) -> None:
    with pytest.raises(error, match=words):
        check_all(debug(tmp_path, override), RL)
    assert not (tmp_path / "debug").exists()


def test_a_context_too_short_for_the_canary_is_refused_before_the_warm_start(tmp_path) -> None:
    small = ("environment.options={letters_min: 2, letters_max: 3}", "sampling.max_tokens=4")
    with pytest.raises(InputError, match=r"no room for the canary.*expected at least 27"):
        before_engines(debug(tmp_path, *small, "policy.context_length=26"), "rl-loop")
    assert before_engines(debug(tmp_path, *small, "policy.context_length=27"), "rl-loop") is None


def test_a_flow_goes_once_through_what_its_command_has_checked(tmp_path: Path) -> None:
    config = debug(tmp_path)
    assert not has_passed(config, RL)
    before_engines(config, RL)
    assert not has_passed(debug(tmp_path, "seed=4"), RL)
    before_engines(config, RL)
    assert has_passed(load_config(DEBUG, [f"root={tmp_path}"]), RL)
    assert not has_passed(config, RL)  # a later flow checks again


def test_another_content_is_refused_first(tmp_path: Path) -> None:
    Run.create_or_open(debug(tmp_path))
    with pytest.raises(ConfigError, match="seed: 0 -> 4"):
        before_engines(debug(tmp_path, "seed=4", "policy.tokenizer=/nowhere"), "rl-loop")


def forget_environments() -> None:
    """Read files again, as another process does."""
    _loaded.cache_clear()


def test_a_locked_run_is_refused_with_the_line_that_follows_it(tmp_path: Path) -> None:
    run = Run.create_or_open(debug(tmp_path))
    with run.lock(), pytest.raises(RunLocked, match=f"process {os.getpid()}") as refused:
        before_engines(debug(tmp_path), "rl-loop")
    assert f"marin-rl status debug --root {tmp_path}" in str(refused.value)
    assert before_engines(debug(tmp_path), "rl-loop") is None


def test_an_evaluation_whose_prompts_are_gone_is_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts)
    environment = {"name": "chat", "options": {"path": str(prompts)}}
    config = debug(tmp_path / "runs", f"environment={json.dumps(environment)}")
    check_files(config, EVALUATE)
    prompts.unlink()
    again = debug(tmp_path / "others", f"environment={json.dumps(environment | {'train_seed': 1})}")
    with pytest.raises(InputError, match=f"no file prompts.jsonl in {tmp_path}"):
        check_files(again, EVALUATE)


def test_a_folder_without_a_model_is_not_served(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a local Hugging Face folder"):
        check_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="cannot read a tokenizer"):
        check_folder(tmp_path)


def test_a_reward_that_gives_no_number_is_refused(tmp_path, monkeypatch) -> None:
    name, body = "preflight_raises", "return example['answer']"
    (tmp_path / f"{name}.py").write_text(f"def score(example, completion):\n    {body}\n")
    write_prompts(tmp_path / "prompts.jsonl")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = {
        "name": "chat",
        "reward_timeout_s": 1,
        "options": {"path": str(tmp_path / "prompts.jsonl"), "reward": f"{name}:score"},
        "pass_environment": ["PYTHONPATH"],
    }
    config = debug(tmp_path / "runs", f"environment={json.dumps(environment)}")
    with pytest.raises(MarinRLError, match="TypeError"):
        before_engines(config, "rl-loop")


@pytest.mark.parametrize("key", ["environment", "evaluation.sets.test"])
def test_rows_that_changed_between_two_starts_are_refused(tmp_path: Path, key: str) -> None:
    """A run without the record, from before there was one, goes on and records what it finds."""
    files = {name: tmp_path / f"{name}.jsonl" for name in ("environment", "evaluation.sets.test")}
    for file in files.values():
        write_prompts(file)
    chat = {name: {"name": "chat", "options": {"path": str(f)}} for name, f in files.items()}
    config = debug(
        tmp_path / "runs",
        f"environment={json.dumps(chat['environment'])}",
        f"evaluation.sets={json.dumps({'test': chat['evaluation.sets.test']})}",
    )
    run = Run.create_or_open(config)
    before_engines(config, "rl-loop")
    record_rows(run)
    assert sorted(run.store.children("data")) == [f"{name}.json" for name in sorted(files)]
    before = files[key].read_bytes()
    for change in (before + b'{"prompt": "9+9=", "answer": "18"}\n', before.replace(b"7", b"8")):
        files[key].write_bytes(change)
        forget_environments()
        for check in (lambda: before_engines(config, "rl-loop"), lambda: record_rows(run)):
            with pytest.raises(
                ConfigError, match=rf"started with other rows .*\n  {key}: "
            ) as told:
                check()
            assert "choose another --run-id, or fork" in str(told.value)
    files[key].write_bytes(before)
    forget_environments()
    assert before_engines(config, "rl-loop") is None
    record_rows(run)


GEMMA_LIKE = """{%- if messages[0]['role'] == 'system' -%}
{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}<{{ message['role'] }}>{{ message['content'] }}{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}"""


def test_a_prompt_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", GEMMA_LIKE, "<eos>")
    rows = [{"id": f"row-{n}", "prompt": f"{n}+0=", "answer": str(n)} for n in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    options = {"path": str(tmp_path / "prompts.jsonl"), "system_prompt": "Be brief."}
    config = debug(
        tmp_path / "runs",
        f"environment={json.dumps({'name': 'chat', 'options': options})}",
        f"policy.tokenizer={tmp_path / 'tokenizer'}",
    )
    told = r"the prompt of the example row-\d+ \(messages of system, user\): .*System role not"
    with pytest.raises(InputError, match=told):
        before_engines(config, "rl-loop")


ABSTAINING = """
def some(prompts, completions, **columns):
    return [None if text == "" else 1.0 for text in completions]

def wrong(example, completion):
    return None if completion == example.answer else 1.0

def never(example, completion):
    return None
"""


@pytest.mark.parametrize(
    ("function", "notice"),
    [
        pytest.param("some", None, marks=pytest.mark.slow),
        ("wrong", r"3 of 6 probes have no reward: the function does not apply"),
        ("never", r"6 of 6 probes have no reward: .*does the function return one\?"),
    ],
)
def test_a_reward_may_abstain(tmp_path, caplog, monkeypatch, function, notice):
    (tmp_path / "abstaining.py").write_text(ABSTAINING)
    write_prompts(tmp_path / "prompts.jsonl")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = {"path": str(tmp_path / "prompts.jsonl"), "reward": f"abstaining:{function}"}
    environment = {"name": "chat", "options": options, "pass_environment": ["PYTHONPATH"]}
    config = debug(tmp_path / "runs", f"environment={json.dumps(environment)}")
    said = own_reward(config)
    assert said in ("a reward for an example", caplog.text.partition("reward: ")[2].strip())
    assert function != "never" or said.startswith("2 of 2 probes have no reward")
    verdict = reward(config)
    assert ("probes have no reward" in verdict) == (notice is not None)
    assert notice is None or re.search(notice, verdict)


def test_a_model_folder_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mamba2"}')
    (folder / "model.safetensors").write_text("")
    policy = f"policy={{context_length: 64, init: hf, hf_path: {folder}}}"
    with pytest.raises(InputError, match="'mamba2' is not supported"):
        before_engines(debug(tmp_path / "runs", policy), "rl-loop")


LOSSES = """
import jax.numpy as jnp
def good(logprobs, advantages): return -logprobs * advantages
def text(logprobs): return "loss"
def shape(logprobs): return logprobs[0]
def nan(logprobs): return jnp.log(logprobs)
def parameters(logprobs, entropies): return logprobs
def raises(logprobs): raise KeyError("no such thing")
"""
LOSSES_REFUSED = """
import sys
from marin_rl.config import load_config
from marin_rl.doctor.engines import check_all
from marin_rl.errors import MarinRLError
for name in sys.argv[3:]:
    chosen = [f"root={sys.argv[2]}", f"objective.loss=losses.py:{name}"]
    try:
        print(check_all(load_config(sys.argv[1], chosen), "rl-loop"))
    except MarinRLError as error:
        print(error)
print(*sorted(name for name in sys.modules if "." not in name))
"""


@pytest.mark.slow
def test_a_loss_of_ones_own_is_refused_before_prefect_starts(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "run.yaml").write_text(DEBUG.read_text())
    names = ("good", "text", "shape", "nan", "parameters", "raises")
    command = [sys.executable, "-c", LOSSES_REFUSED, "run.yaml", str(tmp_path / "runs"), *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    *lines, modules = done.stdout.splitlines()
    expected = (
        "None",
        "losses.py:text returned 'loss'",
        "losses.py:shape returned an array of shape",
        "losses.py:nan: its value is not finite",
        "losses.py:parameters takes (logprobs, entropies)",
        "losses.py:raises failed: KeyError: 'no such thing'",
    )
    assert len(lines) == len(expected)
    assert all(words in line for words, line in zip(expected, lines, strict=True)), lines
    assert "prefect" not in modules.split()
    assert not (tmp_path / "runs/debug").exists()


def test_a_run_is_finished_once_its_last_checkpoint_is_evaluated(tmp_path: Path) -> None:
    run = whole_run(str(tmp_path), rounds=2)
    config = run.config.model_copy(update={"rounds": 2})
    assert finished(config, "rl-loop") is None
    last = committed_checkpoint(run, 2)
    assert last is not None
    evaluate(run, 2, last)
    assert finished(config, "rl-loop") == last
    assert finished(run.config.model_copy(update={"rounds": 3}), "rl-loop") is None
    Path(tmp_path, run.run_id, metrics_key(1)).unlink()  # that round is closed again
    assert finished(config, "rl-loop") is None


def with_folder(root: Path, template: str, *overrides: str) -> Config:
    """The debug configuration with a tokenizer folder of this chat template."""
    folder = chat_folder(root / "folder", template)
    longer = ("policy.context_length=512", "batching.length_buckets=[512]")
    return debug(root, f"policy.tokenizer={folder}", *longer, *overrides)


@pytest.mark.parametrize("flow", ["rl-loop", "sft"])
def test_a_row_that_would_be_learned_otherwise_is_named_before_any_work(tmp_path, flow) -> None:
    rows = tmp_path / "rows.jsonl"
    shown = ["fine", "<think>two and two</think>4"]
    rows.write_text("\n".join(json.dumps({"prompt": "2+2", "completion": c}) for c in shown))
    options = f"{{name: chat, options: {{path: {rows}, eval_fraction: 1.0e-9}}}}"
    config = with_folder(
        tmp_path, WITHOUT_REASONING, f"sft.environment={options}", "policy.init=sft"
    )
    with pytest.raises(InputError, match=r"rows.jsonl, line 2: the answer '<think>two and two<"):
        before_engines(config, flow)
    assert not (tmp_path / config.run_id).exists()
    Run.create_or_open(config)  # as an earlier version began it, which goes on
    before_engines(config, flow)


@pytest.mark.parametrize(
    ("template", "overrides", "words"),
    [
        (TWO_ENDS, (), "set policy.end_tokens to the list"),
        (CHATML, ("policy.end_tokens=[<|eot|>]",), "'<|eot|>' is no token"),
        (CHATML, ("policy.chat_template_options={enable_thinking: false}",), "it reads none"),
        (CHATML, ("environment.chat_template_options={a: 1}",), "environment.chat_template_opti"),
        (
            GEMMA.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{% break %}{% endfor %}"),
            ("environment={name: game, eval_seed: 2000000000}",),
            "environment has episodes of several turns, which the policy's chat template cannot",
        ),
    ],
)
def test_a_template_that_a_run_cannot_be_played_by_is_refused(tmp_path, template, overrides, words):
    with pytest.raises(InputError) as raised:
        before_engines(with_folder(tmp_path, template, *overrides), "rl-loop")
    assert words in str(raised.value)
