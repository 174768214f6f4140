"""Rounds sampled while earlier ones are trained: by which policy, and what a kill loses."""

import asyncio
import os
import random
from itertools import cycle
from pathlib import Path

import pytest
import yaml
from prefect.exceptions import Pause
from support.cases import printed_seed
from support.fault_injection import inject_faults
from support.faults import NamedOperations, Outcome, outcome
from support.flow_runs import DEBUG, debug

from flows.play import Results, run_together
from flows.rl_loop import start
from flows.session import resume_point
from marin_rl.config import Config, load_config
from marin_rl.errors import MarinRLError
from marin_rl.progress import ProgressEvent, listening
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run, latest_checkpoint
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.storage.tables.rollouts import iter_shards

ROUNDS = 5


def ahead(root: Path, staleness: int, *overrides: str) -> Config:
    return debug(root, f"asynchrony.max_staleness={staleness}", f"rounds={ROUNDS}", *overrides)


def policies(config: Config) -> list[set[int]]:
    """The policy versions that sampled each round."""
    run = Run.open(config.root, config.run_id)
    columns = ["policy_version_min", "policy_version_max"]
    tables = [list(iter_shards(run, round, columns)) for round in range(ROUNDS)]
    return [
        {v for t in shards for name in columns for v in t[name].to_pylist()} for shards in tables
    ]


@pytest.fixture(scope="module")
def undisturbed(api: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    """The outcome of a run with a staleness of 2, and the names of its operations."""
    config = ahead(tmp_path_factory.mktemp("ahead"), 2)
    operations = NamedOperations(config.root)
    with inject_faults(operations):
        start(config)
    assert policies(config) == [{0}, {0}, {0}, {1}, {2}]
    return outcome(config), operations.names.seen


@pytest.mark.slow
def test_every_round_is_closed_with_the_evaluation_of_its_checkpoint(undisturbed, tmp_path):
    """The same slots as of rounds that alternate, and the same again with other concurrency."""
    alternating = ahead(tmp_path / "alternating", 0)
    start(alternating)
    assert policies(alternating) == [{round} for round in range(ROUNDS)]
    assert outcome(alternating).slots == undisturbed[0].slots
    again = ahead(tmp_path / "again", 2, "flow.shards_in_flight_max=1")
    start(again)
    assert undisturbed[0].same_as(outcome(again)) == []
    rows = {
        row["round"]: row for row in read_metrics(Run.open(again.root, again.run_id)).to_pylist()
    }
    assert [rows[round]["staleness/max"] for round in range(ROUNDS)] == [0, 1, 2, 2, 2]
    every = again.evaluation.every_rounds
    assert all(rows[r]["eval/accuracy"] is not None for r in range(0, ROUNDS, every))
    assert all(row["timing_s/trainer_idle"] >= 0 for row in rows.values())


@pytest.mark.slow
def test_sampled_rounds_are_trained_and_closed_before_an_error_of_sampling_ends_the_run(
    api: str, tmp_path: Path
) -> None:
    """Its scoring fails as soon as the first round is closed, in whichever round that finds it."""
    flag = tmp_path / "broken"
    (tmp_path / "rewards.py").write_text(
        "from pathlib import Path\n\n\ndef score(example, completion):\n"
        f"    assert not Path({str(flag)!r}).exists()\n    return float(len(completion) % 2)\n"
    )
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "say {i}", "answer": "{i}"}}\n' for i in range(40))
    )
    tree = yaml.safe_load(DEBUG.read_text())
    options = {"path": str(tmp_path / "prompts.jsonl"), "reward": "rewards.py:score"}
    tree |= {"environment": {"name": "chat", "options": options}, "root": str(tmp_path)}
    tree |= {"asynchrony": {"max_staleness": 1}, "rounds": ROUNDS}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "own.yaml")

    def listen(event: ProgressEvent) -> None:
        if event.stage == "round":
            flag.touch()

    with listening(listen), pytest.raises(MarinRLError, match="AssertionError"):
        start(config)
    run = Run.open(config.root, config.run_id)
    sealed = [item.round for item in progress(run).values() if item.rollouts]
    assert 0 < len(sealed) < ROUNDS
    last = latest_checkpoint(run)
    assert last is not None
    assert last.slot.endswith(f"{len(sealed):05d}")
    assert resume_point(run) == last, "all trained rounds are closed"
    flag.unlink()
    start(config)
    assert [item.round for item in progress(run).values() if item.rollouts] == [*range(ROUNDS)]


def test_results_reach_those_who_wait_and_those_who_come_later() -> None:
    async def exchange() -> None:
        results = Results[int]()
        waiting = asyncio.ensure_future(results.of(1))
        results.give(0, 7)
        assert await results.of(0) == 7
        results.fail(ValueError("gone"))
        for late in (waiting, results.of(1), results.of(2)):
            with pytest.raises(ValueError, match="gone"):
                await late
        assert await results.of(0) == 7

    asyncio.run(exchange())


@pytest.mark.parametrize(
    ("error", "ends"),
    [(Pause(), ["sampled"]), (ValueError("broken"), ["cancelled"])],
    ids=lambda value: type(value).__name__,
)
def test_sampling_is_cancelled_by_an_error_and_not_by_a_suspension(error, ends):
    """It ends by itself where the flow run is suspended, whichever coroutine hears of it first."""
    seen = list[str]()

    async def sample(trained: asyncio.Event) -> None:
        try:
            await trained.wait()
            for _ in range(3):  # longer than an error takes to get here
                await asyncio.sleep(0)
            seen.append("sampled")
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def train(trained: asyncio.Event) -> None:
        trained.set()
        raise error

    async def play() -> None:
        trained = asyncio.Event()
        await run_together(sample(trained), train(trained))

    with pytest.raises(type(error)):
        asyncio.run(play())
    assert seen == ends


KILLS = 8 if "MARIN_RL_FAULTS_PLAYED" in os.environ else 16  # a sample, as of other faults


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_ends_in_the_same_bits(undisturbed, forked_runs, tmp_path):
    """Killed amid operations that create something, and right after others, as often as not."""
    expected, names = undisturbed
    creates = [name for name in names if name.startswith("create ") and ".probe" not in name]
    picked = random.Random(printed_seed()).sample(creates, KILLS)
    faults = dict(zip(picked, cycle(["kill-amid", "kill-after"]), strict=False))
    config = ahead(tmp_path / "killed", 2)
    starts, left = forked_runs.run_until_all_came(config, faults)
    print(f"{starts} starts, {len(left)} operations did not come")
    assert starts > KILLS // 2
    assert expected.same_as(outcome(config)) == []
