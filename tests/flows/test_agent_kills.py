"""`kill -9` at random instants of a run of agents, and of its programs: nothing lost or doubled.

    MARIN_RL_KILLS=20 MARIN_RL_SEED=3 pytest -m slow -s tests/flows/test_agent_kills.py

One process samples, serves and trains. What it had committed must never change, and in the end it
must be, bit by bit, the undisturbed run, whose programs, or agents elsewhere, ask the same. A
program that is killed is one that ended with the status of its signal: its rollout is another one,
and a stage most of whose rollouts failed so is played again.
"""

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from integrations.test_agent import CLIENT
from integrations.test_agent_sessions import ask, door, end, sessions_folder
from support.cases import printed_seed
from support.faults import outcome
from support.fleet_servers import RegisteredServer
from support.flow_runs import LATE_S, ROUNDS_MAX, ForkedRuns, reached, still_committed
from support.run_factories import audit_round
from support.sandboxes import reason_to_skip
from support.scripted_policies import tool_run

from marin_rl.config import Config, load_config
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import iter_shards

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * 3600 if "MARIN_RL_KILLS" in os.environ else 1800),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]
KILLS = int(os.environ.get("MARIN_RL_KILLS") or 3)
LIFE_S_MIN, LIVES_MAX = 0.2, 1.5  # in seconds of processor time; times a start and one round
REMOTE = (
    "inference.endpoints=registered",
    "inference.publish=pull",
    "inference.fleet_timeout_s=600",
)
PROGRAM = """
import time
answer = ask(first)
for word in ("so", "why"):
    ask([*first, answer, {"role": "user", "content": word}])
    time.sleep(0.2)
open("out", "w").write(answer["content"])
"""
# Texts of a model that was never trained have one of these soon, so that turns end.
STOPS = ["a", "e", "i", "o", "u", "n", "r", "s", "t", "l", "d", "m"]

PROGRAMS: dict[str, Any] = {
    "command": ["{python}", "agent.py"],
    "check": ["{python}", "-c", "import sys; sys.exit(len(open('out').read()) % 2)"],
}


def agents(place: Path, *overrides: str, sessions: Path | None = None) -> Config:
    """A run of agents that branch; all of the same name, for samples depend on it."""
    work = place / "work"
    work.mkdir(parents=True)
    (work / "agent.py").write_text(CLIENT + PROGRAM)
    rows = "".join(f'{{"prompt": "say {row}", "answer": "x"}}\n' for row in range(8))
    (place / "rows.jsonl").write_text(rows)
    options: dict[str, Any] = {
        "path": str(place / "rows.jsonl"),
        **(PROGRAMS | {"folder": str(work)} if sessions is None else {"sessions": str(sessions)}),
        "eval_fraction": 0.5,
    }
    tool_run(place, {"name": "agent", "step_timeout_s": 120.0, "options": options}, 2, 2, 1024)
    settings = (f"rounds={ROUNDS_MAX}", "sampling.max_tokens=96", f"sampling.stop={STOPS!r}")
    commits = ("rollouts.commit_groups=true",)
    return load_config(place / "run.yaml", [*settings, *commits, *overrides])


def programs() -> list[int]:
    """Processes that run an agent of this test."""
    found = list[int]()
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if (process / "cmdline").read_bytes().endswith(b"\0agent.py\0"):
                found.append(int(process.name))
    return found


def check_kills(forked_runs: ForkedRuns, config: Config, alone: Config) -> None:
    """Kill a run at random moments of starts and rounds; `alone` is what it must end as."""
    choices, known = random.Random(printed_seed()), dict[str, str]()
    life_s_max = LIVES_MAX * forked_runs.first_round_s(config)
    for _ in range(KILLS):
        life_s = choices.uniform(LIFE_S_MIN, life_s_max)
        ended = forked_runs.run(config, life_s=life_s, limit_s=LATE_S)
        assert ended == -signal.SIGKILL, forked_runs.said()
        known = still_committed(config, known)
        print(f"after {life_s:.1f} s: {len(known)} commits, {reached(config)} rounds")
    print(f"{forked_runs.check_end(config, alone)} rounds, {KILLS} kills")


def test_a_run_of_agents_survives_kills(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    config, alone = agents(tmp_path / "killed"), agents(tmp_path / "alone")
    check_kills(forked_runs, config, alone)


def test_programs_that_are_killed_cost_their_rollouts_alone(forked_runs, tmp_path):
    choices, config, ended = (
        random.Random(printed_seed()),
        agents(tmp_path, f"rounds={KILLS}"),
        threading.Event(),
    )
    killed = list[int]()

    def kill() -> None:
        while len(killed) < KILLS and not ended.wait(choices.uniform(0.05, 0.5)):
            if running := programs():
                killed.append(choices.choice(running))
                with suppress(ProcessLookupError):
                    os.kill(killed[-1], signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        starts = 1
        while forked_runs.run(config):
            assert (starts := starts + 1) <= KILLS + 1, forked_runs.said()
    finally:
        ended.set()
        killing.join()
    run, rollouts = Run.open(config.root, config.run_id), list[dict[str, Any]]()
    for round in range(KILLS):
        assert audit_round(run, round).offences == {}
        for table in iter_shards(run, round, ("rollout_id", "status", "error")):
            rollouts += table.to_pylist()
    print(
        f"{len(killed)} kills, {sum(row['status'] != 'complete' for row in rollouts)} not complete"
    )
    assert len({row["rollout_id"] for row in rollouts}) == len(rollouts) == 4 * KILLS
    assert killed


def harness(url: str, ended: threading.Event) -> None:
    """Take sessions and play them; one whose run was killed is left."""
    while not ended.is_set():
        with suppress(httpx.TransportError):
            if (answer := httpx.post(f"{url}/sessions")).status_code != 201:
                ended.wait(0.1)
                continue
            session = answer.json()
            first = [{"role": "user", "content": session["task"]["prompt"]}]
            if (answer := ask(session, first)).status_code == 200:
                said = answer.json()["choices"][0]["message"]["content"]
                end(session, reward=len(said) % 2)


def test_sessions_elsewhere_survive_kills_of_their_run(forked_runs, tmp_path):
    ended = threading.Event()
    config, alone = (
        agents(tmp_path / name, sessions=sessions_folder(tmp_path)) for name in ("killed", "alone")
    )
    with door(config) as first, door(alone) as second:
        threads = [
            threading.Thread(target=harness, args=(url, ended)) for url in (first, second) * 2
        ]
        for thread in threads:
            thread.start()
        try:
            check_kills(forked_runs, config, alone)
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def test_an_engine_that_is_killed_and_started_again_costs_nothing(forked_runs, tmp_path):
    config, alone = (
        agents(tmp_path / name, f"rounds={KILLS}", *REMOTE) for name in ("killed", "alone")
    )
    choices, run, ended = (
        random.Random(printed_seed()),
        Run.create_or_open(config),
        threading.Event(),
    )
    killed = list[int]()

    def kill() -> None:
        for number in range(KILLS + 1):
            engine = RegisteredServer(run, tmp_path / f"{number}.log", "--trust")
            engine.wait()
            over = ended.wait(None if number == KILLS else choices.uniform(0, 3))
            engine.kill()
            if over:
                break
            killed.append(engine.requests)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        assert forked_runs.run(config, limit_s=LATE_S) == 0, forked_runs.said()
    finally:
        ended.set()
        killing.join()
    print(f"{len(killed)} of {KILLS} kills met the run, after {killed} requests")
    assert any(killed)
    engine = RegisteredServer(Run.create_or_open(alone), tmp_path / "alone.log", "--trust")
    try:
        assert forked_runs.run(alone, limit_s=LATE_S) == 0, forked_runs.said()
    finally:
        engine.end()
    assert outcome(config).same_as(outcome(alone)) == []
