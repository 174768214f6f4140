"""Checks of everything a run needs: each reports a result, or an error that says what to do.

`marin-rl doctor` runs all of them and goes on after a failure; `preflight` runs the cheap ones, in
order, at the start of every run and stops at the first. A check is a function of the configuration
that returns a line of text or raises an error of our tree.
"""

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from marin_rl.config import Config, InferenceConfig
from marin_rl.errors import (
    ConfigError,
    EndpointUnavailable,
    InputError,
    MarinRLError,
    ObjectMissing,
    StalePolicy,
)

Check = Callable[[Config], str]

PROMPTS_CHECKED_MAX = 64
HEALTH_TIMEOUT_S = 3.0
ENDPOINT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Outcome of one check; `detail` is its result, or the error with its remedy."""

    name: str
    passed: bool
    detail: str


def storage(config: Config) -> str:
    """Check that the root can be written and creates exclusively."""
    from marin_rl.storage.stores.filesystem import open_store, probe

    store = open_store(config.root, config.storage_options)
    probe(store)
    return f"{store.url}: writable, creates exclusively"


def environment(config: Config) -> str:
    """Check that the environment has examples, and that training and evaluation ones are apart."""
    from marin_rl.environments.base import environment_of
    from marin_rl.rollouts.evaluate import held_out_sets

    built = environment_of(config)
    held_out_sets(config)
    example = built.example(config.environment.train_seed, 0, "train")
    return f"{built.name} {built.version}: {example.messages[-1].content!r:.60}"


def tokenizer(config: Config) -> str:
    """Check that the tokenizer has a chat template and its ids fit the model's vocabulary."""
    from marin_rl.planning import architecture_of
    from marin_rl.tokenizers import check_vocabulary, tokenizer_for

    built = tokenizer_for(config.policy)
    sized_by_tokenizer = config.policy.init != "hf" and config.policy.model.vocab_size is None
    architecture = architecture_of(config)
    if architecture is not None and not sized_by_tokenizer:
        check_vocabulary(built, architecture.vocab_size)
    return f"{len(built)} ids, chat template present"


def prompts(config: Config) -> str:
    """Check that the first round's prompts and a completion fit the context."""
    from marin_rl.batching.sequences import prompts_tokens
    from marin_rl.rollouts.generate import examples_of
    from marin_rl.tokenizers import tokenizer_for

    built = tokenizer_for(config.policy)
    longest = 0
    examples = examples_of(config, 0, 0)[:PROMPTS_CHECKED_MAX]
    rendered = prompts_tokens(built, [example.messages for example in examples])
    for example, tokens in zip(examples, rendered, strict=True):
        length = len(tokens)
        room = config.policy.context_length - config.sampling.max_tokens
        if length > room:
            raise InputError(
                f"the prompt of {example.example_id} has {length} tokens, but "
                f"policy.context_length ({config.policy.context_length}) less sampling.max_tokens "
                f"({config.sampling.max_tokens}) leaves {room}: raise the one or lower the other"
            )
        longest = max(longest, length)
    return f"longest of {len(examples)} prompts: {longest} tokens"


def model(config: Config) -> str:
    """Check that the model folder can be loaded exactly, or that the sizes of a built one fit."""
    from marin_rl.planning import architecture_of

    if config.policy.hf_path is not None:
        from marin_rl.training.model import check_hf_support

        check_hf_support(config.policy.hf_path)
    architecture = architecture_of(config)
    if architecture is None:
        raise InputError(f"no model at {config.policy.hf_path}: expected a Hugging Face folder")
    return f"{architecture.parameters / 1e6:,.2f}M parameters"


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
    wanted = config.inference.model
    for endpoint in config.inference.endpoints:
        served = _models_of(config.inference, endpoint)
        if not any(name == wanted or name.startswith(f"{wanted}@") for name in served):
            raise StalePolicy(
                f"{endpoint} serves {', '.join(served) or 'nothing'}, not {wanted!r}: set "
                "inference.model to a served name, or serve this one"
            )
    return f"{len(config.inference.endpoints)} endpoints serve {wanted}"


def _models_of(inference: InferenceConfig, endpoint: str) -> list[str]:
    """List an endpoint's models, on an event loop of its own: a calling flow may be running one."""
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

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(ask())).result()


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


ALL: tuple[tuple[str, Check], ...] = (
    ("storage root", storage),
    ("environment", environment),
    ("tokenizer", tokenizer),
    ("model", model),
    ("prompts", prompts),
    ("devices", devices),
    ("machine", machine),
    ("endpoints", endpoints),
    ("reward model", reward_model),
    ("Prefect API", orchestrator),
)

BEFORE_A_RUN: tuple[Check, ...] = (
    storage, environment, tokenizer, model, prompts, endpoints, reward_model,
)  # fmt: skip
BEFORE_A_REWARD_MODEL: tuple[Check, ...] = (storage, tokenizer, model, pairs)


def examine(config: Config, checks: Sequence[tuple[str, Check]] = ALL) -> Iterator[Finding]:
    """Run every check, also after failures; a finding each."""
    for name, check in checks:
        try:
            yield Finding(name=name, passed=True, detail=check(config))
        except MarinRLError as error:
            yield Finding(name=name, passed=False, detail=f"{type(error).__name__}: {error}")


def preflight(config: Config, checks: Sequence[Check] = BEFORE_A_RUN) -> None:
    """Raise the error of the first check that fails, before any work is done."""
    for check in checks:
        check(config)
