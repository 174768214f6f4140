"""A worker with the root alone: what it samples, refuses, leaves to others, and how it ends."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fakes import logprob_of
from support.held_server import HeldServer, until
from support.run_factories import checkpoint
from support.streams import stream_of

from marin_rl.config import load_config
from marin_rl.errors import ConfigError
from marin_rl.inference.client.fleet_sources import canary_board, worker_board
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.rollouts.interruption import Interruption
from marin_rl.rollouts.root_worker import RootWorker, stream_digest
from marin_rl.rollouts.streaming import now_utc, sample_chunk
from marin_rl.rollouts.worker_pulse import Pulse, watch_order
from marin_rl.storage.canaries import ProvenVersion
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.fleet import run_sha256
from marin_rl.storage.provenance import code_digest
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.stream import GroupStream, numbers_of
from marin_rl.storage.workers import SamplingOrder, WorkerBeat, WorkerBoard
from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for
from marin_rl.types import Canary, ServedPolicy

DIGEST = "ab" * 32
MODEL = served_model_id("policy", 0, DIGEST)
CANARY = Canary(temperature=1.0, token_ids=(97,), logprobs=(logprob_of(97, 0),), tolerance=1e-3)


def says_a(_text: str, _seed: int) -> str:
    """Answer that begins with the canary's token."""
    return "a"


@pytest.fixture
def server() -> Iterator[HeldServer]:
    """An endpoint that can hold back all but the canary, of one token."""
    with HeldServer(MODEL, says_a, holds=lambda body: body["max_tokens"] > 1) as running:
        running.released.set()
        yield running
        running.released.set()


@pytest.fixture
def run(tmp_path: Path, server: HeldServer) -> Run:
    """A run of two chunks a round, whose endpoints are in a file."""
    listed = tmp_path / "fleet.txt"
    listed.write_text(f"{server.url}\n")
    items = (
        f"root={tmp_path}",
        "asynchrony.sampler=windowed",
        "asynchrony.max_staleness=1",
        f"inference.endpoints=file:{listed}",
        "inference.publish=pull",
        "inference.fleet_timeout_s=600",
    )
    return Run.create_or_open(load_config("configs/debug.yaml", [*items]))


def order_of(run: Run) -> SamplingOrder:
    """The order of a trainer that serves checkpoint 0."""
    names = TokenizerIdentity.of(tokenizer_for(run.config.policy))
    policy = ServedPolicy(
        endpoints=(),
        model=MODEL,
        weight_version=0,
        parameters_digest=DIGEST,
        tokenizer_digest=names.tokenizer_digest,
        chat_template_digest=names.chat_template_digest,
        checkpoint=checkpoint(run, 0, extra={"parameters_digest": DIGEST}),
        canary=CANARY,
    )
    return SamplingOrder(
        run_sha256=run_sha256(run.folder),
        code=code_digest(),
        stream=stream_digest(run.config, policy),
        state="open",
        rounds=run.config.rounds,
        rounds_taken=0,
        groups_open_max=run.config.inflight_groups_max,
        claim_s=3600.0,
        policy=policy,
    )


def test_a_worker_fills_the_room_and_no_more(run: Run, server: HeldServer) -> None:
    """By two rounds of checkpoint 0 there is room for, as for a flow that samples itself."""
    board, order = worker_board(run), order_of(run)
    board.announce(order)
    told: list[dict[str, Any]] = []
    worker = RootWorker(run, report=lambda _, record: told.append(record))
    assert asyncio.run(worker.work()) == order.groups_open_max == 8
    stream = stream_of(run)
    assert stream.numbers == {*range(8)}
    assert {claim.worker for claim in stream.claims.values()} == {worker.name}
    assert [body["max_tokens"] for body in server.requests].count(1) == 1, "the canary, once"
    assert [record["state"] for record in told] == ["proven", *["sampled"] * 4]
    assert board.beats() == {}, "it has withdrawn its heartbeat"
    assert asyncio.run(RootWorker(run).work()) == 0, "there is no room"
    board.announce(replace(order, groups_open_max=12, rounds=8))
    assert asyncio.run(RootWorker(run).work()) == 0, "no round could take more of checkpoint 0"


def test_the_trainer_reads_of_a_chunk_before_it_is_claimed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would take a chunk that begins between two heartbeats for none."""
    board, claim = worker_board(run), GroupStream.claim
    board.announce(order_of(run))
    seen: list[tuple[int, tuple[int, ...]]] = []

    def watched(stream: GroupStream, chunk: int, *arguments: Any) -> bool:
        (beat,) = board.beats().values()
        seen.append((chunk, beat.chunks))
        return claim(stream, chunk, *arguments)

    monkeypatch.setattr(GroupStream, "claim", watched)
    asyncio.run(RootWorker(run, beat_s=3600).work())
    assert seen == [(0, (0,)), (1, (1,)), (2, (2,)), (3, (3,))]


def test_an_order_that_ends_before_a_claim_is_obeyed(
    run: Run, server: HeldServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer ends it and sees no chunk: there must be none afterwards."""
    board, order, beat = worker_board(run), order_of(run), WorkerBoard.beat
    board.announce(order)
    drained: list[bool] = []

    def overtaken(written_to: WorkerBoard, written: WorkerBeat) -> None:
        if written.chunks and not drained:
            board.announce(order.in_state("closed"))
            drained.append(not any(each.chunks for each in board.beats().values()))
        beat(written_to, written)

    monkeypatch.setattr(WorkerBoard, "beat", overtaken)
    assert asyncio.run(RootWorker(run, beat_s=3600).work()) == 0
    assert drained == [True]
    assert stream_of(run).claims == {}
    assert [body["max_tokens"] for body in server.requests] == [1], "the canary alone"


def test_a_chunk_that_another_worker_claimed_is_announced_no_longer(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that waits for it would wait as long as the worker lives."""
    board, order, claim = worker_board(run), order_of(run), GroupStream.claim
    board.announce(order)

    def first(stream: GroupStream, chunk: int, _worker: str, *arguments: Any) -> bool:
        assert claim(stream, chunk, "another", *arguments)
        return False

    async def announced() -> list[tuple[int, ...]]:
        with monkeypatch.context() as patch:
            patch.setattr(GroupStream, "claim", first)
            written = recorded_beats(patch)
            working = asyncio.create_task(RootWorker(run, follow=True, beat_s=3600).work())
            await until(lambda: len(written) > 2)
            board.announce(order.in_state("ended"))
            await working
        return written

    assert asyncio.run(announced()) == [(), (0,), ()]


def test_a_look_that_began_by_an_older_order_ends_no_newer_chunks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is read in a thread while the worker goes on to the next policy."""
    board, order, read = worker_board(run), order_of(run), WorkerBoard.order
    board.announce(order)
    pulse = Pulse(run, board, "worker-a", beat_s=3600)
    earlier, latest = pulse.interruption, Interruption()
    replaced = replace(order.policy, checkpoint=checkpoint(run, 1))

    def overtaken(board: WorkerBoard) -> SamplingOrder | None:
        board.announce(replace(order, policy=replaced))
        pulse.begun, pulse.interruption = read(board), latest
        return read(board)

    monkeypatch.setattr(WorkerBoard, "order", overtaken)
    pulse.look()
    assert not latest.requested
    assert earlier.requested


def recorded_beats(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The chunks of each heartbeat that is written from now on."""
    written, beat = list[tuple[int, ...]](), WorkerBoard.beat

    def recorded(board: WorkerBoard, each: WorkerBeat) -> None:
        beat(board, each)
        written.append(each.chunks)

    patch.setattr(WorkerBoard, "beat", recorded)
    return written


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("run_sha256", "another run of this name"),
        ("code", "other code"),
        ("stream", "other settings, or other code of an environment"),
        ("tokenizer_digest", "another tokenizer"),
        ("chat_template_digest", "another chat template"),
    ],
)
def test_a_worker_of_another_kind_refuses_by_digest(
    run: Run, server: HeldServer, field: str, expected: str
) -> None:
    order = order_of(run)
    if field.endswith("_digest"):
        order = replace(order, policy=replace(order.policy, **{field: "0" * 64}))
    else:
        order = replace(order, **{field: "0" * 64})
    worker_board(run).announce(order)
    with pytest.raises(ConfigError, match=rf"{expected}.*expected digest 000000000000, found"):
        asyncio.run(RootWorker(run, follow=True).work())
    assert server.requests == []
    assert worker_board(run).beats() == {}


def test_an_endpoint_with_other_weights_gets_no_prompt(run: Run, server: HeldServer) -> None:
    order = order_of(run)
    wrong = replace(CANARY, logprobs=(-9.0,))
    worker_board(run).announce(replace(order, policy=replace(order.policy, canary=wrong)))

    async def work() -> None:
        working = asyncio.ensure_future(RootWorker(run).work())
        await until(lambda: len(server.requests) > 1)  # it is refused, and asked again
        assert not working.done()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    asyncio.run(work())
    assert {body["max_tokens"] for body in server.requests} == {1}, "the canary alone"


def test_without_an_order_there_is_nothing_to_sample(run: Run) -> None:
    assert asyncio.run(RootWorker(run).work()) == 0
    worker_board(run).announce(order_of(run).in_state("closed"))
    assert asyncio.run(RootWorker(run).work()) == 0


def test_a_worker_that_follows_waits_and_ends_with_the_run(run: Run) -> None:
    board, order = worker_board(run), order_of(run)

    async def work() -> int:
        working = asyncio.ensure_future(RootWorker(run, follow=True).work())
        await until(lambda: board.beats() != {})
        board.announce(order)
        await until(lambda: len(stream_of(run).numbers) == 8)
        assert not working.done()
        board.announce(order.in_state("ended"))
        return await working

    assert asyncio.run(work()) == 8


def test_claims_of_a_worker_that_is_gone_are_taken_over(run: Run) -> None:
    """Chunk 0 is claimed by one that writes no heartbeat, chunk 1 by the flow."""
    worker_board(run).announce(order_of(run))
    stream = stream_of(run)
    assert stream.claim(0, "worker-killed", 0, now_utc())
    assert stream.claim(1, "flow", 0, now_utc())
    assert asyncio.run(RootWorker(run).work()) == 6
    assert stream_of(run).numbers.isdisjoint(numbers_of(run.config, 1))


def test_a_pause_is_seen_in_the_root_and_ends_a_chunk_between_groups(
    run: Run, server: HeldServer
) -> None:
    """The group that has begun is finished and committed; the other is not begun."""
    run = replace(
        run,
        config=run.config.model_copy(
            update={
                "inference": run.config.inference.model_copy(update={"requests_in_flight_max": 1})
            }
        ),
    )
    board, order, interruption = worker_board(run), order_of(run), Interruption()
    board.announce(order)
    policy = replace(order.policy, endpoints=(server.url,))

    async def sampled() -> int:
        server.released.clear()
        watching = asyncio.ensure_future(watch_order(run, policy, interruption))
        sampling = asyncio.ensure_future(
            sample_chunk(run, 0, policy, "w", interruption=interruption)
        )
        await until(server.asked.is_set)
        assert not watching.done()
        board.announce(order.in_state("closed"))
        await watching
        server.released.set()
        return await sampling

    assert asyncio.run(sampled()) == 1
    assert len(stream_of(run).numbers) == 1
    asked = [body for body in server.requests if body["max_tokens"] > 1]
    assert len(asked) == 1
    again = sample_chunk(run, 0, policy, "w", interruption=Interruption())
    assert asyncio.run(again) == 2
    assert stream_of(run).numbers == {0, 1}


def test_the_next_policy_is_proven_before_it_samples(run: Run, server: HeldServer) -> None:
    """Groups under way when the trainer goes on are of the policy that began them, or of none."""
    board, order = worker_board(run), order_of(run)
    later = checkpoint(run, 1, extra={"parameters_digest": "cd" * 32})
    assert committed_manifest(run.store, later.slot).extra["parameters_digest"] == "cd" * 32
    model = served_model_id("policy", 1, "cd" * 32)
    policy = replace(
        order.policy,
        model=model,
        weight_version=1,
        parameters_digest="cd" * 32,
        checkpoint=later,
    )

    async def work() -> int:
        server.released.clear()
        board.announce(order)
        working = asyncio.ensure_future(RootWorker(run, follow=True).work())
        await until(server.asked.is_set)
        server.model = model  # the endpoint has gone on before the worker was asked to
        board.announce(replace(order, policy=policy))
        server.released.set()
        await until(lambda: len(stream_of(run).numbers) == 8)
        board.announce(replace(order, policy=policy, state="ended"))
        return await working

    asyncio.run(work())
    stream = stream_of(run)
    stream.read(())
    assert {group.version for group in stream.groups.values()} <= {0, 1}
    assert {body["model"] for body in server.requests if body["max_tokens"] == 1} == {MODEL, model}


@pytest.mark.slow
def test_groups_under_way_go_on_with_a_policy_that_comes_in_flight(
    run: Run, server: HeldServer
) -> None:
    """Nothing is cancelled, and what the next policy samples is accepted with its version."""
    config = run.config
    assert config.asynchrony is not None
    chosen = config.asynchrony.model_copy(update={"in_flight_updates": True})
    run = replace(run, config=config.model_copy(update={"asynchrony": chosen}))
    board, order, digest = worker_board(run), order_of(run), "cd" * 32
    later, model = (
        checkpoint(run, 1, extra={"parameters_digest": digest}),
        f"policy@00001-{digest:.8}",
    )
    policy = replace(
        order.policy, model=model, weight_version=1, parameters_digest=digest, checkpoint=later
    )
    server.aliases = ("policy",)
    server.extra = {"weight_version": 0, "parameters_digest": DIGEST}

    async def work() -> int:
        server.released.clear()
        board.announce(order)
        working = asyncio.ensure_future(RootWorker(run, follow=True).work())
        await until(server.asked.is_set)
        server.model = model
        server.extra = {"weight_version": 1, "parameters_digest": digest}
        proven = ProvenVersion(version=1, parameters_digest=digest, canary=CANARY)
        canary_board(run).add(run_sha256(run.folder), proven)
        board.announce(replace(order, policy=policy))
        server.released.set()
        await until(lambda: len(stream_of(run).numbers) == 8)
        board.announce(replace(order, policy=policy, state="ended"))
        return await working

    assert asyncio.run(work()) == 8
    stream = stream_of(run)
    stream.read(())
    assert {group.version for group in stream.groups.values()} == {1}
    asked = [body for body in server.requests if body["max_tokens"] > 1]
    assert len(asked) == 8, "no group was begun again"
    assert {body["model"] for body in asked} == {"policy"}
    canaries = [body for body in server.requests if body["max_tokens"] == 1]
    assert {body["model"] for body in canaries} == {MODEL, model}
