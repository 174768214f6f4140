"""Checks of a teacher of distillation: its files, tokenization, ends, and room for its context.

That it gives the same ids the same scores is proven as it is loaded (`rollouts.teaching`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from marin_rl.config import Config, PolicyConfig
from marin_rl.doctor.policy import first_examples, rendered
from marin_rl.environments.checks import environment_of
from marin_rl.errors import InputError
from marin_rl.models.families import described
from marin_rl.plain_files import check_model_folder, read_object, weight_files
from marin_rl.rollouts.pinned import policy_as_begun
from marin_rl.rollouts.teaching import KEY, Prompts
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.layout import POLICY_SLOTS
from marin_rl.storage.runs import checkpoint_named
from marin_rl.tokenizers import (
    encoder_of,
    end_token_ids,
    load_tokenizer,
    tokenizer_digest,
    tokenizer_for,
)

TEXTS = 50  # prompts that a teacher must tokenize as the policy does
FOLDER = "distillation.folder"


def teacher(config: Config) -> str:
    """Check that a teacher can read what the policy samples, before anything is sampled."""
    settings = config.distillation
    if settings is None:
        return "none configured"
    added = _context_tokens(config)
    if settings.folder is not None:
        return _folder(config, Path(settings.folder), added)
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
    _check_vocabulary(tokenizer_for(policy), theirs)
    own = tokenizer_for(policy)
    ends = [own.get_vocab()[token] for token in policy.end_tokens or ()] or [own.eos_token_id]
    if not set(ends) & set(end_token_ids(theirs)):
        shown = (
            [own.decode([end]) for end in ends],
            [own.decode([e]) for e in end_token_ids(theirs)],
        )
        raise InputError(
            f"{FOLDER}: the policy ends an answer with {shown[0]}, the teacher with {shown[1]}: it "
            "would teach never to end; take a teacher of the same ends, or set policy.end_tokens"
        )
    return f"{folder}, which reads {added} tokens more; {len(texts)} texts have the same ids"


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


def _check_vocabulary(own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> None:
    # Texts are a sample: what the policy may sample is its whole vocabulary.
    vocabulary = theirs.get_vocab()
    other = [token for token, id in own.get_vocab().items() if vocabulary.get(token) != id]
    if other:
        raise InputError(
            f"{FOLDER}: {len(other)} tokens of the policy have another id in the teacher's "
            f"tokenizer: expected {other[0]!r} to be {own.get_vocab()[other[0]]}, found "
            f"{vocabulary.get(other[0])}"
        )


def _context_tokens(config: Config) -> int:
    """Tokens that the teacher reads more than the policy, before any prompt."""
    assert config.distillation is not None, "there is a teacher"
    if config.distillation.context is None:
        return 0
    prompts = Prompts(config, environment_of(config))
    pairs = [prompts.rendered(each, each.messages) for each in first_examples(config, 1)]
    return max(len(taught) - len(plain) for plain, taught in pairs)


def _check_room(policy: PolicyConfig, folder: str | None, added: int) -> None:
    if folder is None:
        return  # built here: any position has an angle
    file = Path(folder) / "config.json"
    longest = described(read_object(file), file).context_length
    if policy.context_length + added > longest:
        raise InputError(
            f"distillation: {folder} was made for {longest} positions, but a teacher may read "
            f"policy.context_length ({policy.context_length}) and {added} tokens of context: lower "
            "the one, or shorten the other"
        )
