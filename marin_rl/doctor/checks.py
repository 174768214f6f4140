"""The checks by their names, and runs of them: all with a finding each, or up to the first failure.

A check is a function of the configuration that returns a line of text or raises an error of our
tree. `marin-rl doctor` runs all of them and goes on after a failure; `preflight` runs the cheap
ones, in order, at the start of every flow and stops at the first. What needs neither Prefect nor
JAX is checked before that (`marin_rl.preflight`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from marin_rl.config import Config
from marin_rl.doctor.data import (
    data,
    environment,
    group_filter,
    pairs,
    reward_model,
    storage,
)
from marin_rl.doctor.memory import memory
from marin_rl.doctor.policy import (
    canary,
    loss,
    model,
    programs,
    prompts,
    reward_model_programs,
    tokenizer,
    tools,
)
from marin_rl.doctor.rewards import reward
from marin_rl.doctor.surroundings import (
    devices,
    endpoints,
    machine,
    mesh,
    orchestrator,
    proxy_variables,
)
from marin_rl.doctor.templates import chat_template, warm_start
from marin_rl.errors import MarinRLError
from marin_rl.progress import phase

Check = Callable[[Config], str]

ALL: tuple[tuple[str, Check], ...] = (
    ("storage root", storage),
    ("environment", environment),
    ("data", data),
    ("tokenizer", tokenizer),
    ("model", model),
    ("chat template", chat_template),
    ("demonstrations", warm_start),
    ("prompts", prompts),
    ("tools", tools),
    ("canary", canary),
    ("reward", reward),
    ("loss", loss),
    ("groups", group_filter),
    ("devices", devices),
    ("memory", memory),
    ("programs", programs),
    ("machine", machine),
    ("proxies", proxy_variables),
    ("endpoints", endpoints),
    ("reward model", reward_model),
    ("Prefect API", orchestrator),
)

BEFORE_A_RUN: tuple[Check, ...] = (
    storage, environment, tokenizer, model, chat_template, warm_start, prompts, endpoints,
    reward_model, loss, group_filter, mesh, memory, programs,
)  # fmt: skip
BEFORE_A_REWARD_MODEL: tuple[Check, ...] = (
    storage, tokenizer, model, chat_template, pairs, mesh, reward_model_programs,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of one check; `detail` is its result, or the error with its remedy."""

    name: str
    passed: bool
    detail: str


def examine(config: Config, checks: Sequence[tuple[str, Check]] = ALL) -> Iterator[Finding]:
    """Run every check, also after failures; a finding each, and one cause is explained once."""
    explained: dict[str, str] = {}
    for name, check in checks:
        try:
            with phase(f"checking {name}"):
                detail = check(config)
            yield Finding(name=name, passed=True, detail=detail)
        except MarinRLError as error:
            detail = f"{type(error).__name__}: {error}"
            first = explained.setdefault(detail, name)
            shown = detail if first == name else f"the same error as {first}"
            yield Finding(name=name, passed=False, detail=shown)


def preflight(config: Config, checks: Sequence[Check] = BEFORE_A_RUN) -> None:
    """Raise the error of the first check that fails, before any work is done."""
    for check in checks:
        with phase(f"checking {check.__name__.replace('_', ' ')}"):
            check(config)
