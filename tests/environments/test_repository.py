"""Issues of repositories: right and wrong changes, changes of the tests, refused rows."""

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.sandboxes import reason_to_skip
from support.scripted_policies import call, record, tool_run

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.registry import construct
from marin_rl.environments.repository import SAMPLE, Repository
from marin_rl.environments.repository_checkouts import files_of_tests, names_in
from marin_rl.errors import ConfigError, InputError
from marin_rl.isolated.scratch import ScratchFolder, bytes_under, sweep
from marin_rl.rollouts.replay import replay_rollouts
from marin_rl.types import Message, ToolCall, Turn

ROWS = json.loads(SAMPLE.read_bytes())["rows"]
GOLD = {row["instance_id"]: row["patch"] for row in ROWS}
CLAMP = "example__tally-clamp-high"


def made(**options: Any) -> Repository:
    """The environment, ready to play, with limits that no busy machine reaches."""
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    options = {"test_timeout_s": 120, "shell_timeout_s": 120, **options}
    config = EnvironmentConfig(name="repository", options=options, reward_timeout_s=900)
    environment = construct(config)
    assert isinstance(environment, Repository)
    environment.load_examples()
    return environment


@pytest.fixture(scope="module")
def sample() -> Repository:
    return made()


def played(environment: Repository, instance: str, *commands: str) -> tuple[list[str], float]:
    """Outputs of commands in an episode of a row, and the reward of what they leave."""
    rows = [environment.example(0, n, "train") for n in range(environment.size or 0)]
    episode = environment.episode(next(row for row in rows if row.example_id == instance))
    episode.start()
    texts: list[str] = []
    for number, command in enumerate(commands):
        arguments = json.dumps({"command": command})
        calls = (ToolCall(id=f"c{number:08d}", name="shell", arguments=arguments),)
        turn = Turn(role="assistant", content="", tool_calls=calls)
        texts += [m.content for m in asyncio.run(episode.step(turn)).messages]
    end = asyncio.run(episode.step(Turn(role="assistant", content="done")))
    assert end.done
    assert end.reward is not None
    asyncio.run(episode.close())
    return texts, end.reward


def apply(instance: str) -> str:
    return f"git apply <<'PATCH'\n{GOLD[instance]}\nPATCH"


def test_the_right_change_earns_1_and_no_change_nothing(sample: Repository):
    (text, diff), reward = played(sample, CLAMP, apply(CLAMP), "git diff --stat")
    assert (text, reward) == ("[no output]", 1.0)
    assert "tally/numbers.py | 2 +-" in diff
    assert played(sample, CLAMP)[1] == 0.0


def test_files_stay_between_calls_and_nothing_else(sample: Repository):
    commands = (
        "cd tally; export X=1; touch new; sleep 1000 > /dev/null 2>&1 &",
        "pwd; echo [$X]; ls tally",
    )
    texts, _ = played(sample, CLAMP, *commands)
    assert texts[1].splitlines()[:2] == ["/work", "[]"]
    assert "new" in texts[1].splitlines()
    # the next episode has a checkout of its own, and no history shows the solution
    (listing, log), _ = played(sample, CLAMP, "ls tally", "git log --all --oneline | wc -l")
    assert "new" not in listing
    assert log == "1"


WRONG = {
    "another change": "sed -i 's/max(value, low)/max(value, high)/' tally/numbers.py",
    "breaks a test that passed": apply(CLAMP) + "\nsed -i 's/int(digit)/digit/' tally/numbers.py",
    "empties the tests": "echo > tests/test_numbers.py",
    "passes all tests": "printf 'import unittest\nclass NumbersTest(unittest.TestCase):\n"
    "    def test_clamp_above(self): pass\n' > tests/test_numbers.py",
    "a package in place of a test": "rm -r tests; mkdir -p tests/test_numbers; "
    "echo > tests/test_numbers/__init__.py",
    "a package before a test": "mkdir tests/test_numbers; sed 's/assert.*/pass/' "
    "tests/test_numbers.py > tests/test_numbers/__init__.py",
    "a compiled test": "sed 's/self.assert.*/pass/' tests/test_numbers.py > t.py; "
    'python -c "import os, py_compile as p; from importlib.util import cache_from_source as c\n'
    "p.compile('t.py', c('tests/test_numbers.py'), "
    'invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)"',
    "a runner of its own": "printf 'def main(**_): pass\n' > unittest.py; echo > json.py",
    "prints a verdict": 'printf \'import os\nprint("OK")\nos.write(1, b"{}")\nos._exit(0)\n\''
    " > tally/__init__.py",
    "prints on every descriptor": "printf 'import os\nfor d in range(64):\n  try: os.write(d, "
    "b'{\\\"tests.test_numbers.NumbersTest.test_clamp_above\\\": true}')\n  except OSError: pass\n"
    "os._exit(0)\n' > tally/__init__.py",
    "skips": "printf 'import unittest\nraise unittest.SkipTest(1)\n' > tally/__init__.py",
}


@pytest.mark.parametrize("command", WRONG.values(), ids=WRONG)
def test_other_changes_earn_nothing(sample: Repository, command: str):
    assert played(sample, CLAMP, command)[1] == 0.0


def test_tests_that_the_model_changed_are_the_rows_again(sample: Repository):
    command = apply(CLAMP) + "\nrm -r tests; ln -s /usr/lib tests"
    assert played(sample, CLAMP, command)[1] == 1.0


def test_a_setup_runs_once_for_each_commit_and_every_episode_has_its_files():
    setup = "mkdir built && date +%N > built/number && chmod 600 built/number"
    environment = made(setup_command=setup)
    show = "cat built/number; rm -r built"
    outputs = [played(environment, row["instance_id"], show)[0] for row in ROWS[:2]]
    assert outputs[0] == outputs[1]
    assert outputs[0][0].strip().isdigit()
    texts, reward = played(environment, CLAMP, "python -c 'print(6 * 7)'", apply(CLAMP))
    assert (texts[0], reward) == ("42", 1.0)


def test_a_setup_that_fails_says_what_it_printed_and_costs_its_episodes():
    environment = made(setup_command="echo no compiler >&2; exit 3", setup_timeout_s=30)
    example = environment.example(0, 0, "train")
    with pytest.raises(InputError, match=r"setup_command failed: no compiler\n.* 3"):
        environment.episode(example).start()


def test_a_setup_has_the_time_of_a_step():
    options = {"setup_command": "make", "setup_timeout_s": 1000}
    config = EnvironmentConfig(name="repository", options=options, reward_timeout_s=900)
    with pytest.raises(ConfigError, match=r"setup_timeout_s: 1000 s, .* at least 1001"):
        construct(config)


def test_tests_that_hang_end_by_their_limit():
    environment = made(test_timeout_s=1)
    hang = "printf 'while True: pass\n' > tally/__init__.py"
    assert played(environment, CLAMP, hang)[1] == 0.0


@pytest.mark.slow
def test_commands_have_limits_and_walls(tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    environment = made(shell_timeout_s=3, workspace_bytes_max=4 << 20)
    commands = (
        f"cat {tmp_path}/secret /etc/shadow; ls /tmp; id -u",
        "while :; do :; done",
        "for i in 1 2 3 4 5 6 7 8 9; do head -c 1000000 /dev/zero > $i; done; sleep 1000",
        "rm ?; python -c \"import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\"",
    )
    (walls, late, full, deep), reward = played(environment, CLAMP, *commands)
    assert "secret: No such file" in walls
    assert "shadow: No such file" in walls
    assert int(walls.splitlines()[0]) > 0
    assert late == "[exceeded its limit of time: 3 s]"
    assert full == "[exceeded its limit of disk: 4 MiB]"
    assert "File name too long" in deep
    assert reward == 0.0


PYTEST_TEST = "from area import area\n\ndef test_area():\n    assert area(2, 3) == 6\n"
HACKED = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
"""


@pytest.fixture(scope="module")
def interpreter() -> Iterator[str]:
    """A Python with pytest, at a place that programs see."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        venv.create(folder, symlinks=True)
        (library,) = Path(folder).glob("lib/*/site-packages")
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            shutil.copytree(Path(spec.origin).parent, library / name)
        shutil.copy(Path(pytest.__file__).parents[1] / "py.py", library)
        Path(folder).chmod(0o755)
        yield f"{folder}/bin/python"


def clone(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A clone with a bug, and the row of its issue, with names as pytest has them."""
    place = folder / "clones" / "someone__area"
    (place / "tests").mkdir(parents=True)
    (place / "area.py").write_text("def area(a, b):\n    return a + b\n")
    (place / "tests/test_one.py").write_text("def test_one():\n    assert True\n")

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *who, *arguments]
        return subprocess.run(command, cwd=place, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "base")
    commit = git("rev-parse", "HEAD").strip()
    (place / "tests/test_area.py").write_text(PYTEST_TEST)
    git("add", ".")
    patch = git("diff", "--cached")
    git("commit", "-q", "-m", "later, with the solution")
    return folder / "clones", {
        "instance_id": "someone__area-1",
        "repo": "someone/area",
        "base_commit": commit,
        "problem_statement": "The area is wrong.",
        "test_patch": patch,
        "FAIL_TO_PASS": json.dumps(["tests/test_area.py::test_area"]),
        "PASS_TO_PASS": json.dumps(["tests/test_one.py::test_one"]),
    }


def of_row(folder: Path, clones: Path, row: dict[str, Any], interpreter: str, **options: Any):
    """The environment over two rows of a clone, both for training."""
    return made(
        path=own_rows(folder, row, row | {"instance_id": "other"}),
        repositories=str(clones),
        interpreter=interpreter,
        eval_fraction=0.0001,
        **options,
    )


def own_rows(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("command", [None, "{python} -m pytest -q {tests}"])
def test_tests_of_pytest_and_by_a_command(tmp_path: Path, interpreter: str, command: str | None):
    clones, row = clone(tmp_path)
    environment = of_row(tmp_path, clones, row, interpreter, test_command=command)
    instance = "someone__area-1"
    assert played(environment, instance, "sed -i 's/+/*/' area.py")[1] == 1.0
    assert played(environment, instance, "ls tests", "git log --all | grep -c later")[1] == 0.0
    hack = f"cat > conftest.py <<'END'\n{HACKED}\nEND\ncp conftest.py tests/"
    assert played(environment, instance, hack)[1] == 0.0
    plugin = (
        f"cat > evil.py <<'END'\n{HACKED}\nEND\nprintf '[pytest]\naddopts=-p evil\n'>pytest.ini"
    )
    assert played(environment, instance, plugin)[1] == 0.0


# Files with which no test is called, or a plugin says that all pass.
STEERING = {
    "pytest.toml": "printf '[pytest]\naddopts = [\"--setup-only\"]\n' > pytest.toml",
    ".pytest.toml": "printf '[pytest]\naddopts = [\"--setup-only\"]\n' > tests/.pytest.toml",
    "setup-plan": "printf '[pytest]\naddopts = --setup-plan\n' > pytest.ini",
    "an entry point": f"cat > evil.py <<'END'\n{HACKED}\nEND\nmkdir e-1.dist-info; printf "
    "'[pytest11]\nevil = evil\n' > e-1.dist-info/entry_points.txt; "
    "printf 'Name: e\nVersion: 1\n' > e-1.dist-info/METADATA",
}


@pytest.mark.slow
def test_files_that_steer_pytest_give_no_reward(tmp_path: Path, interpreter: str):
    clones, row = clone(tmp_path)
    environment = of_row(tmp_path, clones, row, interpreter)
    earned = {
        name: played(environment, "someone__area-1", command)[1]
        for name, command in STEERING.items()
    }
    assert earned == dict.fromkeys(STEERING, 0.0)


SETTINGS = {  # of a row: the test passes with them
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-q"\npythonpath = ["src"]\n',
    "conftest.py": "import pytest\n@pytest.fixture\ndef two():\n    return 2\n",
    "src/settled.py": "",
    "tests/test_one.py": "import settled\n\ndef test_one(two):\n    assert two == 2\n",
}


@pytest.mark.slow
def test_settings_and_fixtures_of_a_row_hold(tmp_path: Path, interpreter: str):
    clones, row = clone(tmp_path)
    place = clones / "someone__area"
    subprocess.run(["git", "checkout", "-q", row["base_commit"]], cwd=place, check=True)
    for name, text in SETTINGS.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    who = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "add", "-A"], cwd=place, check=True)
    subprocess.run([*who, "commit", "-q", "-m", "settings"], cwd=place, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=place, text=True).strip()
    row |= {"base_commit": commit}
    environment = of_row(tmp_path, clones, row, interpreter)
    spoiled = "sed -i 's/+/*/' area.py; rm pyproject.toml; echo 'raise SystemExit' > conftest.py"
    assert played(environment, "someone__area-1", spoiled)[1] == 1.0


def test_rows_that_cannot_be_played_are_refused_before_work(tmp_path: Path, interpreter: str):
    clones, row = clone(tmp_path)

    def refused(words: str, *rows: dict[str, Any], **options: Any) -> None:
        with pytest.raises((ConfigError, InputError), match=words):
            made(
                path=own_rows(tmp_path, *rows),
                repositories=str(clones),
                **{"interpreter": interpreter, **options},
            )

    without = {name: value for name, value in row.items() if name != "test_patch"}
    refused(r"rows.jsonl, line 2: expected the columns repo, .* it lacks test_patch", row, without)
    refused(
        r"repository no/where: expected a clone in one of .*no__where", row | {"repo": "no/where"}
    )
    refused(r"lacks the commit 1{40} .*fetch origin", row | {"base_commit": "1" * 40})
    refused("FAIL_TO_PASS names no test", row | {"FAIL_TO_PASS": "[]"})
    refused("expected a list of names of tests", row | {"PASS_TO_PASS": '"x"'})
    with tempfile.TemporaryDirectory(dir="/var/tmp") as bare:
        venv.create(bare, symlinks=True)
        Path(bare).chmod(0o755)
        words = r"tests of pytest, which .* does not import \(ModuleNotFoundError"
        refused(words, row, interpreter=f"{bare}/bin/python")
    refused(r"test_command: expected \{tests\} in it", row, test_command="pytest")
    with pytest.raises(ConfigError, match=r"expected both path .* and repositories"):
        made(path=own_rows(tmp_path, row))
    with pytest.raises(ConfigError, match=r"test_timeout_s: 90 s, .* expected at least 91"):
        construct(EnvironmentConfig(name="repository"))


def test_a_test_patch_that_does_not_apply_costs_its_episodes(tmp_path: Path, interpreter: str):
    clones, row = clone(tmp_path)
    patch = row["test_patch"].replace("new file mode 100644\n", "").replace("/dev/null", "a/x.py")
    environment = of_row(tmp_path, clones, row | {"test_patch": patch}, interpreter)
    with pytest.raises(InputError, match="the test patch does not apply"):
        played(environment, "someone__area-1")


def test_names_of_tests_lead_to_their_files(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("")
    names = ["tests/test_a.py::test_x[1]", "tests.test_a.Case.test_x", "nowhere.Case.test_y"]
    assert [files_of_tests([name], tmp_path) for name in names] == [{"tests/test_a.py"}] * 2 + [
        set()
    ]
    assert names_in('["a"]') == names_in(["a"]) == ["a"]


def test_folders_of_processes_that_are_gone_are_deleted():
    program = (
        "from marin_rl.isolated.scratch import ScratchFolder; import os\n"
        "folder = ScratchFolder(); print(folder.path); os.kill(os.getpid(), 9)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    left = Path(process.communicate()[0].strip())
    assert process.returncode == -9
    own = ScratchFolder()
    assert not left.exists()
    sweep()
    assert bytes_under(own.path) == 0
    own.close()
    assert not own.path.exists()


def scripted(messages: Sequence[Message], member: int) -> str:
    """Look around and then solve the issue, or by the member: answer at once."""
    if member == 1:
        return "It works as it is."
    if len(messages) == 1:
        return call("shell", command="ls -l; git log -1")
    issue = messages[0].content
    (patch,) = [row["patch"] for row in ROWS if issue.startswith(row["problem_statement"])]
    if len(messages) == 3:
        return call("shell", command=f"git apply <<'PATCH'\n{patch}\nPATCH")
    return "Done."


@pytest.mark.slow
def test_a_round_with_a_tiny_policy_is_rewarded_and_played_again(tmp_path: Path):
    if (reason := reason_to_skip()) is not None:
        pytest.skip(reason)
    options = {"shell_timeout_s": 60, "test_timeout_s": 60}
    settings = {"name": "repository", "turns_max": 3, "reward_timeout_s": 300, "options": options}
    run, (group,) = record(tool_run(tmp_path, settings, 1, 2, context_length=8192), scripted)
    solved, guessed = group.rollouts
    roles = ["user", *["assistant", "tool"] * 2, "assistant"]
    assert (solved.reward, [turn.role for turn in solved.turns]) == (1.0, roles)
    assert (guessed.reward, guessed.finish_reason) == (0.0, "stop")
    assert "patch" not in group.example.metadata
    replays = replay_rollouts(run, 0)
    assert replays.equal, replays
