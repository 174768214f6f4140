"""Queries that people paste: they read the run's rollouts, and nothing else on this machine."""

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from support.run_factories import commit_round, configuration, group

from marin_rl.analysis.query import sql
from marin_rl.errors import InputError
from marin_rl.storage.runs import Run

# FILE is a new file outside the run, SHARD the committed one, TARGET in the run's folder.
WRITING = (
    "copy (select 1) to 'FILE'",
    "copy (select 1) to 'SHARD'",
    "select 1; copy (select 1) to 'TARGET'; select 2",
    "with x as (copy (select 1) to 'TARGET') from x",
    "with x as (/* */CoPy (select 1) to 'SHARD') from x",
    "explain analyze copy (select 1) to 'TARGET'",
    "prepare p as copy (select 1) to 'TARGET'; execute p",
    "from query('with x as (copy (select 1) to ''TARGET'') from x')",
    "attach 'FILE' as e; create table e.t as select 1; commit; select 1",
    "export database 'FILE'",
    "set temp_directory = 'FILE'; select 1",
    "pragma enable_profiling = 'json'; pragma profiling_output = 'FILE'; select 1",
    "call enable_logging(storage = 'file', storage_path = 'FILE')",
)
READING = (
    "from read_text('/etc/hostname')",
    "from '/etc/passwd'",
    "from glob('/*')",
    "from read_text('SHARD/../../../run.json')",
    "from read_text('LINK')",
    "create table t (a text); copy t from '/etc/hostname'; from t",
    "from read_parquet('https://localhost:1/x.parquet')",
)
SETTING = (
    "install httpfs",
    "install nothing from 'http://localhost:1'",
    "set threads = 64; select 1",
    "set allowed_directories = ['/']; select 1",
    "reset enable_external_access; select 1",
)


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    root = tmp_path / "runs" if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    return _run(root)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a root `runs`, in whose run lies a link to a file of the system."""
    folder = tmp_path_factory.mktemp("sql")
    shard = _shard(_run(folder / "runs"))
    shard.with_name("link").symlink_to("/etc/hostname")
    return folder


@pytest.mark.parametrize("query", [*WRITING, *READING, *SETTING])
def test_a_query_is_refused_with_the_remedy_and_changes_nothing(folder: Path, query: str) -> None:
    shard = folder / "runs/run/rollouts/round-00000/shard-0000.parquet"
    places = {"FILE": folder / "new", "SHARD": shard, "LINK": shard.with_name("link")}
    for word, path in {**places, "TARGET": shard.with_name("other.csv")}.items():
        query = query.replace(word, str(path))
    before = _tree(folder)
    with pytest.raises(InputError) as refused:
        sql(folder / "runs", "run", query)
    assert "--unsafe" in str(refused.value) or "must be at the top level" in str(refused.value)
    assert _tree(folder) == before
    assert sql(folder / "runs", "run", "select sum(reward) from rollouts").item() == 1.0


def test_a_run_in_an_object_store_opens_no_file_of_this_machine() -> None:
    run = _run(f"memory://{uuid.uuid4().hex}")
    for query in READING:
        with pytest.raises(InputError, match="--unsafe"):
            sql(run.config.root, "run", query)
    assert sql(run.config.root, "run", "select sum(reward) from rollouts").item() == 1.0


def test_queries_on_tables_in_memory_are_answered(run: Run) -> None:
    def ask(query: str) -> list[tuple]:
        return sql(run.config.root, "run", query).rows()

    assert ask("create table kept as from rollouts; select count(*) from kept") == [(2,)]
    assert ask("with x as (select reward from rollouts) select max(reward) from x") == [(1.0,)]
    assert ask('select reward as "copy" from rollouts order by all') == [(0.0,), (1.0,)]
    assert ask("select 'copy' as a, $$copy$$ as b -- copy") == [("copy", "copy")]
    assert ask("pivot (select reward, 1 as n from rollouts) on reward using sum(n)") == [(1, 1)]
    assert len(ask("explain select count(*) from rollouts")) == 1
    assert ask("create macro twice(x) as x * 2; select twice(21)") == [(42,)]


def test_rollouts_are_read_through_a_link_to_the_root(tmp_path: Path) -> None:
    _run(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert sql(tmp_path / "link", "run", "select count(*) from rollouts").item() == 2


def test_python_variables_are_no_tables(run: Run) -> None:
    query = "from secrets_of_the_caller"
    secrets_of_the_caller = sql(run.config.root, "run", "select 1 as a")
    with pytest.raises(InputError, match="does not exist"):
        sql(run.config.root, "run", query)
    del secrets_of_the_caller


def test_unsafe_lifts_the_limits_for_one_query(run: Run, tmp_path: Path) -> None:
    there = tmp_path / "there.csv"
    query = f"copy (select count(*) n from rollouts) to '{there}'; select 1"
    assert sql(run.config.root, "run", query, unsafe=True).item() == 1
    assert there.read_text() == "n\n2\n"
    assert sql(run.config.root, "run", f"from '{there}'", unsafe=True).item() == 2
    with pytest.raises(InputError, match="--unsafe"):
        sql(run.config.root, "run", f"from '{there}'")


@pytest.mark.slow
def test_the_command_refuses_and_names_the_flag(tmp_path: Path) -> None:
    _run(tmp_path)
    written = tmp_path / "written.csv"
    query = f"copy (select 1 as a) to '{written}'; select 7 as b"
    command = [sys.executable, "-m", "marin_rl", "sql", "run", query, "--root", str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 1
    assert "--unsafe" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not written.exists()
    done = subprocess.run(
        [*command, "--unsafe", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, '{"b": 7}')
    assert written.exists()


def _run(root: str | Path) -> Run:
    run = Run.create_or_open(configuration(str(root)))
    commit_round(run, 0, [[group("a", [0.0, 1.0])]])
    return run


def _shard(run: Run) -> Path:
    path = run.store.local_path("rollouts/round-00000/shard-0000.parquet")
    assert path is not None, "the root is local"
    return path


def _tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}
