"""Sandboxed programs as tools of a model: the text that a call returns, and the time it may take.

Leaves out the tools (`python_tool`, `repository`) and the sandbox (`marin_rl.isolated.sandbox`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.episode import StepResult
from marin_rl.environments.tool_class import (
    MalformedCallOptions,
    ToolClass,
    ToolEpisode,
    ToolOptions,
)
from marin_rl.errors import ConfigError
from marin_rl.isolated.sandbox import Sandbox, SandboxLimits, SandboxResult, check_sandbox
from marin_rl.isolated.scratch import ENTRY_BYTES
from marin_rl.types import Example, Turn

NO_OUTPUT = "[no output]"
_MARGIN_S = 1.0  # between the last program of a turn and the time limit of the step


class SandboxOptions(Section):
    """Options of environments whose programs may do without walls."""

    sandbox: Literal["bubblewrap", "rlimits_only"] = Field(
        default="bubblewrap",
        description="rlimits_only: programs have limits and this user's rights, no sandbox",
    )
    interpreter: str | None = Field(
        default=None, description="absolute path of the Python of programs; null: this one"
    )

    def check_sandbox(self) -> None:
        """Prove the walls here. Raises ConfigError that says what to install or to set."""
        check_sandbox(self.sandbox, self.interpreter)

    def box(self, wall_s: float, **limits: int) -> Sandbox:
        """A sandbox of programs that have `wall_s` seconds. Raises ConfigError."""
        chosen = SandboxLimits(wall_s=wall_s, cpu_s=int(wall_s) + 1, **limits)
        return Sandbox(chosen, mode=self.sandbox, interpreter=self.interpreter)


def step_budget_s(config: EnvironmentConfig, program_s: float, option: str) -> float:
    """Seconds for all programs of a turn. ConfigError where one program needs more."""
    key = "step_timeout_s" if config.step_timeout_s else "reward_timeout_s"
    step_s = config.step_timeout_s or config.reward_timeout_s
    if program_s + _MARGIN_S > step_s:
        raise ConfigError(
            f"environment.options.{option}: {program_s:g} s, but the step of an episode has "
            f"environment.{key} {step_s:g} for all calls of a turn: expected at least "
            f"{program_s + _MARGIN_S:g}"
        )
    return step_s - _MARGIN_S


class TimedEpisode(ToolEpisode):
    """An episode whose programs share the time that a turn may take."""

    def __init__(self, tool_class: ToolClass, example: Example, budget_s: float) -> None:
        super().__init__(tool_class, example)
        self._budget_s = budget_s

    async def step(self, turn: Turn) -> StepResult:
        tool: Any = self._instance
        tool.deadline = time.monotonic() + self._budget_s
        return await super().step(turn)


def shipped_tools(
    kind: type, config: EnvironmentConfig, options: MalformedCallOptions
) -> ToolClass:
    malformed = {name: getattr(options, name) for name in MalformedCallOptions.model_fields}
    return ToolClass(kind, {}, ToolOptions(**malformed), config)


def run_tool(
    box: Sandbox,
    arguments: Sequence[str],
    *,
    deadline: float,
    characters_max: int,
    files: Mapping[str, bytes] | None = None,
    workspace: Path | None = None,
) -> str:
    """Run a program of a call and return its text; `deadline` is in monotonic seconds."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return "The program was not run: the time of this turn is over."
    wall_s = min(box.limits.wall_s, left_s)
    result = box.run(arguments, files=files, workspace=workspace, wall_s=wall_s)
    return program_text(result, replace(box.limits, wall_s=round(wall_s, 1)), characters_max)


def program_text(result: SandboxResult, limits: SandboxLimits, characters_max: int) -> str:
    """Return what a program printed, its errors, and its end where that was no success.

    Long outputs lose their middle, so that the end of a program is always there.
    """
    end = _end(result, limits)
    room = max(characters_max - len(end) - 2, 0)
    stderr = _shortened(_text(result.stderr), room // 2)
    stdout = _shortened(_text(result.stdout), room - len(stderr))
    return "\n".join(part for part in (stdout, stderr, end) if part) or NO_OUTPUT


def _end(result: SandboxResult, limits: SandboxLimits) -> str:
    if result.limit is None:
        return "" if result.exit_status == 0 else f"[{result.how}]"
    most = {
        "time": f"{limits.wall_s:g} s",
        "CPU time": f"{limits.cpu_s} s",
        "memory": f"{limits.memory_bytes >> 20} MiB",
        "output": f"{limits.output_bytes >> 10} KiB",
        "disk": f"{limits.workspace_bytes >> 20} MiB",
        "processes": f"{limits.processes}",
        "files": f"{limits.disk_bytes // ENTRY_BYTES} in temporary folders",
    }
    return f"[{result.how}: {most[result.limit]}]"


def _text(data: bytes) -> str:
    return data.decode(errors="replace").rstrip()


def _shortened(text: str, characters_max: int) -> str:
    if len(text) <= characters_max:
        return text
    note = f"\n[{len(text)} characters: the middle is left out]\n"
    kept = max(characters_max - len(note), 0)
    head = kept // 2
    return text[:head] + note + text[len(text) - (kept - head) :]
