"""Advantage estimators: one record each, which everything that asks about an estimator reads.

The functions that compute advantages have the same names in batching/advantages.py. To add an
estimator, add its record here and its function there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Facts of an advantage estimator: all that the rest of the code asks about one.

    Its function over one group has the same name in batching/advantages.py and takes `inputs` in
    addition to the rewards. `within_groups`: members are compared with one another, so a group of
    equal rewards has no signal and one of a single member no baseline. `over_round`: the baseline
    is the round's. `linear`: the advantage of a sum of rewards is the sum of their advantages.
    `by_turns`: returns of turns can stand for rewards. `by_token`: the training stage makes
    advantages, token by token, with a critic if `needs_critic`. `scale` is what the scale
    `default` means to it;
    `scales_refused` make no sense with it, for `scales_reason`. `no_penalty` says why rewards
    cannot be lowered by a penalty; empty where they can.
    """

    name: str
    inputs: tuple[Literal["tokens_G", "greedy_G", "k", "threshold", "parts_GK"], ...] = ()
    within_groups: bool = True
    over_round: bool = False
    linear: bool = False
    by_turns: bool = True
    by_token: bool = False
    needs_critic: bool = False
    scale: str = "none"
    scales_refused: tuple[str, ...] = ()
    scales_reason: str = ""
    no_penalty: str = ""

    def members_min(self, pass_k: int) -> int:
        """Return the fewest valid rewards of a group that is trained on."""
        if "k" in self.inputs:
            return pass_k
        return 2 if self.within_groups else 1


DIVIDES_BY_0 = (
    "divides by a spread that is 0 where rewards are equal, and advantage {} is not 0 there"
)

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        each.name: each
        for each in (
            Estimator(name="rloo", linear=True),
            Estimator(name="grpo", scale="group_std"),
            Estimator(name="dr_grpo", linear=True),
            Estimator(
                name="reinforce",
                within_groups=False,
                linear=True,
                scales_refused=("group_std", "batch_std"),
                scales_reason=DIVIDES_BY_0.format("reinforce"),
            ),
            Estimator(
                name="reinforce_batch",
                within_groups=False,
                over_round=True,
                linear=True,
                scales_refused=("group_std",),
                scales_reason=DIVIDES_BY_0.format("reinforce_batch"),
            ),
            Estimator(name="maxrl", no_penalty="needs rewards of at least 0"),
            Estimator(
                name="pass_at_k",
                inputs=("k", "threshold"),
                by_turns=False,
                no_penalty="would count a success that is penalised at all as a failure",
            ),
            Estimator(
                name="gdpo",
                inputs=("parts_GK",),
                by_turns=False,
                scale="batch_whitening",
                scales_refused=("group_std", "batch_std"),
                scales_reason="divides by the spread of summed rewards, of which gdpo has divided "
                "each by its own",
                no_penalty="compares the components of rewards one by one",
            ),
            Estimator(name="opo", inputs=("tokens_G",)),
            Estimator(
                name="remax",
                inputs=("greedy_G",),
                by_turns=False,
                scales_refused=("batch_whitening", "token_whitening"),
                scales_reason="takes the mean of advantages over all members, and remax has a "
                "baseline of its own that is not trained on",
            ),
            Estimator(
                name="gae",
                within_groups=False,
                by_turns=False,
                by_token=True,
                needs_critic=True,
                scales_refused=("group_std", "batch_std"),
                scales_reason="divides by the spread of rewards, and advantage gae is a critic's",
            ),
            Estimator(
                name="optimal_token_baseline",
                by_turns=False,
                by_token=True,
                scales_refused=("group_std", "batch_std", "batch_whitening", "token_whitening"),
                scales_reason="divides advantages before a round is trained on, and those of "
                "optimal_token_baseline are made then",
            ),
        )
    }
)
SCALES = ("default", "none", "group_std", "batch_std", "batch_whitening", "token_whitening")
GROUPS_OF_ONE = tuple(sorted(e.name for e in ESTIMATORS.values() if not e.within_groups))

if TYPE_CHECKING:
    AdvantageName = ScaleName = str
else:  # literals, so that pydantic refuses other names and documents these
    AdvantageName, ScaleName = Literal[tuple(ESTIMATORS)], Literal[SCALES]
