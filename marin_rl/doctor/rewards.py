"""Trials of the reward function: right and wrong answers of examples, scored as in a run."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from marin_rl.config import Config
from marin_rl.doctor.policy import first_examples, rendered
from marin_rl.doctor.stages import await_apart
from marin_rl.environments.base import reward_of
from marin_rl.environments.checks import environment_of
from marin_rl.environments.registry import foreign_code, part_for
from marin_rl.environments.scoring import scorer_for
from marin_rl.errors import Abstained, InputError, RewardFault
from marin_rl.types import Example

TRIALS = 3  # examples whose answers are scored
TRIAL_COLUMNS = (34, 14, 6, 14, 6)  # characters
WRONG_ANSWER = ""  # where no example has another answer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The prompt of an example as the model sees it, and the rewards of two answers.

    `right` is the answer of the example, None where it has none; `wrong` is another answer. A
    reward is None where no function applies.
    """

    prompt: str
    right: str | None
    right_reward: float | None
    wrong: str
    wrong_reward: float | None

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return (*(() if self.right is None else (self.right_reward,)), self.wrong_reward)


def trials(config: Config, count: int = TRIALS) -> list[Trial]:
    """Render the first prompts, and score a right and a wrong answer of each as a run would.

    Raises InputError where the reward function fails on one, or gives what is no reward.
    """
    examples = first_examples(config, count + 1)  # the last one only lends its answer
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


def abstentions(tried: Sequence[Trial]) -> str | None:
    """Say how many of the tried answers have no reward, None where all have one."""
    rewards = [reward for trial in tried for reward in trial.rewards]
    missing = rewards.count(None)
    if not missing:
        return None
    notice = f"{missing} of {len(rewards)} probes have no reward"
    if missing < len(rewards):
        return f"{notice}: the function does not apply to them"
    return f"{notice}: expected a number for some, found None alone; does the function return one?"


def own_reward(config: Config) -> str:
    """Check a reward function of the user's own on one example; others are known to work."""
    if not foreign_code({"environment": config.environment.model_dump(mode="json")}):
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
    rows = [("prompt", "right", "reward", "wrong", "reward"), *map(_cells, tried)]
    return "\n".join([verdict, *("  " + _aligned(row) for row in rows)])


def _cells(trial: Trial) -> tuple[str, ...]:
    right = "" if trial.right is None else repr(trial.right)
    scored = "" if trial.right is None else _written(trial.right_reward, ".4g")
    wrong_scored = _written(trial.wrong_reward, ".4g")
    return (repr(trial.prompt), right, scored, repr(trial.wrong), wrong_scored)


def _written(reward: float | None, form: str = "g") -> str:
    return "none" if reward is None else format(reward, form)


def _aligned(cells: Sequence[str]) -> str:
    """Cut and pad the cells of a row to TRIAL_COLUMNS, 78 characters together."""
    cut = (
        text if len(text) <= width else f"{text[: width - 1]}…"
        for text, width in zip(cells, TRIAL_COLUMNS, strict=True)
    )
    return " ".join(f"{t:<{w}}" for t, w in zip(cut, TRIAL_COLUMNS, strict=True)).rstrip()


def _rewards(config: Config, example: Example, completions: Sequence[str]) -> list[float | None]:
    """Score completions in the worker that the run will use; None where no function applies.

    Raises InputError for a fault, before the next call: a failed one may have taken all its time.
    """
    part = part_for(environment_of(config), config.environment, example)
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
