"""`marin-rl evaluate` on each kind of target; what goes together and what does not."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from support.fakes import FakePolicyServer
from typer.testing import CliRunner, Result

from marin_rl.cli import app
from marin_rl.config import load_config
from marin_rl.environments.answers import exact_match
from marin_rl.errors import BadResponse, ConfigError, InputError, ObjectMissing
from marin_rl.evaluation import (
    EvaluationRequest,
    EvaluationResult,
    Target,
    evaluate_target,
    evaluation_config,
)
from marin_rl.inference.client.answers import likeliest
from marin_rl.rollouts.evaluate import held_out_sets
from marin_rl.storage.runs import Run
from marin_rl.tokenizers import character_tokenizer, tokenizer_for
from marin_rl.training.hf_folders import save_hf
from marin_rl.training.loop import Trainer
from marin_rl.training.model import build_model
from marin_rl.training.sft import WarmStart
from marin_rl.types import Example, Message

# Programs as users have them are not the subject here, and take twice as long to compile.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

DEBUG = Path(__file__).parents[1] / "configs/debug.yaml"


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["evaluate", *arguments])


@pytest.fixture
def endpoint() -> Iterator[FakePolicyServer]:
    with FakePolicyServer("gpt-x") as fake:
        yield fake


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts that the fake server repeats, and one it cannot know the answer of."""
    rows = [{"prompt": f"repeat {word}", "answer": word} for word in ("dog", "cat", "bird")]
    path = tmp_path / "set.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "a", "answer": "b"}])
    )
    return path


def test_an_endpoint_that_gives_text_alone(endpoint, prompts, tmp_path):
    rows = tmp_path / "rows.parquet"
    shown = invoke(
        "--endpoint", endpoint.url, "--model", "gpt-x", "--env", str(prompts), "--k", "1,3",
        "--json", "-o", str(rows),
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    # every third seed of the fake gets it wrong, and of any three seeds one is that
    assert told["eval/examples"] == 4
    assert told["eval/accuracy"] == pytest.approx(6 / 12)
    assert told["eval/pass@3"] == told["eval/majority@3"] == 0.75
    assert told["eval/chat/pass@3/high"] > 0.75 > told["eval/chat/pass@3/low"]
    assert "eval/mean_length" not in told
    asked = endpoint.requests[0]
    assert {"return_token_ids", "compact_logprobs", "logprobs", "top_k"} & set(asked) == set()
    assert (asked["n"], asked["temperature"]) == (3, 1.0)
    frame = pl.read_parquet(rows)
    assert frame.height == 12
    assert set(frame["turns"].list.last().struct.field("content")) >= {"dog", "cat", "bird"}
    assert frame["n_completion_tokens"].to_list() == [0] * 12


def test_an_endpoint_that_ignores_n_is_asked_again(endpoint, prompts):
    endpoint.fault = lambda body: "fewer" if body["n"] > 1 else None
    found = evaluate_target(
        Target(endpoint=endpoint.url, model="gpt-x"),
        EvaluationRequest(environment=str(prompts), k=(2,)),
    )
    assert [len(group.rollouts) for group in found.groups] == [2] * 4
    seeds = sorted(body["seed"] for body in endpoint.requests)
    assert len(set(seeds)) == 8  # the second choice is another sample, not the first again


def test_a_configuration_gives_environment_and_sampling(endpoint, tmp_path):
    (tmp_path / "own.yaml").write_text(
        "run_id: own\nenvironment: {name: echo}\nsampling: {max_tokens: 7}\n"
    )
    target = Target(endpoint=endpoint.url, model="gpt-x")
    own = EvaluationRequest(environment=str(tmp_path / "own.yaml"), examples=2)
    for request, tokens in ((own, 7), (replace(own, max_tokens=5), 5)):
        endpoint.requests.clear()
        evaluate_target(target, request)
        assert {body["max_tokens"] for body in endpoint.requests} == {tokens}


@pytest.fixture
def suites(tmp_path: Path) -> Path:
    """A folder of two suites: two problems, and three questions with the answers B, B and C."""
    for name, rows in (
        ("gsm8k", [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in (1, 2)]),
        ("mmlu", [
            {"question": str(n), "subject": "sums", "choices": [*"wxyz"], "answer": n}
            for n in (1, 1, 2)
        ]),
    ):  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_suites_at_an_endpoint(suites: Path) -> None:
    rows = suites / "rows.parquet"
    say = lambda text, seed: "B" if "A. w" in text else "2" if "1 + 1" in text else "5"
    with FakePolicyServer("gpt-x", script=say) as fake:
        fake.compact = False
        shown = invoke(
            fake.url, "--model", "gpt-x", "--suite", "gsm8k,mmlu:lm-eval-0shot", "--data",
            str(suites), "--k", "1,2", "--json", "-o", str(rows),
        )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert told["eval/examples"] == 5
    assert told["eval/gsm8k/pass@2"] == told["eval/gsm8k/mean@2"] == 0.5
    assert told["eval/mmlu-lm-eval-0shot/pass@1"] == pytest.approx(2 / 3)
    low, high = (told[f"eval/mmlu-lm-eval-0shot/pass@1/{end}"] for end in ("low", "high"))
    assert low < 2 / 3 < high
    assert told["suites"]["gsm8k"]["prompt"] == "chat-boxed"
    digest = hashlib.sha256((suites / "mmlu.jsonl").read_bytes()).hexdigest()
    assert told["suites"]["mmlu-lm-eval-0shot"]["sha256"] == digest
    plain = [body for body in fake.requests if "prompt" in body]
    chat = [body for body in fake.requests if "messages" in body]
    assert {(body["max_tokens"], body["logprobs"]) for body in plain} == {(1, 20)}
    assert {body["max_tokens"] for body in chat} == {512}
    frame = pl.read_parquet(rows)
    assert frame.height == 10
    versions = set(frame["environment_version"])
    assert f"mmlu lm-eval-0shot {digest}" in versions
    assert {turns[-1]["content"] for turns in frame["turns"].to_list()} == {"B", "2", "5"}


def test_no_suite_is_sampled_where_one_does_not_fit(suites: Path, tmp_path: Path) -> None:
    (tmp_path / "mmlu.jsonl").write_text('{"question": "q", "answer": "B", "choices": "wxyz"}\n')
    with FakePolicyServer("gpt-x") as fake:
        target = Target(endpoint=fake.url, model="gpt-x")
        for request, words in (
            (EvaluationRequest(suites=("gsm8k", "mmlu"), data=str(suites)), "line 1: choices: exp"),
            (EvaluationRequest(suites=("mlu",), data=str(suites)), "did you mean mmlu"),
            (EvaluationRequest(suites=("gsm8k",)), "--suite and --data FILE or FOLDER go together"),
            (EvaluationRequest(data=str(suites)), "--suite and --data FILE or FOLDER go together"),
            (EvaluationRequest(suites=("gsm8k",), data="x", environment="echo"), "without --env"),
            (EvaluationRequest(suites=("gsm8k",), data="nowhere"), "no file nowhere"),
            (EvaluationRequest(suites=("gsm8k", "gsm8k"), data=str(suites)), "gsm8k twice"),
        ):
            with pytest.raises((ConfigError, InputError), match=words):
                evaluate_target(target, request)
        assert not fake.requests


@pytest.mark.parametrize(("top", "text"), [
    ({" B": -1.0, "A": -0.5, " A": -2.0, "\n": -0.1}, "B"),  # as the text goes on: after a space
    ({"A": -0.5, "B": -1.0}, "A"),
    ({"\n": -0.1}, "said"),
])  # fmt: skip
def test_the_likeliest_of_some_texts(top: dict[str, float], text: str) -> None:
    choice = {"text": "said", "logprobs": {"top_logprobs": [top, {" A": 0.0}]}}
    assert likeliest(choice, ("A", "B")) == text


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {},
        {"top_logprobs": None},
        {"top_logprobs": [3]},
        {"top_logprobs": [{" A": "x"}]},
    ],
)
def test_an_endpoint_without_likely_tokens_is_refused(logprobs: object) -> None:
    with pytest.raises(BadResponse, match="must honour `logprobs: 20`; choose a prompt whose"):
        likeliest({"text": "A", "logprobs": logprobs}, ("A", "B"))


def test_a_suite_is_a_named_set_of_a_run(suites: Path) -> None:
    (suites / "own.yaml").write_text(
        "run_id: own\nevaluation:\n  examples: 2\n  sets:\n"
        "    sums: {name: suite, options: {suite: gsm8k, path: gsm8k.jsonl}}\n"
        "    facts: {name: suite, options: {suite: mmlu, path: ., prompt: lm-eval-0shot}}\n"
    )
    facts, sums = held_out_sets(load_config(suites / "own.yaml"))
    assert (facts.name, facts.examples, sums.name, sums.examples) == ("facts", 2, "sums", 2)
    assert facts.part.environment.choices == ("A", "B", "C", "D")


@pytest.mark.slow
def test_suites_with_a_model_folder(suites: Path, tmp_path: Path) -> None:
    config = load_config(DEBUG).policy.model_copy(update={"context_length": 256})
    tokenizer = character_tokenizer()
    folder = tmp_path / "model"
    save_hf(build_model(config, len(tokenizer), 0), tokenizer, folder)
    names = ("mmlu:lm-eval-0shot", "gsm8k:lm-eval-0shot")
    found = evaluate_target(
        Target(name=str(folder)),
        EvaluationRequest(suites=names, data=str(suites), max_tokens=4),
    )
    assert found.metrics["eval/examples"] == 5
    assert found.metrics["eval/errors"] == 0
    for group in found.groups:
        (rollout,) = group.rollouts
        asked, said = rollout.turns
        text = asked.content
        ids = rollout.token_ids.tolist()
        assert ids[: len(ids) - rollout.n_completion_tokens] == tokenizer.encode(text)
        if group.example.environment.startswith("mmlu"):
            assert rollout.n_completion_tokens == 1
            assert said.content in "ABCD"


@pytest.mark.slow
def test_a_run_in_its_own_environment_and_in_another(prompts: Path, tmp_path: Path) -> None:
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}"]))
    Trainer(run, character_tokenizer()).init_policy()
    before = run.store.list()
    found = evaluate_target(Target(name=str(tmp_path / "debug")), EvaluationRequest())
    assert found.metrics["eval/examples"] == 4
    assert 0 < found.metrics["eval/mean_length"] <= 8
    other = evaluate_target(
        Target(name="debug", root=str(tmp_path)),
        EvaluationRequest(environment=str(prompts), k=(1, 2), temperature=0.5, max_tokens=4),
    )
    assert other.metrics["eval/examples"] == 4
    assert {r.sampling.temperature for g in other.groups for r in g.rollouts} == {0.5}
    assert max(r.n_completion_tokens for g in other.groups for r in g.rollouts) <= 4
    assert run.store.list() == before
    with pytest.raises(ObjectMissing, match="no checkpoint of round 7"):
        evaluate_target(Target(name="debug", root=str(tmp_path), round=7), EvaluationRequest())


@pytest.mark.slow
def test_another_task_of_a_run_has_the_context_of_its_model(prompts: Path, tmp_path: Path) -> None:
    policy, folder = load_config(DEBUG).policy, tmp_path / "model"
    longer = policy.model_copy(update={"context_length": 256})
    tokenizer = character_tokenizer()
    save_hf(build_model(longer, len(tokenizer), 5), tokenizer, folder)
    own = ["policy.init=hf", f"policy.hf_path={folder}", f"policy.tokenizer={folder}"]
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *own]))
    Trainer(run, tokenizer_for(run.config.policy)).init_policy()
    target = Target(name=str(tmp_path / "debug"), trust=True)
    for environment, expected in ((None, 64), (str(prompts), 256)):
        request = EvaluationRequest(environment=environment, samples=1, k=(1,), max_tokens=4)
        found = evaluate_target(target, request)
        assert found.config.policy.context_length == expected


def said_by(found: EvaluationResult) -> list[list[int]]:
    """The tokens of every sample."""
    return [r.token_ids.tolist() for group in found.groups for r in group.rollouts]


@pytest.mark.slow
def test_one_checkpoint_by_its_own_name(tmp_path: Path) -> None:
    averaged = ["objective.kl_coefficient=0.1", "objective.reference=average"]
    sft = ["policy.init=sft", "sft.steps=2", *averaged]
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *sft]))
    warm = WarmStart(run, character_tokenizer()).run_segment(0)
    first = Trainer(run, character_tokenizer()).init_policy()
    request = EvaluationRequest(k=(1,), samples=3, temperature=1.0, max_tokens=4)
    ours, warms = (
        evaluate_target(Target(name=f"{tmp_path}/debug/{slot}"), request)
        for slot in (first.slot, f"{warm.slot}/manifest.json")
    )  # the warm start is what checkpoint 0 is
    assert ours.metrics == warms.metrics
    assert said_by(ours) == said_by(warms)
    assert len(said_by(ours)) == 4 * 3


def test_a_checkpoints_own_name_is_one_checkpoint(tmp_path: Path) -> None:
    Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}"]))
    with pytest.raises(ConfigError, match=r"--round 0: .*round-00007 names a checkpoint already"):
        evaluate_target(
            Target(name=f"{tmp_path}/debug/checkpoints/round-00007", round=0), EvaluationRequest()
        )
    with pytest.raises(ConfigError, match="round-00007 is not committed"):
        evaluate_target(
            Target(name=f"{tmp_path}/debug/checkpoints/round-00007/"), EvaluationRequest()
        )


@pytest.mark.slow
def test_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 layers of keys and values of one head of 16, 64 positions: room for two slots, not for three
    monkeypatch.setattr("marin_rl.planning.CACHE_BYTES_MAX", 3 * (2 * 2 * 16 * 64 * 4) - 1)
    tokenizer, folder = character_tokenizer(), tmp_path / "model"
    save_hf(build_model(load_config(DEBUG).policy, len(tokenizer), 5), tokenizer, folder)
    found = evaluate_target(
        Target(name=str(folder)),
        EvaluationRequest(
            environment="echo", options=["letters_max=2"], k=(1,), examples=3, max_tokens=4
        ),
    )
    assert found.metrics["eval/examples"] == 3
    assert found.config.inference.engine.slots == found.config.inference.engine.prefill_rows == 2
    assert all(len(group.example.answer or "") <= 2 for group in found.groups)


def test_a_run_is_distinguished_from_its_checkpoints_and_from_models(tmp_path: Path) -> None:
    """Of a run alone, without further options, the evaluation is committed."""
    Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}"]))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    folder, url = f"{tmp_path}/debug", "http://127.0.0.1:9/v1"
    for name in ("debug", "debug/", folder, f"{folder}/"):
        target = Target(name=name, root=str(tmp_path))
        assert target.is_run
        assert target.open_run().run_id == "debug"
    others = (
        f"{folder}/checkpoints/round-00000",
        f"{tmp_path}/model",
        "s3://bucket/run/sft/step-1",
    )
    assert not any(Target(name=name, root=str(tmp_path)).is_run for name in others)
    assert not Target(endpoint=url).is_run


def test_overrides_are_resolved_once(prompts: Path) -> None:
    config = load_config(DEBUG)
    chosen, _ = evaluation_config(config, EvaluationRequest())
    assert (chosen.evaluation.samples, chosen.evaluation.temperature) == (1, 0.0)
    chosen, _ = evaluation_config(config, EvaluationRequest(k=(1, 8)))
    assert (chosen.evaluation.samples, chosen.evaluation.temperature) == (8, 1.0)
    chosen, _ = evaluation_config(
        config, EvaluationRequest(k=(1, 8), samples=16, temperature=0.0, examples=5)
    )
    assert (chosen.evaluation.samples, chosen.evaluation.temperature) == (16, 0.0)
    assert chosen.evaluation.examples == 5
    fixed, _ = evaluation_config(config, EvaluationRequest(environment=str(prompts)))
    assert fixed.evaluation.examples == 4


def test_invalid_combinations_are_refused(prompts: Path) -> None:
    config = load_config(DEBUG)
    with pytest.raises(ConfigError, match="--examples 9: the environment holds out 4"):
        evaluation_config(config, EvaluationRequest(environment=str(prompts), examples=9))
    with pytest.raises(ConfigError, match="k reaches 8, but samples is 2"):
        evaluation_config(config, EvaluationRequest(k=(8,), samples=2))
    with pytest.raises(ConfigError, match="did you mean echo"):
        evaluation_config(config, EvaluationRequest(environment="ecko"))
    with pytest.raises(ConfigError, match="--endpoint URL --model NAME"):
        evaluate_target(
            Target(endpoint="http://127.0.0.1:9/v1"), EvaluationRequest(environment="echo")
        )
    with pytest.raises(ConfigError, match="say what is to be answered"):
        evaluate_target(Target(endpoint="http://127.0.0.1:9/v1", model="m"), EvaluationRequest())
    assert isinstance(invoke().exception, ConfigError)
    assert "expected numbers like 1,8" in str(invoke("debug", "--k", "1;8").exception)


def test_ready_made_rewards() -> None:
    example = Example(
        environment="chat", environment_version="1", example_id="x", split="eval", seed=0,
        messages=(Message(role="user", content="?"),), answer="so 1,200",
    )  # fmt: skip
    assert exact_match(example, " so 1,200\n") == 1.0
    assert exact_match(example, "1,200") == 0.0
