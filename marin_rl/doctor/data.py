"""Checks of what a run reads and writes: storage, examples, rewards, rows to learn from, pairs.

A run keeps what it began with, so rows are compared only for runs that are still to begin.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from marin_rl.batching.pairs import check_identity, shared_prompt
from marin_rl.batching.selection import check_filter
from marin_rl.batching.sequences import TrainOn, check_lengths, rendered_lengths
from marin_rl.chat_templates import check_options
from marin_rl.config import Config
from marin_rl.doctor.policy import AS_BEGUN, first_examples, policy_to_begin, rendered
from marin_rl.doctor.stages import await_apart
from marin_rl.environments import registry
from marin_rl.environments.base import reward_of
from marin_rl.environments.chat import RowEnvironment
from marin_rl.environments.checks import check_demonstrations, environment_of
from marin_rl.environments.prompt_files import OPTIONS
from marin_rl.environments.scoring import scorer_for
from marin_rl.errors import Abstained, InputError, ObjectMissing, RewardFault
from marin_rl.processes import joined
from marin_rl.rollouts.data_warnings import data_warnings
from marin_rl.rollouts.evaluate import held_out_sets
from marin_rl.rollouts.pinned import refuse_other_rows
from marin_rl.rollouts.rewards import given_pairs
from marin_rl.storage.runs import Run, committed, pairs_slot
from marin_rl.storage.stores.filesystem import LocalStore, open_store, probe
from marin_rl.storage.tables.pairs import PairFile
from marin_rl.tokenizers import TokenizerIdentity, end_token_ids, tokenizer_for
from marin_rl.types import Demonstration, Example, PairSection, assistant

ROWS_TOGETHER = 64
GENERATED_CHECKED_MAX = 256  # examples of an environment that generates them without end

TRIALS = 3  # examples whose answers are scored
TRIAL_COLUMNS = (34, 14, 6, 14, 6)  # characters

_log = logging.getLogger(__name__)


def storage(config: Config) -> str:
    """Check that the root can be written and creates exclusively; new local folders go again."""
    store = open_store(config.root, config.storage_options)
    folder = Path(store.url) if isinstance(store, LocalStore) else Path()
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    probe(store)
    if joined() is not None:
        made = []  # others probe it meanwhile
    with suppress(OSError):  # a run has begun there meanwhile
        for each in made:
            each.rmdir()
    return f"{store.url}: writable, creates exclusively"


def environment(config: Config) -> str:
    """Check that the environment has examples, and that training and evaluation ones are apart."""
    built = environment_of(config)
    if config.evaluation.sets is not None:
        held_out_sets(config)
    example = built.example(config.environment.train_seed, 0, "train")
    return f"{built.name} {built.version}: {example.messages[-1].content!r:.60}"


def rows(config: Config) -> str:
    refuse_other_rows(config)
    return AS_BEGUN


def warnings(config: Config) -> str:
    return "; ".join(data_warnings(config)) or "nothing unexpected in prompts and held-out sets"


def warm_start(config: Config) -> str:
    return "none configured" if config.policy.init != "sft" else learned_rows(config)


def demonstrations(config: Config) -> str:
    """Check that every example that a warm start comes to has a demonstration, learned as it is."""
    check_demonstrations(config)
    learned_rows(config)
    return f"{config.sft.steps * config.sft.sequences_per_step} examples have demonstrations"


def group_filter(config: Config) -> str:
    """Check that a filter of groups of the user's own can be loaded and takes a group."""
    chosen = config.ahead.group_filter
    return "every group passes" if chosen is None else check_filter(chosen.score)


def pairs(config: Config, section: PairSection) -> str:
    """Check that the preference pairs are well-formed, or that the run has its own copy."""
    settings = config.pair_training(section)
    if not Path(settings.pairs).is_file():  # gone, or a run that may have grown
        with suppress(ObjectMissing):
            run = Run.open(config.root, config.run_id, config.storage_options)
            if committed(run, pairs_slot()) is not None:
                return f"{settings.pairs} is not read; the run has its own copy"
    file = given_pairs(settings, section)
    learned_pairs(config, file, section)
    kind = "answers with labels" if settings.labelled else "pairs"
    return f"{settings.pairs}: {len(file.pairs)} {kind}"


def learned_pairs(config: Config, file: PairFile, section: PairSection) -> None:
    """Check that pairs without tokens are learned as they are written, and that all fit.

    The tokens of the others have to be the policy's and, for `preference`, of one prompt.
    """
    policy = policy_to_begin(config)
    if policy is None:
        return
    tokenizer = tokenizer_for(policy)
    texts: list[Demonstration] = []
    lengths: list[tuple[str, int]] = []
    names = asdict(TokenizerIdentity.of(tokenizer))
    for pair, place in zip(file.pairs, file.places, strict=True):
        try:
            check_identity(pair, **names)
            if section == "preference" and pair.rejected_token_ids is not None:
                shared_prompt(pair)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        for field in ("chosen", "rejected"):
            ids = getattr(pair, f"{field}_token_ids")
            if ids is not None:
                lengths.append((f"{place}, field {field}_token_ids", len(ids)))
            if pair.chosen_token_ids is None and (field == "chosen" or pair.label is None):
                answer, name = assistant(getattr(pair, field)), f"{place}, field {field}"
                texts.append(Demonstration(messages=pair.messages, answer=answer, name=name))
    lengths += _lengths(tokenizer, iter(texts))
    check_lengths(lengths, policy.context_length)


def learned_rows(config: Config) -> str:
    """Check that a warm start learns from a row exactly what the row says."""
    policy = policy_to_begin(config)
    if policy is None:
        return AS_BEGUN
    return f"{_compared(config.model_copy(update={'policy': policy}).model_dump_json())} rows"


@lru_cache(maxsize=1)
def _compared(settings: str) -> int:
    """Compare the demonstrations of a configuration, given as JSON; return how many differ.

    Cached, for two stages of the warm start ask. Raises InputError that names the row.
    """
    config = Config.model_validate_json(settings)
    tokenizer = tokenizer_for(config.policy)
    learned = _checked(tokenizer, _demonstrations(config), config.sft.train_on)
    lengths = _lengths(tokenizer, learned, config.sft.train_on)
    check_lengths(lengths, config.policy.context_length)
    return len(lengths)


def _lengths(
    tokenizer: PreTrainedTokenizerBase, learned: Iterator[Demonstration], train_on: TrainOn = None
) -> list[tuple[str, int]]:
    """Tokens of demonstrations by their names. Raises InputError for one that is cut otherwise."""
    lengths: list[tuple[str, int]] = []
    while some := list(islice(learned, ROWS_TOGETHER)):
        counts = rendered_lengths(tokenizer, some, end_token_ids(tokenizer), train_on)
        lengths += zip([each.name for each in some], counts, strict=True)
    return lengths


def _demonstrations(config: Config) -> Iterator[Demonstration]:
    """Yield each different demonstration of a warm start."""
    chosen = config.sft.environment or config.environment
    examples = config.sft.steps * config.sft.sequences_per_step
    order = None if chosen.mixture is None else registry.order_in(chosen.mixture)
    for place, part in enumerate(
        registry.parts_of(registry.loaded_environment(chosen, "train"), chosen)
    ):
        own, seed = part.environment, part.config.train_seed
        count = examples if order is None else order.count(place, examples)
        different = GENERATED_CHECKED_MAX if own.size is None else own.size
        indices = list(range(min(count, different)))
        if isinstance(own, RowEnvironment):  # by file order: its first wrong row is named
            indices = sorted(indices, key=partial(own.row_number, seed, split="train"))
        for index in indices:
            example = own.example(seed, index, "train")
            name = own.place(seed, index, "train")
            name = name or f"example {example.example_id} of {own.name}"
            try:
                learned = registry.demonstrated_by(part, example)
            except InputError as error:
                raise InputError(f"{name}: {error}") from None
            if learned is not None:  # an example without one is refused by `demonstrations`
                yield replace(learned, name=name)


def _checked(
    tokenizer: PreTrainedTokenizerBase, learned: Iterator[Demonstration], train_on: TrainOn
) -> Iterator[Demonstration]:
    """The same; raises InputError for an empty answer, and an option that no template reads."""
    known = set[frozenset[str]]()
    for each in learned:
        if (names := frozenset(each.options)) not in known:
            if "date" in names:
                raise InputError(f"{each.name}, {OPTIONS}.date: the day is that of the whole run")
            check_options(tokenizer, each.options, f"{each.name}, {OPTIONS}")
            known.add(names)
        answers = each.answers if train_on in ("all", "flagged") else [each]
        for one, share in zip(answers, each.trained or [True] * len(answers), strict=False):
            if share and not one.answer.content.strip() and not one.answer.tool_calls:
                raise InputError(
                    f"{one.name}: its answer is empty, so that only its end would be learned: "
                    "expected a text or a call of a tool; remove the row"
                )
        yield each


class Trial(NamedTuple):
    """The prompt of an example as the model sees it, and the rewards of two answers.

    `right` is the answer of the example, None where it has none; `wrong` is another answer. A
    reward is None where no function applies.
    """

    prompt: str
    right: str | None
    right_reward: float | None
    wrong: str
    wrong_reward: float | None


def trials(config: Config, count: int = TRIALS) -> list[Trial]:
    """Render the first prompts, and score a right and a wrong answer of each as a run would."""
    examples = first_examples(config, count + 1)  # the last one only lends its answer
    answers = [environment_of(config).demonstration(example) for example in examples]
    result: list[Trial] = []
    for place, (prompt, _) in enumerate(rendered(config, examples[:count])):
        right, example = answers[place], examples[place]
        others = [answer for answer in answers if answer is not None and answer != right]
        wrong = others[place % len(others)] if others else ""
        rewards = _rewards(config, example, [wrong] if right is None else [wrong, right])
        of_right = None if right is None else rewards[-1]
        result.append(Trial(prompt, right, of_right, wrong, rewards[0]))
    return result


def abstentions(tried: Sequence[Trial]) -> str | None:
    """Say how many of the tried answers have no reward, None where all have one."""
    rewards = [trial.wrong_reward for trial in tried]
    rewards += [trial.right_reward for trial in tried if trial.right is not None]
    missing = rewards.count(None)
    if not missing:
        return None
    notice = f"{missing} of {len(rewards)} probes have no reward"
    if missing < len(rewards):
        return f"{notice}: the function does not apply to them"
    return f"{notice}: expected a number for some, found None alone; does the function return one?"


def own_reward(config: Config) -> str:
    """Check a reward function of the user's own on one example; others are known to work."""
    if not registry.foreign_code({"environment": config.environment.model_dump(mode="json")}):
        return "shipped"
    if notice := abstentions(trials(config, 1)):
        _log.warning("reward: %s", notice)
        return notice
    return "a reward for an example"


def reward(config: Config) -> str:
    """Check that the reward function scores right answers of examples, and wrong ones."""
    built = environment_of(config)
    if built.has_episodes:
        by = "their steps, or the score of a finished one, bring the reward"
        by = "score_group compares the finished ones" if built.scores_groups else by
        verdict = f"episodes of several turns: {by}, and none is played here"
        prompts = [prompt for prompt, _ in rendered(config, first_examples(config, TRIALS))]
        return "\n".join([verdict, *(f"  {prompt!r:.76}" for prompt in prompts)])
    tried = trials(config)
    right = [_written(trial.right_reward) for trial in tried if trial.right is not None]
    wrong = [_written(trial.wrong_reward) for trial in tried]
    if not right:
        verdict = f"{', '.join(wrong)} for an empty completion; the examples have no answers"
    else:
        same = "; the reward does not tell them apart" if right == wrong else ""
        verdict = f"{', '.join(right)} for right answers, {', '.join(wrong)} for wrong ones{same}"
    if notice := abstentions(tried):
        verdict += f"; {notice}"
    rows: list[tuple[str, ...]] = [("prompt", "right", "reward", "wrong", "reward")]
    for trial in tried:
        cells = ("", "")
        if trial.right is not None:
            cells = repr(trial.right), _written(trial.right_reward, ".4g")
        wrong_reward = _written(trial.wrong_reward, ".4g")
        rows.append((repr(trial.prompt), *cells, repr(trial.wrong), wrong_reward))
    return "\n".join([verdict, *("  " + _aligned(row) for row in rows)])


def _written(reward: float | None, form: str = "g") -> str:
    return "none" if reward is None else format(reward, form)


def _aligned(cells: Sequence[str]) -> str:
    """Cut and pad the cells of a row to TRIAL_COLUMNS, 78 characters together."""
    padded = []
    for text, width in zip(cells, TRIAL_COLUMNS, strict=True):
        cut = text if len(text) <= width else f"{text[: width - 1]}…"
        padded.append(f"{cut:<{width}}")
    return " ".join(padded).rstrip()


def _rewards(config: Config, example: Example, completions: Sequence[str]) -> list[float | None]:
    """Score completions in the worker that the run will use; None where no function applies.

    Raises InputError for a fault, before the next call: a failed one may have taken all its time.
    """
    part = registry.part_for(environment_of(config), config.environment, example)
    scorer = scorer_for(part.environment, part.config)
    by_group = await_apart(scorer.scores_groups)
    rewards: list[float | None] = []
    for call in [completions] if by_group else [[text] for text in completions]:
        scores = await_apart(lambda call=call: scorer.score(example, call))
        for completion, score in zip(call, scores, strict=True):
            if isinstance(score, RewardFault) and not isinstance(score, Abstained):
                raise InputError(
                    f"the reward function failed on the completion {completion[:80]!r} of the "
                    f"example {example.example_id}: {score}"
                )
            rewards.append(None if isinstance(score, RewardFault) else reward_of(score))
    return rewards
