"""`kill -9` at random instants of a run, and of the server it reports to: nothing lost or doubled.

    MARIN_RL_KILLS=200 MARIN_RL_SEED=3 pytest -m slow -s tests/flows/test_many_kills.py

One long run is killed again and again, and resumed each time. What it had committed must never
change, and in the end it must be, bit by bit, the undisturbed run.
"""

import os
import random
import signal
from collections.abc import Iterator

import pytest
from support.cases import printed_seed
from support.faults import committed_digests
from support.flow_runs import LATE_S, ROUNDS_MAX, ForkedRuns, debug, still_committed
from support.prefect_server import PrefectServer

KILLS = 5
VICTIMS = ("flow", "flow", "flow", "flow", "server")
# Rounds of a second, so that kills hit what they do and not only how they begin.
LARGER = ("rollouts.groups_per_round=24", "sampling.max_tokens=24")
LIFE_S_MIN = 0.2  # of processor time, here and below
LIVES_MAX = 1.5  # times what a start and one round take, undisturbed
LIFE_S_MAX = 8.0  # a start takes 5; or the undisturbed run has hundreds of rounds to play after it
AFTER_THE_SERVER_S = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """A running server of this module."""
    server = PrefectServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def forked_runs(server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> ForkedRuns:
    return ForkedRuns(tmp_path_factory.mktemp("forked") / "said", PREFECT_API_URL=server.url)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600 if "MARIN_RL_KILLS" in os.environ else 1800)
def test_a_run_survives_many_kills(server, forked_runs, tmp_path):
    count = int(os.environ.get("MARIN_RL_KILLS") or KILLS)
    print(f"{count} kills")
    choices = random.Random(printed_seed())
    config = debug(tmp_path / "killed", f"rounds={ROUNDS_MAX}", *LARGER)
    life_s_max = min(LIVES_MAX * forked_runs.first_round_s(config), LIFE_S_MAX)
    known = committed_digests(config)
    killed, refused = {"flow": 0, "server": 0}, 0
    for _ in range(count):
        victim, life_s = choices.choice(VICTIMS), choices.uniform(LIFE_S_MIN, life_s_max)
        killed[victim] += 1
        if victim == "flow":
            ended = forked_runs.run(config, life_s=life_s, limit_s=LATE_S)
        else:
            longer_s, also_kill = life_s + AFTER_THE_SERVER_S, {server.pid: life_s}
            ended = forked_runs.run(config, life_s=longer_s, also_kill=also_kill, limit_s=LATE_S)
            server.kill()
            server.start()
            refused += ended == 1  # no answer came when it was about to begin
        assert ended == -signal.SIGKILL or (victim, ended) == ("server", 1), forked_runs.said()
        known = still_committed(config, known)
        print(f"{sum(killed.values())}: {victim} after {life_s:.1f} s, {len(known)} commits")
    print(f"killed {killed}, of the latter {refused} before the flow had begun")
    rounds = forked_runs.check_end(config, debug(tmp_path / "alone", *LARGER))
    print(f"{rounds} rounds, {len(known)} commits before the last start")
