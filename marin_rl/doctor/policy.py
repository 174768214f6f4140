"""Checks of the policy, of a reward model, and of a teacher of distillation.

They look at files, tokenizers, chat templates, prompts and tools. That a teacher gives the same ids
the same scores is proven as it is loaded (`rollouts.teaching`).
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from marin_rl.batching.sequences import check_lengths, rendered_prompts
from marin_rl.chat_templates import check_options
from marin_rl.config import Config, EnvironmentConfig, PolicyConfig
from marin_rl.doctor.stages import await_apart
from marin_rl.environments.chat import RowEnvironment
from marin_rl.environments.checks import environment_of
from marin_rl.environments.registry import loaded_environment, parts_of
from marin_rl.errors import BridgeFault, InputError, ObjectMissing, RequestRejected
from marin_rl.inference.client.proofs import CANARY, CANARY_PROMPT
from marin_rl.lora.peft import configured_modules
from marin_rl.models.families import described
from marin_rl.plain_files import check_model_folder, read_hf_config, read_object, weight_files
from marin_rl.planning import architecture_of
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.rollouts.data_warnings import all_environments, training_environments
from marin_rl.rollouts.evaluate import held_out_sets
from marin_rl.rollouts.pinned import as_begun, has_dialogues, policy_as_begun
from marin_rl.rollouts.rewards import reward_model_slot_of
from marin_rl.rollouts.teaching import KEY, EndpointTeacher, Prompts, check_recorded, check_steady
from marin_rl.rollouts.tool_turns import ToolTurns
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.layout import POLICY_SLOTS
from marin_rl.storage.runs import Run, checkpoint_named, recorded_config
from marin_rl.tokenizers import (
    TokenizerIdentity,
    check_vocabulary,
    encoder_of,
    end_token_ids,
    load_tokenizer,
    tokenizer_digest,
    tokenizer_for,
)
from marin_rl.types import Example

AS_BEGUN = "as the run began"
PROMPTS_CHECKED_MAX = 64


def policy_to_begin(config: Config) -> PolicyConfig | None:
    """The policy as a new run records it; None once the run has begun. Raises InputError."""
    return None if recorded_config(config) else policy_as_begun(config.policy)


def source(config: Config) -> str:
    """Check that the checkpoint or the folder that the policy starts from is there and whole."""
    policy = config.policy
    if policy.init == "checkpoint":
        key, place = "policy.checkpoint", policy.checkpoint or ""
        run, ref = checkpoint_named(place, POLICY_SLOTS, key, config.storage_options)
        return run.store.url_of(ref.slot)
    if policy.hf_path is None:
        return policy.init
    check_model_folder(Path(policy.hf_path))
    model(config)
    read_hf_config(Path(policy.hf_path))
    weight_files(Path(policy.hf_path))
    return policy.hf_path


def model(config: Config) -> str:
    """Check that the model folder can be loaded exactly, or that the sizes of a built one fit."""
    architecture = architecture_of(config)
    if architecture is None:
        raise InputError(
            f"no model at {config.policy.hf_path}: expected a local Hugging Face folder with "
            "config.json and safetensors; download it first"
        )
    return f"{architecture.parameters / 1e6:,.2f}M parameters"


def adapter(config: Config) -> str:
    """Check that the base can have the adapter: its modules, ranks, and where it begins."""
    lora, architecture = config.policy.lora, architecture_of(config)
    if lora is None or architecture is None:
        return "none configured"
    if lora.init_from is not None and recorded_config(config):
        return AS_BEGUN  # the folder is needed no more
    modules = configured_modules(lora, architecture.linear_shapes)
    return f"{len(modules)} modules of rank {max(module.rank for module in modules.values())}"


def tokenizer(config: Config) -> str:
    """Check that the tokenizer has a chat template and its ids fit the model's vocabulary."""
    built, architecture = tokenizer_for(config.policy), architecture_of(config)
    policy = config.policy
    sized_by_tokenizer = policy.hf_path is None and policy.model.vocab_size is None
    if architecture is not None and not sized_by_tokenizer:
        check_vocabulary(built, architecture.vocab_size)
    return f"{len(built)} ids, chat template present"


def chat_template(config: Config) -> str:
    """Check options of the chat template, that an answer has an end, and that dialogues go on."""
    policy = policy_to_begin(config)
    if policy is None:
        return AS_BEGUN
    built = tokenizer_for(policy)
    environments = all_environments(config)
    if config.sft.environment is not None:  # also for the warm start of a run without one
        environments["sft.environment"] = config.sft.environment
    for key, chosen in environments.items():
        options = chosen.chat_template_options or {}
        if "date" in options:
            raise InputError(f"{key}.chat_template_options.date: the day is that of the whole run")
        if options:
            check_options(built, options, f"{key}.chat_template_options")
    for key, chosen in training_environments(config).items():
        _check_dialogues(policy, chosen, key)
    named = ", ".join(policy.end_tokens or ("the tokenizer's end token",))
    return f"an answer ends with {named}"


def _check_dialogues(policy: PolicyConfig, chosen: EnvironmentConfig, key: str) -> None:
    """Refuse a template that cannot carry the turns of an environment's episodes."""
    if chosen.on_broken_prefix == "segments" or not has_dialogues(chosen):
        return
    environment = loaded_environment(chosen)
    if environment.own_prompts:  # a new segment begins where it cannot
        return
    try:
        TemplateBridge(policy, chosen.chat_template_options).check(environment.tools_offered())
    except BridgeFault as error:
        raise InputError(
            f"{key} has episodes of several turns, which the policy's chat template cannot carry: "
            f"{error}. Use a template that can, set {key}.on_broken_prefix to segments, or "
            f"{key}.turns_max to 1"
        ) from None


def prompts(config: Config) -> str:
    """Check that prompts and a completion fit the context: of rows of files all, up to a bound."""
    if any(each.long_prompts == "drop" for each in training_environments(config).values()):
        config = recorded_config(config) or as_begun(config)  # without the rows that are left out
    measured = _measured(config)
    lengths = [length for _, length in rendered(config, [*measured.values()])]
    room = config.policy.context_length - config.sampling.max_tokens
    check_lengths(
        [*zip(measured, lengths, strict=True)],
        room,
        f"policy.context_length ({config.policy.context_length}) less sampling.max_tokens "
        f"({config.sampling.max_tokens}) leaves {room}: raise the one, lower the other, set "
        "environment.long_prompts to drop",
    )
    return f"longest of {len(lengths)} prompts: {max(lengths, default=0)} tokens"


def _measured(config: Config) -> dict[str, Example]:
    """Return the examples whose prompts are measured: a new run's rows, else a first round's.

    By name, with the place of a row; rows in the order of their files.
    """
    count = min(PROMPTS_CHECKED_MAX, config.rollouts.groups_per_round)
    few = {f"the prompt of {each.example_id}": each for each in first_examples(config, count)}
    with suppress(ObjectMissing):  # a run that has begun keeps its rows
        Run.open(config.root, config.run_id, config.storage_options)
        return few
    rows: dict[str, Example] = {}
    for part in parts_of(environment_of(config), config.environment):
        if isinstance(part.environment, RowEnvironment):
            own = part.environment.first_of_each_split(part.config)
            rows |= {f"{place}: the prompt of {each.example_id}": each for place, each in own}
    known = {each.example_id for each in rows.values()}
    return rows | {name: each for name, each in few.items() if each.example_id not in known}


def tools(config: Config) -> str:
    """Check that the policy's chat template carries the tools that episodes offer.

    Also that no prompt to sample for calls tools, which its environment would not offer.
    """
    names: list[str] = []
    sampled = [*parts_of(environment_of(config), config.environment)]
    if config.evaluation.sets is not None:
        sampled += (held_out.part for held_out in held_out_sets(config))
    for part in sampled:
        if isinstance(part.environment, RowEnvironment):
            part.environment.check_prompts()
    for part in parts_of(environment_of(config), config.environment):
        if offered := part.environment.tools_offered():
            ToolTurns(config.policy, part.config).check(offered)
            names += (tool["function"]["name"] for tool in offered)
    if not names:
        return "none (an episode may add some when it starts)"
    return f"the chat template carries {', '.join(names)}"


def canary(config: Config) -> str:
    """Check that the context has room for the canary, which proves each round's weights."""
    ((_, length),) = rendered_prompts(tokenizer_for(config.policy), [CANARY_PROMPT])
    if length + CANARY.tokens > config.policy.context_length:
        raise InputError(
            f"policy.context_length ({config.policy.context_length}) has no room for the canary, "
            f"a prompt of {length} tokens and {CANARY.tokens} sampled ones that proves before each "
            f"round which weights are served: expected at least {length + CANARY.tokens}"
        )
    return f"{length} tokens and {CANARY.samples} samples of {CANARY.tokens}"


def reward_model(config: Config) -> str:
    """Check that the reward model is committed, and made for the policy's tokenizer."""
    if config.environment.reward_model is None:
        return "none configured"
    names = TokenizerIdentity.of(tokenizer_for(config.policy))
    judge = reward_model_slot_of(config, names.tokenizer_digest, names.chat_template_digest)
    return f"{judge.run.store.url_of(judge.ref.slot)}: {judge.identity.parameters_digest[:12]}"


def first_examples(config: Config, count: int) -> list[Example]:
    built, seed = environment_of(config), config.environment.train_seed
    return [built.example(seed, index, "train") for index in range(count)]


def rendered(config: Config, examples: Sequence[Example]) -> list[tuple[str, int]]:
    """Return the prompts of examples as the model sees them, each with its number of tokens.

    Raises InputError with the example, its roles and the reason where the template refuses one.
    """
    tokenizer = tokenizer_for(config.policy)
    try:
        return rendered_prompts(tokenizer, [example.messages for example in examples])
    except InputError:
        for example in examples:
            _check_rendering(tokenizer, example)
        raise


def _check_rendering(tokenizer: PreTrainedTokenizerBase, example: Example) -> None:
    try:
        rendered_prompts(tokenizer, [example.messages])
    except InputError as error:
        roles = ", ".join(message.role for message in example.messages)
        raise InputError(
            f"the chat template refuses the prompt of the example {example.example_id} (messages "
            f"of {roles}): {error}; expected messages that it takes: change the row, leave "
            "environment.options.system_prompt out, or choose another template"
        ) from None


TEXTS = 50  # prompts that a teacher must tokenize as the policy does
FOLDER, ENDPOINT = "distillation.folder", "distillation.endpoint"


def teacher(config: Config) -> str:
    """Check that a teacher can read what the policy samples, before anything is sampled."""
    settings = config.distillation
    if settings is None:
        return "none configured"
    added = _context_tokens(config)
    if settings.folder is not None:
        return _folder(config, Path(settings.folder), added)
    if settings.endpoint is not None:
        return await_apart(lambda: asyncio.to_thread(_endpoint, config, added))
    if settings.checkpoint is None:
        _check_room(config.policy, config.policy.hf_path, added)
        return f"the run's first checkpoint, which reads {added} tokens more"
    run, ref = checkpoint_named(settings.checkpoint, POLICY_SLOTS, KEY, config.storage_options)
    found = str(manifest_of(run.store, ref).extra.get("tokenizer_digest"))
    if (expected := tokenizer_digest(tokenizer_for(config.policy))) != found:
        raise InputError(
            f"{KEY}: {run.store.url_of(ref.slot)} was trained with another tokenizer: expected "
            f"digest {expected[:12]} of the policy's, found {found[:12]}"
        )
    _check_room(config.policy, run.config.policy.hf_path, added)
    return f"{run.store.url_of(ref.slot)}, which reads {added} tokens more"


def _folder(config: Config, folder: Path, added: int) -> str:
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{FOLDER}: no model at {folder}: expected a local Hugging Face folder with "
            "config.json and safetensors"
        )
    check_model_folder(folder)
    weight_files(folder)
    _check_room(config.policy, str(folder), added)
    theirs, policy = load_tokenizer(folder), policy_as_begun(config.policy)
    texts = [text for text, _ in rendered(config, first_examples(config, TEXTS))]
    check_tokenization(policy, texts, lambda text: encoder_of(theirs)(text, False), FOLDER)
    # Texts are a sample: what the policy may sample is its whole vocabulary.
    known, vocabulary = theirs.get_vocab(), tokenizer_for(policy).get_vocab()
    if other := [token for token, id in vocabulary.items() if known.get(token) != id]:
        raise InputError(
            f"{FOLDER}: {len(other)} tokens of the policy have another id in the teacher's "
            f"tokenizer: expected {other[0]!r} to be {vocabulary[other[0]]}, found "
            f"{known.get(other[0])}"
        )
    _check_ends(policy, end_token_ids(theirs), FOLDER)
    return f"{folder}, which reads {added} tokens more; {len(texts)} texts have the same ids"


def _endpoint(config: Config, added: int) -> str:
    teacher, policy = EndpointTeacher(config, attempts_max=1), policy_as_begun(config.policy)
    texts = [text for text, _ in rendered(config, first_examples(config, TEXTS))]
    bodies = [{"prompt": text, "add_special_tokens": False} for text in texts]
    found, longest = teacher.tokenized(bodies)
    check_tokenization(policy, texts, dict(zip(texts, found, strict=True)).__getitem__, ENDPOINT)
    if longest is not None:  # after each sequence a token is sampled
        _check_positions(policy, f"{teacher.identity}, less a token to sample,", longest - 1, added)
    dialogue = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ends = "the same ends"
    try:
        asked = {"messages": dialogue[:1], "add_generation_prompt": True}
        whole = {"messages": dialogue, "add_generation_prompt": False}
        (question, answered), _ = teacher.tokenized([asked, whole])
    except RequestRejected:
        ends = "ends unknown, as it has no chat template"
    else:
        _check_ends(policy, answered[len(question) :], ENDPOINT)
    check_steady(config, teacher)
    with suppress(ObjectMissing):  # a run that is new
        run = Run.open(config.root, config.run_id, config.storage_options)
        addressed = run.config.model_copy(update={"distillation": config.distillation})
        check_recorded(replace(run, config=addressed), teacher)  # run.json keeps no addresses
    return f"{teacher.identity}, which reads {added} tokens more; {len(texts)} texts alike, {ends}"


def _check_ends(policy: PolicyConfig, theirs: Sequence[int], key: str) -> None:
    """Raise InputError unless an end of the policy's answers is among the teacher's ids."""
    own = tokenizer_for(policy)
    ends = [own.get_vocab()[token] for token in policy.end_tokens or ()] or [own.eos_token_id]
    if not set(ends) & set(theirs):
        shown = [own.decode([end]) for end in ends], [own.decode([each]) for each in theirs]
        raise InputError(
            f"{key}: the policy ends an answer with {shown[0]}, the teacher with {shown[1]}: it "
            "would teach never to end; take a teacher of the same ends, or set policy.end_tokens"
        )


def check_tokenization(
    policy: PolicyConfig, texts: Sequence[str], ids_of: Callable[[str], Sequence[int]], key: str
) -> None:
    """Raise InputError naming the first text that a teacher tokenizes into other ids."""
    own = encoder_of(tokenizer_for(policy))
    for text in texts:
        expected, found = list(own(text, False)), list(ids_of(text))
        if expected != found:
            pairs = enumerate(zip(expected, found, strict=False))
            at = next((n for n, (a, b) in pairs if a != b), min(len(expected), len(found)))
            raise InputError(
                f"{key}: the teacher has another tokenizer: for {text!r:.80} expected the "
                f"{len(expected)} ids of the policy's, found {len(found)}, the first other one at "
                f"{at} ({expected[at : at + 1]} and {found[at : at + 1]}); take a teacher of the "
                "policy's tokenizer"
            )


def _context_tokens(config: Config) -> int:
    """Tokens of the teacher's context, which it reads before every prompt."""
    assert config.distillation is not None, "there is a teacher"
    if config.distillation.context is None:
        return 0
    (first,) = first_examples(config, 1)
    plain, taught = Prompts(config, environment_of(config)).rendered(first, first.messages)
    return len(taught) - len(plain)


def _check_room(policy: PolicyConfig, folder: str | None, added: int) -> None:
    if folder is None:
        return  # built here: any position has an angle
    file = Path(folder) / "config.json"
    _check_positions(policy, folder, described(read_object(file), file).context_length, added)


def _check_positions(policy: PolicyConfig, name: str, longest: int, added: int) -> None:
    if policy.context_length + added > longest:
        raise InputError(
            f"distillation: {name} was made for {longest} positions, but a teacher may read "
            f"policy.context_length ({policy.context_length}) and {added} tokens of context: lower "
            "the one, or shorten the other"
        )
