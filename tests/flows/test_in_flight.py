"""Weights that change within completions: what each token is, and what a run makes of it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support.flow_runs import debug
from support.models import full_logprobs
from support.policy_runs import embedded_server
from support.servers import wait_until
from support.streams import checked, groups_in
from support.vllm_stand_in import VllmStandIn

from flows.rl_loop import start
from marin_rl.analysis.lineage import trace
from marin_rl.config import Config
from marin_rl.inference.client import fleet_watch
from marin_rl.inference.client.fleet_sources import board_of
from marin_rl.inference.engine import Engine
from marin_rl.rollouts.streaming import sample_chunk
from marin_rl.runtime import RunRuntime
from marin_rl.serving.launch import proven_server
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.checkpoint_loader import Loaded, read_checkpoint
from marin_rl.serving.weights.following import CheckpointWatcher, whole_checkpoints
from marin_rl.storage.fleet import CANARIES_KEY, ProvenVersion, run_sha256
from marin_rl.storage.layout import STREAM, numbers_in
from marin_rl.storage.runs import Run, checkpoint_slot, committed
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.parquet import FETCHES_MAX, iter_present
from marin_rl.storage.tables.rollouts import decode_shard, groups_of, iter_shards
from marin_rl.storage.tables.stream import numbers_of
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.model import build_model, named_parameters, with_parameters
from marin_rl.training.replay import replay_round
from marin_rl.types import Rollout, RolloutGroup, ServedPolicy, SlotRef

pytestmark = pytest.mark.slow
ROUNDS = 3
CHUNK = 50  # of groups that the run itself never samples


@pytest.fixture(scope="module")
def played(api: str, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run whose checkpoints are served while completions are sampled."""
    config = debug(
        tmp_path_factory.mktemp("in-flight"),
        "asynchrony.max_staleness=2",
        "asynchrony.sampler=windowed",
        "asynchrony.in_flight_updates=true",
        f"rounds={ROUNDS}",
        "policy.init=random",
        "sampling.max_tokens=24",
        "inference.engine.chunk_steps=1",
    )
    start(config)
    return config


def mixed(rollouts: list[Rollout]) -> list[Rollout]:
    """Those with tokens of several policies."""
    return [each for each in rollouts if each.policy_version_min < each.policy_version_max]


def test_a_run_is_whole_and_knows_the_policy_of_each_token(played: Config) -> None:
    """The speed of the machine decides how many completions a checkpoint comes upon."""
    run = checked(played)
    rows = read_metrics(run).to_pylist()
    assert all(row["staleness/max"] <= 2 for row in rows)
    assert all(row["staleness/tokens/mean"] <= row["staleness/mean"] for row in rows)
    assert all(row["staleness/in_flight/max"] is not None for row in rows)
    assert replay_round(run, ROUNDS - 1).equal
    assert any(node.startswith("intakes/") for node in trace(run, 1).nodes)


@pytest.fixture
def served(played: Config) -> Iterator[tuple[Run, RunRuntime, ServedPolicy]]:
    """The run with a server of checkpoint 0."""
    run = Run.open(played.root, played.run_id)
    with closing(RunRuntime(run)) as runtime:
        yield run, runtime, runtime.serve(checkpoint(run, 0))


def checkpoint(run: Run, version: int) -> SlotRef:
    ref = committed(run, checkpoint_slot(version))
    assert ref is not None
    return ref


def sampled_over(
    run: Run,
    runtime: RunRuntime,
    policy: ServedPolicy,
    chunk: int,
    version: int,
    engines: Sequence[Engine] = (),
    before_others: Callable[[], None] = lambda: None,
) -> list[RolloutGroup]:
    """The groups of a chunk whose completions are under way when a checkpoint is served.

    `engines` are those that sample, by default the run's own. They rest in the middle of
    completions until the first of them has the checkpoint; then that goes on, and after a call of
    `before_others` the others do.
    """
    if not engines:
        engines = [embedded_server(runtime).engine]
    failed, before = list[BaseException](), tokens_of(engines)

    def sample() -> None:
        try:
            asyncio.run(sample_chunk(run, chunk, policy, "test"))
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failed.append(error)

    threads = [
        threading.Thread(target=sample),
        threading.Thread(target=runtime.serve, args=(checkpoint(run, version),)),
    ]
    threads[0].start()
    wait_until(lambda: all(map(int.__lt__, before, tokens_of(engines))) or bool(failed))
    for engine in engines:
        engine.pause()
    threads[1].start()
    wait_until(lambda: engines[0].policy.weight_version == version)
    engines[0].resume()
    before_others()
    for engine in engines[1:]:
        engine.resume()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return groups_in(run, numbers_of(run.config, chunk))


def proven_by(run: Run) -> dict[int, ProvenVersion]:
    """The versions that a trainer has proven."""
    return board_of(run.config.inference, run.folder).canaries(run_sha256(run.folder))


def tokens_of(engines: Sequence[Engine]) -> list[int]:
    """Tokens that each engine has sampled."""
    return [engine.stats.tokens for engine in engines]


def digests_of(run: Run, chunk: int) -> dict[str, str]:
    """The policy digest of each rollout of a chunk, as its objects name it."""
    numbers = numbers_of(run.config, chunk)
    keys = [key for key in run.store.list(STREAM) if {*numbers_in(key)} & {*numbers}]
    objects = iter_present(run.store, keys, FETCHES_MAX)
    tables = [decode_shard(data) for data in objects if data is not None]
    rows = [row for table in tables for row in table.to_pylist()]
    return {row["rollout_id"]: row["policy_digest"] for row in rows}


def test_each_token_has_the_logprob_of_the_policy_that_sampled_it(served):
    run, runtime, policy = served
    assert_tokens(run, sampled_over(run, runtime, policy, CHUNK, 2), CHUNK)
    assert embedded_server(runtime).engine.stats.recomputed_sequences > 0


def assert_tokens(run: Run, groups: Sequence[RolloutGroup], chunk: int) -> None:
    """Of groups that new weights came upon: versions, log-probabilities and digests by token."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    models = {version: read_checkpoint(run, version) for version in (0, 2)}
    digests = digests_of(run, chunk)
    assert mixed(rollouts)
    for rollout in rollouts:
        sampled = rollout.loss_mask == 1
        of_sampled = versions_of(rollout)[sampled].tolist()
        assert all(first <= then for first, then in pairwise(of_sampled))
        assert (rollout.policy_version_min, rollout.policy_version_max) == (
            of_sampled[0], of_sampled[-1],
        )  # fmt: skip
        assert digests[rollout.rollout_id] == models[of_sampled[-1]].parameters_digest
        assert_logprobs(rollout, models)
        turn = rollout.turns[-1].inference_metadata
        assert turn is not None
        assert turn.weight_version == of_sampled[-1]


def versions_of(rollout: Rollout) -> np.ndarray:
    """The version of the policy by each token, `[T]`."""
    if rollout.policy_versions is not None:
        return rollout.policy_versions
    return np.full(len(rollout.token_ids), rollout.policy_version_min)


def assert_logprobs(rollout: Rollout, models: Mapping[int, Loaded]) -> None:
    """Each sampled token has its log-probability by the policy of its version."""
    sampled = rollout.loss_mask == 1
    prompt, completion = rollout.token_ids[~sampled], rollout.token_ids[sampled]
    versions = versions_of(rollout)[sampled]
    assert set(versions.tolist()) <= set(models)
    for version, loaded in models.items():
        expected = full_logprobs(loaded.model, prompt, completion)
        gap = np.abs(rollout.logprobs[sampled] - expected)[versions == version].max(initial=0)
        assert gap < 1e-4


@contextmanager
def server_of(run: Run) -> Iterator[PolicyServer]:
    """A server of checkpoint 0, as `marin-rl serve RUN`."""
    tokenizer = tokenizer_for(run.config.policy)
    server = proven_server(read_checkpoint(run, 0), tokenizer, run.config)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def followed(run: Run, server: PolicyServer) -> AbstractContextManager[CheckpointWatcher]:
    """Have a server take the checkpoint that the trainer asks for, as `--follow` does."""
    take, board = whole_checkpoints(server.updater, run), board_of(run.config.inference, run.folder)
    return CheckpointWatcher(take, run, 0, board=board, poll_s=0.02)


def sampling_from(run: Run, servers: Sequence[PolicyServer]) -> Run:
    """The run with servers that follow it as its endpoints."""
    urls = {"endpoints": tuple(server.base_url for server in servers), "publish": "pull"}
    inference = run.config.inference.model_copy(update=urls)
    return replace(run, config=run.config.model_copy(update={"inference": inference}))


def test_servers_that_follow_go_on_with_the_weights_of_later_checkpoints(played: Config) -> None:
    run = Run.open(played.root, played.run_id)
    with server_of(run) as server:
        remote = sampling_from(run, [server])
        with closing(RunRuntime(remote)) as runtime:
            policy = runtime.serve(checkpoint(run, 0))
            assert policy.canary is not None
            with followed(remote, server):
                groups = sampled_over(remote, runtime, policy, CHUNK + 2, 2, [server.engine])
    assert_tokens(remote, groups, CHUNK + 2)
    assert server.engine.stats.recomputed_sequences > 0
    proven = proven_by(remote)
    assert {version: each.parameters_digest for version, each in proven.items()} == {
        version: read_checkpoint(run, version).parameters_digest for version in (0, 2)
    }


def test_a_server_with_other_weights_under_the_right_name_is_lost_and_no_group_is(
    played: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its completions are sampled again by the other server."""
    monkeypatch.setattr(fleet_watch, "SPREAD_S", 60.0)  # both sample, however long a look takes
    run, caplog_level = Run.open(played.root, played.run_id), caplog.at_level(logging.WARNING)
    with server_of(run) as honest, server_of(run) as liar, caplog_level:
        remote = sampling_from(run, [honest, liar])
        run.folder.delete(CANARIES_KEY)
        right = read_checkpoint(run, 2)
        scaled = {name: 1.5 * array for name, array in named_parameters(right.model).items()}

        def go_wrong() -> None:
            wait_until(
                lambda: (
                    2
                    in board_of(remote.config.inference, remote.folder).canaries(
                        run_sha256(run.folder)
                    )
                )
            )
            wrong = with_parameters(right.model, scaled)
            liar.engine.swap(wrong, 2, right.parameters_digest)

        with closing(RunRuntime(remote)) as runtime:
            policy = runtime.serve(checkpoint(run, 0))
            assert len(policy.endpoints) == 2
            engines = [honest.engine, liar.engine]
            with followed(remote, honest):
                groups = sampled_over(remote, runtime, policy, CHUNK + 3, 2, engines, go_wrong)
    assert_tokens(remote, groups, CHUNK + 3)
    assert len(groups) == len(numbers_of(run.config, CHUNK + 3))
    assert all(len(group.rollouts) == group.group_size for group in groups)
    assert f"endpoint {liar.base_url} is lost" in caplog.text


@contextmanager
def vllm_of(config: Config) -> Iterator[VllmStandIn]:
    """A vLLM with random weights of a run's shape."""
    tokenizer = tokenizer_for(config.policy)
    server = PolicyServer(
        build_model(config.policy, len(tokenizer), seed=99),
        tokenizer,
        config.inference,
        context_length=config.policy.context_length,
    )
    with VllmStandIn(server) as vllm:
        yield vllm


def test_a_window_is_sampled_by_a_vllm_that_is_sent_each_checkpoint(api, tmp_path):
    window = (
        "asynchrony.max_staleness=1",
        "asynchrony.sampler=windowed",
        "asynchrony.in_flight_updates=true",
        "rounds=2",
        "policy.init=random",
    )
    with vllm_of(debug(tmp_path, *window)) as vllm:
        config = debug(
            tmp_path,
            *window,
            f"inference.endpoints={vllm.url}",
            "inference.publish=vllm_reload",
            "inference.route=vllm_generate",
        )
        start(config)
        assert vllm.version >= 1
    run = checked(config)
    # Of the first round all tokens are its own policy's, which this metric compares with; later
    # rounds have some of earlier ones.
    assert read_metrics(run).to_pylist()[0]["sampling/logp_difference/max"] < 1e-4
    models = {version: read_checkpoint(run, version) for version in range(config.rounds)}
    tables = [table for round in range(config.rounds) for table in iter_shards(run, round)]
    groups = [group for table in tables for group in groups_of(table)]
    assert len(groups) == config.rounds * config.rollouts.groups_per_round
    for group in groups:
        for rollout in group.rollouts:
            assert_logprobs(rollout, models)
