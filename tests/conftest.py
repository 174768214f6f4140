"""Shared setup of all tests. It also lets them import the helpers in this folder by name."""

import gc
import os
import re
import sys
from pathlib import Path

# As the Makefile does: with it, every process that tests start compiles its modules again, 6 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Collections of garbage take a quarter of the time of the imports, and find none.
gc.set_threshold(100_000, 20, 100)
# No test cuts the power, and a disk takes 3 ms for each of tens of thousands of small files.
os.fsync = lambda descriptor: None
# Before anything imports JAX: two devices, so that every test of sharding has something to shard.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

# What one test compiles, the next one finds, in whatever process, also of the next `make test`; the
# home folder stays clean. `pytest --cache-clear` drops it.
PROGRAMS = Path(__file__).resolve().parents[1] / ".pytest_cache/d/marin-rl-programs"
os.environ.setdefault("MARIN_RL_TEST_PROGRAMS", str(PROGRAMS))
os.environ["MARIN_RL_COMPILATION_CACHE"] = os.environ["MARIN_RL_TEST_PROGRAMS"]

from support import type_checks

type_checks.install()

from marin_rl.machine import machine_key

os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", f"{os.environ['MARIN_RL_TEST_PROGRAMS']}/{machine_key()}"
)
# Programs that compile in a moment are kept too: thousands of them take most of the suite's time.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Runs that tests start are remembered apart from the user's own.
os.environ["XDG_STATE_HOME"] = str(PROGRAMS.with_name("marin-rl-state"))
# So is what Prefect keeps of them: it makes its folder, but no parent.
PROGRAMS.parent.mkdir(parents=True, exist_ok=True)
os.environ["PREFECT_HOME"] = str(PROGRAMS.with_name("marin-rl-prefect"))

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, settings
from support.forked_python import python
from support.forked_workers import ForkedWorkers
from support.quick_programs import drop_quick_programs, quick_programs
from xdist.scheduler import LoadFileScheduling

# jaxtyping's plugin has imported JAX before this file, so the variables above reach children only.
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

settings.register_profile(
    "marin-rl",
    max_examples=30,  # others each time
    deadline=None,  # the cores are shared with other programs
    derandomize="MARIN_RL_SEED" in os.environ,  # a fixed seed means the same examples
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("marin-rl")


QUICK = frozenset({"compiled_quickly", "itself_compiled_quickly"})


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """A module whose programs are compiled quickly."""
    with quick_programs():
        yield


@pytest.fixture
def itself_compiled_quickly() -> Iterator[None]:
    """A test whose programs are compiled quickly, before those of its room that use users' own."""
    with quick_programs():
        yield


@pytest.fixture(scope="module")
def long_runs() -> Iterator[None]:
    """A module that trains for minutes by what other tests call with shapes checked."""
    with type_checks.shapes_unchecked():
        yield


@pytest.fixture(scope="module")
def prefect_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of one Prefect server that commands report to: one of its own costs each 6 s.

    It is forked, and ends with the file: one that waits takes a fiftieth of a core.
    """
    from support.prefect_server import PrefectServer  # imports Prefect, 2 s of each small run

    server = PrefectServer(tmp_path_factory.mktemp("prefect"), python())
    server.start()
    yield server.url
    server.kill()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test of programs as users have them meets none that was compiled quickly before it."""
    if not is_quick(item):
        drop_quick_programs()


def is_quick(item: pytest.Item) -> bool:
    """Return True for a test whose programs are compiled quickly."""
    return not QUICK.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what is imported out of collections of garbage: it takes 0.5 s of each full one."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without a test of the mark that is asked for: to import all takes 15 s.

    `-m slow` and `-m 'bits and (isa or not slow)'` ask for what their first word marks. A test has
    a mark by `pytest.mark` or from `others_slow`, which both leave the word in the file.
    """
    asked = re.fullmatch(r"(slow|bits)( and \([^()]*\))?", config.option.markexpr)
    if asked is None or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    marked = rf"(mark\.|others_){asked[1]}\b"
    return None if re.search(marked, collection_path.read_text("utf-8")) else True


# What `make test` gives to a process at a time, in this order: rooms whose tests share much
# (compiled programs, what JAX has traced, servers of buckets), from the one that takes longest on,
# and every file outside of them. Files whose tests wait for processes of theirs begin among the
# first rooms, while others compute. The Prefect server of flows lives as long as its process, so
# they are the last room; short files after it fill both cores to the end.
UNITS = (
    "training",
    "integrations/test_agent.py",
    "inference",
    "serving",
    "integrations/test_agent_sessions.py",
    "attacks",
    "rollouts",
    "environments",
    "storage",
    "models",
    "analysis",
    "flows",
    "batching",
)
# The files with the slow tests that take longest, from about the longest on: they begin first, so
# that `make test-slow`, where a process takes a file at a time, does not end with one at work.
LONGEST = (
    "test_bench_runs.py",
    "test_doc_stories.py",
    "flows/test_runners.py",
    "flows/test_suspended.py",
    "flows/test_every_operation.py",
    "training/test_recipes.py",
    "flows/test_server_dies.py",
    "flows/test_stack.py",
    "flows/test_demo.py",
    "flows/test_game.py",
    "flows/test_many_kills.py",
    "test_bench.py",
    "flows/test_ahead.py",
    "test_wheel.py",
    "analysis/test_verify.py",
    "flows/test_reward_model.py",
    "test_doc_commands.py",
    "test_notebooks.py",
    "flows/test_windowed.py",
    "training/test_replay.py",
    "flows/test_fleet.py",
    "attacks/test_bodies.py",
    "flows/test_choices.py",
    "pages/test_browser.py",
    "serving/test_standalone.py",
    "attacks/test_templates.py",
    "serving/test_life.py",
)
TOP = Path(__file__).parent


def is_of_slow(config: pytest.Config) -> bool:
    """Return True where slow tests alone are asked for."""
    return config.option.markexpr.strip() == "slow"


def room_of(path: Path | str) -> str:
    """Return the folder below this one that a test file is in; the file itself if it is in none."""
    return Path(path).resolve().relative_to(TOP).parts[0]


def unit_of(path: Path) -> str:
    """Return the part of `make test` that a test file is in: its room, or the file itself."""
    room = room_of(path)
    return room if room in UNITS else str(path.resolve().relative_to(TOP))


class ByUnit(LoadFileScheduling):
    """A unit of tests at a time to each process."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(self.config.rootpath / nodeid.partition("::")[0])


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers of this machine from one process that has imported the tests."""
    local = [spec for spec in specs if spec.popen and not spec.python]
    if local:
        workers = ForkedWorkers(config)
        config.add_cleanup(workers.stop)
        for spec in local:
            spec.python = workers.python


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Give units to processes; slow tests, of which one may take minutes, by file."""
    by_file = config.option.dist != "loadfile" or is_of_slow(config)
    return None if by_file else ByUnit(config, log)


def keep_one_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the slow tests of part K of N, which `MARIN_RL_SLOW_PART=K/N` asks for: every Nth of
    each room, and one of a room that has fewer.

    Tests of a file that run in order stay together, and those in no folder are one room. Where bits
    are asked for, slow tests are those marked `isa`.
    """
    text = os.environ.get("MARIN_RL_SLOW_PART", "1/1")
    asked = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", text)
    if asked is None or not 1 <= int(asked[1]) <= int(asked[2]):
        raise pytest.UsageError(f"MARIN_RL_SLOW_PART is {text!r}; give K/N, such as 2/5")
    marks = {"slow"} if is_of_slow(config) else {"slow", "isa"}
    slow = [item for item in items if marks <= {mark.name for mark in item.iter_markers()}]
    unit = lambda item: item.path if item.get_closest_marker("in_order") else item
    part, parts = int(asked[1]) - 1, int(asked[2])
    rooms: dict[str, dict[Any, None]] = {}
    for item in slow:
        room = room_of(item.path)
        rooms.setdefault("" if room == item.path.name else room, {})[unit(item)] = None
    units = set[Any]()
    for of_room in map(list, rooms.values()):
        units.update(of_room[part % len(of_room) :: parts])
    dropped = {item for item in slow if unit(item) not in units}
    if dropped:
        config.hook.pytest_deselected(items=[*dropped])
        items[:] = [item for item in items if item not in dropped]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Units in their order, and of slow tests the longest files first; in a unit, tests that are
    compiled quickly before others.

    A test that is not, after one that is, drops all programs of its process, which then traces and
    reads them again: tests of one kind come together, so that this happens once in a unit.
    """
    longest = LONGEST if is_of_slow(config) else ()
    files = {TOP / name: number for number, name in enumerate(longest)}
    units = {name: number for number, name in enumerate(UNITS)}
    unit = {item.path: unit_of(item.path) for item in items}
    order = {name: number for number, name in enumerate(dict.fromkeys([*unit.values(), *unit]))}
    others = {unit[item.path] for item in items if not is_quick(item)}
    items.sort(
        key=lambda item: (
            files.get(item.path, len(files)),
            units.get(unit[item.path], len(units)),
            unit[item.path] in others,
            order[unit[item.path]],
            not is_quick(item),
            order[item.path],
        )
    )
    if is_of_slow(config) or config.option.markexpr.startswith("bits"):
        keep_one_part(config, items)
