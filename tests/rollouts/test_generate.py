"""Generate and evaluate against the fake server: what is asked, kept, refused, and done once."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from support.fakes import END, FakePolicyServer, echo_script, logprob_of, prompt_ids, served_policy

from marin_rl.config import Config, load_config, override, parse_config
from marin_rl.errors import (
    BadResponse,
    CommitConflict,
    EndpointUnavailable,
    RequestRejected,
    RewardFault,
    StalePolicy,
)
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.progress import ProgressEvent, listening
from marin_rl.rollouts.evaluate import evaluate_round
from marin_rl.rollouts.generate import examples_of, generate_shard
from marin_rl.storage.runs import Run, evals_slot, shard_key
from marin_rl.storage.tables.rollouts import decode_shard, groups_of
from marin_rl.types import RolloutGroup, ServedPolicy, SlotRef

DIGEST = "ab" * 32
MODEL = served_model_id("policy", 4, DIGEST)


def configured(root: Path, *items: str) -> Config:
    tree = load_config("configs/debug.yaml").model_dump(mode="json")
    settings = (f"root={root}", "inference.request_attempts_max=2", *items)
    return parse_config(override(tree, settings))


def policy_of(server: FakePolicyServer, **changes: Any) -> ServedPolicy:
    values = {"weight_version": 4, "parameters_digest": DIGEST} | changes
    return served_policy(server.url, MODEL, **values)


def groups_in(run: Run, key: str) -> list[RolloutGroup]:
    return groups_of(decode_shard(run.store.read(key)))


@pytest.fixture
def server() -> Iterator[FakePolicyServer]:
    with FakePolicyServer(MODEL) as fake:
        yield fake


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create_or_open(configured(tmp_path))


def generate(run: Run, server: FakePolicyServer, round: int = 4, shard: int = 0) -> SlotRef:
    return asyncio.run(generate_shard(run, round, shard, policy_of(server)))


def test_a_shard_holds_what_the_policy_said(run: Run, server: FakePolicyServer) -> None:
    ref = generate(run, server)
    assert (ref.slot, ref.reused) == (shard_key(4, 0), False)
    assert ref.summary["rows"] == 8
    groups = groups_in(run, ref.slot)
    assert [g.group_id for g in groups] == ["round-00004/group-00000", "round-00004/group-00001"]
    asked = {body["messages"][0]["content"]: body for body in server.requests}
    for group in groups:
        body = asked[group.example.messages[0].content]
        prompt = prompt_ids(body["messages"])
        assert (group.group_size, len(group.rollouts), body["n"]) == (4, 4, 4)
        for index, rollout in enumerate(group.rollouts):
            text = echo_script(body["messages"][0]["content"], body["seed"] + index)
            sampled = [*text.encode(), END]
            assert rollout.rollout_id == f"{group.group_id}/{index:03d}"
            assert rollout.token_ids.tolist() == prompt + sampled
            assert rollout.loss_mask.tolist() == [0] * len(prompt) + [1] * len(sampled)
            expected = [0.0] * len(prompt) + [logprob_of(t, i) for i, t in enumerate(sampled)]
            assert rollout.logprobs.tobytes() == np.array(expected, np.float32).tobytes()
            assert (rollout.status, rollout.finish_reason) == ("complete", "stop")
            assert rollout.reward == (1.0 if text == group.example.answer else rollout.reward)
            assert rollout.sampling.seed == body["seed"] + index
            assert (rollout.policy_version_min, rollout.policy_version_max) == (4, 4)
            user, assistant = rollout.turns
            assert (user.role, user.start, user.end) == ("user", 0, len(prompt))
            assert (assistant.start, assistant.end) == (len(prompt), len(rollout.token_ids))
            assert (assistant.content, assistant.reward) == (text, rollout.reward)
            assert assistant.logprobs is not None
            assert assistant.logprobs.tolist() == rollout.logprobs[len(prompt) :].tolist()
            metadata = assistant.inference_metadata
            assert metadata is not None
            assert (metadata.model, metadata.weight_version) == (MODEL, 4)
            assert metadata.sampling == rollout.sampling
            assert (metadata.sampling.temperature, metadata.sampling.top_p) == (1.0, 1.0)
            assert metadata.request_id.startswith("chatcmpl-")
            assert rollout.timing.started_at <= rollout.timing.finished_at


def test_a_committed_shard_is_not_made_again(run: Run, server: FakePolicyServer) -> None:
    first = generate(run, server)
    asked = len(server.requests)
    second = generate(run, server)
    assert second == first
    assert second.reused
    assert len(server.requests) == asked
    other = policy_of(server, parameters_digest="cd" * 32)
    with pytest.raises(CommitConflict):
        asyncio.run(generate_shard(run, 4, 0, other))


def test_requests_depend_on_seed_and_position_alone(tmp_path, server):
    seen: list[dict[str, list[list[int]]]] = []
    for place, order in enumerate([(0, 1), (1, 0)]):
        run = Run.create_or_open(configured(tmp_path / str(place)))
        for shard in order:
            generate(run, server, shard=shard)
        rollouts = [g for shard in (0, 1) for g in groups_in(run, shard_key(4, shard))]
        seen.append({g.group_id: [r.token_ids.tolist() for r in g.rollouts] for g in rollouts})
    assert seen[0] == seen[1]


def test_every_prompt_of_a_run_is_fresh(tmp_path: Path) -> None:
    config = configured(tmp_path, "rollouts.groups_per_round=7", "rollouts.shards_per_round=3")
    rounds = [[len(examples_of(config, r, s)) for s in range(3)] for r in range(3)]
    assert rounds == [[2, 2, 3]] * 3
    names = [e.example_id for r in range(3) for s in range(3) for e in examples_of(config, r, s)]
    assert names == [f"train-0-{index}" for index in range(21)]


def test_seeds_differ_between_rounds_and_groups(run: Run, server: FakePolicyServer) -> None:
    for round in (4, 5):
        for shard in (0, 1):
            generate(run, server, round, shard)
    seeds = [body["seed"] for body in server.requests]
    assert len(set(seeds)) == len(seeds) == 8
    assert all(0 <= seed < 2**48 for seed in seeds)


def test_a_failed_group_is_kept_as_errors(run: Run, server: FakePolicyServer) -> None:
    lost = server_word(run, 0)
    server.fault = lambda body: "reject" if lost in body["messages"][0]["content"] else None
    ref = generate(run, server)
    failed, fine = groups_in(run, ref.slot)
    assert [r.status for r in failed.rollouts] == ["error"] * 4
    assert {len(r.token_ids) for r in failed.rollouts} == {0}
    assert {r.reward for r in failed.rollouts} == {None}
    assert "RequestRejected: " in (failed.rollouts[0].error or "")
    assert "scripted fault" in (failed.rollouts[0].error or "")
    assert failed.rollouts[0].turns[0].content.endswith(lost)
    assert [r.status for r in fine.rollouts] == ["complete"] * 4


def server_word(run: Run, group: int) -> str:
    return examples_of(run.config, 4, 0)[group].answer or ""


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("503", EndpointUnavailable),
        ("drop", EndpointUnavailable),
        ("reject", RequestRejected),
        ("missing-ids", BadResponse),
        ("wrong-model", StalePolicy),
    ],
)
def test_a_shard_of_errors_is_refused(run, server, fault, error):
    server.fault = lambda _: fault
    with pytest.raises(error, match=r"8 of 8 rollouts failed|other weights"):
        generate(run, server)
    assert run.store.list("rollouts") == []
    server.fault = lambda _: None
    assert not generate(run, server).reused


def test_samples_of_other_parameters_are_refused(run: Run, server: FakePolicyServer) -> None:
    server.extra = {"weight_version": 4, "parameters_digest": "cd" * 32}
    with pytest.raises(StalePolicy, match=f"expected samples of the parameters {DIGEST}"):
        generate(run, server)
    server.extra = {"weight_version": 4, "parameters_digest": DIGEST}
    assert not generate(run, server).reused


def test_aborted_completions_have_no_reward(run: Run, server: FakePolicyServer) -> None:
    lost = server_word(run, 0)
    server.fault = lambda body: "abort" if lost in body["messages"][0]["content"] else None
    aborted, _ = groups_in(run, generate(run, server).slot)
    assert {(r.status, r.reward) for r in aborted.rollouts} == {("aborted", None)}
    server.fault = lambda _: "abort"
    with pytest.raises(EndpointUnavailable, match="aborted the completion"):
        generate(run, server, shard=1)


def test_faults_that_pass_leave_no_trace(run: Run, server: FakePolicyServer) -> None:
    faults, asked = ["503", "drop"], set[str]()

    def of_first_request(body: Mapping[str, Any]) -> str | None:
        prompt = body["messages"][0]["content"]
        if prompt in asked:
            return None
        asked.add(prompt)
        return faults.pop()

    server.fault = of_first_request  # none has both: two attempts are all there are
    ref = generate(run, server)
    assert faults == []
    assert ref.summary["errors"] == 0


FAULTY = """
import time
def reward(example, completion):
    if completion == "hang":
        time.sleep(100)
    if completion == "raise":
        raise ArithmeticError("by design")
    return 1.0
"""


def test_a_faulty_reward_costs_its_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty_rewards.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [f'{{"prompt": "say {i}"}}' for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    options = f"{{path: {tmp_path / 'prompts.jsonl'}, reward: 'faulty_rewards:reward'}}"
    environment = f"environment={{name: chat, reward_timeout_s: 1, options: {options}}}"
    says = ["fine", "hang", "raise", "good"]
    run = Run.create_or_open(configured(tmp_path, environment))
    with FakePolicyServer(MODEL, lambda _prompt, seed: says[seed % 4]) as server:
        ref = generate(run, server)
        says[1] = "raise"
        limit = "rollouts.errors_max_fraction=0.4"
        strict = Run.create_or_open(configured(tmp_path / "strict", environment, limit))
        with pytest.raises(RewardFault, match="4 of 8 rollouts failed"):
            generate(strict, server)
    rollouts = [r for g in groups_in(run, ref.slot) for r in g.rollouts]
    errors = {
        r.turns[-1].content: re.sub(r"example \w+", "example", r.error or "") for r in rollouts
    }
    where = "RewardFault: faulty_rewards:reward, example"
    assert errors == {
        "fine": "",
        "good": "",
        "hang": f"{where}: took longer than 1 s; environment.reward_timeout_s sets the limit",
        "raise": f"{where}: ArithmeticError: by design (faulty_rewards.py, line 7)",
    }
    assert {(r.status, r.reward) for r in rollouts} == {("error", None), ("complete", 1.0)}


def test_a_cancelled_call_leaves_nothing(run: Run, server: FakePolicyServer) -> None:
    server.delay_s = 0.5

    async def cancelled() -> None:
        await asyncio.wait_for(generate_shard(run, 4, 0, policy_of(server)), 0.2)

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert run.store.list("rollouts") == []


def test_two_workers_racing_for_a_shard_commit_one(run: Run, server: FakePolicyServer) -> None:
    async def race() -> list[SlotRef]:
        return await asyncio.gather(
            *[generate_shard(run, 4, 0, policy_of(server)) for _ in range(2)]
        )

    first, second = asyncio.run(race())
    assert first == second
    assert run.store.list("rollouts") == [shard_key(4, 0)]


def test_progress_is_reported_group_by_group(run: Run, server: FakePolicyServer) -> None:
    told: list[ProgressEvent] = []
    with listening(told.append):
        generate(run, server)
    assert [(e.stage, e.round, e.done, e.total) for e in told] == [
        ("generate", 4, 1, 2),
        ("generate", 4, 2, 2),
    ]
    assert told[-1].metrics["perf/tokens_per_second"] > 0
    assert 0 <= told[-1].metrics["reward"] <= 1


def test_an_evaluation_is_kept_and_summed_up(run: Run, server: FakePolicyServer) -> None:
    ref = asyncio.run(evaluate_round(run, 4, policy_of(server)))
    assert ref.slot == evals_slot(4)
    assert {body["temperature"] for body in server.requests} == {0.0}
    assert ref.summary["eval/examples"] == 4
    keys = run.store.list("evals")
    assert len(keys) == 2
    part = next(key for key in keys if key.endswith(".parquet"))
    path = run.store.local_path(part)
    assert path is not None
    frame = pl.read_parquet(path)
    assert frame["split"].unique().to_list() == ["eval"]
    right = (frame["reward"] >= 1.0).mean()
    assert ref.summary["eval/accuracy"] == right
    assert ref.summary["eval/reward_mean"] == pytest.approx(frame["reward"].mean())
    assert ref.summary["eval/mean_length"] == frame["n_completion_tokens"].mean()
    assert ref.summary["eval/errors"] == 0
    again = asyncio.run(evaluate_round(run, 4, policy_of(server)))
    assert again == ref
    assert again.reused
    with pytest.raises(CommitConflict):
        asyncio.run(evaluate_round(run, 4, policy_of(server, parameters_digest="0" * 64)))


def test_two_evaluations_differ_by_the_policy_alone(run: Run, server: FakePolicyServer) -> None:
    def asked(round: int) -> list[Any]:
        server.requests.clear()
        asyncio.run(evaluate_round(run, round, policy_of(server)))
        return sorted((body["seed"], body["messages"][0]["content"]) for body in server.requests)

    assert asked(4) == asked(6)


def test_the_last_member_is_greedy_where_it_is_the_baseline(tmp_path, server):
    settings = ("objective.advantage=remax", "rollouts.greedy_baseline=true")
    run = Run.create_or_open(configured(tmp_path, *settings))
    ref = generate(run, server)
    asked = sorted((body["n"], body["temperature"]) for body in server.requests)
    assert asked == [(1, 0.0), (1, 0.0), (3, 1.0), (3, 1.0)]
    for group in groups_in(run, ref.slot):
        assert (group.group_size, len(group.rollouts)) == (4, 4)
        assert [r.sampling.temperature for r in group.rollouts] == [1.0, 1.0, 1.0, 0.0]
        assert [r.index_in_group for r in group.rollouts] == [0, 1, 2, 3]
        first = group.rollouts[0].sampling.seed
        assert first is not None
        assert [r.sampling.seed for r in group.rollouts] == [first + i for i in range(4)]
        answers = [r.turns[-1].inference_metadata for r in group.rollouts]
        assert len({answer.request_id for answer in answers if answer is not None}) == 2
