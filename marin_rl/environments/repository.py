"""Issues of repositories: rows of SWE-bench over local clones, a shell, and the row's tests.

The model works in a copy of the checkout at `base_commit`, by a tool `shell` whose calls run in the
sandbox; files stay from call to call, processes do not. A turn without calls ends the episode: the
row's test files are written again, and FAIL_TO_PASS and PASS_TO_PASS decide. Leaves out trees and
the running of tests in them (`repository_checkouts`).
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.chat import ProblemOptions, Problems
from marin_rl.environments.episode import Episode, Tool
from marin_rl.environments.prompt_files import Columns
from marin_rl.environments.registry import parse_options, register
from marin_rl.environments.repository_checkouts import (
    Checkouts,
    are_nodes,
    check_commit,
    clone_of,
    files_of_tests,
    git,
    missing_commits,
    names_in,
    open_to_all,
    restore,
    run_tests,
)
from marin_rl.environments.row_files import Rows, open_rows
from marin_rl.environments.sandbox_tools import (
    SandboxOptions,
    TimedEpisode,
    program_text,
    run_tool,
    shipped_tools,
    step_budget_s,
)
from marin_rl.environments.tool_class import MalformedCallOptions
from marin_rl.errors import ConfigError, InputError, RewardFault
from marin_rl.isolated.sandbox import Sandbox
from marin_rl.isolated.scratch import ScratchFolder, delete_tree, entries_under
from marin_rl.plain_files import Content, contents_at
from marin_rl.types import Example, RewardComponent, Split

SAMPLE = Path(__file__).parent / "samples" / "repository.json"
COLUMNS = (
    "repo", "base_commit", "problem_statement", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS",
    "instance_id",
)  # fmt: skip
HIDDEN = frozenset({"patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "hints_text"})
# Files that decide how pytest judges; they are those of the row, as the tests are.
OF_RUNNERS = frozenset(
    {
        "conftest.py", "pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "tox.ini",
        "setup.cfg", "pyproject.toml",
    }
)  # fmt: skip
_PYTEST_TIMEOUT_S = 120.0  # to import pytest once
_SETUP_CHARACTERS = 1000  # of the output of a set-up, in an error
INSTRUCTION = (
    "The repository is in the current folder. Solve the issue by changing its files with the tool "
    "`shell`. Hidden tests are run when you answer without calling the tool."
)


class RepositoryOptions(SandboxOptions, MalformedCallOptions, ProblemOptions):
    """Options of `repository`: issues of repositories with tests (docs/environments.md)."""

    repositories: str | None = Field(
        default=None,
        description="folder of local clones: owner/name, owner__name or name; null: that of the "
        "sample",
    )
    instruction: str = Field(default=INSTRUCTION, description="text after every issue; empty: none")
    test_command: str | None = Field(
        default=None,
        description="shell command that runs one test, with {tests} and maybe {python}; it passes "
        "by exit status 0; null: pytest for names with ::, else unittest",
    )
    setup_command: str | None = Field(
        default=None,
        min_length=1,
        description="shell command that builds what calls and tests need; it runs once for each "
        "commit in each process, in a checkout that the episodes get copies of; null: none",
    )
    setup_timeout_s: float = Field(
        default=60.0, gt=0, le=86_400, description="seconds of setup_command"
    )
    test_timeout_s: float = Field(
        default=60.0, gt=0, le=86_400, description="seconds of all tests of an episode"
    )
    shell_timeout_s: float = Field(default=30.0, gt=0, le=3600, description="seconds of one call")
    memory_bytes_max: int = Field(
        default=1 << 30, ge=32 << 20, description="memory of a call or of the tests, in bytes"
    )
    workspace_bytes_max: int = Field(
        default=1 << 30, ge=1 << 20, description="files of an episode's checkout, in bytes"
    )
    output_bytes_max: int = Field(
        default=1 << 20, ge=1 << 10, description="output that ends a call, in bytes"
    )
    processes_max: int = Field(
        default=64, ge=1, le=4096, description="processes and threads of a call or of the tests"
    )
    sandbox: Literal["bubblewrap"] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="bubblewrap", description="walls of a call and of the tests; there is no other"
    )
    interpreter: str | None = Field(
        default=None,
        description="absolute path of the Python of calls and tests, such as that of a virtual "
        "environment with the repository's packages; null: this one without packages",
    )
    reward_workers: int = Field(
        default=1, ge=1, le=64, description="processes that run calls and tests, each one at a time"
    )


@register("repository", RepositoryOptions)
class Repository(Problems):
    """Rewards a change of a repository after which all tests of the row pass."""

    name = "repository"

    def __init__(self, config: EnvironmentConfig) -> None:
        self._repository = options = parse_options(RepositoryOptions, config)
        if (options.path is None) != (options.repositories is None):
            raise ConfigError(
                "environment.options: expected both path (rows) and repositories (a folder of "
                "clones), or neither for the sample"
            )
        both_s = options.shell_timeout_s + options.test_timeout_s  # the last turn may need both
        spare_s = step_budget_s(config, both_s, "shell_timeout_s and test_timeout_s") - both_s
        self._budget_s = spare_s + options.shell_timeout_s
        if options.setup_command is not None:  # within the start of an episode
            step_budget_s(config, options.setup_timeout_s, "setup_timeout_s")
        columns = Columns(
            prompt=options.prompt_key or "problem_statement", id=options.id_key or "instance_id"
        )
        super().__init__(config, options, SAMPLE, columns)
        self._tools = shipped_tools(ShellTool, config, options)
        self.characters_max = self._tools.characters_max
        self._scratch: ScratchFolder | None = None

    def load_examples(self) -> None:
        self._repository.check_sandbox()
        if shutil.which("git") is None:
            raise ConfigError("environment repository needs git: apt-get install git")
        clones = self._clones
        rows = open_rows(self._path)
        _check_rows(rows, clones, self._box(_PYTEST_TIMEOUT_S), self._repository.test_command)
        super().load_examples()

    def example(self, seed: int, index: int, split: Split) -> Example:
        example = self.problem(super().example(seed, index, split), self._repository.instruction)
        shown = {name: value for name, value in example.metadata.items() if name not in HIDDEN}
        row = self.row_number(seed, index, split)
        return replace(example, answer=None, metadata={**shown, "row": row})

    def demonstration(self, example: Example) -> str | None:
        return None

    def load_scorer(self) -> None:
        """Tests are run by the episode."""

    def episode(self, example: Example) -> Episode:
        if example.environment_version != self.version:
            raise RewardFault(
                f"{self._path} is another file than that of the example: expected "
                f"{example.environment_version}, found {self.version}"
            )
        tools = replace(self._tools, arguments={"repository": self})
        return TimedEpisode(tools, example, self._budget_s)

    def tools_offered(self) -> Sequence[Tool]:
        return self._tools.schemas

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """0: of an episode that ended before its tests were run."""
        return (RewardComponent(name="resolved", value=0.0),)

    @cached_property
    def checkouts(self) -> Checkouts:
        """Trees of this process, which its episodes share."""
        prepare = None if self._repository.setup_command is None else self._set_up
        return Checkouts(self._clones, self._scratch, prepare)

    @cached_property
    def task_of_row(self) -> Callable[[int], "Task"]:
        return lru_cache(64)(lambda row: task_of(self._loaded.rows.row(row), self.checkouts))

    @cached_property
    def shell_box(self) -> Sandbox:
        return self._box(self._repository.shell_timeout_s)

    def passed(self, workspace: Path, names: Sequence[str], files: Mapping[str, Content]) -> bool:
        """Run tests in a tree that has the row's `files`; True where all of them pass."""
        options = self._repository
        box = self._box(options.test_timeout_s)
        return run_tests(box, workspace, names, options.test_command, files) >= {*names}

    def _set_up(self, tree: Path) -> None:
        """Run `setup_command` in a tree. Raises InputError with what it printed."""
        options, box = self._repository, self._box(self._repository.setup_timeout_s)
        assert options.setup_command is not None, "see the caller"
        result = box.run(_in_shell(box, options.setup_command), workspace=tree)
        open_to_all(tree)
        if not result.succeeded:
            said = program_text(result, box.limits, _SETUP_CHARACTERS)
            raise InputError(f"environment.options.setup_command failed: {said}")

    @cached_property
    def _clones(self) -> Path:
        """Folder of clones: `repositories`, or the sample's, which is made here."""
        if self._repository.repositories is not None:
            return Path(self._repository.repositories).absolute()
        self._scratch = ScratchFolder()
        rows, clones = make_sample(self._scratch.path)
        self._path = str(rows)
        return clones

    def _box(self, wall_s: float) -> Sandbox:
        options = self._repository
        return options.box(
            wall_s,
            memory_bytes=options.memory_bytes_max,
            disk_bytes=min(options.workspace_bytes_max, 256 << 20),
            workspace_bytes=options.workspace_bytes_max,
            output_bytes=options.output_bytes_max,
            processes=options.processes_max,
            files=1024,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Commit of a row, its tests, and the content of the files that belong to them."""

    repo: str
    commit: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    files: Mapping[str, Content]


def task_of(row: Mapping[str, Any], checkouts: Checkouts) -> Task:
    """Return the task of a row. Raises InputError where its test patch does not apply."""
    repo, commit = str(row["repo"]), str(row["base_commit"])
    failing, passing = (names_in(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    base = checkouts.pristine(repo, commit)
    with checkouts.patched(repo, commit, str(row["test_patch"])) as tree:
        git(tree, "add", "-A", "-f")  # also what the repository ignores
        changed = git(tree, "diff", "--cached", "--name-only", "-z", "--no-renames")
        names = {os.fsdecode(name) for name in changed.split(b"\0") if name}
        names |= files_of_tests([*failing, *passing], tree)
        names |= _files_of_runners(base) | _files_of_runners(tree)
        files: dict[str, Content] = {}
        for name in sorted(names):
            files |= contents_at(tree, name)
    return Task(
        repo=repo,
        commit=commit,
        fail_to_pass=tuple(failing),
        pass_to_pass=tuple(passing),
        files=files,
    )


def _files_of_runners(tree: Path) -> set[str]:
    """Return the names of files that steer pytest. Raises OSError as `entries_under`."""
    places = [entry.path for entry in entries_under(tree) if entry.name in OF_RUNNERS]
    return {str(Path(place).relative_to(tree)) for place in places}


class ShellTool:
    """The shell of an episode, in its own checkout."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._workspace: Path | None = None
        self.deadline = float("inf")

    def reset(self, row: int) -> None:
        """Make the checkout of a row. Raises InputError."""
        self._task = task = self._repository.task_of_row(row)
        self._workspace = self._repository.checkouts.workspace(task.repo, task.commit)

    def shell(self, command: str) -> str:
        """Run a command with `sh` in the folder of the repository and return its output.

        Files stay for the next call; processes, variables and the current folder do not.

        Args:
            command: The command line.
        """
        box = self._repository.shell_box
        text = run_tool(
            box,
            _in_shell(box, command),
            deadline=self.deadline,
            characters_max=self._repository.characters_max,
            workspace=self._place,
        )
        open_to_all(self._place)
        return text

    def get_reward(self) -> float:
        """Run the row's tests: 1 where all of them pass."""
        task = self._task
        try:
            # Configuration of test runners, and compiled modules, which Python may prefer, would
            # influence the tests: what was added of them goes.
            files = task.files
            compiled = {str(Path(name).with_name("__pycache__")) for name in files}
            restore(
                self._place, {**dict.fromkeys(_files_of_runners(self._place) | compiled), **files}
            )
            open_to_all(self._place)
        except OSError:  # a tree that cannot be read: paths that a program made too long
            return 0.0
        names = [*task.fail_to_pass, *task.pass_to_pass]
        return float(self._repository.passed(self._place, names, task.files))

    def close(self) -> None:
        if self._workspace is not None:
            delete_tree(self._workspace)

    @property
    def _place(self) -> Path:
        assert self._workspace is not None, "reset comes first"
        return self._workspace


# The tree belongs to another user than the one that a program runs as.
_SAFE_GIT = ("GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*")


def _in_shell(box: Sandbox, command: str) -> list[str]:
    path = f"{Path(box.python).parent}:/usr/local/bin:/usr/bin:/bin"
    return ["env", f"PATH={path}", *_SAFE_GIT, "/bin/sh", "-c", command]


def make_sample(folder: Path) -> tuple[Path, Path]:
    """Make the sample's repository in a folder; return its rows and the folder of clones."""
    sample = json.loads(SAMPLE.read_bytes())
    clones = folder / "clones"
    clone = clones / sample["name"]
    for name, text in sample["files"].items():
        place = clone / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    git(clone, "init", "-q", "-b", "main")
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "base")
    commit = git(clone, "rev-parse", "HEAD").decode().strip()
    rows = folder / "rows.jsonl"
    lines = [json.dumps({**row, "base_commit": commit}) for row in sample["rows"]]
    rows.write_text("\n".join(lines) + "\n")
    return rows, clones


def _check_rows(rows: Rows, clones: Path, box: Sandbox, command: str | None) -> None:
    """Refuse rows that could not be played. Raises InputError that names the row."""
    if command is not None and "{tests}" not in command:
        raise ConfigError(
            "environment.options.test_command: expected {tests} in it, where the name of a test "
            f"goes, found {command!r:.80}"
        )
    commits: dict[str, dict[str, int]] = {}
    nodes = False
    for index, row in enumerate(rows.scan(frozenset(COLUMNS))):
        try:
            nodes |= _names_nodes(row)
        except ValueError as error:
            raise InputError(f"{rows.place(index)}: {error}") from None
        commits.setdefault(str(row["repo"]), {}).setdefault(str(row["base_commit"]), index)
    for repo, rows_of in commits.items():
        _check_commits(rows, clones, repo, rows_of)
    if nodes and command is None:
        result = box.run([box.python, "-s", "-P", "-c", "import pytest"])
        if not result.succeeded:
            said = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(
                f"the rows name tests of pytest, which {box.python} does not import ({said}): "
                "expected environment.options.interpreter to name a Python with pytest and the "
                "repository's packages, or a test_command"
            )


def _names_nodes(row: Mapping[str, Any]) -> bool:
    """Return True if the row names tests as pytest does. Raises ValueError, InputError."""
    absent = [name for name in COLUMNS if row.get(name) is None]
    if absent:
        raise InputError(
            f"expected the columns {', '.join(COLUMNS)}, as SWE-bench has them; it lacks "
            f"{', '.join(absent)}"
        )
    failing = names_in(row["FAIL_TO_PASS"])
    if not failing:
        raise InputError("FAIL_TO_PASS names no test")
    check_commit(str(row["base_commit"]))
    return are_nodes([*failing, *names_in(row["PASS_TO_PASS"])])


def _check_commits(rows: Rows, clones: Path, repo: str, rows_of: Mapping[str, int]) -> None:
    try:
        clone = clone_of(clones, repo)
        missing = missing_commits(clone, list(rows_of))
    except InputError as error:
        raise InputError(f"{rows.place(min(rows_of.values()))}: {error}") from None
    if missing:
        raise InputError(
            f"{rows.place(rows_of[missing[0]])}: {clone} lacks the commit {missing[0]} "
            f"({len(missing)} of {len(rows_of)} are not there): git -C {clone} fetch origin "
            f"{missing[0]}"
        )
