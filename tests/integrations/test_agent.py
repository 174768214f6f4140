"""Programs that call a model, played as they are: calls are turns, the end is the reward."""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import others_slow
from support.run_factories import audit_round
from support.sandboxes import reason_to_skip
from support.scripted_policies import play, record, tool_run, write_tokenizer
from support.templates import QWEN

from marin_rl.analysis.dialogues import rollout_named
from marin_rl.analysis.query import answer_rows
from marin_rl.batching.build import build_round
from marin_rl.config import Config
from marin_rl.environments.checks import environment_of
from marin_rl.errors import ConfigError, InputError
from marin_rl.rollouts.assemble import samples_of
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.storage.runs import Run, committed, rollouts_slot
from marin_rl.storage.tables.batches import read_batches
from marin_rl.types import Message, Rollout, Turn

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))

# The client that the agents of these tests have in common: the standard library alone.
CLIENT = """
import json, os, sys, urllib.error, urllib.request

def post(path, body, key=os.environ["OPENAI_API_KEY"]):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + key},
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

def ask(messages, **fields):
    status, text = post("/chat/completions", {"model": "any", "messages": messages, **fields})
    assert status == 200, text
    return json.loads(text)["choices"][0]["message"]

task = json.load(open("task.json"))
first = [{"role": "user", "content": task["prompt"]}]
"""
REWARD = """
def score(example, completion):
    return float(len(completion))

def of_second_agents(messages, tools):
    return messages[0].role == "system" and messages[-1].role == "assistant" and not tools
"""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


def configured(place: Path, program: str, rows: int = 4, **options: Any) -> Config:
    """A run of one group of two whose agent is `program` after the client."""
    work = place / "work"
    work.mkdir(exist_ok=True)
    (work / "agent.py").write_text(CLIENT + program)
    (place / "rewards.py").write_text(REWARD)
    lines = [json.dumps({"prompt": f"say {row}", "answer": "secret"}) for row in range(rows)]
    (place / "rows.jsonl").write_text("\n".join(lines))
    settings = options.pop("settings", {})
    environment = {
        "name": "agent",
        "step_timeout_s": 120.0,
        "options": {
            "path": str(place / "rows.jsonl"),
            "reward": "rewards.py:score",
            "folder": str(work),
            "command": ["{python}", "agent.py"],
            "eval_fraction": 0.5,
            **options,
        },
        **settings,
    }
    return tool_run(place, environment, groups=1, size=2)


def rollouts_of(config: Config, script: Any) -> tuple[Rollout, ...]:
    (group,) = play(config, script)
    return group.rollouts


def count(messages: Sequence[Message], member: int) -> str:
    """Answer with the number of messages that the policy reads."""
    return f"turn {len(messages)} of {member}"


def printed(rollout: Rollout) -> dict[str, Turn]:
    """The output that the end of a rollout shows, by its name."""
    shown = [turn for turn in rollout.turns if turn.role == "tool" and turn.tool_name is None]
    assert [*rollout.turns[len(rollout.turns) - len(shown) :]] == shown
    return {turn.content.partition("]")[0][1:]: turn for turn in shown}


def roles(rollout: Rollout) -> list[str]:
    return [turn.role for turn in rollout.turns[: len(rollout.turns) - len(printed(rollout))]]


def check_batch(run: Run, rollouts: Sequence[Rollout]) -> None:
    """Build the first round; its batch has all tokens that are trained, and no audit objects."""
    ref = committed(run, rollouts_slot(0))
    assert ref is not None
    trained = sum(batch.loss_mask.sum() for batch in read_batches(run, build_round(run, 0, ref)))
    assert trained in (0, sum(rollout.loss_mask.sum() for rollout in rollouts))
    assert audit_round(run, 0).offences == {}


def segments(rollout: Rollout, array: np.ndarray) -> list[list[int]]:
    lengths = rollout.segment_lengths or (len(array),)
    return [part.tolist() for part in np.split(array, np.cumsum(lengths)[:-1])]


def test_a_conversation_that_goes_on_is_one_sequence_and_stdout_is_scored(tmp_path: Path) -> None:
    program = """
messages = first
for turn in range(3):
    messages = [*messages, ask(messages), {"role": "user", "content": f"again {turn}"}]
print("x" * (len(messages) + int(messages[1]["content"][-1])))
"""
    firsts = itertools.count()

    def script(messages: Sequence[Message], _: int) -> str:
        return f"turn {len(messages)} of {next(firsts) if len(messages) == 1 else 0}"

    run, (group,) = record(configured(tmp_path, program), script)
    assert sorted(rollout.reward or 0 for rollout in group.rollouts) == [7.0, 8.0]
    for rollout in group.rollouts:
        assert (rollout.status, rollout.finish_reason) == ("complete", "stop")
        assert rollout.segment_lengths is None
        assert roles(rollout) == ["user", "assistant"] * 3
        said = [turn.content for turn in rollout.turns if turn.role == "assistant"]
        assert rollout.reward == 7 + int(said[0][-1])
        assert said[1:] == ["turn 3 of 0", "turn 5 of 0"]
        # what was sampled, and it alone, is trained on
        spans = [range(t.start or 0, t.end or 0) for t in rollout.turns if t.role == "assistant"]
        trained = np.flatnonzero(rollout.loss_mask).tolist()
        assert trained == [place for span in spans for place in span]
    check_batch(run, group.rollouts)


@pytest.mark.parametrize(
    ("train", "trained"),
    [("all", {2, 4, 7, 9, 13}), ("main", {2, 4, 9}), ("rewards.py:of_second_agents", {7})],
)
def test_calls_are_a_table_and_those_that_are_chosen_are_trained(
    tmp_path: Path, train: str, trained: set[int]
) -> None:
    program = """
answer = ask(first)
ask([{"role": "system", "content": "name the task"}, *first])  # a second agent
for word in ("so", "why"):
    ask([*first, answer, {"role": "user", "content": word}])
other = {"role": "assistant", "content": "not what it said"}
ask([*first, other, {"role": "user", "content": "so"}])
print("x" * (1 + int(answer["content"][-1])))
"""
    numbers = itertools.count()
    config = configured(tmp_path, program, train=train)
    run, (group,) = record(config, lambda *_: f"answer {next(numbers) % 10}")
    answer = answer_rows(run.config.root, run.run_id, "select * from calls order by all")
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    for rollout in group.rollouts:
        own = [row for row in rows if row["rollout_id"] == rollout.rollout_id]
        assert [(row["call"], row["segment"], row["parent"], row["reason"]) for row in own] == [
            (2, 0, None, "first call"),
            (4, 0, 2, None),
            (7, 1, None, "another system prompt"),
            (9, 2, 2, "goes back to turn 2"),
            (13, 3, None, "rewritten history"),
        ]
        assert {row["call"] for row in own if row["n_trained"]} == trained
        assert sum(row["n_sampled"] for row in own) == rollout.n_completion_tokens
        assert sum(row["n_trained"] for row in own) == rollout.loss_mask.sum()
        assert all(row["n_trained"] in (0, row["n_sampled"]) for row in own)
        assert all(row["environment_s"] > 0 for row in own)
        # a response begins with what was sampled, be it trained or not
        for sample in samples_of(rollout, begins_anew=True):
            sampled = [turn for turn in sample.response if turn.inference_metadata is not None]
            assert sample.response[0] is sampled[0]
            n_sampled = sum(len(turn.logprobs) for turn in sampled if turn.logprobs is not None)
            assert np.count_nonzero(sample.logprobs) == n_sampled
    check_batch(run, group.rollouts)


@pytest.mark.parametrize("train", ["mine", "rewards.py:not_there", "no_module_of_ours:f"])
def test_a_choice_of_calls_that_is_not_there_is_refused(tmp_path: Path, train: str) -> None:
    with pytest.raises((ConfigError, InputError), match=r"options\.train|choosing function"):
        play(configured(tmp_path, "ask(first)", train=train), count)


def test_agents_call_their_own_tools_by_three_model_apis(tmp_path: Path) -> None:
    program = (
        f"TOOLS = {TOOLS!r}"
        """
said = []
answer = ask(first, tools=TOOLS)
(call,) = answer["tool_calls"]
result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
said.append(ask([*first, answer, result], tools=TOOLS)["content"])

function = TOOLS[0]["function"]
_, text = post("/responses", {"input": task["prompt"], "tools": [{"type": "function", **function}]})
items = json.loads(text)["output"]
(call,) = [item for item in items if item["type"] == "function_call"]
result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
whole = [{"role": "user", "content": task["prompt"]}, *items, result]
_, text = post("/responses", {"input": whole, "tools": [{"type": "function", **function}]})
said.append(json.loads(text)["output"][0]["content"][0]["text"])

tool = {"name": "add", "input_schema": function["parameters"]}
body = {"max_tokens": 99, "messages": first, "tools": [tool]}
_, text = post("/messages", body)
content = json.loads(text)["content"]
(call,) = [block for block in content if block["type"] == "tool_use"]
result = {"type": "tool_result", "tool_use_id": call["id"], "content": "5"}
body["messages"] = [
    *first, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}
]
_, text = post("/messages", body)
said.append(json.loads(text)["content"][0]["text"])
print(json.dumps(said))
"""
    )

    def script(messages: Sequence[Message], member: int) -> str:
        if messages[-1].role == "tool":
            return f"it is {messages[-1].content}"
        return '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'

    rollout, _ = rollouts_of(configured(tmp_path, program), script)
    assert rollout.error is None
    assert rollout.reward == len(json.dumps(["it is 5"] * 3))
    # each conversation is a segment, and its second call goes on from the first
    assert roles(rollout) == ["user", "assistant", "tool", "assistant"] * 3
    assert rollout.segment_lengths is not None
    assert len(rollout.segment_lengths) == 3
    assert [t.tool_name for t in rollout.turns if t.role == "tool"][:3] == ["add"] * 3


COMPACTING = """
answer = ask(first)
going_on = [*first, answer, {"role": "user", "content": "x " * 20_000}]
for path, body, code in (
    ("/chat/completions", {"messages": going_on}, "context_length_exceeded"),
    ("/responses", {"input": going_on, "stream": True}, "context_length_exceeded"),
    ("/messages", {"messages": going_on, "max_tokens": 9}, "context_length_exceeded"),
):
    status, text = post(path, body)
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error"), text
    assert error["message"].startswith("prompt is too long: "), text
    assert error.get("code") in (code, None), text
messages = [*first, answer, {"role": "user", "content": "so"}]
print(ask(messages)["content"])
"""


def test_a_program_hears_of_a_prompt_beyond_the_context_and_asks_for_less(tmp_path: Path) -> None:
    run, (group,) = record(configured(tmp_path, COMPACTING), count)
    for rollout in group.rollouts:
        assert (rollout.status, rollout.finish_reason) == ("complete", "stop"), rollout.error
        assert rollout.reward == len("turn 3 of 0")
        assert sum(turn.role == "assistant" for turn in rollout.turns) == 2
        assert rollout.segment_lengths is None
        assert rollout.n_completion_tokens == rollout.loss_mask.sum()
    assert replay_rollouts(run, 0).equal


def test_a_program_that_asks_for_too_much_for_ever_ends_without_a_reward(tmp_path: Path) -> None:
    program = """
ask(first)
while True:
    post("/chat/completions", {"messages": [{"role": "user", "content": "x " * 20_000}]})
"""
    for rollout in rollouts_of(configured(tmp_path, program, settings={"turns_max": 4}), count):
        assert (rollout.status, rollout.finish_reason) == ("truncated", "context")
        assert rollout.reward == 0.0
        assert [component.name for component in rollout.reward_components] == ["unfinished"]


def test_of_questions_that_are_asked_again_the_answer_that_is_used_is_trained(
    tmp_path: Path,
) -> None:
    program = """
first_time, again, last = ask(first), ask(first), ask(first)
ask([*first, again, {"role": "user", "content": "so"}])
for _ in range(2):
    ask([*first, again, {"role": "user", "content": "why"}])
print("done")
"""
    numbers = itertools.count()
    run, (group,) = record(configured(tmp_path, program), lambda *_: f"answer {next(numbers)}")
    answer = answer_rows(run.config.root, run.run_id, "select * from calls order by all")
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    for rollout in group.rollouts:
        own = [row for row in rows if row["rollout_id"] == rollout.rollout_id]
        trained = [row["n_trained"] == row["n_sampled"] for row in own]
        assert trained == [False, True, True, False, False, True], own
        assert [row["reason"] for row in own if row["call"] in (4, 8, 12)] == [
            "asks again for turn 2", "asks again for turn 4", "asks again for turn 10",
        ], own  # fmt: skip
        assert {row["n_trained"] for row, whole in zip(own, trained, strict=True) if not whole} == {
            0
        }
    check_batch(run, group.rollouts)


def test_an_agent_that_asks_in_another_order_gets_the_same_answers(tmp_path: Path) -> None:
    program = """
for question in ORDER:
    ask([{"role": "user", "content": question}], tools=[])
print("done")
"""

    def seeds(name: str, order: str) -> list[dict[str, list[int]]]:
        place = tmp_path / name
        place.mkdir()
        given: list[dict[str, list[int]]] = []
        for rollout in rollouts_of(configured(place, f"ORDER = {order!r}" + program), count):
            given.append({})
            asked = ""
            for turn in rollout.turns:
                if turn.role == "user":
                    asked = turn.content
                elif turn.inference_metadata is not None:
                    seed = turn.inference_metadata.sampling.seed
                    given[-1].setdefault(asked, []).append(seed or 0)
        return given

    first, second = seeds("one", "abca"), seeds("two", "caab")
    assert first == second
    for member in first:
        assert [*map(len, (member["a"], member["b"], member["c"]))] == [2, 1, 1]
    every = [seed for member in first for asked in member.values() for seed in asked]
    assert len(set(every)) == len(every) == 8


def test_a_check_decides_and_sees_files_that_the_agent_did_not(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "check.py").write_text("assert open('answer').read() == 'turn 1 of 0'")
    (hidden / "data").mkdir()
    (hidden / "data/file").write_text("from the check")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("of this machine")
    elsewhere.chmod(0o777)
    program = (
        f"""
ELSEWHERE = {str(elsewhere)!r}
"""
        """
assert not os.path.exists("check.py")
os.symlink(ELSEWHERE + "/file", "check.py")  # what is written there would be written outside
os.symlink(ELSEWHERE, "data")
open("answer", "w").write(ask(first)["content"])
"""
    )
    config = configured(tmp_path, program, check=["{python}", "check.py"], check_folder=str(hidden))
    answers = itertools.count()
    rollouts = rollouts_of(config, lambda *_: f"turn 1 of {next(answers)}")
    assert sorted(rollout.reward or 0 for rollout in rollouts) == [0.0, 1.0]
    assert [path.read_text() for path in elsewhere.iterdir()] == ["of this machine"]


def test_after_the_last_turn_further_calls_are_refused_and_the_agent_ends(tmp_path: Path) -> None:
    program = """
messages, turns = first, 0
while True:
    status, text = post("/chat/completions", {"messages": messages})
    if status == 400:
        break
    turns += 1
    messages = [*messages, json.loads(text)["choices"][0]["message"], *first]
print("x" * turns)
"""
    rollout, _ = rollouts_of(configured(tmp_path, program, settings={"turns_max": 3}), count)
    assert (rollout.reward, rollout.status) == (3.0, "complete")


@pytest.mark.parametrize(
    ("program", "options", "error"),
    [
        (
            "sys.exit('no model here')",
            {},
            r"RewardFault: the agent ended \(exit status 1\) without",
        ),
        (
            "ask(first)\nwhile True: pass",
            {"agent_timeout_s": 5.0},
            "EnvironmentTimeout: the agent took longer than 5 s; its stdout ends in ''",
        ),
        ("ask(first)\nprint('x' * 3000)", {"output_bytes_max": 2048}, "limit of output"),
    ],
)
def test_an_agent_that_breaks_a_limit_costs_its_rollout_alone(
    tmp_path: Path, program: str, options: dict[str, Any], error: str
) -> None:
    rollouts = rollouts_of(configured(tmp_path, program, **options), count)
    for rollout in rollouts:
        assert rollout.status == "error"
        assert rollout.error is not None
        assert re.search(error, rollout.error)


def test_a_program_that_hangs_is_scored_where_the_run_says_so(tmp_path: Path) -> None:
    program = "ask(first)\nprint('so far', flush=True)\nwhile True: pass"
    config = configured(tmp_path, program, agent_timeout_s=5.0, on_timeout="score")
    for rollout in rollouts_of(config, count):
        assert (rollout.status, rollout.finish_reason) == ("complete", "timeout")
        assert rollout.reward == len("so far")


def test_output_of_a_program_is_kept_with_its_rollout_without_its_key(tmp_path: Path) -> None:
    program = """
ask([*first, {"role": "user", "content": json.dumps(dict(os.environ))}])
print("o" * 5000 + "last", os.environ["OPENAI_API_KEY"])
print(os.environ["ANTHROPIC_API_KEY"], file=sys.stderr)
raise SystemExit(3)
"""
    check = ["{python}", "-c", "print('checked'); raise SystemExit(4)"]
    run, (group,) = record(configured(tmp_path, program, check=check), count)
    for rollout in group.rollouts:
        assert (rollout.reward, rollout.finish_reason) == (0.0, "exit 3")
        assert '"OPENAI_API_KEY": "..."' in rollout.turns[1].content
        kept = printed(rollout)
        assert kept["stdout"].content == "[stdout]\n" + "o" * (4096 - 8) + "last ..."
        assert kept["stdout"].cut
        assert kept["stderr"].content == "[stderr]\n..."
        assert kept["check"].content == "[check]\nexit status 4\nchecked"
        (sample,) = samples_of(rollout)
        assert [turn.role for turn in sample.response] == ["assistant"]
    shown = rollout_named(run, group.rollouts[0].rollout_id)
    assert [turn["content"][-3:] for turn in shown["turns"][-3:]] == ["...", "...", "ked"]
    check_batch(run, group.rollouts)


def test_files_of_a_row_lie_in_its_folder(tmp_path: Path) -> None:
    program = """
ask(first)
print(open("input/text").read(), end="")
"""

    def with_files(name: str, files: Any) -> Config:
        (tmp_path / name).mkdir()
        config = configured(tmp_path / name, program)
        rows = [{"prompt": f"say {n}", "answer": "x", "files": files} for n in range(4)]
        (tmp_path / name / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return config

    rollouts = rollouts_of(with_files("there", {"input/text": "12345"}), count)
    assert [rollout.reward for rollout in rollouts] == [5.0, 5.0]
    wrong: list[Any] = [{"../out": "x"}, {"/out": "x"}, {"name": 3}, ["name"]]
    for number, files in enumerate(wrong):
        with pytest.raises(InputError, match=r"example .*expected (texts by|a plain)"):
            play(with_files(f"wrong {number}", files), count)


@pytest.mark.parametrize("name", ["command", "check"])
@pytest.mark.parametrize("program", ["no-such-program", "/usr/bin/none", "./none", "data", "/tmp"])
def test_a_program_that_cannot_be_started_is_refused(
    tmp_path: Path, name: str, program: str
) -> None:
    options: dict[str, Any] = {name: [program, "x"]}
    config = configured(tmp_path, "", **options)
    (tmp_path / "work/data").write_text("no program")
    with pytest.raises(ConfigError, match=rf"environment\.options\.{name}: expected a program"):
        play(config, count)


@pytest.mark.parametrize("check", others_slow(["/bin/sh", "sh", "./run", "/work/run"], "./run"))
def test_a_check_may_be_a_program_of_the_system_or_of_the_folder(
    tmp_path: Path, check: str
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/run").write_text("#!/bin/sh\ntest -f task.json\n")
    (tmp_path / "work/run").chmod(0o755)
    arguments = ["-c", "test -f task.json"] if check.endswith("sh") else []
    config = configured(tmp_path, "ask(first)", check=[check, *arguments])
    assert [rollout.reward for rollout in rollouts_of(config, count)] == [1.0, 1.0]


def test_an_agent_that_is_killed_is_scored_by_what_it_printed(tmp_path: Path) -> None:
    program = "ask(first)\nprint('said', flush=True)\nos.kill(os.getpid(), 9)"
    for rollout in rollouts_of(configured(tmp_path, program), count):
        assert (rollout.status, rollout.reward) == ("complete", 4.0), rollout.error
        assert rollout.finish_reason == "exit 137"


def test_messages_that_the_template_refuses_cost_their_rollout_alone(tmp_path: Path) -> None:
    program = """
answer = ask(first)
if answer["content"] == "answer 0":
    ask([{"role": "system", "content": "name the task"}, *first])
print("done")
"""
    config = configured(tmp_path, program)
    refusing = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + QWEN
    write_tokenizer(tmp_path / "tokenizer", refusing, "<|im_end|>")
    numbers = itertools.count()
    refused, other = sorted(
        rollouts_of(config, lambda *_: f"answer {next(numbers)}"), key=lambda r: r.reward or 0
    )
    assert (other.status, other.reward) == ("complete", 4.0)
    assert (refused.status, refused.finish_reason, refused.reward) == ("truncated", "bridge", 0.0)


def test_a_changed_program_is_another_environment(tmp_path: Path) -> None:
    versions = set[str]()
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        versions.add(environment_of(configured(tmp_path / name, f"print({name!r})")).version)
    assert len(versions) == 2


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.options\.folder: expected a folder"):
        play(configured(tmp_path, "", folder=str(tmp_path / "none")), count)


BRANCHING = """
answer = ask(first)
seconds = [[*first, answer, {"role": "user", "content": word}] for word in ("so", "why")]
said = [ask(each, tools=TOOLS) for each in [first, *seconds]] + [ask(each) for each in seconds]
other = {"role": "assistant", "content": "not what it said"}
ask([*first, other, {"role": "user", "content": "so"}])
print("x" * len(said))
"""


def test_a_program_is_run_again_against_its_recorded_answers(tmp_path: Path) -> None:
    program = f"TOOLS = {TOOLS!r}" + BRANCHING
    config = configured(tmp_path, program)
    numbers = itertools.count()
    run, (group,) = record(config, lambda *_: f"answer {next(numbers)}")
    assert [len(rollout.segment_lengths or ()) for rollout in group.rollouts] == [6, 6]
    assert [rollout.reward for rollout in group.rollouts] == [5.0, 5.0]
    replayed = replay_rollouts(run, 0)
    assert replayed.equal, replayed.episodes
    assert [len(episode.turns) for episode in replayed.episodes] == [8, 8]
    # the fifth request is another one, and there is a call less, and another reward
    place, name = tmp_path / "work/agent.py", group.rollouts[0].rollout_id
    changes = {
        ("ask(each) for each in seconds", "ask(each + each[-1:]) for each in seconds"): (
            4,
            "no recorded call goes on with 'so'",
        ),
        ("ask([*first, other", "([*first, other"): (6, "it ended without 1 of the recorded calls"),
        ('"x" * len', '"xx" * len'): (7, "reward 5.0 then, 10.0 now"),
    }
    for (then, now), (number, difference) in changes.items():
        place.write_text(CLIENT + program.replace(then, now))
        (episode,) = replay_rollouts(run, 0, name).episodes
        assert (episode.turns[-1].turn, episode.turns[-1].difference) == (number, difference)


def test_a_program_can_neither_reward_itself_nor_leave_its_session(tmp_path: Path) -> None:
    program = """
import socket, threading
for path in ("/reward", "/take", "/../reward", "/completions"):
    status, text = post(path, {"reward": 100.0})
    assert status == 404, (path, status)
status, text = post("/chat/completions", {"messages": first}, key="another")
assert status == 401, text
assert "secret" not in json.dumps(task)
try:
    socket.create_connection(("1.1.1.1", 80), timeout=1)
    raise SystemExit("it has a network")
except OSError:
    pass
# the sockets of its session are there, and those of no other
others = [name for place in ("/", "/tmp", "/work", "..") for name in os.listdir(place)]
assert sum(name.endswith(".sock") for name in others if name.startswith(".")) == 2 * 1, others
direct = socket.socket(socket.AF_UNIX)
direct.connect("/work/.model.sock")
lines = ["POST /v1/responses HTTP/1.1", "Host: x", "Content-Length: 2", "", "{}"]
direct.sendall("\\r\\n".join(lines).encode())
assert b" 401 " in direct.recv(4096)[:20]
ask(first)
if os.fork() == 0:  # which goes on after its parent
    for number in range(1000):
        ask([{"role": "user", "content": f"more {number}"}])
print("done")
"""
    for rollout in rollouts_of(configured(tmp_path, program), count):
        assert rollout.error is None
        assert rollout.reward == 4.0
        assert len([turn for turn in rollout.turns if turn.role == "assistant"]) < 60


def test_a_slow_agent_stalls_no_other(tmp_path: Path) -> None:
    program = """
import time
answer = ask(first)
if answer["content"] == "answer 0":
    time.sleep(3)
for number in range(4):
    ask([*first, answer, {"role": "user", "content": f"{answer['content']} {number}"}])
print("ok")
"""
    numbers, asked = itertools.count(), list[str]()

    def script(messages: Sequence[Message], _: int) -> str:
        asked.append(messages[-1].content)
        return f"answer {next(numbers)}" if len(messages) == 1 else "so"

    rollouts = rollouts_of(configured(tmp_path, program), script)
    assert [rollout.reward for rollout in rollouts] == [2.0, 2.0]
    later = [text for text in asked if text.startswith("answer")]
    assert later == [f"answer {agent} {number}" for agent in (1, 0) for number in range(4)]
