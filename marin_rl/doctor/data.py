"""Checks of what a run reads and writes: storage, examples, group filter, preference pairs."""

from contextlib import suppress
from pathlib import Path

from marin_rl.config import Config
from marin_rl.doctor.templates import learned_pairs, learned_rows
from marin_rl.errors import ConfigError, ObjectMissing


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
    """Check that every example that a warm start comes to has a demonstration, learned as it is."""
    from marin_rl.environments.checks import check_demonstrations

    check_demonstrations(config)
    learned_rows(config)
    return f"{config.sft.steps * config.sft.sequences_per_step} examples have demonstrations"


def group_filter(config: Config) -> str:
    """Check that a filter of groups of the user's own can be loaded and takes a group."""
    from marin_rl.batching.group_filters import check_filter

    name = config.asynchrony and config.asynchrony.group_filter
    return "every group passes" if name is None else check_filter(name)


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
    file = read_pairs(settings.pairs)
    learned_pairs(config, file)
    return f"{settings.pairs}: {len(file.pairs)} pairs"


def reward_model(config: Config) -> str:
    """Check that the reward model is committed, and made for the policy's tokenizer."""
    if config.environment.reward_model is None:
        return "none configured"
    from marin_rl.rollouts.rewards import reward_model_slot_of
    from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for

    names = TokenizerIdentity.of(tokenizer_for(config.policy))
    judge = reward_model_slot_of(config, names.tokenizer_digest, names.chat_template_digest)
    return f"{judge.run.store.url_of(judge.ref.slot)}: {judge.identity.parameters_digest[:12]}"
