"""Evaluating anything once: a run's checkpoint, a Hugging Face folder, or an OpenAI endpoint.

Owns `marin-rl evaluate` with options of its own: which configuration holds, what is served from
this process, and the rows that go to a file. Nothing is written into a run: evaluations in a
run's own environment, committed with it, are `rollouts.evaluate` and the flow "evaluate".
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from marin_rl.config import (
    Config,
    EnvironmentConfig,
    content_fields,
    load_config,
    override,
    parse_config,
    pin_files,
)
from marin_rl.environments.registry import EnvironmentPart, construct
from marin_rl.environments.suites import prompt_of
from marin_rl.errors import ConfigError
from marin_rl.inference.client.dialects import TextDialect
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.models.spec import Spec
from marin_rl.planning import CONTEXT_TOKENS_MAX, within_memory
from marin_rl.rollouts.clients import Connect
from marin_rl.rollouts.evaluate import (
    HeldOut,
    answered,
    evaluation_metrics,
    extractors_of,
    held_out_sets,
)
from marin_rl.storage.commits import new_attempt
from marin_rl.storage.layout import POLICY_SLOTS
from marin_rl.storage.run_records import RUN_KEY, seed_from
from marin_rl.storage.runs import Run, checkpoint_named, policy_at
from marin_rl.storage.tables.rollouts import encode_shard
from marin_rl.tokenizers import tokenizer_for
from marin_rl.trust import Consent, check_named, settings_of
from marin_rl.types import BEYOND_OPENAI, RolloutGroup, ServedPolicy, SlotRef

NEW_TOKENS_MAX = 512
TABLES = (".jsonl", ".parquet")
MODEL_KEY = "config.json"  # of a Hugging Face folder


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Request for an evaluation; None means the target's configuration.

    `environment` is a registered name, a YAML configuration whose environment is meant, or a JSONL
    or Parquet file of prompts and answers; `options` are its, as `key=value`. In its place `suites`
    are benchmarks by name, each maybe with `:` and its prompt, in the file or folder `data`.
    """

    environment: str | None = None
    suites: Sequence[str] = ()
    data: str | None = None
    options: Sequence[str] = ()
    k: Sequence[int] | None = None
    examples: int | None = None
    samples: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target of an evaluation: `name` is a run, its folder, one checkpoint of it, or a model's
    folder.

    A checkpoint is ROOT/RUN_ID/checkpoints/round-00012 or ROOT/RUN_ID/sft/step-00500. Where there
    is an endpoint, `name` is empty. `trust` takes what a run of somebody else names outside of its
    folder: see `marin_rl.trust`.
    """

    name: str = ""
    root: str = "runs"
    round: int | None = None
    endpoint: str | None = None
    model: str | None = None
    config: Path | None = None
    api_key_variable: str | None = None
    trust: bool = False

    @property
    def is_run(self) -> bool:
        """True for a run, by id or folder; False for one checkpoint of it and for other targets."""
        folder = Path(self.name)
        if self.endpoint is not None or (folder / RUN_KEY).is_file():
            return self.endpoint is None
        return "/" not in self.name.rstrip("/") and not (folder / MODEL_KEY).is_file()

    def open_run(self) -> Run:
        folder = Path(self.name)
        if (folder / RUN_KEY).is_file():
            return Run.open(str(folder.parent), folder.name)
        return Run.open(self.root, self.name.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The `eval/*` metrics of a target, its samples, and the rows as one Parquet file's bytes.

    `suites` are the prompt and the files of each suite, with their SHA-256.
    """

    model: str
    config: Config
    metrics: Mapping[str, float]
    groups: Sequence[RolloutGroup]
    rows: bytes
    suites: Mapping[str, Mapping[str, str]]


def evaluate_target(target: Target, request: EvaluationRequest) -> EvaluationResult:
    """Evaluate a target on held-out examples.

    Raises ConfigError for settings that do not go together, ObjectMissing for a checkpoint that is
    not there, InputError for an unfit folder or prompt file, and what the client raises.
    """
    if bool(request.suites) != bool(request.data) or (request.suites and request.environment):
        raise ConfigError("--suite and --data FILE or FOLDER go together, and without --env")
    if target.endpoint is not None:
        return _at_endpoint(target, request)
    folder = Path(target.name)
    if (folder / MODEL_KEY).is_file() and not (folder / RUN_KEY).is_file():
        from marin_rl.serving.launch import folder_tokenizer, serving
        from marin_rl.serving.weights.checkpoint_loader import read_folder

        config, sets = evaluation_config(_folder_config(folder, target, request), request)
        loaded, source = read_folder(str(folder)), SlotRef(slot=str(folder), sha256="")
        with serving(loaded, folder_tokenizer(folder), source, config) as policy:
            return _evaluate(policy, PolicyClient, config, sets)
    return _of_run(folder, target, request)


def evaluation_config(
    config: Config, request: EvaluationRequest
) -> tuple[Config, tuple[HeldOut, ...]]:
    """The configuration of one evaluation, and its held-out examples, loaded.

    Without a word on samples there are as many as the largest k needs; without one on temperature,
    several samples are drawn at the temperature of training, for greedy ones would all be equal.
    """
    evaluation = config.evaluation
    k = tuple(request.k or evaluation.k)
    samples = request.samples or max(*k, evaluation.samples if request.k is None else 1)
    temperature = request.temperature
    if temperature is None:
        greedy = samples > 1 and evaluation.temperature == 0
        temperature = config.sampling.temperature if greedy else evaluation.temperature
    tree = content_fields(config)
    tree |= {"root": config.root, "inference": config.inference.model_dump()}
    tree["environment"] = _environment(config, request)
    tree["evaluation"] |= {"k": k, "samples": samples, "temperature": temperature, "sets": None}
    if request.max_tokens is not None:
        tree["sampling"]["max_tokens"] = request.max_tokens
    if request.suites:
        return _suites_config(tree, request, config.policy.context_length // 2)
    chosen_config = parse_config(tree, "evaluation")
    environment = construct(chosen_config.environment)
    environment.load_examples()
    examples = request.examples or chosen_config.evaluation.examples
    if environment.eval_size is not None:
        if request.examples is not None and request.examples > environment.eval_size:
            raise ConfigError(
                f"--examples {request.examples}: the environment holds out {environment.eval_size}"
            )
        examples = min(examples, environment.eval_size)
    chosen = chosen_config.evaluation.model_copy(update={"examples": examples})
    part = EnvironmentPart(label="", config=chosen_config.environment, environment=environment)
    held_out = HeldOut(part=part, examples=examples)
    return chosen_config.model_copy(update={"evaluation": chosen}), (held_out,)


def _suites_config(
    tree: dict[str, Any], request: EvaluationRequest, most: int
) -> tuple[Config, tuple[HeldOut, ...]]:
    """The configuration of suites as named sets; each has its usual limit of at most `most` tokens.

    Raises ConfigError, InputError for files of another shape.
    """
    sets = tree["evaluation"]["sets"] = dict[str, Any]()
    for item in request.suites:
        suite, _, prompt = item.partition(":")
        if item.replace(":", "-") in sets:
            raise ConfigError(f"--suite names {item} twice")
        name, usual = prompt_of(suite, prompt or None)
        options = {"suite": suite, "path": request.data, "prompt": name}
        options["max_tokens"] = request.max_tokens or min(usual.max_tokens, most)
        chosen = override({"options": options}, [f"options.{each}" for each in request.options])
        sets[item.replace(":", "-")] = {"name": "suite", **chosen}
    if request.max_tokens is None:
        limits = [each["options"]["max_tokens"] or most for each in sets.values()]
        tree["sampling"]["max_tokens"] = max(limits)
    tree["environment"] = {"name": "echo"}  # that of a run has no part in it
    tree["evaluation"]["examples"] = request.examples or 1_000_000  # all
    config = parse_config(pin_files(tree), "evaluation")
    return config, held_out_sets(config)


def _environment(config: Config, request: EvaluationRequest) -> dict[str, Any]:
    tree = config.environment.model_dump(mode="json")
    if request.environment is not None:
        path = Path(request.environment)
        if path.suffix in TABLES:
            tree |= {"name": "chat", "options": {"path": str(path), "eval_fraction": 1.0}}
        elif _is_yaml(request.environment):
            tree = load_config(path).environment.model_dump(mode="json")
        else:
            same = request.environment == config.environment.name
            tree |= {"name": request.environment, "options": tree["options"] if same else {}}
    changed = override(tree, [f"options.{item}" for item in request.options])
    return pin_files({"environment": changed})["environment"]


def _of_run(folder: Path, target: Target, request: EvaluationRequest) -> EvaluationResult:
    """Evaluate a checkpoint from its files: its trainer's state is not needed."""
    from marin_rl.serving.launch import serving
    from marin_rl.serving.weights.checkpoint_loader import read_slot
    from marin_rl.training.state import template_of

    opened, checkpoint = _checkpoint(folder, target)
    options = tuple(f"environment.options.{item}" for item in request.options)
    consent = Consent(file=target.config, overrides=options, trust=target.trust)
    chosen = settings_of(opened, replace(consent, overrides=()), ())
    # This process serves it, whatever served its training.
    here = chosen.inference.model_copy(update={"endpoints": ()})
    config = chosen.model_copy(update={"inference": here})
    own = bool(request.suites) or request.environment not in (None, config.environment.name)
    played = EnvironmentConfig.model_validate(_environment(config, request))
    sections = ("policy",) if own else ("policy", "environment.")
    check_named(opened, config.model_copy(update={"environment": played}), consent, sections)
    tokenizer = tokenizer_for(opened.config.policy)
    if own and target.config is None:  # the run's context says nothing of it
        config = _as_long_as(config, template_of(opened.config.policy, tokenizer).spec)
    settings, sets = evaluation_config(config, request)
    loaded = read_slot(opened, checkpoint)
    with serving(loaded, tokenizer, checkpoint, settings) as policy:
        return _evaluate(policy, PolicyClient, settings, sets)


def _as_long_as(config: Config, spec: Spec) -> Config:
    """The configuration with the context that a model has, bounded, where that is longer."""
    longest = min(spec.context_length, CONTEXT_TOKENS_MAX)
    if longest <= config.policy.context_length:
        return config
    tree: dict[str, Any] = content_fields(config) | {
        "root": config.root,
        "inference": config.inference.model_dump(),
    }
    tree["policy"]["context_length"], tree["batching"] = longest, {}
    return within_memory(parse_config(tree, config.run_id))


def _checkpoint(folder: Path, target: Target) -> tuple[Run, SlotRef]:
    """The run and the committed checkpoint that a target names: its latest, a round's, or one."""
    text = target.name.rstrip("/").removesuffix("/manifest.json")
    kind = text.rpartition("/")[0].rpartition("/")[2]
    if kind in POLICY_SLOTS and not (folder / RUN_KEY).is_file():
        if target.round is not None:
            raise ConfigError(f"--round {target.round}: {text} names a checkpoint already")
        return checkpoint_named(text, POLICY_SLOTS, "what is evaluated", {})
    run = target.open_run()
    return run, policy_at(run, target.round)


def _at_endpoint(target: Target, request: EvaluationRequest) -> EvaluationResult:
    if target.name or not target.model:
        raise ConfigError(
            "an endpoint is evaluated by --endpoint URL --model NAME, without another target"
        )
    base = _base(target, request)
    max_tokens = request.max_tokens or base.sampling.max_tokens
    tree: dict[str, Any] = content_fields(base) | {"root": base.root}
    longest = max(base.policy.context_length, max_tokens + CONTEXT_TOKENS_MAX)
    tree["policy"]["context_length"], tree["batching"]["length_buckets"] = longest, ()
    tree["sampling"]["max_tokens"] = max_tokens
    config, sets = evaluation_config(parse_config(tree, "endpoint"), request)
    for name in BEYOND_OPENAI:
        if getattr(config.sampling, name):
            raise ConfigError(
                f"sampling.{name}: OpenAI's protocol has no such field; set it to "
                + ("0" if name == "top_k" else "null")
            )
    variable = target.api_key_variable or config.inference.api_key_variable
    inference = config.inference.model_copy(update={"api_key_variable": variable})
    endpoint = (target.endpoint or "").rstrip("/")
    policy = ServedPolicy(
        endpoints=(endpoint,),
        model=target.model,
        weight_version=0,
        parameters_digest="",
        tokenizer_digest="",
        chat_template_digest="",
        checkpoint=SlotRef(slot=endpoint, sha256=""),
    )
    chosen = config.model_copy(update={"inference": inference})
    return _evaluate(policy, partial(PolicyClient, dialect=TextDialect()), chosen, sets)


def _evaluate(
    policy: ServedPolicy, connect: Connect, config: Config, sets: Sequence[HeldOut]
) -> EvaluationResult:
    """Sample the held-out examples, score the samples, and summarise them."""
    name = policy.model
    seed_of, version = partial(seed_from, config), policy.weight_version
    groups = asyncio.run(answered(config, policy, sets, name, seed_of, version, connect))
    rows = encode_shard(
        groups,
        run_id=config.run_id,
        round=version,
        shard=0,
        attempt=new_attempt(),
        replica="",
        fingerprint="",
        policy=policy,
    )
    return EvaluationResult(
        model=name,
        config=config,
        metrics=evaluation_metrics(groups, config.evaluation, extractors_of(config)),
        groups=groups,
        rows=rows,
        suites={each.part.label: each.part.environment.record for each in sets if each.name},
    )


def _base(target: Target, request: EvaluationRequest) -> Config:
    """Configuration for a folder or an endpoint: a file's, else the defaults."""
    if target.config is not None:
        return load_config(target.config)
    if request.environment is None and not request.suites:
        raise ConfigError(
            "say what is to be answered: --env NAME, --suite NAME --data FILE, or --config FILE"
        )
    defaults = Config(run_id="evaluation")
    if request.environment is None or not _is_yaml(request.environment):
        return defaults
    own = load_config(Path(request.environment))
    return defaults.model_copy(update={"sampling": own.sampling})


def _is_yaml(environment: str | None) -> bool:
    return environment is not None and Path(environment).suffix in (".yaml", ".yml")


def _folder_config(folder: Path, target: Target, request: EvaluationRequest) -> Config:
    """Return the configuration of a folder; its context is, by default, the model's, bounded."""
    from marin_rl.training.hf_weights import hf_template

    base = _base(target, request)
    tree: dict[str, Any] = content_fields(base) | {"root": base.root}
    tree["policy"] |= {"init": "hf", "hf_path": str(folder), "tokenizer": str(folder)}
    if target.config is None:
        longest = min(hf_template(folder).spec.context_length, CONTEXT_TOKENS_MAX)
        tree["policy"]["context_length"] = longest
        if not _is_yaml(request.environment):
            tree["sampling"]["max_tokens"] = min(NEW_TOKENS_MAX, longest // 2)
    if request.max_tokens is not None:
        tree["sampling"]["max_tokens"] = request.max_tokens
    config = parse_config(tree, str(folder))
    return config if target.config is not None else within_memory(config)
