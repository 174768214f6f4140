"""Scores of a finished group: rewards of its steps, and those that its environment gives its ends.

Leaves out the workers that score (`environments.scoring`).
"""

from collections.abc import Sequence

from marin_rl.environments.base import checked_components
from marin_rl.environments.scoring import Scorer, fault_of
from marin_rl.errors import MarinRLError
from marin_rl.rollouts.trajectories import Trajectory
from marin_rl.types import Example, RewardComponent, Rollout

Score = tuple[RewardComponent, ...] | MarinRLError


async def score_group(
    scorer: Scorer, example: Example, trajectories: Sequence[Trajectory]
) -> list[Score]:
    """Scores of a finished group: its steps' rewards, else the environment's for its last turns.

    What the environment scores goes to a worker in one message. Raises InputError where no worker
    can be started.
    """
    finished = [t for t in trajectories if t.fault is None and t.scored]
    texts = [t.text for t in finished]
    ids = [t.turns[-1].completion.token_ids for t in finished]
    dialogues = [t.dialogue for t in finished] if any(len(t.turns) > 1 for t in finished) else []
    scored = iter(await scorer.score(example, texts, ids, dialogues) if finished else [])
    scores: list[Score] = []
    for trajectory in trajectories:
        if trajectory.fault is not None:
            scores.append(trajectory.fault)
            continue
        score = next(scored) if trajectory.scored else ()
        if trajectory.reward is not None and not isinstance(score, MarinRLError):
            score = (RewardComponent(name="steps", value=trajectory.reward), *score)
        scores.append(_checked(score))
    return scores


def _checked(score: Score) -> Score:
    """Return a score, or the fault of one whose sum cannot be trained on."""
    try:
        return checked_components(score) if score and not isinstance(score, MarinRLError) else score
    except ValueError as error:
        return fault_of(error)


def last_completion(rollout: Rollout) -> str | None:
    """The text of the last sampled turn; None where nothing was sampled."""
    texts = [turn.content for turn in rollout.turns if turn.role == "assistant"]
    return texts[-1] if texts else None
