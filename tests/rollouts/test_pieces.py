"""Groups that are durable before their shard: what a kill, a fault or another process costs."""

import asyncio
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.cases import others_slow, printed_seed
from support.fake_stores import Fault, fake_gcs, fake_s3
from support.fakes import FakePolicyServer, served_policy
from support.fault_injection import inject_faults
from support.faults import CrashStates, Recording

from marin_rl.config import Config, load_config, override, parse_config
from marin_rl.errors import EndpointUnavailable
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.rollouts.generate import generate_shard
from marin_rl.storage.commits import ATTEMPT_LIFETIME_S
from marin_rl.storage.runs import Run, shard_key
from marin_rl.storage.tables.rollouts import decode_shard
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import CLOCKS_APART_S, collect
from marin_rl.storage.upkeep.inventory import is_temporary
from marin_rl.types import ServedPolicy, SlotRef

DIGEST = "ab" * 32
MODEL = served_model_id("policy", 4, DIGEST)
GROUPS, SIZE, ROUND = 6, 4, 4
# What differs between two samplings of the same tokens.
TIMES = [
    "attempt", "replica", "worker", "started_at", "finished_at", "queue_s", "prefill_s", "decode_s",
    "start_s",
]  # fmt: skip


def configured(root: str | Path, *items: str) -> Config:
    tree = load_config("configs/debug.yaml").model_dump(mode="json")
    settings = [
        f"root={root}",
        f"rollouts.groups_per_round={GROUPS}",
        f"rollouts.group_size={SIZE}",
        "rollouts.shards_per_round=1",
        "rollouts.commit_groups=true",
        "inference.request_attempts_max=1",
        *items,
    ]
    return parse_config(override(tree, settings))


def policy_at(url: str) -> ServedPolicy:
    return served_policy(url, MODEL, weight_version=4, parameters_digest=DIGEST)


@pytest.fixture
def server() -> Iterator[FakePolicyServer]:
    with FakePolicyServer(MODEL) as fake:
        yield fake


def generate(run: Run, server: FakePolicyServer) -> SlotRef:
    return asyncio.run(generate_shard(run, ROUND, 0, policy_at(server.url)))


def rows(run: Run) -> list[dict[str, Any]]:
    """Rows of the shard without what a second sampling changes."""
    table = decode_shard(run.store.read(shard_key(ROUND, 0))).drop_columns(TIMES)
    return [_without_requests(row) for row in table.to_pylist()]


def _without_requests(row: dict[str, Any]) -> dict[str, Any]:
    for turn in row["turns"]:
        for name in ("queue_s", "prefill_s", "decode_s", "environment_s"):
            del turn[name]
        if turn["inference_metadata"] is not None:
            turn["inference_metadata"]["request_id"] = ""
    return row


def pieces(run: Run) -> list[str]:
    keys = run.store.list(f"rollouts/round-{ROUND:05d}")
    return [key for key in keys if "/.groups/" in key and not is_temporary(key)]


@pytest.fixture
def plain(tmp_path: Path, server: FakePolicyServer) -> list[dict[str, Any]]:
    """Rows of a shard without pieces."""
    config = configured(tmp_path / "plain", "rollouts.commit_groups=null")
    run = Run.create_or_open(config)
    generate(run, server)
    server.requests.clear()
    assert pieces(run) == []
    return rows(run)


def test_a_shard_of_pieces_is_the_shard_without_them(tmp_path, server, plain):
    run = Run.create_or_open(configured(tmp_path / "runs"))
    generate(run, server)
    assert rows(run) == plain
    assert len(pieces(run)) == GROUPS
    assert len(server.requests) == GROUPS
    # once it is committed they are garbage, which harms no one
    checked = check_run(str(tmp_path / "runs"), run.run_id)
    assert (checked.whole, {fault.kind for fault in checked.faults}) == (True, {"leftover"})
    assert len(collect(run).garbage) == GROUPS
    assert pieces(run) == []
    assert check_run(str(tmp_path / "runs"), run.run_id).faults == ()
    assert rows(run) == plain


def test_a_retry_asks_for_what_is_missing(tmp_path, server, plain):
    """Two groups fail; the next attempt samples those two, and the shard is the same."""
    run = Run.create_or_open(configured(tmp_path / "runs", "rollouts.errors_max_fraction=0.1"))
    seeds = sorted(row["sampling"]["seed"] for row in plain if row["index_in_group"] == 0)
    failing = set(random.Random(printed_seed()).sample(seeds, 2))
    server.fault = lambda body: "503" if body["seed"] in failing else None
    with pytest.raises(EndpointUnavailable):
        generate(run, server)
    assert len(pieces(run)) == GROUPS - 2
    open_pieces = check_run(str(tmp_path / "runs"), run.run_id)
    assert open_pieces.faults == ()
    assert collect(run).garbage == ()
    server.requests.clear()
    server.fault = lambda _: None
    generate(run, server)
    assert {body["seed"] for body in server.requests} == failing
    assert rows(run) == plain


def test_a_retry_asks_for_the_missing_members_of_a_group(tmp_path, server, plain):
    """Completions without tokens cost their own rollout; only those are sampled again."""
    lost = [row["rollout_id"] for row in plain[1::3]]
    run = Run.create_or_open(configured(tmp_path / "runs", "rollouts.errors_max_fraction=0.1"))
    seeds = {row["rollout_id"]: row["sampling"]["seed"] for row in plain}
    missing = {seeds[name] for name in lost}
    answer = server.answer

    def without_tokens(body: Any, fault: str | None) -> dict[str, Any]:
        response = answer(body, fault)
        for choice in response["choices"]:
            if body["seed"] + choice["index"] in missing:
                choice["finish_reason"] = "abort"
        return response

    server.answer = without_tokens  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EndpointUnavailable):
        generate(run, server)
    server.requests.clear()
    server.answer = answer  # pyright: ignore[reportAttributeAccessIssue]
    generate(run, server)
    assert sorted(body["seed"] for body in server.requests) == sorted(missing)
    assert {body["n"] for body in server.requests} == {1}
    assert rows(run) == plain


@pytest.mark.parametrize("kind", others_slow(["gs", "s3"], "gs"))
def test_a_bucket_keeps_finished_groups_until_the_shard_has_them_or_they_are_old(
    kind: str, server: FakePolicyServer, plain: list[dict[str, Any]]
) -> None:
    """One create fails although it took effect; groups are kept, read again, and deleted."""
    with (fake_gcs if kind == "gs" else fake_s3)() as bucket:
        bucket.create_bucket("bucket")
        config = configured(f"{kind}://bucket/runs", "rollouts.errors_max_fraction=0.1")
        run = Run.create_or_open(config.model_copy(update={"storage_options": bucket.options}))
        failing = {row["sampling"]["seed"] for row in plain[: 2 * SIZE : SIZE]}
        server.fault = lambda body: "503" if body["seed"] in failing else None
        method = "POST" if kind == "gs" else "PUT"
        bucket.faults.add(Fault(method, "group-00002", "after", 503))
        with pytest.raises(EndpointUnavailable):
            generate(run, server)
        assert len(pieces(run)) == GROUPS - 2
        assert bucket.faults.waiting == []
        # of an attempt that may go on until it is older than any that commits
        limit = timedelta(seconds=ATTEMPT_LIFETIME_S + CLOCKS_APART_S)
        late = datetime.now(UTC) + limit
        assert collect(run, dry_run=True, now=late - timedelta(hours=1)).garbage == ()
        old = collect(run, dry_run=True, now=late + timedelta(hours=1)).garbage
        assert [(item.key, item.reason) for item in old] == [
            (key, "uncommitted") for key in pieces(run)
        ]
        server.requests.clear()
        server.fault = lambda _: None
        generate(run, server)
        assert {body["seed"] for body in server.requests} == failing
        assert rows(run) == plain
        assert {item.reason for item in collect(run).garbage} == {"unreferenced"}
        assert pieces(run) == []


def test_groups_of_a_shard_that_never_ended_go_by_age(tmp_path, server):
    run = Run.create_or_open(configured(tmp_path / "runs", "rollouts.errors_max_fraction=0.1"))
    fine = iter([None, None])
    server.fault = lambda _: next(fine, "503")
    with pytest.raises(EndpointUnavailable):
        generate(run, server)
    kept = pieces(run)
    assert len(kept) == 2
    damaged = run.store.local_path(kept[0])
    assert damaged is not None
    # a day is long enough for other files on this machine; a retry still goes on from these
    now = datetime.now(UTC)
    assert collect(run, now=now + timedelta(days=1)).garbage == ()
    damaged.write_bytes(b"PAR1")  # fsck names it
    assert collect(run, now=now + timedelta(days=10)).garbage[0].key == kept[1]
    assert pieces(run) == kept[:1]
    assert {f.kind for f in check_run(str(tmp_path / "runs"), run.run_id).faults} != set()


@pytest.mark.slow
def test_every_crash_state_keeps_its_finished_groups(tmp_path, server, plain):
    """Go on from a seeded sample of the folders that a kill before an operation leaves."""
    config = configured(tmp_path / "runs")
    run_folder = tmp_path / "runs" / config.run_id
    states = CrashStates(run_folder, tmp_path / "states")
    with inject_faults(Recording(states)):
        generate(Run.create_or_open(config), server)
    chosen = random.Random(printed_seed()).sample(
        range(len(states.numbers)), min(6, len(states.numbers))
    )
    for index in chosen:
        root = tmp_path / f"again-{index}"
        root.mkdir()
        states.copy(index).rename(root / config.run_id)
        run = Run.create_or_open(configured(root))
        finished = len(pieces(run))
        committed = (root / config.run_id / shard_key(ROUND, 0)).exists()
        server.requests.clear()
        generate(run, server)
        assert len(server.requests) == (0 if committed else GROUPS - finished), f"state {index}"
        assert rows(run) == plain, f"state {index}"
