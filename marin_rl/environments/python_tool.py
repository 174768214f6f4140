r"""Mathematics with a `python` tool: the model writes programs, reads what they print, and answers.

Problems and the check of the answer are those of `math`. A call runs one program in a sandbox of
its own and keeps nothing for the next: what a program needs, it computes itself. Leaves out turns
and malformed calls (`tool_class`), answers (`math_problems`), and walls (`isolated.sandbox`).
"""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from marin_rl.config import EnvironmentConfig
from marin_rl.environments.episode import Episode, Tool
from marin_rl.environments.math_problems import Math, MathOptions
from marin_rl.environments.registry import parse_options, register
from marin_rl.environments.sandbox_tools import (
    SandboxOptions,
    TimedEpisode,
    run_tool,
    shipped_tools,
    step_budget_s,
)
from marin_rl.environments.tool_class import MalformedCallOptions
from marin_rl.isolated.sandbox import Sandbox
from marin_rl.types import Example

INSTRUCTION = (
    "Reason step by step. You may run Python programs with the tool `python`; it returns what they "
    r"print. Put the final answer in \boxed{}."
)
_PROGRAM = "program.py"


class PythonOptions(SandboxOptions, MalformedCallOptions, MathOptions):
    """Options of `python`: those of `math`, and limits of programs (docs/environments.md)."""

    instruction: str = Field(
        default=INSTRUCTION, description="text after every problem; empty: none"
    )
    program_timeout_s: float = Field(
        default=4.0, gt=0, le=3600, description="seconds of one program, and of its CPU time"
    )
    program_memory_bytes_max: int = Field(
        default=512 << 20, ge=32 << 20, description="memory of a program, in bytes"
    )
    program_disk_bytes_max: int = Field(
        default=32 << 20, ge=1 << 20, description="files that a program may write, in bytes"
    )
    program_output_bytes_max: int = Field(
        default=1 << 20, ge=1 << 10, description="output that ends a program, in bytes"
    )
    program_processes_max: int = Field(
        default=32, ge=1, le=1024, description="processes and threads of a program"
    )
    reward_workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="processes that run programs and check answers, each one at a time",
    )


@register("python", PythonOptions)
class Python(Math):
    """Rewards the answer that a dialogue with Python programs ends with, as `math` does."""

    name = "python"

    def __init__(self, config: EnvironmentConfig) -> None:
        options = parse_options(PythonOptions, config)
        super().__init__(config, options)
        self._budget_s = step_budget_s(config, options.program_timeout_s, "program_timeout_s")
        self._python = options
        self._tools = shipped_tools(PythonTool, config, options)

    def load_examples(self) -> None:
        self._python.check_sandbox()
        super().load_examples()

    def load_scorer(self) -> None:
        super().load_scorer()
        options = self._python
        box = options.box(
            options.program_timeout_s,
            memory_bytes=options.program_memory_bytes_max,
            disk_bytes=options.program_disk_bytes_max,
            output_bytes=options.program_output_bytes_max,
            processes=options.program_processes_max,
        )
        arguments = {"box": box, "characters_max": self._tools.characters_max}
        self._tools = replace(self._tools, arguments=arguments)

    def episode(self, example: Example) -> Episode:
        return TimedEpisode(self._tools, example, self._budget_s)

    def tools_offered(self) -> Sequence[Tool]:
        return self._tools.schemas


class PythonTool:
    """The tool of an episode: programs until `deadline`, each in a new sandbox."""

    def __init__(self, box: Sandbox, characters_max: int) -> None:
        self._box, self._characters_max = box, characters_max
        self.deadline = float("inf")

    def reset(self) -> None:
        """Begin an episode; there is no state."""

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints, with its errors.

        Each call is a program of its own: nothing is kept from one call to the next. Print the
        values to be read.

        Args:
            code: The whole program.
        """
        return run_tool(
            self._box,
            # not -I, which would ignore the fixed hash seed of the sandbox's environment
            [self._box.python, "-s", _PROGRAM],
            deadline=self.deadline,
            characters_max=self._characters_max,
            files={_PROGRAM: code.encode(errors="replace")},
        )
