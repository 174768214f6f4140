"""Checks of everything a run needs: each reports a result, or an error that says what to do.

`marin-rl doctor` runs all of them and goes on after a failure; `preflight` runs the cheap ones, in
order, at the start of every flow and stops at the first. What needs neither Prefect nor JAX is
checked before that (`marin_rl.preflight`). A check is a function of the configuration
that returns a line of text or raises an error of our tree.
"""

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from marin_rl.config import REGISTERED, Config, InferenceConfig
from marin_rl.errors import (
    ConfigError,
    EndpointUnavailable,
    InputError,
    MarinRLError,
    ObjectMissing,
    RewardFault,
    StalePolicy,
)
from marin_rl.types import Example, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from marin_rl.environments.scoring import Score, Scorer
    from marin_rl.tokenizer_files import FileTokenizer

T = TypeVar("T")

Check = Callable[[Config], str]

PROMPTS_CHECKED_MAX = 64
TRIALS = 3  # examples whose answers are scored
TRIAL_COLUMNS = (34, 14, 6, 14, 6)  # characters
WRONG_ANSWER = ""  # where no example has another answer
HEALTH_TIMEOUT_S = 3.0
ENDPOINT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of one check; `detail` is its result, or the error with its remedy."""

    name: str
    passed: bool
    detail: str


def storage(config: Config) -> str:
    """Check that the root can be written and creates exclusively; new local folders go again."""
    from marin_rl.storage.stores.filesystem import LocalStore, open_store, probe

    store = open_store(config.root, config.storage_options)
    folder = Path(store.url) if isinstance(store, LocalStore) else Path()
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    probe(store)
    with suppress(OSError):  # a run has begun there meanwhile
        for each in made:
            each.rmdir()
    return f"{store.url}: writable, creates exclusively"


def environment(config: Config) -> str:
    """Check that the environment has examples, and that training and evaluation ones are apart."""
    from marin_rl.environments.checks import environment_of

    built = environment_of(config)
    if config.evaluation.sets is not None:
        from marin_rl.rollouts.evaluate import held_out_sets  # imports transformers

        held_out_sets(config)
    example = built.example(config.environment.train_seed, 0, "train")
    return f"{built.name} {built.version}: {example.messages[-1].content!r:.60}"


def data(config: Config) -> str:
    """Report facts about the prompts that a user may not expect; none of them is an error."""
    from marin_rl.rollouts.data_warnings import data_warnings

    return "; ".join(data_warnings(config)) or "nothing unexpected in prompts and held-out sets"


def demonstrations(config: Config) -> str:
    """Check that every example that a warm start comes to has a demonstration."""
    from marin_rl.environments.checks import check_demonstrations

    check_demonstrations(config)
    return f"{config.sft.steps * config.sft.sequences_per_step} examples have demonstrations"


def tokenizer(config: Config) -> str:
    """Check that the tokenizer has a chat template and its ids fit the model's vocabulary."""
    from marin_rl.planning import architecture_of
    from marin_rl.tokenizer_files import check_vocabulary
    from marin_rl.tokenizers import tokenizer_for

    built = tokenizer_for(config.policy)
    sized_by_tokenizer = config.policy.init != "hf" and config.policy.model.vocab_size is None
    architecture = architecture_of(config)
    if architecture is not None and not sized_by_tokenizer:
        check_vocabulary(built, architecture.vocab_size)
    return f"{len(built)} ids, chat template present"


def prompts(config: Config) -> str:
    """Check that the first round's prompts and a completion fit the context."""
    longest, count = 0, min(PROMPTS_CHECKED_MAX, config.rollouts.groups_per_round)
    examples = first_examples(config, count)
    for example, (_, length) in zip(examples, rendered(config, examples), strict=True):
        room = config.policy.context_length - config.sampling.max_tokens
        if length > room:
            raise InputError(
                f"the prompt of {example.example_id} has {length} tokens, but "
                f"policy.context_length ({config.policy.context_length}) less sampling.max_tokens "
                f"({config.sampling.max_tokens}) leaves {room}: raise the one or lower the other"
            )
        longest = max(longest, length)
    return f"longest of {len(examples)} prompts: {longest} tokens"


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
        return "none that are known before an episode starts"
    return f"the chat template carries {', '.join(names)}"


def canary(config: Config) -> str:
    """Check that the context has room for the canary, which proves each round's weights."""
    from marin_rl.inference.canary_prompt import CANARY_PROMPT, CANARY_TOKENS

    ((_, length),) = rendered_by(config, [CANARY_PROMPT])
    if length + CANARY_TOKENS > config.policy.context_length:
        raise InputError(
            f"policy.context_length ({config.policy.context_length}) has no room for the canary, "
            f"a prompt of {length} tokens and {CANARY_TOKENS} sampled ones that proves before each "
            f"round which weights are served: expected at least {length + CANARY_TOKENS}"
        )
    return f"{length} tokens and {CANARY_TOKENS} sampled"


def first_examples(config: Config, count: int) -> list[Example]:
    """Return the first training examples of a run, those of its first round."""
    from marin_rl.environments.checks import environment_of

    built, seed = environment_of(config), config.environment.train_seed
    return [built.example(seed, index, "train") for index in range(count)]


def rendered(config: Config, examples: Sequence[Example]) -> list[tuple[str, int]]:
    """Return the prompts of examples as the model sees them, each with its number of tokens."""
    return rendered_by(config, [example.messages for example in examples])


def rendered_by(config: Config, prompts: Sequence[Sequence[Message]]) -> list[tuple[str, int]]:
    """Return conversations as the chat template writes them, each with its number of tokens."""
    from marin_rl.batching.sequences import rendered_prompts

    return rendered_prompts(_tokenizer_of(config), prompts)


def _tokenizer_of(config: Config) -> "FileTokenizer | PreTrainedTokenizerBase":
    """Return the policy's tokenizer, by its files alone where they say how it is built."""
    from marin_rl.tokenizer_files import read_tokenizer

    built = read_tokenizer(config.policy)
    if built is not None:
        return built
    from marin_rl.tokenizers import tokenizer_for

    return tokenizer_for(config.policy)


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


def loss(config: Config) -> str:
    """Check that a loss of the user's own has a finite value and gradient on a small batch."""
    if config.objective.loss is None:
        return f"surrogate {config.objective.surrogate}"
    from marin_rl.training.custom_loss import check_loss

    return check_loss(config.objective)


def group_filter(config: Config) -> str:
    """Check that a filter of groups of the user's own can be loaded and takes a group."""
    from marin_rl.batching.group_filters import check_filter, filter_of

    name = filter_of(config.asynchrony)
    return "every group passes" if name is None else check_filter(name)


def devices(config: Config) -> str:
    """Check that JAX has devices, and that the mesh fits them."""
    import jax

    visible = jax.devices()
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    product = 1
    for axis in sizes:
        product *= max(axis, 1)
    if len(visible) % product or (-1 not in sizes and product > len(visible)):
        raise ConfigError(
            f"the mesh data={sizes[0]} fsdp={sizes[1]} tensor={sizes[2]} does not fit "
            f"{len(visible)} devices: make their product divide the device count"
        )
    return f"{len(visible)} x {visible[0].device_kind}"


def machine(config: Config) -> str:
    """Report the facts that bits depend on, and the proofs of engines on this machine."""
    import jax

    from marin_rl.inference.batch_invariance import recorded_proofs
    from marin_rl.machine import machine_facts

    jax.devices()  # facts are those of a process that computes
    facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    outcomes = [outcome for _, outcome in recorded_proofs()]
    if not outcomes:
        return f"{facts}; no engine has proven its programs here yet: the first one to start does"
    alike = sum(outcome.slots and outcome.prompts for outcome in outcomes)
    shared = sum(outcome.shared for outcome in outcomes)
    return (
        f"{facts}; of {len(outcomes)} engine programs tried here {alike} are batch invariant, and "
        f"{shared} may read a shared prompt's cache once"
    )


def endpoints(config: Config) -> str:
    """Check that every endpoint answers and serves the model by name."""
    if not config.inference.endpoints:
        return "embedded server (none configured)"
    from marin_rl.inference.client.fleet_sources import EndpointSource

    wanted, entries = config.inference.model, config.inference.endpoints
    named = EndpointSource([entry for entry in entries if entry != REGISTERED]).resolve()
    for endpoint in (each.url for each in named):
        served = _models_of(config.inference, endpoint)
        if not any(name == wanted or name.startswith(f"{wanted}@") for name in served):
            raise StalePolicy(
                f"{endpoint} serves {', '.join(served) or 'nothing'}, not {wanted!r}: set "
                "inference.model to a served name, or serve this one"
            )
    later = "; servers may register later" if REGISTERED in entries else ""
    return f"{len(named)} endpoints serve {wanted}{later}"


def _models_of(inference: InferenceConfig, endpoint: str) -> list[str]:
    """List an endpoint's models."""
    from marin_rl.inference.client.policy_client import PolicyClient

    async def ask() -> list[str]:
        async with PolicyClient(
            endpoints=(endpoint,),
            model=inference.model,
            api_key=os.environ.get(inference.api_key_variable),
            timeout_s=ENDPOINT_TIMEOUT_S,
            attempts_max=1,
            in_flight_max=1,
        ) as client:
            return await client.models()

    return _apart(ask)


def reward_model(config: Config) -> str:
    """Check that the reward model is committed, and made for the policy's tokenizer."""
    if config.environment.reward_model is None:
        return "none configured"
    from marin_rl.rollouts.rewards import reward_model_slot_of
    from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for

    names = TokenizerIdentity.of(tokenizer_for(config.policy))
    judge = reward_model_slot_of(config, names.tokenizer_digest, names.chat_template_digest)
    return f"{judge.run.store.url_of(judge.ref.slot)}: {judge.identity.parameters_digest[:12]}"


def pairs(config: Config) -> str:
    """Check that the preference pairs are well-formed, or that the run has its own copy."""
    from marin_rl.storage.runs import Run, committed, pairs_slot
    from marin_rl.storage.tables.pairs import read_pairs

    settings = config.reward_model
    if settings is None:
        raise ConfigError(
            "there is no section reward_model: add one that names the file of preference pairs "
            "(reward_model.pairs)"
        )
    if not Path(settings.pairs).exists():
        with suppress(ObjectMissing):
            run = Run.open(config.root, config.run_id, config.storage_options)
            if committed(run, pairs_slot()) is not None:
                return f"{settings.pairs} is gone; the run has its own copy"
    return f"{settings.pairs}: {len(read_pairs(settings.pairs).pairs)} pairs"


def orchestrator(config: Config) -> str:
    """Check that the configured Prefect API answers; without one, runs start a temporary server."""
    url = os.environ.get("PREFECT_API_URL") or ""
    if not url:
        return f"no PREFECT_API_URL: {config.run_id} would use a temporary server"
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S) as reply:
            healthy = json.loads(reply.read())
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise EndpointUnavailable(
            f"no Prefect API at {url} ({error}): run `make up`, or unset PREFECT_API_URL"
        ) from error
    return f"{url}: healthy" if healthy else f"{url}: answers, not healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The prompt of an example as the model sees it, and the rewards of two answers.

    `right` is the answer of the example, None where it has none; `wrong` is another answer.
    """

    prompt: str
    right: str | None
    right_reward: float | None
    wrong: str
    wrong_reward: float


def trials(config: Config, count: int = TRIALS) -> list[Trial]:
    """Render the first prompts, and score a right and a wrong answer of each as a run would.

    Raises InputError where the reward function fails on one, or gives what is no reward.
    """
    from marin_rl.environments.checks import environment_of

    examples = first_examples(config, count + 1)  # the last is for its answer alone
    answers = [environment_of(config).demonstration(example) for example in examples]
    result: list[Trial] = []
    for place, (prompt, _) in enumerate(rendered(config, examples[:count])):
        right, example = answers[place], examples[place]
        others = [answer for answer in answers if answer not in (None, right)]
        wrong = others[place % len(others)] if others else None
        wrong = WRONG_ANSWER if wrong is None else wrong
        rewards = _rewards(config, example, [wrong] if right is None else [wrong, right])
        result.append(
            Trial(
                prompt=prompt,
                right=right,
                right_reward=None if right is None else rewards[-1],
                wrong=wrong,
                wrong_reward=rewards[0],
            )
        )
    return result


def reward(config: Config) -> str:
    """Check that the reward function scores right answers of examples, and wrong ones."""
    from marin_rl.environments.base import ScoresGroups
    from marin_rl.environments.checks import environment_of
    from marin_rl.environments.episode import HasEpisodes

    built = environment_of(config)
    if isinstance(built, HasEpisodes):
        compared = isinstance(built, ScoresGroups) and built.scores_groups
        by = "score_group compares the finished ones" if compared else "their steps, or the score"
        by += "" if compared else " of a finished one, bring the reward"
        verdict = f"episodes of several turns: {by}, and none is played here"
        prompts = [prompt for prompt, _ in rendered(config, first_examples(config, TRIALS))]
        return "\n".join([verdict, *(f"  {prompt!r:.76}" for prompt in prompts)])
    tried = trials(config)
    right = [f"{trial.right_reward:g}" for trial in tried if trial.right_reward is not None]
    wrong = [f"{trial.wrong_reward:g}" for trial in tried]
    if not right:
        verdict = f"{', '.join(wrong)} for an empty completion; the examples have no answers"
    else:
        same = "; the reward does not tell them apart" if right == wrong else ""
        verdict = f"{', '.join(right)} for right answers, {', '.join(wrong)} for wrong ones{same}"
    rows = [("prompt", "right", "reward", "wrong", "reward"), *map(_cells, tried)]
    return "\n".join([verdict, *("  " + _aligned(row) for row in rows)])


def _cells(trial: Trial) -> tuple[str, ...]:
    scored = "" if trial.right_reward is None else f"{trial.right_reward:.4g}"
    right = "" if trial.right is None else repr(trial.right)
    return (repr(trial.prompt), right, scored, repr(trial.wrong), f"{trial.wrong_reward:.4g}")


def _aligned(cells: Sequence[str]) -> str:
    """Cut and pad the cells of a row to TRIAL_COLUMNS, 78 characters together."""
    cut = (
        text if len(text) <= width else f"{text[: width - 1]}…"
        for text, width in zip(cells, TRIAL_COLUMNS, strict=True)
    )
    return " ".join(f"{t:<{w}}" for t, w in zip(cut, TRIAL_COLUMNS, strict=True)).rstrip()


def _rewards(config: Config, example: Example, completions: Sequence[str]) -> list[float]:
    """Score completions in the worker that the run will use. Raises InputError for a fault."""
    from marin_rl.environments.base import reward_of
    from marin_rl.environments.checks import environment_of
    from marin_rl.environments.mixture import part_for
    from marin_rl.environments.scoring import scorer_for

    part = part_for(environment_of(config), config.environment, example)
    scorer = scorer_for(part.environment, part.config)
    rewards: list[float] = []
    by_group = _apart(scorer.scores_groups)
    calls = [completions] if by_group else [[text] for text in completions]
    for completion, score in _scored(scorer, example, calls):
        if isinstance(score, RewardFault):
            raise InputError(
                f"the reward function failed on the completion {completion[:80]!r} of the example "
                f"{example.example_id}: {score}"
            )
        rewards.append(reward_of(score))
    return rewards


def _scored(
    scorer: "Scorer", example: Example, calls: Sequence[Sequence[str]]
) -> Iterator[tuple[str, "Score"]]:
    """Score call by call: after a failed one, which may take all its time, the next is spared."""
    for call in calls:
        scores = _apart(lambda call=call: scorer.score(example, call))
        yield from zip(call, scores, strict=True)


def _apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await on an event loop of its own: a calling flow may be running one."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(make())).result()


ALL: tuple[tuple[str, Check], ...] = (
    ("storage root", storage),
    ("environment", environment),
    ("data", data),
    ("tokenizer", tokenizer),
    ("model", model),
    ("prompts", prompts),
    ("tools", tools),
    ("canary", canary),
    ("reward", reward),
    ("loss", loss),
    ("groups", group_filter),
    ("devices", devices),
    ("machine", machine),
    ("endpoints", endpoints),
    ("reward model", reward_model),
    ("Prefect API", orchestrator),
)

BEFORE_A_RUN: tuple[Check, ...] = (
    storage, environment, tokenizer, model, prompts, endpoints, reward_model, loss, group_filter,
)  # fmt: skip
BEFORE_A_REWARD_MODEL: tuple[Check, ...] = (storage, tokenizer, model, pairs)


def examine(config: Config, checks: Sequence[tuple[str, Check]] = ALL) -> Iterator[Finding]:
    """Run every check, also after failures; a finding each, and one cause is explained once."""
    explained: dict[str, str] = {}
    for name, check in checks:
        try:
            yield Finding(name=name, passed=True, detail=check(config))
        except MarinRLError as error:
            detail = f"{type(error).__name__}: {error}"
            first = explained.setdefault(detail, name)
            shown = detail if first == name else f"the same error as {first}"
            yield Finding(name=name, passed=False, detail=shown)


def preflight(config: Config, checks: Sequence[Check] = BEFORE_A_RUN) -> None:
    """Raise the error of the first check that fails, before any work is done."""
    for check in checks:
        check(config)
