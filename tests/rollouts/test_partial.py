"""Completions in pieces: the same tokens as whole ones, whichever process goes on with them."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rollouts.scripted_pieces import (
    MODEL,
    PIECE,
    TOKENS_MAX,
    FirstPieces,
    ScriptedClient,
    settings,
    text_of,
)
from support.fakes import FakePolicyServer, served_policy
from support.flow_runs import DEBUG
from support.run_factories import audit_round, checkpoint, train
from support.servers import serving

from marin_rl.analysis.lineage import trace
from marin_rl.analysis.verify import verify_run
from marin_rl.batching.build import build_round
from marin_rl.config import load_config
from marin_rl.environments.checks import environment_of
from marin_rl.errors import InputError, MarinRLError
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.protocol import ChatRequest
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.clients import policy_client
from marin_rl.rollouts.generate import (
    SamplingJob,
    generate_shard,
    sample_groups,
    shard_fingerprint,
    shard_requests,
)
from marin_rl.rollouts.partial import in_pieces, piecewise
from marin_rl.rollouts.sampler import CommittedMembers
from marin_rl.rollouts.streaming import CHUNK, group_id_of, stream_requests
from marin_rl.rollouts.trajectories import GroupRequest, Interrupted
from marin_rl.serving.server import PolicyServer
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.layout import STREAM, partial_key, partial_of
from marin_rl.storage.runs import Run, checkpoint_slot, shard_key
from marin_rl.storage.tables.group_log import (
    GroupLog,
    groups_of_chunk,
    members_of_shard,
    partials_of_shard,
    partials_of_stream,
)
from marin_rl.storage.tables.intakes import Settled, collect_shard, commit_intake, decide
from marin_rl.storage.tables.rollouts import decode_shard, groups_of, iter_shards, seal_round
from marin_rl.storage.tables.stream import GroupStream
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.storage.upkeep.gc import collect
from marin_rl.storage.upkeep.streams import unfinished_groups, waiting_rollouts
from marin_rl.types import Rollout, RolloutGroup, ServedPolicy


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create_or_open(settings(tmp_path))


def policy_at(version: int) -> ServedPolicy:
    return served_policy("http://127.0.0.1:1/v1", MODEL, weight_version=version)


def request_of(run: Run, number: int = 0) -> GroupRequest:
    (request,) = stream_requests(run, [number], environment_of(run.config))
    return request


def chains_of(run: Run, version: int = 0, fingerprint: str = "f") -> GroupLog:
    return partials_of_stream(run, fingerprint, policy_at(version), "w")


def sampled(
    run: Run,
    client: ScriptedClient,
    version: int = 0,
    *,
    piece: int = PIECE,
    oldest: int = 0,
    stop: tuple[str, ...] = (),
) -> ChatAnswer:
    """Group 0, sampled in pieces from what is committed of it on. Raises Interrupted."""
    request = stopping(request_of(run), stop)
    partial = piecewise(
        client,
        [request],
        log=chains_of(run, version),
        tokens=piece,
        decode=text_of,
        interruption=client.interruption,
        oldest=oldest,
    )

    async def sample() -> ChatAnswer:
        name = request.group_id
        async with partial as pieces:
            return await pieces.chat(request.example.messages, 4, request.sampling, session=name)

    return asyncio.run(sample())


def stopping(request: GroupRequest, stop: tuple[str, ...]) -> GroupRequest:
    return replace(request, sampling=replace(request.sampling, stop=stop))


def whole(run: Run, stop: tuple[str, ...] = ()) -> ChatAnswer:
    request = stopping(request_of(run), stop)
    return asyncio.run(ScriptedClient().chat((), 4, request.sampling))


def same(one: Completion, other: Completion) -> bool:
    arrays = [(one.token_ids, other.token_ids), (one.logprobs, other.logprobs)]
    equal = all(np.array_equal(a, b) for a, b in arrays)
    return equal and (one.text, one.finish_reason) == (other.text, other.finish_reason)


@pytest.mark.slow
@hypothesis_settings(max_examples=30)
@given(st.data())
def test_pieces_are_what_one_request_brings_whichever_process_goes_on(tmp_path_factory, data):
    """Of any length, interrupted after any number of them, ended by a string across a border."""
    run = Run.create_or_open(settings(tmp_path_factory.mktemp("pieces")))
    stop = ()
    if data.draw(st.booleans()):
        texts = [each.text for each in whole(run).completions]
        text = data.draw(st.sampled_from([text for text in texts if len(text) > 3]))
        begin = data.draw(st.integers(0, len(text) - 2))
        stop = (text[begin : begin + data.draw(st.integers(2, 4))], "zz")
        assert any(each.text == text[:begin] for each in whole(run, stop).completions)
    piece = data.draw(st.integers(1, TOKENS_MAX + 1))
    for _ in range(2 * TOKENS_MAX):
        client = ScriptedClient(pieces_max=data.draw(st.sampled_from([1, 2, 5, 1000])))
        try:
            answer = sampled(run, client, piece=piece, stop=stop)
        except Interrupted:
            assert client.asked, "each process gets on by a piece"
            continue
        break
    else:
        raise AssertionError("it never ended")
    assert all(map(same, answer.completions, whole(run, stop).completions))
    assert all(each.policy_versions is None for each in answer.completions)


def test_borders_are_at_multiples_of_the_piece_in_every_process(run: Run) -> None:
    """So that a killed process is followed by the requests that it would have made."""
    undisturbed = ScriptedClient()
    expected = sampled(run, undisturbed)
    other = Run.create_or_open(settings(Path(run.config.root, "other")))
    first, second = ScriptedClient(pieces_max=1), ScriptedClient()
    with pytest.raises(Interrupted):
        sampled(other, first)
    assert first.asked == undisturbed.asked[:1] == [(5, PIECE)]
    answer = sampled(other, second)
    assert sorted(second.asked) == sorted(undisturbed.asked[1:])
    assert all(map(same, answer.completions, expected.completions))


def test_tokens_have_the_version_of_the_policy_that_sampled_them(run: Run) -> None:
    with pytest.raises(Interrupted):
        sampled(run, ScriptedClient(pieces_max=1), 1)
    answer = sampled(run, ScriptedClient(), 2)
    long = [each for each in answer.completions if len(each.token_ids) > PIECE]
    assert long
    for completion in long:
        versions = completion.policy_versions
        assert versions is not None
        assert versions.tolist() == [1] * PIECE + [2] * (len(versions) - PIECE)


def test_parts_that_no_round_could_take_are_sampled_again(run: Run) -> None:
    """The chain goes on: what begins a member again replaces what came before."""
    with pytest.raises(Interrupted):
        sampled(run, ScriptedClient(pieces_max=1), 0)
    with pytest.raises(Interrupted):
        sampled(run, ScriptedClient(pieces_max=1), 3, oldest=1)
    answer = sampled(run, ScriptedClient(), 4, oldest=2)
    versions = [each.policy_versions for each in answer.completions]
    assert {v for each in versions if each is not None for v in each.tolist()} == {3, 4}
    assert all(map(same, answer.completions, whole(run).completions))


class FirstIsSilent(ScriptedClient):
    """The first member ends without a token, as at endpoints that leave the end token out."""

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Sample completions, of which the first of a new request has no tokens."""
        answer = await super().answer(request)
        if request.prompt_ids is not None:
            return answer
        none = {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}
        first = replace(answer.completions[0], text="", finish_reason="stop", **none)
        return replace(answer, completions=(first, *answer.completions[1:]))


def test_a_member_that_ended_without_a_token_stays_ended(run: Run) -> None:
    with pytest.raises(Interrupted):
        sampled(run, FirstIsSilent(pieces_max=1))
    first, *others = sampled(run, ScriptedClient()).completions
    assert (len(first.token_ids), first.text, first.finish_reason) == (0, "", "stop")
    assert all(map(same, others, whole(run).completions[1:]))


def test_one_process_goes_on_with_a_part_and_the_other_appends_no_more(run: Run) -> None:
    with pytest.raises(Interrupted):
        sampled(run, ScriptedClient(pieces_max=1))
    group_id = group_id_of(0)
    first, second = chains_of(run), chains_of(run)
    chains = [each.read([group_id]) for each in (first, second)]
    assert [len(chain[group_id]) for chain in chains] == [1, 1]
    part = chains[0][group_id][0]
    assert first.go_on(group_id, part)
    assert not second.go_on(group_id, part)
    assert not second.go_on(group_id, part), "it leaves the group to the other"
    assert first.go_on(group_id, part)
    assert len(chains_of(run).read([group_id])[group_id]) == 3


def test_parts_are_checked_by_fsck_and_go_with_their_group(run: Run) -> None:
    with pytest.raises(Interrupted):
        sampled(run, ScriptedClient(pieces_max=1))
    assert [partial_of(key) for key in run.store.list(STREAM)] == [0]
    assert [f for f in check_run(run.config.root, run.run_id).faults if not f.harmless] == []
    assert collect(run).garbage == (), "no round has the group"
    key = partial_key(0, 0)
    run.store.put_part(key, run.store.read(key)[:-9])
    faults = check_run(run.config.root, run.run_id).faults
    assert any(key in fault.place for fault in faults if not fault.harmless)


def streamed(run: Run, client: ScriptedClient, version: int) -> list[RolloutGroup]:
    """Sample the first groups of the stream by a policy, and commit those that are finished."""
    policy, environment = digested(version), environment_of(run.config)
    requests = stream_requests(run, range(4), environment)
    partial = piecewise(
        client, requests, log=partials_of_stream(run, "f", policy, "w"), tokens=PIECE,
        decode=text_of, interruption=client.interruption,
    )  # fmt: skip
    progress = ProgressEvent(run_id="", stage="generate", round=0)
    job = SamplingJob(config=run.config, policy=policy, environment=environment, progress=progress)
    groups = asyncio.run(sample_groups(job, requests, partial))
    groups_of_chunk(run, range(4), "f", policy, "w").complete(CHUNK, groups)
    return groups


def digested(version: int) -> ServedPolicy:
    """A policy with parameters of its own."""
    return replace(policy_at(version), parameters_digest=f"{version:064x}")


@pytest.mark.slow
def test_a_round_of_several_policies_is_audited_and_its_tokens_are_traced(run: Run) -> None:
    """From parts to the lineage of an update: digests, ages, waste and counts of one round."""
    start = checkpoint(run, 0, extra={"parameters_digest": f"{0:064x}"})
    assert streamed(run, ScriptedClient(pieces_max=4), 0) == [], "each began"
    assert unfinished_groups(run).groups == 4
    assert waiting_rollouts(run) == 0
    groups = streamed(run, ScriptedClient(), 1)
    assert unfinished_groups(run).groups == 0
    assert waiting_rollouts(run) == sum(len(group.rollouts) for group in groups)
    stream = GroupStream(run, fingerprint="f")
    stream.look()
    intake = decide(1, stream.groups.values(), Settled(), run.config)
    assert intake is not None
    assert {version for _, _, version, *_ in intake.taken} == {0}, "groups are as old as a token"
    first = replace(intake, round=0)
    taken = commit_intake(run, first)
    sealed = seal_round(run, 0, [collect_shard(run, 0, 0, taken)], [taken])
    train(run, 0, start, build_round(run, 0, sealed), {"parameters_digest": f"{1:064x}"})
    assert audit_round(run, 0).problems == ()
    (rows,) = iter_shards(run, 0, ["rollout_id", "policy_version_max", "policy_digest"])
    digests = {f"{v:064x}" for v in rows["policy_version_max"].to_pylist()}
    assert digests == set(rows["policy_digest"].to_pylist()) == {f"{v:064x}" for v in (0, 1)}
    manifest = committed_manifest(run.store, "batches/round-00000")
    assert manifest.totals["staleness/in_flight/max"] == 1
    assert -1 < manifest.totals["staleness/tokens/mean"] < 0, "a round before its policy"
    rollouts = [
        each for table in iter_shards(run, 0) for g in groups_of(table) for each in g.rollouts
    ]
    mixed = [each for each in rollouts if each.policy_version_min < each.policy_version_max]
    sampled = sum(int(each.loss_mask.sum()) for each in mixed)
    kept, continued = (manifest.totals[f"tokens/in_flight/{n}"] for n in ("kept", "continued"))
    assert kept > 0
    assert continued > 0
    assert kept + continued == sampled, "two policies share the tokens of these rollouts"
    findings = {finding.metric: finding for finding in verify_run(run, 0)}
    for name in ("kept", "continued"):
        assert findings[f"tokens/in_flight/{name}"].problem == ""
    parts = ("in_flight/mean", "in_queue/max", "tokens/mean", "groups_dropped", "groups_waiting")
    assert all(findings[f"staleness/{name}"].problem == "" for name in parts)
    counted = ("staleness/", "tokens/", "rollouts/", "replay/", "reward", "completions/")
    wrong = [f.message for f in findings.values() if f.problem and f.metric.startswith(counted)]
    assert wrong == []
    graph = trace(run, 0)
    mixed = [n for n in graph.nodes.values() if "tokens_by_policy_version" in n.facts]
    assert any(set(n.facts["tokens_by_policy_version"]) == {"0", "1"} for n in mixed)
    assert checkpoint_slot(1) in graph.nodes


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with serving(weight_version=0, parameters_digest="ab" * 32) as running:
        yield running


def committed(run: Run) -> list[Rollout]:
    groups = groups_of(decode_shard(run.store.read(shard_key(0, 0))))
    return [rollout for group in groups for rollout in group.rollouts]


def shard_of(root: Path, server: PolicyServer, *items: str) -> list[Rollout]:
    config = load_config(DEBUG, [f"root={root}", "sampling.max_tokens=11", *items])
    run = Run.create_or_open(config)
    asyncio.run(generate_shard(run, 0, 0, served_policy(server.base_url, server.model_id)))
    return committed(run)


PIECES = (f"asynchrony.partial_tokens={PIECE}",)


@pytest.mark.slow
def test_pieces_of_the_engine_have_the_tokens_of_whole_completions(server, tmp_path):
    """Logprobs differ by what a cache that was filled at once differs from one that grew."""
    expected, rollouts = shard_of(tmp_path / "a", server), shard_of(tmp_path / "b", server, *PIECES)
    assert any(rollout.n_completion_tokens > PIECE for rollout in rollouts)
    for rollout, other in zip(rollouts, expected, strict=True):
        assert rollout.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(rollout.logprobs - other.logprobs).max() < 1e-4
        assert rollout.reward == other.reward
        assert [t.content for t in rollout.turns] == [t.content for t in other.turns]


@pytest.mark.slow
@pytest.mark.bits
def test_a_shard_goes_on_with_what_a_process_left_of_it(server, tmp_path):
    """With a policy that follows from the round's number, no bit shows where it was left."""
    policy = served_policy(server.base_url, server.model_id)
    expected = shard_of(tmp_path / "undisturbed", server, *PIECES)
    items = [f"root={tmp_path / 'left'}", "sampling.max_tokens=11", *PIECES]
    run = Run.create_or_open(load_config(DEBUG, items))
    environment, progress = (
        environment_of(run.config),
        ProgressEvent(run_id="", stage="generate", round=0),
    )
    digest = shard_fingerprint(run, 0, 0, policy, environment)
    requests = shard_requests(run, 0, 0, environment)
    job = SamplingJob(config=run.config, policy=policy, environment=environment, progress=progress)
    log = CommittedMembers(members_of_shard(run, 0, 0, digest, policy))
    partials = partials_of_shard(run, 0, 0, digest, policy)

    async def left() -> list[RolloutGroup]:
        endpoints = policy_client(run.config, policy)
        client = in_pieces(run.config, endpoints, partials, requests, FirstPieces(2))
        return await sample_groups(job, requests, client, log)

    assert len(asyncio.run(left())) < len(requests)
    names = [key.rpartition("/")[2] for key in run.store.list("rollouts")]
    assert any(name.startswith("partial-") for name in names)
    assert [f for f in check_run(run.config.root, run.run_id).faults if not f.harmless] == []
    rollouts = shard_of(tmp_path / "left", server, *PIECES)
    for rollout, other in zip(rollouts, expected, strict=True):
        assert rollout.token_ids.tolist() == other.token_ids.tolist()
        assert rollout.logprobs.tobytes() == other.logprobs.tobytes()
    assert {name for name in names if name.startswith("partial-")} <= {
        item.key.rpartition("/")[2] for item in collect(run).garbage
    }, "they go once the shard is committed"


def test_endpoints_are_asked_once_for_a_policy_and_again_after_a_refusal(tmp_path: Path) -> None:
    """Two shards in turn, and one after a server that cannot go on took the place."""
    with FakePolicyServer(MODEL, lambda _text, _seed: "eight of") as server:
        items = [f"root={tmp_path}", *PIECES, f"inference.endpoints=[{server.url}]"]
        run = Run.create_or_open(load_config(DEBUG, [*items, "sampling.max_tokens=12"]))
        policy = served_policy(server.url, MODEL)

        def single_tokens() -> int:
            asked = sum(body["max_tokens"] == 1 for body in server.requests)
            server.requests.clear()
            return asked

        async def shards() -> None:
            await generate_shard(run, 0, 0, policy)
            assert single_tokens() == 2
            await generate_shard(run, 1, 0, policy)
            assert single_tokens() == 0
            server.fault = lambda body: "route" if "tokens" in body or "prompt" in body else None
            with pytest.raises(MarinRLError):
                await generate_shard(run, 1, 1, policy)
            with pytest.raises(InputError, match="does not go on from token ids"):
                await generate_shard(run, 1, 1, policy)
            assert single_tokens() == 3, "a token, and the next one by two routes"

        asyncio.run(shards())
