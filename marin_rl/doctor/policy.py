"""Checks of the policy: tokenizer, model, prompts that fit, tools in its template, own losses,
and its programs.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from marin_rl.config import Config
from marin_rl.errors import InputError, ObjectMissing
from marin_rl.machine import share_one_heap
from marin_rl.types import Example, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from marin_rl.tokenizer_files import FileTokenizer
    from marin_rl.training.adapters import Modules

PROMPTS_CHECKED_MAX = 64


def tokenizer(config: Config) -> str:
    """Check that the tokenizer has a chat template and its ids fit the model's vocabulary."""
    from marin_rl.tokenizers import tokenizer_for

    return _checked(config, tokenizer_for(config.policy))


def tokenizer_files(config: Config) -> str:
    """Check the tokenizer by its files; load it where only transformers knows how it is built."""
    from marin_rl.rollouts.policy_tokenizer import light_tokenizer

    return _checked(config, light_tokenizer(config.policy))


def _checked(config: Config, built: "FileTokenizer | PreTrainedTokenizerBase") -> str:
    from marin_rl.planning import architecture_of
    from marin_rl.tokenizer_files import check_vocabulary

    sized_by_tokenizer = config.policy.init != "hf" and config.policy.model.vocab_size is None
    architecture = architecture_of(config)
    if architecture is not None and not sized_by_tokenizer:
        check_vocabulary(built, architecture.vocab_size)
    return f"{len(built)} ids, chat template present"


def model(config: Config) -> str:
    """Check that the model folder can be loaded exactly, or that the sizes of a built one fit."""
    from marin_rl.planning import architecture_of

    if config.policy.hf_path is not None:
        from marin_rl.hf_settings import check_hf_folder

        check_hf_folder(config.policy.hf_path)
    architecture = architecture_of(config)
    if architecture is None:
        raise InputError(f"no model at {config.policy.hf_path}: expected a Hugging Face folder")
    return f"{architecture.parameters / 1e6:,.2f}M parameters"


def prompts(config: Config) -> str:
    """Check that prompts and a completion fit the context: of rows of files all, up to a bound."""
    from marin_rl.batching.row_checks import check_lengths

    measured = _measured(config)
    lengths = [length for _, length in rendered(config, [*measured.values()])]
    room = config.policy.context_length - config.sampling.max_tokens
    check_lengths(
        [*zip(measured, lengths, strict=True)],
        room,
        f"policy.context_length ({config.policy.context_length}) less sampling.max_tokens "
        f"({config.sampling.max_tokens}) leaves {room}: raise the one or lower the other",
    )
    return f"longest of {len(lengths)} prompts: {max(lengths, default=0)} tokens"


def _measured(config: Config) -> dict[str, Example]:
    """Return the examples whose prompts are measured: a new run's rows, else a first round's.

    By name, with the place of a row; rows in the order of their files.
    """
    from marin_rl.environments.chat import Chat
    from marin_rl.environments.checks import environment_of
    from marin_rl.environments.mixture import parts_of
    from marin_rl.storage.runs import Run

    count = min(PROMPTS_CHECKED_MAX, config.rollouts.groups_per_round)
    few = {f"the prompt of {each.example_id}": each for each in first_examples(config, count)}
    with suppress(ObjectMissing):  # a run that was begun goes on with what it has
        Run.open(config.root, config.run_id, config.storage_options)
        return few
    rows: dict[str, Example] = {}
    for part in parts_of(environment_of(config), config.environment):
        if isinstance(part.environment, Chat):
            own = part.environment.first_of_each_split(part.config)
            rows |= {f"{place}: the prompt of {each.example_id}": each for place, each in own}
    known = {each.example_id for each in rows.values()}
    return rows | {name: each for name, each in few.items() if each.example_id not in known}


def tools(config: Config) -> str:
    """Check that the policy's chat template carries the tools that episodes offer."""
    from marin_rl.environments.checks import environment_of
    from marin_rl.environments.episode import OffersTools
    from marin_rl.environments.mixture import parts_of

    names: list[str] = []
    for part in parts_of(environment_of(config), config.environment):
        if isinstance(part.environment, OffersTools):
            # imports transformers
            from marin_rl.rollouts.tool_turns import ToolTurns

            offered = part.environment.tools_offered()
            ToolTurns(config.policy, part.config).check(offered)
            names += (tool["function"]["name"] for tool in offered)
    if not names:
        return "none (an episode may add some when it starts)"
    return f"the chat template carries {', '.join(names)}"


def canary(config: Config) -> str:
    """Check that the context has room for the canary, which proves each round's weights."""
    from marin_rl.inference.canary_prompt import CANARY, CANARY_PROMPT

    ((_, length),) = rendered_by(config, [CANARY_PROMPT])
    if length + CANARY.tokens > config.policy.context_length:
        raise InputError(
            f"policy.context_length ({config.policy.context_length}) has no room for the canary, "
            f"a prompt of {length} tokens and {CANARY.tokens} sampled ones that proves before each "
            f"round which weights are served: expected at least {length + CANARY.tokens}"
        )
    return f"{length} tokens and {CANARY.samples} samples of {CANARY.tokens}"


def loss(config: Config) -> str:
    """Check that a loss of the user's own has a finite value and gradient on a small batch."""
    if config.objective.loss is None:
        return f"surrogate {config.objective.surrogate}"
    from marin_rl.training.custom_loss import check_loss

    return check_loss(config.objective)


def programs(config: Config) -> str:
    """Check that every program of the run can be built, by tracing them with shapes alone."""
    from marin_rl.tokenizers import tokenizer_for
    from marin_rl.training.tracing import trace_programs

    share_one_heap()  # as a flow does, before JAX starts its threads
    count = trace_programs(config, tokenizer_for(config.policy), _recorded_modules(config))
    return f"{count} traced by shapes"


def reward_model_programs(config: Config) -> str:
    """Check that the step of a reward model can be built, by tracing it with shapes alone."""
    from marin_rl.tokenizers import tokenizer_for
    from marin_rl.training.tracing import trace_reward_model

    share_one_heap()  # as in `programs`
    return f"{trace_reward_model(config, tokenizer_for(config.policy))} traced by shapes"


def _recorded_modules(config: Config) -> "Modules | None":
    """Return the modules of a run's adapter where the folder that it began from may be gone."""
    if config.policy.lora is None or config.policy.lora.init_from is None:
        return None
    from marin_rl.storage.runs import Run
    from marin_rl.training.policy_source import recorded_modules

    with suppress(ObjectMissing):
        return recorded_modules(Run.open(config.root, config.run_id, config.storage_options))
    return None


def first_examples(config: Config, count: int) -> list[Example]:
    """Return the first training examples of a run, those of its first round."""
    from marin_rl.environments.checks import environment_of

    built, seed = environment_of(config), config.environment.train_seed
    return [built.example(seed, index, "train") for index in range(count)]


def rendered(config: Config, examples: Sequence[Example]) -> list[tuple[str, int]]:
    """Return the prompts of examples as the model sees them, each with its number of tokens.

    Raises InputError with the example, its roles and the reason where the template refuses one.
    """
    try:
        return rendered_by(config, [example.messages for example in examples])
    except InputError:
        for example in examples:
            _check_rendering(config, example)
        raise


def _check_rendering(config: Config, example: Example) -> None:
    try:
        rendered_by(config, [example.messages])
    except InputError as error:
        roles = ", ".join(message.role for message in example.messages)
        raise InputError(
            f"the chat template refuses the prompt of the example {example.example_id} (messages "
            f"of {roles}): {error}; expected messages that it takes: change the row, leave "
            "environment.options.system_prompt out, or choose another template"
        ) from None


def rendered_by(config: Config, prompts: Sequence[Sequence[Message]]) -> list[tuple[str, int]]:
    """Return conversations as the chat template writes them, each with its number of tokens."""
    from marin_rl.batching.sequences import rendered_prompts
    from marin_rl.rollouts.policy_tokenizer import light_tokenizer

    return rendered_prompts(light_tokenizer(config.policy), prompts)
