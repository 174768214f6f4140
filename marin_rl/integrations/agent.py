"""Any program that calls a model, played as it is: `environment.name: agent`.

Each rollout runs the command in a sandbox of its own, in a copy of a folder, with the address of a
session in its variables. Each call of the model is a turn of the policy. A call whose messages go
on from any turn before extends its tokens; another one (a rewritten history, a second agent) begins
a conversation. The program's standard output is the answer that the reward function scores, and a
command may check the folder that it leaves. Leaves out the session (`agent_gateway`) and the model
APIs (`model_apis`).
"""

import asyncio
import hashlib
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from marin_rl.config import CodeName, EnvironmentConfig
from marin_rl.environments.chat import Chat, ChatOptions
from marin_rl.environments.episode import Opening, Start, StepResult, Tool
from marin_rl.environments.registry import parse_options, register
from marin_rl.environments.repository_checkouts import open_to_all, restore
from marin_rl.errors import ConfigError, EnvironmentTimeout, InputError, RewardFault
from marin_rl.integrations import agent_relay
from marin_rl.integrations.agent_gateway import REDACTED, Session, WaitingCall
from marin_rl.integrations.agent_sessions import OfferedSession, private_folder
from marin_rl.isolated.sandbox import Sandbox, SandboxLimits, SandboxResult, check_sandbox
from marin_rl.isolated.sandbox_command import ENVIRONMENT, WORK, mounted
from marin_rl.isolated.scratch import ScratchFolder, delete_tree
from marin_rl.isolated.worker import uncharged
from marin_rl.model_apis.call import ModelAnswer, ModelCall, comparable
from marin_rl.plain_files import Content, plain_parts
from marin_rl.types import Example, Message, RewardComponent, Split, Turn
from marin_rl.user_code import check_importable, load

MODEL = "policy"
ALL, MAIN = "all", "main"  # calls that are trained
EXIT = "exit "  # an end, with the status of the program
TASK_FILE = "task.json"
VARIABLES = {
    "OPENAI_BASE_URL": "{base_url}",
    "OPENAI_API_BASE": "{base_url}",
    "OPENAI_API_KEY": "{key}",
    "ANTHROPIC_BASE_URL": "{root_url}",
    "ANTHROPIC_API_KEY": "{key}",
}
FILES = "files"  # a column: texts by path, which the folder of the row's rollouts has too
TIMEOUT = "timeout"  # an end
PRINTED_CHARACTERS_MAX = 4096  # of each output that is kept with a rollout
_SHOWN = 600  # characters of an output in a fault
_CALLS_DEFAULT = 64


class AgentOptions(ChatOptions):
    """Options of `agent`: a program, its folder and its limits (docs/agents.md)."""

    command: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="the program and its arguments; {prompt} is the row's prompt, {base_url}, "
        "{root_url} (without /v1), {key} and {model} are those of the session, {python} is the "
        "interpreter; null: agents elsewhere take `sessions`",
    )
    sessions: str | None = Field(
        default=None,
        description="folder of this machine through which `marin-rl sessions` hands rollouts out "
        "to agents elsewhere, of this user alone; in place of command",
    )
    take_timeout_s: float = Field(
        default=3600.0, gt=0, le=604_800, description="seconds that a session waits for its agent"
    )
    folder: str | None = Field(
        default=None,
        description="folder that each rollout works in a copy of; null: an empty one. task.json in "
        "it has the row without its answer",
    )
    variables: dict[str, str] = Field(
        default={},
        description="variables of the program beside OPENAI_BASE_URL, OPENAI_API_KEY, "
        "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; with the names in braces of command",
    )
    interpreter: str | None = Field(
        default=None,
        description="absolute path of a Python, such as that of a virtual environment with the "
        "agent's packages; null: this one without packages",
    )
    programs_max: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="programs that run at once in each of reward_workers processes",
    )
    agent_timeout_s: float = Field(
        default=300.0, gt=0, le=86_400, description="seconds of a program in all"
    )
    on_timeout: Literal["drop", "score"] = Field(
        default="drop",
        description="a program that takes longer costs its rollout, or is ended and scored as one "
        "that ended by itself",
    )
    check: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="command that runs in the folder afterwards: the reward is 1 if it succeeds, "
        "else 0, in place of the reward function; null: the function scores the standard output",
    )
    train: Literal["all", "main"] | CodeName = Field(
        default="all",
        description="calls of the model that are trained: all; main, the first and those that go "
        "on from it; or FILE.py:function or module:function of (messages, tools), of which the "
        "last message is the answer, that returns True for a call to train",
    )
    check_folder: str | None = Field(
        default=None,
        description="folder whose entries replace those of the rollout's before the check, such as "
        "tests that the agent must not see or change",
    )
    memory_bytes_max: int = Field(
        default=1 << 30, ge=32 << 20, description="memory of a program, in bytes"
    )
    workspace_bytes_max: int = Field(
        default=1 << 30, ge=1 << 20, description="files of a program, in bytes"
    )
    output_bytes_max: int = Field(
        default=1 << 20, ge=1 << 10, description="output that ends a program, in bytes"
    )
    processes_max: int = Field(
        default=64, ge=4, le=4096, description="processes and threads of a program"
    )


@register("agent", AgentOptions, tools=True)
class Agent(Chat):
    """Rewards the standard output of a program, or a check of the folder that it leaves."""

    name = "agent"
    replayable = False
    own_prompts = True

    def __init__(self, config: EnvironmentConfig) -> None:
        self.options = options = parse_options(AgentOptions, config)
        super().__init__(config, options)
        if (options.command is None) == (options.sessions is None):
            raise ConfigError(
                "environment.options: expected one of command, a program that each rollout runs, "
                "and sessions, a folder of rollouts for agents that run elsewhere"
            )
        if options.train not in (ALL, MAIN):
            check_importable(options.train, "choosing function")
        step_s = config.step_timeout_s or config.reward_timeout_s
        self.replays_calls = options.command is not None
        self.calls_max = config.turns_max or _CALLS_DEFAULT
        for name in ("folder", "check_folder"):
            folder = getattr(options, name)
            if folder is not None and not Path(folder).is_dir():
                raise ConfigError(
                    f"environment.options.{name}: expected a folder, found {Path(folder)}"
                )
        limits = SandboxLimits(
            wall_s=options.agent_timeout_s,
            cpu_s=int(options.agent_timeout_s) + 1,
            memory_bytes=options.memory_bytes_max,
            workspace_bytes=options.workspace_bytes_max,
            output_bytes=options.output_bytes_max,
            processes=options.processes_max,
        )
        self.box = Sandbox(limits, interpreter=options.interpreter)
        self.check_box = Sandbox(
            replace(limits, wall_s=step_s, cpu_s=int(step_s) + 1), interpreter=options.interpreter
        )
        path = ENVIRONMENT["PATH"]
        self._check_program("command", [options.folder], options.variables.get("PATH", path))
        self._check_program("check", [options.folder, options.check_folder], path)
        # Threads that wait for programs: asyncio's own are a few more than there are cores.
        self.threads = ThreadPoolExecutor(2 * options.programs_max, thread_name_prefix="agent")
        self.room = asyncio.Semaphore(options.programs_max)
        self._scratch: ScratchFolder | None = None

    def _check_program(self, name: str, folders: Sequence[str | None], path: str) -> None:
        """Raise ConfigError for a command that the sandbox cannot start."""
        if (command := getattr(self.options, name)) is None:
            return
        program, places = self._filled(command[0]), [*filter(None, folders)]
        own = program.removeprefix(f"{WORK}/")
        is_own = "/" in program and not own.startswith("/")
        tried = [str(Path(place, own)) for place in places] if is_own else [program]
        found = next(filter(None, (shutil.which(each, path=path) for each in tried)), None)
        shown = (*mounted(self.box.interpreter), *places)
        if found is None or not any(map(Path(found).is_relative_to, shown)):
            raise ConfigError(
                f"environment.options.{name}: expected a program that the sandbox has and may run, "
                f"{{python}}, one of {path}, or an executable file of the folder, such as ./run; "
                f"found {program!r}"
            )

    def load_examples(self) -> None:
        if self.options.command is not None:
            check_sandbox("bubblewrap", self.options.interpreter)
        super().load_examples()
        # A changed program is another environment.
        folders = filter(None, (self.options.folder, self.options.check_folder))
        self.version = "+".join((self.version, *map(_digest_of, folders)))

    def load_scorer(self) -> None:
        super().load_scorer()
        if self.options.train not in (ALL, MAIN):
            load(self.options.train, "choosing function")

    def trains(self, call: ModelCall, answer: Message, *, is_main: bool) -> bool:
        """True where a call is trained. Raises what the user's function raises."""
        if self.options.train in (ALL, MAIN):
            return is_main or self.options.train == ALL
        chosen = load(self.options.train, "choosing function")(
            [*call.messages, answer], [*call.tools]
        )
        if not isinstance(chosen, bool):
            raise RewardFault(
                f"environment.options.train: expected True or False, found {chosen!r:.80}"
            )
        return chosen

    def example(self, seed: int, index: int, split: Split) -> Example:
        example = super().example(seed, index, split)
        try:
            _files_of(example)
        except ValueError as error:
            raise InputError(f"example {example.example_id}: {error}") from None
        return example

    def episode(self, example: Example) -> "AgentEpisode":
        if self.options.sessions is not None:
            return ElsewhereEpisode(self, example, Path(self.options.sessions))
        if self._scratch is None:
            self._scratch = ScratchFolder()
        return ProgramEpisode(self, example, self._scratch)

    def workspace(self, example: Example, scratch: ScratchFolder) -> Path:
        """A new folder for one rollout, which the program's user may write to."""
        outer = Path(tempfile.mkdtemp(prefix="agent-", dir=scratch.path))
        outer.chmod(0o711)
        workspace = outer / "work"
        if self.options.folder is None:
            workspace.mkdir()
        else:
            shutil.copytree(self.options.folder, workspace, symlinks=True)
        restore(workspace, _files_of(example))
        (workspace / TASK_FILE).write_text(json.dumps(_task(example)), encoding="utf-8")
        open_to_all(workspace)
        return workspace

    def reward_of(
        self, example: Example, result: SandboxResult, workspace: Path
    ) -> tuple[dict[str, float], str]:
        """Reward of a program that ended, by component, and the end and output of a check.

        Raises what a reward function raises.
        """
        if self.options.check is None:
            text = result.stdout.decode(errors="replace").strip()
            return self.reward_of_text(example, text), ""
        if self.options.check_folder is not None:
            _replace_entries(Path(self.options.check_folder), workspace)
            open_to_all(workspace)
        command = [self._filled(part) for part in self.options.check]
        checked = self.check_box.run(command, workspace=workspace)
        printed = (checked.stdout + checked.stderr).decode(errors="replace")
        return {"check": float(checked.succeeded)}, f"{checked.how}\n{printed}"

    def reward_of_text(self, example: Example, output: str) -> dict[str, float]:
        components = super().score(example, output)
        return {each.name: each.value * each.weight for each in components}

    def _filled(self, part: str) -> str:
        return part.replace("{python}", self.box.python)

    def run(self, example: Example, session: Session, workspace: Path) -> SandboxResult:
        """Run the program to its end, or to that of its session."""
        values = {"key": session.key, "model": MODEL, "python": self.box.python}
        setup = {
            "control": f"/work/{CONTROL}",
            "socket": f"/work/{SOCKET}",
            "values": values | {"prompt": example.messages[-1].content},
            "variables": VARIABLES | self.options.variables,
            "command": self.options.command,
        }
        return self.box.run(
            [self.box.python, "-I", "-S", "-c", relay_source()],
            stdin=json.dumps(setup).encode(),
            workspace=workspace,
        )

    @property
    def scores_groups(self) -> bool:
        return False  # each rollout is scored as it ends

    def score(self, example: Example, completion: str) -> tuple[RewardComponent, ...]:
        """0: of a rollout whose program had not ended when a limit did."""
        return (RewardComponent(name="unfinished", value=0.0),)


SOCKET, CONTROL = ".model.sock", ".session.sock"


def _task(example: Example) -> dict[str, Any]:
    return {
        "id": example.example_id,
        "prompt": example.messages[-1].content,
        "messages": [{"role": m.role, "content": m.content} for m in example.messages],
    }


def _files_of(example: Example) -> dict[str, Content]:
    """Files of a row, by their paths in the folder. Raises ValueError."""
    files = example.metadata.get(FILES) or {}
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise ValueError(f"{FILES}: expected texts by path, found {files!r:.80}")
    for path in files:
        plain_parts(path)
    return {path: text.encode() for path, text in files.items()}


def _replace_entries(source: Path, workspace: Path) -> None:
    """Put the entries of a folder in the place of those of the same names.

    The program's own go first, and with them links that it may have made to files of this machine.
    """
    for entry in source.iterdir():
        place = workspace / entry.name
        delete_tree(place)
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, place, symlinks=True)
        else:
            shutil.copy2(entry, place, follow_symlinks=False)


def _digest_of(folder: str) -> str:
    """Digest of the names and contents of all files in a folder, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
            name, content = str(path.relative_to(folder)).encode(), path.read_bytes()
            digest.update(b"%d %d " % (len(name), len(content)) + name + content)
    return digest.hexdigest()[:16]


@cache
def relay_source() -> str:
    assert agent_relay.__file__ is not None, "it is a file of this package"
    return Path(agent_relay.__file__).read_text(encoding="utf-8")


class Conversations:
    """Conversations of a session up to each turn of the policy, found by what an agent sends."""

    def __init__(self) -> None:
        self._turns: dict[tuple[Any, ...], int] = {}
        self._count = 0

    def add(self, call: ModelCall, answer: Message) -> None:
        """Keep the conversation that an answer ends; answers are numbered from 0."""
        self._count += 1
        self._turns[_known_by((*call.messages, answer), call.tools)] = self._count - 1

    def parent(self, call: ModelCall) -> tuple[int, tuple[Message, ...]] | None:
        """The turn that a call goes on from, the last such, and the messages that it adds.

        None where it begins a conversation.
        """
        said = [n for n, message in enumerate(call.messages, 1) if message.role == "assistant"]
        last = max(said, default=0)
        number = self._turns.get(_known_by(call.messages[:last], call.tools))
        added = call.messages[last:]
        return (number, added) if number is not None and added else None


def _known_by(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Any, ...]:
    return (*map(comparable, messages), json.dumps([*map(dict, tools)], sort_keys=True))


class AgentEpisode(ABC):
    """One session of an agent, whose calls are the policy's turns; a subclass says where it runs.

    `_over` is done as soon as the agent has ended.
    """

    _session: Session
    _over: asyncio.Future[Any] | None = None
    end: str | None = None  # of an agent that has ended, unless it did well
    printed: Mapping[str, str] = {}  # by an agent that has ended

    def __init__(self, environment: Agent, example: Example) -> None:
        self._environment, self._example = environment, example
        self._pending: WaitingCall | None = None
        self._conversations = Conversations()  # as the agent has them
        self._calls = 0
        self._main = {0}  # the first call and those that go on from it
        self._has_room = False

    @abstractmethod
    async def begin(self) -> None:
        """Start the agent, or wait for it."""

    @abstractmethod
    def silent(self) -> RewardFault:
        """The fault of an agent that ended without a call."""

    @abstractmethod
    async def reward(self) -> Mapping[str, float]:
        """Reward of an agent that has ended. Raises RewardFault, and what a function raises."""

    async def start(self) -> Opening:
        """The messages and tools of the agent's first call.

        Raises RewardFault where it ends without one.
        """
        with uncharged():  # others end first
            await self._environment.room.acquire()
        self._has_room = True
        await self.begin()
        call = await self._next_call()
        if call is None:
            raise self.silent()
        return call.messages, call.tools

    async def step(self, turn: Turn) -> StepResult:
        """Hand the turn to the program, and wait for its next call, or its end."""
        assert self._pending is not None, "a turn answers a call"
        trained = True
        if turn.role == "system":
            self._session.refuse(self._pending, turn.content)
            self._main.discard(self._calls)
        else:
            trained = self._taken(self._pending, turn)
        call = await self._next_call()
        if call is None:
            reward = await self.reward()
            shown = tuple(_shown(self.printed, self._session.key))
            return StepResult(reward=reward, done=True, end=self.end, trained=trained, shown=shown)
        if (extended := self._conversations.parent(call)) is not None:
            parent, added = extended
            if parent in self._main:
                self._main.add(self._calls)
            return StepResult(messages=added, parent=parent, trained=trained)
        opening = Start(messages=call.messages, tools=call.tools)
        return StepResult(opening=opening, trained=trained)

    def _taken(self, pending: WaitingCall, turn: Turn) -> bool:
        """Answer a call; return True where the turn is trained."""
        answer, environment = self._answer(pending, turn), self._environment
        trained = environment.trains(pending.call, answer, is_main=self._calls in self._main)
        self._calls += 1
        if self._calls >= environment.calls_max:
            limit = f"the limit of {environment.calls_max} calls is reached: end now"
            self._session.refusal = limit
        return trained

    async def close(self) -> None:
        """End the session, and with it what was started."""
        await self._session.close()
        if self._has_room:
            self._environment.room.release()

    def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._environment.threads, function, *arguments)

    def _answer(self, pending: WaitingCall, turn: Turn) -> Message:
        """Answer a call; return the message that the agent reads."""
        text = turn.content
        cuts = [(place, stop) for stop in pending.call.stop if (place := text.find(stop)) >= 0]
        place, stop = min(cuts, default=(len(text), None))
        text = text[:place]
        said = Message(role="assistant", content=text, tool_calls=turn.tool_calls)
        self._conversations.add(pending.call, said)
        start, end = turn.start or 0, turn.end or 0
        if not pending.answered.done():
            pending.answered.set_result(
                ModelAnswer(
                    text=text,
                    tool_calls=turn.tool_calls,
                    prompt_tokens=start,
                    completion_tokens=end - start,
                    stop=stop,
                )
            )
        return said

    async def _next_call(self) -> ModelCall | None:
        """The next call of the model; None once the agent has ended."""
        assert self._over is not None, "it has begun"
        arriving = asyncio.ensure_future(self._session.calls.get())
        try:
            await asyncio.wait({arriving, self._over}, return_when=asyncio.FIRST_COMPLETED)
            self._pending = arriving.result() if arriving.done() else None
        finally:
            arriving.cancel()
        return None if self._pending is None else self._pending.call


class ProgramEpisode(AgentEpisode):
    """One run of the program in its sandbox."""

    def __init__(self, environment: Agent, example: Example, scratch: ScratchFolder) -> None:
        super().__init__(environment, example)
        self._session, self._scratch = Session(MODEL), scratch
        self._workspace: Path | None = None

    async def begin(self) -> None:
        environment = self._environment
        folder: Path = await self._in_thread(environment.workspace, self._example, self._scratch)
        self._workspace = folder
        await self._session.open(folder / SOCKET, folder / CONTROL)
        self._over = self._in_thread(environment.run, self._example, self._session, folder)

    def silent(self) -> RewardFault:
        result = self._result()
        return RewardFault(
            f"the agent ended ({result.how}) without calling the model; {self._words(result)}"
        )

    async def reward(self) -> Mapping[str, float]:
        result, workspace = self._result(), self._workspace
        assert workspace is not None, "the program was started in it"
        reward, check = await self._in_thread(
            self._environment.reward_of, self._example, result, workspace
        )
        status = result.exit_status
        self.end = TIMEOUT if result.limit is not None else f"{EXIT}{status}" if status else None
        self.printed = _texts(result) | {"check": check}
        return reward

    async def close(self) -> None:
        """End the program and delete its folder."""
        await super().close()
        if self._over is not None:
            await asyncio.wait({self._over})
            if not self._over.cancelled():
                self._over.exception()  # retrieved: `_result` raises it where it counts
        if self._workspace is not None:
            await self._in_thread(delete_tree, self._workspace.parent)

    def _result(self) -> SandboxResult:
        """The program's end. Raises RewardFault for a limit."""
        assert self._over is not None, "the program was started"
        result: SandboxResult = self._over.result()
        options = self._environment.options
        if result.limit == "time" and options.on_timeout == "drop":
            raise EnvironmentTimeout(f"{_late(options)}; {self._words(result)}")
        if result.limit not in (None, "time"):
            raise RewardFault(f"the agent {result.how}; {self._words(result)}")
        return result

    def _words(self, result: SandboxResult) -> str:
        """The last words of a program, for a fault."""
        texts = [f"its {name} ends in {text[-_SHOWN:]!r}" for name, text in _texts(result).items()]
        return " and ".join(texts).replace(self._session.key, REDACTED.decode())


def _late(options: AgentOptions) -> str:
    return f"the agent took longer than {options.agent_timeout_s:g} s"


def _texts(result: SandboxResult) -> dict[str, str]:
    return {
        name: getattr(result, name).decode(errors="replace").strip()
        for name in ("stdout", "stderr")
    }


def _shown(printed: Mapping[str, str], key: str) -> Iterator[Message]:
    """The ends of what an agent printed, as results of no tool, without its key."""
    for name, text in printed.items():
        if text := text.replace(key, REDACTED.decode()).strip():
            cut = len(text) > PRINTED_CHARACTERS_MAX
            content = f"[{name}]\n{text[-PRINTED_CHARACTERS_MAX:]}"
            yield Message(role="tool", content=content, cut=cut)


class ElsewhereEpisode(AgentEpisode):
    """A session that an agent elsewhere takes, and its harness ends."""

    _offered: OfferedSession
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, environment: Agent, example: Example, folder: Path) -> None:
        super().__init__(environment, example)
        self._folder = folder

    async def begin(self) -> None:
        options = self._environment.options
        task = {"task": _task(self._example), "split": self._example.split, "model": MODEL}
        self._session = self._offered = OfferedSession(
            MODEL, private_folder(str(self._folder)), task
        )
        self._over = self._offered.outcome
        await self._offered.offer()
        loop = asyncio.get_running_loop()
        with uncharged():
            await asyncio.wait({self._offered.taken}, timeout=options.take_timeout_s)
        if not self._offered.taken.done():
            raise RewardFault(
                f"no agent took the session for {options.take_timeout_s:g} s "
                "(environment.options.take_timeout_s): is `marin-rl sessions` running, and do "
                "agents ask it?"
            )
        self._deadline = loop.call_later(options.agent_timeout_s, self._late)

    def _late(self) -> None:
        options, outcome = self._environment.options, self._offered.outcome
        if outcome.done():
            return
        if options.on_timeout == "drop":
            outcome.set_exception(EnvironmentTimeout(_late(options)))
        else:
            self.end = TIMEOUT
            outcome.set_result("")

    def silent(self) -> RewardFault:
        self._offered.outcome.result()
        return RewardFault("the session was ended without a call of the model")

    async def reward(self) -> Mapping[str, float]:
        outcome = self._offered.outcome.result()
        if not isinstance(outcome, str):
            return outcome
        self.printed = {"output": outcome}
        return await self._in_thread(
            self._environment.reward_of_text, self._example, outcome.strip()
        )

    async def close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._over is not None:
            self._over.cancel()
            await super().close()
