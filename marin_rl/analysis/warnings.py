"""Warnings about a run: rules over its metric rows, a sentence each, for `run` and `status`.

Owns the limits and the words. A rule looks at the latest round, or at a stretch of them; what the
rows do not say (a process that is gone, a run that stands still) is status.py's.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.estimates import held_out_accuracies

Rows = Sequence[Mapping[str, Any]]

ENTROPY_LEFT_MIN = 0.1  # of the first round's
ENTROPY_MIN = 0.001  # nats a token: all samples of a prompt are the same text
INTERVAL_MAX = 0.3  # width of the 95 % interval, beyond which an accuracy says little
GAIN_MIN = 0.05
ROUNDS_JUDGED = 10

_LIMITS = {
    "mismatch_kl": (0.01, "sampler and trainer disagree: mismatch KL {:.3g}"),
    "rollouts/errors": (0.05, "{:.0%} of the rollouts failed"),
    "completions/clipped_ratio": (0.5, "{:.0%} of the completions are cut off"),
    "frac_reward_zero_std": (0.8, "{:.0%} of the groups carry no signal"),
    "updates/skipped": (0.0, "{:.0f} updates were not finite and were skipped"),
    "weights/failures": (0.0, "giving weights to servers failed {:.0f} times"),
}
_ALL = {  # where the share is 100 %
    "completions/clipped_ratio": (
        "every completion is cut off at sampling.max_tokens: raise it, or teach the model to end"
    ),
    "frac_reward_zero_std": (
        "nothing can be learned: within every group all rewards are equal. "
        "`marin-rl rollouts {run}` shows whether the reward is too hard, too easy or wrong"
    ),
}


def warnings_of(rows: Rows, run_id: str = "RUN") -> list[str]:
    """Warnings about the latest rounds, a sentence each; none for a run that goes well.

    `run_id` stands in the commands that they name.
    """
    trained = [row for row in rows if row.get("reward") is not None]
    if not trained:
        return []
    last = trained[-1]
    # With a teacher, groups without a signal of their own have one.
    taught = {"frac_reward_zero_std"} if last.get("distillation/kl") is not None else set[str]()
    beyond = [
        f"round {last['round']}: "
        + (_ALL.get(name, text) if last[name] >= 1.0 else text).format(last[name], run=run_id)
        for name, (limit, text) in _LIMITS.items()
        if last.get(name) is not None and last[name] > limit and name not in taught
    ]
    return beyond + _collapse(trained) + _hacked(rows)


class NewWarnings:
    """Warnings of a run in progress, by its events; a kind is announced once, when it appears.

    Evaluations of few examples are one of them where the environment has `more_examples`.
    """

    def __init__(
        self, run_id: str, announce: Callable[[str], None], *, more_examples: bool = False
    ) -> None:
        self._run_id, self._announce, self._more_examples = run_id, announce, more_examples
        self._rows: dict[int, dict[str, Any]] = {}
        self._seen: set[str] = set()

    def listen(self, event: ProgressEvent) -> None:
        ends = event.stage in ("round", "evaluate") and event.metrics
        if not ends or event.run_id != self._run_id or event.round is None:
            return
        self._rows.setdefault(event.round, {"round": event.round}).update(event.metrics)
        rows = [self._rows[round] for round in sorted(self._rows)]
        small = _held_out(rows) if self._more_examples else []
        for warning in (*warnings_of(rows, self._run_id), *small):
            words = warning.partition(": ")[2] if warning.startswith("round ") else warning
            if (kind := "".join(sign for sign in words if sign.isalpha())) not in self._seen:
                self._seen.add(kind)
                self._announce(warning)


def _held_out(rows: Rows) -> list[str]:
    """Warn of a held-out set that is too small to tell two policies apart."""
    evaluated = [row for row in rows if row.get("eval/examples")]
    last = held_out_accuracies(evaluated[-1:])
    return [
        f"held-out accuracy {100 * item.value:.1f} % (95 % CI {100 * item.low:.0f}–"  # noqa: RUF001
        f"{100 * item.high:.0f} %, n = {evaluated[-1]['eval/examples']:.0f}): raise "
        "evaluation.examples for a narrower interval"
        for item in last.values()
        if item.high - item.low > INTERVAL_MAX
    ]


def _collapse(rows: Rows) -> list[str]:
    entropies = [row["entropy"] for row in rows if row.get("entropy") is not None]
    if not entropies:
        return []
    first, last = entropies[0], entropies[-1]
    if last < ENTROPY_MIN:
        return [
            f"entropy is gone ({last:.2g}): samples of a group are alike, nothing can be learned"
        ]
    if len(entropies) < 2 or last >= ENTROPY_LEFT_MIN * first:
        return []
    return [f"entropy fell to {last / first:.1%} of what it was: samples of a group become alike"]


def _hacked(rows: Rows) -> list[str]:
    """Warn of reward that goes up while evaluation accuracy does not, over the latest rounds."""
    latest = rows[-2 * ROUNDS_JUDGED :]
    rewards = [row["reward"] for row in latest if row.get("reward") is not None]
    held_out = [row["eval/accuracy"] for row in latest if row.get("eval/accuracy") is not None]
    if len(rewards) < ROUNDS_JUDGED or len(held_out) < 4:
        return []
    gain, accuracy_gain = _gain(rewards), _gain(held_out)
    # An accuracy of nearly 1 has no room to rise.
    gain_min = 0.0 if max(held_out) < 1 - GAIN_MIN else -GAIN_MIN
    if gain < GAIN_MIN or accuracy_gain > gain_min:
        return []
    return [
        f"reward rose by {gain:.3f} over {len(rewards)} rounds, held-out accuracy by "
        f"{accuracy_gain:+.3f}: is the reward being hacked? Read the rollouts with the best rewards"
    ]


def _gain(values: Sequence[float]) -> float:
    half = len(values) // 2
    return statistics.fmean(values[half:]) - statistics.fmean(values[:half])
