"""Environments of atropos push groups: every route, every refusal, and what a restart knows."""

import asyncio
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integrations.trajectories import push, pushed_config, receiving, registration, scored, zipped
from support.fake_stores import Fault, fake_gcs, fake_s3
from support.run_factories import checkpoint, policy

from marin_rl.batching.build import build_round
from marin_rl.errors import ConfigError, EnvironmentTimeout
from marin_rl.integrations.atropos import receiver as receiver_module
from marin_rl.integrations.atropos.api import trajectory_server
from marin_rl.integrations.atropos.receiver import Receiver
from marin_rl.integrations.atropos.scored_data import DIGEST, ENVIRONMENT, ORIGIN
from marin_rl.progress import ProgressEvent, listening
from marin_rl.rollouts.generate import generate_shard
from marin_rl.storage.runs import Run, committed_checkpoint, shard_key
from marin_rl.storage.tables.group_queue import GroupQueue
from marin_rl.storage.tables.metrics import write_round_metrics
from marin_rl.storage.tables.rollouts import decode_shard, groups_of, seal_round
from marin_rl.storage.upkeep.archive import verify_archive, write_archive
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.forks import fork_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect, rule_of
from marin_rl.types import SlotRef

DIGESTS = ("a" * 64, "b" * 64)


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "LOOK_S", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.create_or_open(pushed_config(tmp_path))
    checkpoint(run, 0, extra={"parameters_digest": DIGESTS[0]})
    return run


@pytest.fixture
def client(run: Run) -> Iterator[httpx.Client]:
    with receiving(run) as client:
        assert client.post("/register-env", json=registration()).json()["env_id"] == 0
        yield client


def first_tokens(run: Run, round: int) -> list[int]:
    """The token by which groups differ, of each group of a round, as its shards have them."""
    shards = (run.store.read(shard_key(round, shard)) for shard in range(2))
    groups = [group for data in shards for group in groups_of(decode_shard(data))]
    return [int(group.rollouts[0].token_ids[3]) for group in groups]


def generated(run: Run, round: int) -> SlotRef:
    """The sealed rollouts of a round."""
    served = policy(round)
    shards = [asyncio.run(generate_shard(run, round, shard, served)) for shard in range(2)]
    start = committed_checkpoint(run, round)
    assert start is not None
    return seal_round(run, round, shards, [start])


def test_an_environment_waits_for_the_first_policy(tmp_path: Path) -> None:
    run = Run.create_or_open(pushed_config(tmp_path, rounds=7))
    with receiving(run) as client:
        waiting = client.post("/register-env", json=registration()).json()
        assert waiting == {"status": "wait for trainer to start"}
        checkpoint(run, 0, extra={"parameters_digest": DIGESTS[0]})
        assert client.post("/register-env", json=registration()).json() == {
            "status": "success", "env_id": 0, "wandb_name": "spell_0", "checkpoint_dir": "",
            "starting_step": 0, "checkpoint_interval": -1, "num_steps": 7,
        }  # fmt: skip
        again = client.post("/register-env", json=registration()).json()
        assert (again["env_id"], again["wandb_name"]) == (1, "spell_1")


def test_the_routes_that_only_read(run: Run, client: httpx.Client) -> None:
    assert client.get("/").json() == {"message": "AtroposLib API", "run_id": run.run_id}
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/wandb_info").json() == {"group": run.run_id, "project": "marin-rl"}
    length = run.config.policy.context_length
    assert client.get("/info").json() == {"batch_size": 6, "max_token_len": length + 1}
    assert client.get("/latest_example").json()["tokens"] == []
    push(client, [20, 30])
    assert client.get("/latest_example").json()["tokens"] == scored(first=30)["tokens"]
    status = client.get("/status").json()
    assert (status["current_step"], status["queue_size"]) == (0, 2)


def test_the_queue_is_shared_by_weight_and_length(client: httpx.Client) -> None:
    heavy = registration("other", weight=3.0, min_batch_allocation=0.4)
    assert client.post("/register-env", json=heavy).json()["env_id"] == 1
    push(client, [20, 30])
    client.post("/scored_data", json=scored(1))
    assert client.request("GET", "/status-env", json={"env_id": 0}).json() == {
        "current_step": 0, "queue_size": 2, "unallocated_fraction": 0.6, "self_queue_size": 2,
        "max_group_size": 2, "env_weight": 0.25,
    }  # fmt: skip
    assert client.post("/disconnect-env", json={"env_id": 1}).json() == {"status": "success"}
    alone = client.request("GET", "/status-env", json={"env_id": 0}).json()
    assert alone["env_weight"] == 1.0


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", "/register", "no_trainer"),
        ("GET", "/batch", "no_trainer"),
        ("GET", "/reset_data", "durable"),
    ],
)
def test_a_trainer_of_atropos_is_refused(client, method, path, code):
    push(client, [20])
    answer = client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, code)
    assert client.get("/status").json()["queue_size"] == 1


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server that nothing is committed by."""
    run = Run.create_or_open(pushed_config(tmp_path_factory.mktemp("runs")))
    checkpoint(run, 0, extra={"parameters_digest": DIGESTS[0]})
    with receiving(run) as client:
        client.post("/register-env", json=registration())
        yield client


def changed(**fields: Any) -> dict[str, Any]:
    """Change items of lists: `masks={"1.3": 4}` sets masks[1][3]."""
    group = scored()
    for name, items in fields.items():
        for place, value in items.items():
            *outer, last = map(int, place.split("."))
            target = group[name]
            for index in outer:
                target = target[index]
            target[last] = value
    return group


REFUSED: list[tuple[dict[str, Any], str]] = [
    (scored(None), "env_id: expected the number of an environment"),
    (scored(7), "found 7; there are 1"),
    (scored(inference_logprobs=None), "inference_logprobs: expected 2, rollouts.group_size, found"),
    (scored(scores=[1.0]), "scores: expected 2, rollouts.group_size, found 1"),
    (scored(messages=[[]]), "messages: expected 2"),
    (scored(tokens=[[5], [5, 6, 7, 21]]), "tokens.0: expected 2 to 128 ids"),
    (scored(tokens=[[5] * 129, [5, 6, 7, 21]]), "tokens.0: expected 2 to 128 ids"),
    (scored(masks=[[-100, 6], [-100, -100, -100, 21]]), "masks.0: expected 5, one for each token"),
    (changed(tokens={"1.0": 103}), "tokens.1.0: expected ids below 103, found 103"),
    (changed(tokens={"0.1": -1}), "tokens.0.1: expected ids below 103, found -1"),
    (changed(masks={"1.3": 4}), "masks.1.3: expected -100 or the token's own id, found 4"),
    (changed(masks={"0.0": 5}, inference_logprobs={"0.0": -1.0}), "found a sampled first token"),
    (changed(masks={"1.3": -100}, inference_logprobs={"1.3": 1.0}), "found -100 everywhere"),
    (changed(inference_logprobs={"0.2": -0.5}), "expected 1.0 where masks has -100, found -0.5"),
    (changed(inference_logprobs={"0.4": 1.0}), "expected a finite logprob, at most 0, where"),
    (changed(inference_logprobs={"0.4": -1e39}), "where sampled, and at least -100000, found -1e"),
    (scored(scores=[1e300, 0.0]), "scores.0: expected a number between -1e+15 and 1e+15"),
    (scored(scores=[0.0, -3e38]), "scores.1: expected a number between -1e+15 and 1e+15"),
    (scored(advantages=[[0.0], [0.0]]), "advantages: expected null or an empty list"),
    (scored(ref_logprobs=[[0.0], [0.0]]), "ref_logprobs: expected null"),
    (scored(images=["x"]), "policies read text alone"),
    (scored(distill_token_ids=[[[1]]]), "runs train on rewards"),
    (scored(distill_logprobs=[[[1.0]]]), "runs train on rewards"),
    (scored(overrides=[{}, {"set_advantage_to_zero": True}]), "overrides.1.set_advantage_to_zero"),
    (scored(generation_params={"temperature": 0.5}), "expected 1, sampling.temperature"),
    (scored(group_overrides={"policy_version": 4}), "expected a committed checkpoint"),
    (scored(group_overrides={"policy_version": "x"}), "expected the number of a checkpoint"),
    (scored(tokens=[["x"], [1]]), "tokens.0.0: Input should be a valid integer"),
    (scored(messages=[[{"content": "x"}], []]), "messages.0.0.role: Field required"),
    (
        scored(messages=[[{"role": "assistant", "content": "words of another"}]] * 2),
        "expected what the tokens say with the run's tokenizer, found 'words of another'",
    ),
]


@pytest.mark.parametrize(("group", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_a_group_that_cannot_be_trained_on_is_refused(refusing, group, told):
    before = refusing.get("/status").json()["groups_refused"]
    answer = refusing.post("/scored_data", json=group)
    assert answer.status_code == 422
    assert told in answer.json()["error"]["message"]
    status = refusing.get("/status").json()
    assert (status["queue_size"], status["groups_refused"]) == (0, before + 1)


def with_last(name: str, value: Any) -> dict[str, Any]:
    """A group whose last entry of an array is `value`."""
    group = scored()
    group[name][1][-1] = value
    return group


HOSTILE: dict[str, Any] = {
    "of nobody": scored(7),
    "not a number": scored(generation_params={"x": float("nan")}),
    "infinite": scored(group_overrides={"x": float("inf")}),
    "a large integer": scored(generation_params={"x": 10**400}),
    "an id beyond int64": with_last("tokens", 2**63),
    "a mask beyond int64": with_last("masks", -(2**70)),
    "an id beyond int32": with_last("tokens", 2**31),
    "a logprob beyond float32": with_last("inference_logprobs", -1e39),
    "half a character": scored(generation_params={"x": "\ud800"}),
    "deep": scored(generation_params={"x": json.loads("[" * 300 + "]" * 300)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_of_a_list_is_committed_where_one_has_no_value(refusing, name):
    for groups in ([scored(), HOSTILE[name]], [HOSTILE[name], scored()]):
        answer = refusing.post("/scored_data_list", content=json.dumps(groups))
        assert answer.status_code == 422, answer.text
    assert refusing.get("/status").json()["queue_size"] == 0


def test_a_name_that_is_there_twice_is_refused(refusing: httpx.Client) -> None:
    twice = json.dumps(scored())[:-1] + ', "env_id": 0}'
    assert refusing.post("/scored_data", content=twice).status_code == 422


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"group_size": 3}, "group_size: expected 2, rollouts.group_size of run"),
        ({"desired_name": "a b"}, "desired_name: String should match pattern"),
        ({"max_token_length": 0}, "max_token_length: Input should be greater"),
        ({"weight": -1}, "weight: Input should be greater"),
    ],
)
def test_a_registration_that_does_not_fit_is_refused(refusing, fields, told):
    answer = refusing.post("/register-env", json=registration() | fields)
    assert answer.status_code == 422
    assert told in answer.json()["error"]["message"]


def test_a_list_is_committed_whole(client: httpx.Client) -> None:
    two = [scored(first=20), scored(first=30)]
    answer = client.post("/scored_data_list", json=two)
    assert answer.json() == {"status": "received", "groups_processed": 2}
    assert client.get("/status").json()["queue_size"] == 2


def test_bodies_in_gzip(client: httpx.Client) -> None:
    assert client.post("/scored_data", **zipped(scored())).json() == {"status": "received"}
    body = zipped(scored())
    for wrong in (b"x", body["content"][:-9]):
        body["content"] = wrong
        assert client.post("/scored_data", **body).status_code == 400


def test_a_body_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    limits = {"body_bytes_max": 4096, "bodies_bytes_max": 4096}
    run = Run.create_or_open(pushed_config(tmp_path, inference={"server": limits}))
    with receiving(run) as client:
        assert client.post("/scored_data", **zipped(" " * 5000)).status_code == 413


def test_a_token_opens_the_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is open to others"):
        trajectory_server(Receiver(run), "0.0.0.0")
    monkeypatch.setenv("MARIN_RL_API_KEY", "a-token")
    with receiving(run) as client:
        assert client.get("/status").status_code == 401
        assert client.get("/healthz").status_code == 200
        bearer = {"Authorization": "Bearer a-token"}
        assert client.get("/status", headers=bearer).status_code == 200
        # as an address http://any:a-token@host has it
        assert client.get("/status", auth=("any", "a-token")).status_code == 200
        assert client.get("/status", auth=("any", "another")).status_code == 401


def test_a_repeated_request_is_adopted_also_after_a_restart(run: Run, client: httpx.Client) -> None:
    push(client, [20, 30, 20])
    assert client.get("/status").json()["groups_repeated"] == 1
    with receiving(run) as other:  # knows what is committed, and no more
        push(other, [30, 20, 40])
        status = other.get("/status").json()
        assert (status["queue_size"], status["groups_accepted"]) == (3, 1)
        assert other.post("/register-env", json=registration()).json()["env_id"] == 1
        own = other.request("GET", "/status-env", json={"env_id": 0}).json()
        assert own["self_queue_size"] == 3
    generated(run, 0)
    assert first_tokens(run, 0) == [20, 30, 40]


def test_two_servers_of_a_run_leave_no_place_out_and_double_none(run, client):
    with receiving(run) as other:
        push(client, [20, 30])
        push(other, [40, 30, 50, 60])  # 40 finds 20 and 30 at its places
        push(client, [60, 70])
    generated(run, 0)
    checkpoint(run, 1, extra={"parameters_digest": DIGESTS[1]})
    generated(run, 1)
    assert first_tokens(run, 0) + first_tokens(run, 1) == [20, 30, 40, 50, 60, 70]


def test_a_round_is_made_of_its_own_places(run: Run, client: httpx.Client) -> None:
    push(client, [20, 30, 40, 50])
    checkpoint(run, 1, extra={"parameters_digest": DIGESTS[1]})
    push(client, [60])
    told = scored(first=70, group_overrides={"policy_version": 0})
    assert client.post("/scored_data", json=told).status_code == 200
    generated(run, 1)
    generated(run, 0)
    assert first_tokens(run, 0) == [20, 30, 40]
    assert first_tokens(run, 1) == [50, 60, 70]
    rows = [decode_shard(run.store.read(shard_key(1, shard))) for shard in range(2)]
    versions = [v for table in rows for v in table["policy_version_min"].to_pylist()]
    digests = [v for table in rows for v in table["policy_digest"].to_pylist()]
    assert versions == [0, 0, 1, 1, 0, 0]
    assert digests == [DIGESTS[version] for version in versions]
    assert {v for table in rows for v in table["round"].to_pylist()} == {1}


def test_a_pushed_sequence_becomes_a_rollout(run: Run, client: httpx.Client) -> None:
    talk = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
         {"role": "assistant", "content": "a"}],
    ] * 2  # fmt: skip
    push(client, [20])
    client.post("/scored_data", json=scored(first=30, messages=talk))
    push(client, [40])
    generated(run, 0)
    groups = groups_of(decode_shard(run.store.read(shard_key(0, 0))))
    groups += groups_of(decode_shard(run.store.read(shard_key(0, 1))))
    first = groups[0].rollouts[0]
    assert first.token_ids.tolist() == [5, 6, 7, 20, 9]
    assert first.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert first.logprobs.tolist() == [0, 0, 0, -0.5, -1.0]
    assert (first.reward, first.status, first.n_prompt_tokens) == (1.0, "complete", 3)
    assert [(turn.role, turn.start, turn.end) for turn in first.turns] == [
        ("user", 0, 3),
        ("assistant", 3, 5),
    ]
    example = groups[0].example
    assert (example.environment, example.environment_version) == ("spell", "atropos")
    assert example.metadata[ORIGIN][ENVIRONMENT] == 0
    assert len(example.metadata[ORIGIN][DIGEST]) == 64
    talked = groups[1].rollouts[1]
    assert [(turn.role, turn.content, turn.start) for turn in talked.turns] == [
        ("system", "s", None),
        ("user", "u", None),
        ("assistant", "a", 3),
    ]
    assert [message.role for message in groups[1].example.messages] == ["system", "user"]
    # the same prompt is the same example
    assert groups[0].example.example_id == groups[1].example.example_id


def test_the_rest_of_a_round_is_as_of_any_run(run: Run, client: httpx.Client) -> None:
    push(client, [20, 30, 40, 50])
    sealed = generated(run, 0)
    batches = build_round(run, 0, sealed)
    assert batches.summary["rows"] == 6
    assert all(found.balanced for found in audit_run(run))
    faults = check_run(run.config.root, run.run_id).faults
    assert [fault.detail for fault in faults] == ["a group that its shard has collected"] * 3
    collect(run, rule_of(run, None, None))
    assert check_run(run.config.root, run.run_id).faults == ()


def test_an_archive_of_everything_has_the_groups_that_wait(run, client, tmp_path):
    push(client, range(20, 24))
    generated(run, 0)
    archive = write_archive(run, tmp_path / "run.tar", everything=True)
    assert verify_archive(archive.path).root_hash == archive.root_hash
    with tarfile.open(archive.path) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
        names = tar.getnames()
    (waiting,) = [name for name in names if "/.groups/" in name]
    assert "round-00001" in waiting
    unpacked = Run.open(str(tmp_path / "unpacked"), run.run_id)
    queue = GroupQueue(unpacked)
    queue.open()
    assert (queue.accepted, queue.queued(3)) == (4, {0: 1})
    assert Receiver(unpacked).environment(0).name == "spell"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_a_queue_in_a_bucket_keeps_a_group_whose_reply_was_lost(kind: str) -> None:
    """The first create of a group takes effect and fails; the second finds another's group."""
    with (fake_gcs if kind == "gs" else fake_s3)() as bucket:
        bucket.create_bucket("bucket")
        config = pushed_config(f"{kind}://bucket/runs")
        run = Run.create_or_open(config.model_copy(update={"storage_options": bucket.options}))
        checkpoint(run, 0, extra={"parameters_digest": DIGESTS[0]})
        bucket.faults.add(Fault("POST" if kind == "gs" else "PUT", "group-00000", "after", 503))
        with receiving(run) as first, receiving(run) as second:
            first.post("/register-env", json=registration())
            push(first, [20])
            push(second, [30, 31])
            push(first, [20])
        assert bucket.faults.waiting == []
        queue = GroupQueue(run)
        queue.open()
        assert queue.accepted == 3
        generated(run, 0)
        assert first_tokens(run, 0) == [20, 30, 31]


def test_gc_takes_collected_groups_alone_and_numbers_go_on(run: Run, client: httpx.Client) -> None:
    push(client, [20, 30, 40, 50])
    with receiving(run) as stale:  # does not see what comes next
        generated(run, 0)
        push(client, [60])
        taken = collect(run, rule_of(run, None, None)).garbage
        assert len([item for item in taken if "/.groups/" in item.key]) == 3
        push(stale, [70])
    with receiving(run) as restarted:
        assert restarted.get("/status").json()["queue_size"] == 3
        push(restarted, [60, 70])
        assert restarted.get("/status").json()["groups_accepted"] == 0
    checkpoint(run, 1, extra={"parameters_digest": DIGESTS[1]})
    generated(run, 1)
    assert first_tokens(run, 1) == [50, 60, 70]


@pytest.mark.slow
def test_a_server_that_is_behind_does_not_fill_places_that_were_collected(run, client):
    with receiving(run) as behind:
        push(client, [20, 30, 40])
        generated(run, 0)
        collect(run, rule_of(run, None, None))
        push(behind, [30, 50, 60, 70])  # 30 is known by the shard that has it
    checkpoint(run, 1, extra={"parameters_digest": DIGESTS[1]})
    generated(run, 1)
    assert first_tokens(run, 0) + first_tokens(run, 1) == [20, 30, 40, 50, 60, 70]


def test_a_shard_waits_for_its_groups_and_tells_of_them(run: Run, client: httpx.Client) -> None:
    heard = list[ProgressEvent]()

    async def push_late() -> SlotRef:
        waiting = asyncio.create_task(generate_shard(run, 0, 0, policy()))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await asyncio.to_thread(push, client, [20, 30, 40])
        return await waiting

    with listening(heard.append):
        assert asyncio.run(push_late()).summary["groups"] == 1
    assert [(event.done, event.total) for event in heard] == [(1, 1)]


def test_a_shard_without_groups_fails_in_time(tmp_path: Path) -> None:
    config = pushed_config(tmp_path, rollouts={"push_timeout_s": 0.05})
    run = Run.create_or_open(config)
    began = time.monotonic()
    with pytest.raises(EnvironmentTimeout, match="expected 2 pushed groups, found 0, and no other"):
        asyncio.run(generate_shard(run, 0, 1, policy()))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"rollouts": {"commit_groups": True}}, "expected greedy_baseline and commit_groups null"),
        ({"environment": {"reward_model": {"checkpoint": "x"}}}, "have their scores already"),
        ({"asynchrony": {"max_staleness": 1}}, "are ahead of the rounds by themselves"),
    ],
)
def test_settings_of_runs_that_sample_are_refused(tmp_path, sections, told):
    with pytest.raises(ConfigError, match=told):
        pushed_config(tmp_path, **sections)


def test_a_fork_has_a_queue_of_its_own_rounds(run: Run, client: httpx.Client) -> None:
    push(client, [20, 30, 40, 50])
    generated(run, 0)
    checkpoint(run, 1, extra={"parameters_digest": DIGESTS[1]})
    write_round_metrics(run, 0, {"timing_s/round": 1.0})
    fork = fork_run(run, 1, "fork")
    with receiving(fork) as other:
        assert other.get("/status").json()["queue_size"] == 0
        assert other.post("/register-env", json=registration()).json()["env_id"] == 0
        push(other, [60, 70, 80])
    generated(fork, 1)
    assert first_tokens(fork, 0) + first_tokens(fork, 1) == [20, 30, 40, 60, 70, 80]
    assert client.get("/status").json()["queue_size"] == 1


def test_an_environment_that_ignores_the_queue_is_asked_to_wait(run, client, monkeypatch):
    monkeypatch.setattr(receiver_module, "QUEUE_ROUNDS_MAX", 1)
    most = run.config.rollouts.groups_per_round * 2 * (1 + run.config.batching.staleness_rounds_max)
    push(client, range(20, 20 + most))
    answer = client.post("/scored_data", json=scored(first=20 + most))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert f"{most} groups wait" in answer.text
    assert client.get("/status").json()["queue_size"] == most
