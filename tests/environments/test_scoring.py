"""Scorers that hang, die and lie: each costs one rollout, and at most the time limit."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cases import others_slow
from support.processes import wait_until_gone

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.base import reward_of
from marin_rl.environments.checks import make_environment
from marin_rl.environments.registry import construct
from marin_rl.environments.scoring import Score, Scorer
from marin_rl.errors import InputError, RewardFault
from marin_rl.isolated.pool import Pool
from marin_rl.isolated.processes import WorkerLimits, WorkerSpec
from marin_rl.types import Example

LIMIT = "environment.reward_timeout_s sets the limit"

REWARDS = """
import os, re, subprocess, sys, time
import numpy as np

def reward(example, completion):
    match completion:
        case "raise": raise KeyError("who knows")
        case "exit": sys.exit(3)
        case "die": os.kill(os.getpid(), 9)
        case "hang": time.sleep(3600)
        case "hang in C": re.match(r"(a+)+$", "a" * 60 + "b")
        case "catch all":
            while True:
                try:
                    time.sleep(100)
                except BaseException:
                    pass
        case "nan": return float("nan")
        case "inf": return {"good": 1.0, "bad": float("inf")}
        case "beyond": return 1e300
        case "text": return "1.0"
        case "none": return None
        case "numpy": return np.float32(0.25)
        case "bool": return True
        case "named": return {"format": 1, "answer": 0.5}
        case "print": print("to standard output", flush=True); return 1
        case "answer": return float(example.answer == "4" and example.metadata["level"] == 2)
        case "jax": return float("jax" in sys.modules)
        case "pid": return os.getpid()
        case "child": return subprocess.Popen(["sleep", "600"]).pid
        case "child of a session":
            return subprocess.Popen(["sleep", "600"], start_new_session=True).pid
        case "say and hang in C":
            print("hanging", flush=True)
            re.match(r"(a+)+$", "a" * 60 + "b")
    return len(completion)

def by_group(prompts, completions, completion_ids, level, **columns):
    match completions[0]:
        case "raise": raise KeyError("who knows")
        case "short": return [1.0]
        case "kinds": return [0.5, None, "1.0", float("nan")]
        case "hang": time.sleep(3600)
        case "die": os.kill(os.getpid(), 9)
    return [len(text) + 10 * len(ids) + 100 * n
            for text, ids, n in zip(completions, completion_ids, level)]

def wrong_signature(completion): return 1
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentConfig]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "my_rewards.py").write_text(REWARDS)
    rows = [f'{{"prompt": "{i} + {i}?", "answer": "4", "level": 2}}\n' for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(rows))
    sys.path.insert(0, str(folder))
    options = {
        "path": str(folder / "prompts.jsonl"),
        "reward": "my_rewards:reward",
        "eval_fraction": 0.3,
        "reward_weights": {"format": 0.5},
    }
    yield EnvironmentConfig(name="chat", options=options, reward_timeout_s=3)
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def scorer(config: EnvironmentConfig) -> Iterator[Scorer]:
    """A scorer whose time limit no busy machine reaches."""
    patient = config.model_copy(update={"reward_timeout_s": 300.0})
    scorer = Scorer(make_environment(patient), patient)
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def impatient(config: EnvironmentConfig) -> Iterator[Scorer]:
    """A scorer with a short time limit, for what never ends."""
    scorer = Scorer(make_environment(config), config)
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def example(config: EnvironmentConfig) -> Example:
    return make_environment(config).example(0, 0, "train")


def score(scorer: Scorer, example: Example, *completions: str) -> list[Score]:
    return asyncio.run(scorer.score(example, completions))


def rewards(scores: list[Score]) -> list[float | str]:
    return [str(s) if isinstance(s, RewardFault) else reward_of(s) for s in scores]


def test_return_values_of_a_reward_function(scorer: Scorer, example: Example) -> None:
    scores = score(scorer, example, "abc", "numpy", "bool", "answer", "print", "named")
    assert rewards(scores) == [3.0, 0.25, 1.0, 1.0, 1.0, 1.0]
    assert not isinstance(scores[-1], RewardFault)
    assert [(c.name, c.value, c.weight) for c in scores[-1]] == [
        ("format", 1.0, 0.5),
        ("answer", 0.5, 1.0),
    ]


def test_limits_of_a_worker(scorer: Scorer, example: Example) -> None:
    where = f"my_rewards:reward, example {example.example_id}"
    told = rewards(
        score(scorer, example, "raise", "exit", "nan", "inf", "beyond", "text", "none", "ok")
    )
    assert told == [
        f"{where}: KeyError: 'who knows' (my_rewards.py, line 7)",
        f"{where}: SystemExit: 3 (my_rewards.py, line 8)",
        f"{where}: ValueError: expected finite numbers, found reward = nan with weight 1.0",
        f"{where}: ValueError: expected finite numbers, found bad = inf with weight 1.0",
        f"{where}: ValueError: expected numbers between -1e+15 and 1e+15: scale or clip it; found "
        "reward = 1e+300 with weight 1.0",
        f"{where}: ValueError: expected a number, found '1.0'",
        f"{where}: None: the function does not apply, so this rollout has no reward",
        2.0,
    ]


def of_group(config: EnvironmentConfig, **changes: object) -> EnvironmentConfig:
    options = {**config.options, "reward": "my_rewards:by_group"}
    return config.model_copy(update={"options": options, **changes})


def test_a_function_of_groups_is_called_once_for_all(config, example):
    patient = of_group(config, reward_timeout_s=300.0)
    scorer = Scorer(make_environment(patient), patient)
    where = f"my_rewards:by_group, example {example.example_id}"
    ids = [[1], [], [1, 2]]
    scores = asyncio.run(scorer.score(example, ["a", "bb", "ccc"], ids))
    assert rewards(scores) == [211.0, 202.0, 223.0]
    short = f"{where}: ValueError: expected a list of 3 numbers, found 1: [1.0]"
    assert rewards(score(scorer, example, "short", "b", "c")) == [short] * 3
    raised = f"{where}: KeyError: 'who knows' (my_rewards.py, line 40)"
    assert rewards(score(scorer, example, "raise", "b")) == [raised] * 2
    assert rewards(score(scorer, example, "kinds", "b", "c", "d")) == [
        0.5,
        f"{where}: None: the function does not apply, so this rollout has no reward",
        f"{where}: expected a number, found '1.0'",
        f"{where}: ValueError: expected finite numbers, found reward = nan with weight 1.0",
    ]
    dead = f"{where}: ended its process (signal 9)"
    assert rewards(score(scorer, example, "die", "b")) == [dead] * 2
    assert rewards(score(scorer, example, "after", "it")) == [205.0, 202.0]
    scorer.close()


@pytest.mark.slow
def test_a_hanging_group_costs_the_time_of_its_completions_once(config, example):
    impatient = of_group(config, reward_timeout_s=1.0)
    scorer = Scorer(make_environment(impatient), impatient)
    slow = f"my_rewards:by_group, example {example.example_id}: took longer than 3 s; {LIMIT}"
    assert rewards(score(scorer, example, "hang", "b", "c")) == [slow] * 3
    scorer.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong_signature", r"takes \(completion\): expected one of(.|\n)*\(verl\)"),
        ("no_such", "no_such"),
    ],
)
def test_an_unusable_function_is_an_error_at_once(config, example, name, words):
    options = {**config.options, "reward": f"my_rewards:{name}"}
    wrong = config.model_copy(update={"options": options})
    scorer = Scorer(make_environment(wrong), wrong)
    with pytest.raises(InputError, match=words):
        scorer.check()
    with pytest.raises(InputError, match=words):
        score(scorer, example, "abc")
    scorer.close()


def test_a_module_that_is_not_installed_is_an_error_at_once(config: EnvironmentConfig) -> None:
    options = {**config.options, "reward": "no_such_module:reward"}
    with pytest.raises(InputError, match="no module named 'no_such_module'"):
        make_environment(config.model_copy(update={"options": options}))


@pytest.mark.slow
@pytest.mark.parametrize("trouble", others_slow(["hang", "hang in C", "catch all"], "hang in C"))
def test_a_hanging_function_is_interrupted(impatient, example, trouble):
    told = rewards(score(impatient, example, "before", trouble, "after it"))
    slow = f"my_rewards:reward, example {example.example_id}: took longer than 3 s; {LIMIT}"
    assert told == [6.0, slow, 8.0]  # it would hang for ever


def test_a_worker_is_kept_and_knows_no_jax(scorer: Scorer, example: Example) -> None:
    first, jax = rewards(score(scorer, example, "pid", "jax"))
    assert rewards(score(scorer, example, "pid")) == [first]
    assert jax == 0.0
    assert first != os.getpid()


@pytest.mark.slow
def test_several_workers_score_at_once(config: EnvironmentConfig, example: Example) -> None:
    options = {**config.options, "reward_workers": 3}
    wide = config.model_copy(update={"options": options})
    scorer = Scorer(construct(wide), wide)

    async def run() -> list[list[Score]]:
        await asyncio.gather(*[scorer.score(example, ["warm up"]) for _ in range(3)])
        return await asyncio.gather(*[scorer.score(example, ["pid", "hang"]) for _ in range(3)])

    groups = asyncio.run(run())
    assert len({rewards(group)[0] for group in groups}) == 3
    scorer.close()


PARENT = """
import asyncio, sys, time
from marin_rl.config import EnvironmentConfig
from marin_rl.environments.checks import make_environment
from marin_rl.environments.scoring import Scorer
config = EnvironmentConfig.model_validate_json(sys.argv[1])
environment = make_environment(config)
scorer = Scorer(environment, config)
example = environment.example(0, 0, "train")
scores = asyncio.run(scorer.score(example, ["pid", "child", "child of a session"]))
print(*scorer._pool.process_ids, *(int(components[0].value) for components in scores), flush=True)
if sys.argv[2] == "busy":
    asyncio.run(scorer.score(example, ["say and hang in C"]))
time.sleep(100)
"""


@pytest.mark.parametrize("state", others_slow(["idle", "busy"], "busy"))
def test_a_worker_and_its_children_end_with_their_killed_parent(config, state):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, config.model_dump_json(), state],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
    )
    assert parent.stdout is not None
    processes = [int(word) for word in parent.stdout.readline().split()]
    assert len(processes) == 4
    if state == "busy":
        assert parent.stderr is not None
        assert "hanging" in parent.stderr.readline()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for pipe in (parent.stdout, parent.stderr):
        assert pipe is not None
        pipe.close()
    wait_until_gone(processes)


def test_starting_a_worker_does_not_wait_for_it(config, tmp_path, monkeypatch):
    (tmp_path / "imports_for_an_hour.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    limits = WorkerLimits(wall_s=1.0, memory_bytes=2**30, answer_bytes=2**10)
    pool = Pool(WorkerSpec(module="imports_for_an_hour", limits=limits), 1)
    pool.start()  # the test's own time limit is far below an hour
    worker = pool.assign()
    assert Path(f"/proc/{worker.process_id}").exists()
    assert not worker.ready.done()
    pool.close()


CHILDREN = """
import os, time

def begin(settings):
    return answer

def answer(request):
    if request == "interrupt":
        raise KeyboardInterrupt
    if request == "close":
        os.closerange(3, 4096)
    if request == "child":
        os.fork()  # and the child goes on as if it were the process
    return b"1"
"""


def test_a_call_that_ends_or_doubles_its_process_costs_itself(tmp_path, monkeypatch):
    (tmp_path / "children_of_calls.py").write_text(CHILDREN)
    monkeypatch.syspath_prepend(str(tmp_path))
    limits = WorkerLimits(wall_s=300.0, memory_bytes=2**30, answer_bytes=2**10, sealed=False)
    pool = Pool(WorkerSpec(module="children_of_calls", limits=limits), 1)
    calls = ["child", "interrupt", "1", "close", "1"]
    told = pool.ask([json.dumps(call).encode() for call in calls])
    expected = [1, "signal 2", 1, "exit status 1", 1]
    assert [str(each) for each in told] == [str(each) for each in expected]
    pool.close()


FORK_THAT_CLOSES = """
import os
from marin_rl.isolated.pool import Pool
from marin_rl.isolated.processes import WorkerLimits, WorkerSpec
limits = WorkerLimits(wall_s=1.0, memory_bytes=2**30, answer_bytes=2**10)
pool = Pool(WorkerSpec(module="imports_for_an_hour", limits=limits), 1)
worker = pool.assign()
pool.release(worker)
fork = os.fork()
if fork == 0:
    pool.close()
    os._exit(0)
assert os.waitpid(fork, 0)[1] == 0
fork = os.fork()
if fork == 0:
    own = pool.assign()
    assert own is not worker
    del worker
    pool.close()
    os._exit(0)
assert os.waitpid(fork, 0)[1] == 0
assert os.path.exists(f"/proc/{worker.process_id}")
assert pool.assign() is worker
pool.close()
assert not os.path.exists(f"/proc/{worker.process_id}")
"""


def test_a_fork_that_closes_a_pool_leaves_its_parents_workers_alone(tmp_path):
    (tmp_path / "imports_for_an_hour.py").write_text("import time\ntime.sleep(3600)\n")
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-W", "default::ResourceWarning", "-c", FORK_THAT_CLOSES]
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stderr.decode()) == (0, "")
