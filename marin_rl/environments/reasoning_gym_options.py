"""Options of the environment `reasoning_gym`.

Apart from the environment because the library takes seconds to import, and the reference page of
the configuration lists these options too.
"""

from typing import Any

from pydantic import Field, model_validator

from marin_rl.config import Section


class MixtureItem(Section):
    """Dataset of a mixture."""

    dataset: str = Field(description="name of a reasoning-gym dataset")
    weight: float = Field(default=1.0, gt=0, le=1e6, description="relative share of the examples")
    config: dict[str, Any] = Field(default={}, description="parameters of the dataset")


class Demonstration(Section):
    """Way in which the answer is written in supervised examples."""

    text: str = Field(
        default="{answer}", description="{answer}, {question} and the item's metadata by name"
    )
    weight: float = Field(
        default=1.0, gt=0, le=1e6, description="relative share of the demonstrations"
    )


class ReasoningGymOptions(Section):
    """Options of `reasoning_gym`: either `dataset` with its `config`, or a `mixture`."""

    dataset: str | None = Field(default=None, description="name of a reasoning-gym dataset")
    config: dict[str, Any] = Field(default={}, description="parameters of the dataset")
    mixture: tuple[MixtureItem, ...] = Field(default=(), description="datasets with weights")
    system_prompt: str | None = Field(
        default=None, description="system message before every question"
    )
    prompt: str = Field(
        default="{question}", description="user message; {question} and the item's metadata by name"
    )
    demonstrations: tuple[Demonstration, ...] = Field(
        default=(Demonstration(),),
        min_length=1,
        description="ways to write the answer in a warm start",
    )
    answer_tag: str | None = Field(
        default=None,
        pattern="^[A-Za-z_]+$",
        description="score only what stands in the last <tag>…</tag>; null: all",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "ReasoningGymOptions":
        if (self.dataset is None) == (not self.mixture):
            raise ValueError("give either dataset (with config) or mixture")
        names = [item.dataset for item in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f"a mixture names each dataset once, found {', '.join(names)}")
        return self
