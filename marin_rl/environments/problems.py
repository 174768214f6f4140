"""Base of environments of problems from files: mathematics, programs.

Owns the options that they share and the text of a problem, which ends with an instruction. Leaves
out files, rows and the split (`chat`), and what a right answer is (each environment).
"""

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from marin_rl.config import EnvironmentConfig, Section
from marin_rl.environments.chat import Chat, ChatOptions
from marin_rl.types import Example, Message


class ProblemOptions(Section):
    """Options of environments of problems from files."""

    path: str | None = Field(
        default=None, description="problems, as `path` of chat; null: a sample that comes along"
    )
    prompt_key: str | None = Field(
        default=None, min_length=1, description="column of the problem; null: its usual names"
    )
    id_key: str | None = Field(
        default=None, min_length=1, description="column of unique ids; null: id, else a hash"
    )
    system_prompt: str | None = Field(default=None, description="system message of all problems")
    instruction: str = Field(default="", description="text after every problem; empty: none")
    reward_workers: int = Field(default=1, ge=1, le=64, description="processes that check answers")
    eval_fraction: float = Field(
        default=0.1, gt=0, le=1, description="share of rows that are held out; 1: a fixed set"
    )

    def chat_options(
        self, sample: Path, *, prompt_key: str | None = None, answer_key: str | None = None
    ) -> ChatOptions:
        """Return these options as those of chat, with columns that these do not name."""
        return ChatOptions(
            path=str(sample) if self.path is None else self.path,
            prompt_key=prompt_key or self.prompt_key,
            answer_key=answer_key,
            id_key=self.id_key,
            system_prompt=self.system_prompt,
            reward_workers=self.reward_workers,
            eval_fraction=self.eval_fraction,
        )


class Problems(Chat):
    """Problems from files, whose answers this package checks, one completion at a time.

    A subclass defines `extract`, `load_scorer` and `score`; chat's reward function is not used.
    """

    extracts_here = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    answers_by_function = False

    def __init__(self, config: EnvironmentConfig, options: ChatOptions) -> None:
        super().__init__(config, options)
        self.reward_name = self.name

    def problem(self, example: Example, *after: str, context: str | None = None) -> Example:
        """Return `example` with texts before and after its last, an empty line between them."""
        *before, problem = example.messages
        text = "\n\n".join(filter(None, (context, problem.content, *after)))
        return replace(example, messages=(*before, Message(role=problem.role, content=text)))
