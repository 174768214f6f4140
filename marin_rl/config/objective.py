"""The objective, as choices that can be combined, with the combinations that are refused.

Leaves out the critic's own settings and the optimizer (training.py).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import model_validator

from marin_rl.config.estimators import ESTIMATORS, SCALES, AdvantageName, Estimator, ScaleName
from marin_rl.config.section import CodeName, Count, Section, field, optional_field

# Surrogates that say what their ratio is taken over.
RATIO_LEVELS: Mapping[str, str] = MappingProxyType(
    {"gspo": "sequence_mean", "gmpo": "sequence_mean", "dppo": "token", "dppo_kl": "token"}
)
SURROGATE_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"clip_dual": ("ppo_clip", "gspo"), "cispo_clip_low": ("cispo",), "dro_beta": ("dro",)}
)


class ObjectiveConfig(Section):
    """The objective: orthogonal choices instead of named trainers (docs/objectives.md)."""

    advantage: AdvantageName = field("rloo", "advantage estimator; gae needs training.critic")
    advantage_scale: ScaleName = field(
        "default", "divisor; default: group_std for grpo, token_whitening for gae, else none"
    )
    pass_k: Count = field(4, "k of pass_at_k", le=4096)
    success_threshold: float = field(
        1.0, "reward from which pass_at_k counts a success, and a curriculum an example as solved"
    )
    turn_discount: float | None = optional_field(
        "discount between turns: turn k of a rollout has a discounted return of its own, which "
        "is compared with turn k of the group's other rollouts; null: one advantage for the "
        "whole rollout",
        ge=0,
        le=1,
    )
    surrogate: Literal[
        "reinforce", "ppo_clip", "gspo", "gmpo", "cispo", "sapo", "dppo", "dppo_kl", "dro"
    ] = field("ppo_clip", "form of the policy loss: how the importance ratio enters it")
    loss: CodeName | None = optional_field(
        "FILE.py:function or module:function that takes the place of the surrogate "
        "(docs/objectives.md); null: surrogate"
    )
    loss_options: dict[str, bool | int | float | str] | None = optional_field(
        "arguments of that function by name, such as its clip; null: none"
    )
    ratio_level: Literal["token", "sequence", "sequence_mean"] = field(
        "sequence", "ratio of a token, of the completion, or its geometric mean per token"
    )
    clip_low: float = field(
        0.2,
        "ratio is clipped below 1 - clip_low; gmpo, dppo and dppo_kl bound log-ratios, "
        "probabilities and KL by it",
        ge=0,
        lt=1,
    )
    clip_high: float = field(0.2, "ratio is clipped above 1 + clip_high", ge=0, le=100)
    clip_dual: float | None = field(
        None, "largest ratio where the advantage is negative", gt=1, le=1000
    )
    cispo_clip_low: float | None = optional_field(
        "cispo: weights are at least 1 - this; null: no bound", ge=0, le=1
    )
    sapo_temperature_positive: float = field(
        1.0, "sapo's steepness where the advantage is positive", gt=0, le=1000
    )
    sapo_temperature_negative: float = field(1.05, "sapo's steepness elsewhere", gt=0, le=1000)
    dro_beta: float | None = optional_field("dro: weight of the squared log-ratio", gt=0, le=1000)
    aggregation: Literal[
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_norm",
        "token_sum",
    ] = field("sequence_mean_token_sum", "how token losses become one number")
    kl_coefficient: float = field(0.0, "weight of KL to the reference", ge=0, le=100)
    kl_estimator: Literal["k1", "k2", "k3", "k3_k2_gradient"] = field(
        "k3", "Schulman's estimators; the last has k3's value, k2's gradient"
    )
    kl_placement: Literal["loss", "reward"] = field(
        "loss", "loss: a term of the loss; reward: subtracted from the reward"
    )
    kl_target: float | None = field(
        None,
        "target of an adaptive kl_coefficient, in nats per completion; null: the coefficient is "
        "fixed",
        gt=0,
        le=1000,
    )
    kl_rate: float = field(0.1, "adaptive: proportional gain per round", gt=0, le=1)
    reference: Literal["first", "refreshed", "average"] = field(
        "first",
        "reference policy of the KL: first, checkpoint 0; refreshed, a copy of the policy every "
        "reference_every_rounds; average, the policy's moving average",
    )
    reference_every_rounds: Count = field(
        10, "refreshed: rounds between two changes of the reference"
    )
    reference_decay: float = field(
        0.99, "average: share of the old average in each step", gt=0, lt=1
    )
    entropy_coefficient: float = field(
        0.0, "weight of the policy's entropy, maximised", ge=0, le=100
    )
    importance_correction: Literal["none", "truncated", "masked", "rejected"] = field(
        "none",
        "weight of the loss by trainer over sampler probability, in addition to the importance "
        "ratio; rejected: weight 1, and 0 for what `rejection` rejects",
    )
    correction_level: Literal["token", "sequence"] = field(
        "token", "whether that weight is computed per token or per sequence"
    )
    correction_low: float = field(
        0.0, "weights below it are raised to it (truncated) or set to 0 (masked)", ge=0, le=1
    )
    correction_high: float = field(
        2.0, "weights above it are lowered to it (truncated) or set to 0 (masked)", ge=1, le=1000
    )
    rejection: Literal["k1", "k2", "k3"] | None = optional_field(
        "weight 0 where this estimate of the sampler's KL to the trainer is above "
        "rejection_high; null: nothing is rejected"
    )
    rejection_level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] | None = (
        optional_field(
            "rejection: estimate of each token, or its sum, mean or maximum over the completion"
        )
    )
    rejection_high: float | None = optional_field(
        "rejection: largest estimate in nats that is accepted; of k1 both ways", gt=0, le=1e6
    )
    overlong: Literal["keep", "mask", "soft_penalty"] = field(
        "keep",
        "completions that reach max_tokens: keep; mask, which leaves them out of the loss; "
        "soft_penalty, which lowers the reward near the limit",
    )
    overlong_buffer: float = field(
        0.2, "soft_penalty: last share of max_tokens, over which the penalty grows", gt=0, le=1
    )
    overlong_penalty: float = field(
        1.0, "soft_penalty: subtracted from the reward at max_tokens", ge=0, le=1000
    )

    @model_validator(mode="after")
    def _goes_together(self) -> "ObjectiveConfig":
        level = RATIO_LEVELS.get(self.surrogate, self.ratio_level)
        if self.ratio_level != level:
            raise ValueError(
                f"surrogate {self.surrogate} needs ratio_level {level}, found {self.ratio_level}"
            )
        for name, users in SURROGATE_KEYS.items():
            if getattr(self, name) is not None and self.surrogate not in users:
                raise ValueError(f"{name} is for {' and '.join(users)}, found {self.surrogate}")
        if self.loss_options is not None and self.loss is None:
            raise ValueError("loss_options are arguments of loss: found null there")
        if self.surrogate == "dro" and self.dro_beta is None:
            raise ValueError("surrogate dro needs dro_beta: found null; Tinker's is 0.05")
        self._rejection_goes_together()
        self._advantage_goes_together()
        self._kl_goes_together()
        return self

    def _rejection_goes_together(self) -> None:
        keys = ("rejection", "rejection_level", "rejection_high")
        missing = [name for name in keys if getattr(self, name) is None]
        if missing and len(missing) < len(keys):
            raise ValueError(f"{', '.join(keys)} go together: found {' and '.join(missing)} null")
        if not missing and self.importance_correction == "none":
            raise ValueError(
                "rejection compares the sampler with the trainer before its first update, whose "
                "log-probabilities importance_correction none does not ask for: expected rejected "
                "(weights of 1), truncated or masked"
            )
        if missing and self.importance_correction == "rejected":
            raise ValueError(
                "importance_correction rejected needs rejection, rejection_level and "
                "rejection_high: found null"
            )
        if (
            self.importance_correction == "truncated"
            and self.correction_low >= self.correction_high
        ):
            raise ValueError(
                f"correction_low ({self.correction_low:g}) must be below correction_high "
                f"({self.correction_high:g}): truncated weights would all be equal"
            )

    def _advantage_goes_together(self) -> None:
        if self.turn_discount is not None:
            self._turns_go_together()
        refused = self.estimator.scales_refused
        if self.advantage_scale in refused:
            others = ", ".join(s for s in SCALES[1:] if s not in refused)
            raise ValueError(
                f"advantage_scale {self.advantage_scale} {self.estimator.scales_reason}: "
                f"expected {others}"
            )
        if self.estimator.by_token and self.ratio_level != "token":
            raise ValueError(
                f"advantage {self.advantage} differs from token to token and needs ratio_level "
                f"token, found {self.ratio_level}"
            )
        if self.advantage == "optimal_token_baseline" and self.overlong == "mask":
            raise ValueError(
                "overlong mask keeps what is cut off in the baseline of rewards, and "
                "optimal_token_baseline has a baseline of what is trained on alone: set "
                "filters.truncated instead, which leaves it out of both"
            )
        if self.overlong == "soft_penalty" and self.estimator.no_penalty:
            raise ValueError(
                f"overlong soft_penalty takes something off rewards, and advantage "
                f"{self.advantage} {self.estimator.no_penalty}: expected keep or mask"
            )

    def _kl_goes_together(self) -> None:
        if self.kl_coefficient == 0 and self.kl_target is not None:
            raise ValueError(
                f"kl_target is {self.kl_target}, but kl_coefficient 0 stays 0 whatever it is "
                "multiplied by: expected a first kl_coefficient above 0"
            )
        if self.kl_coefficient == 0 and self.reference == "average":
            raise ValueError(
                "reference average keeps a copy of the parameters that kl_coefficient 0 never "
                "looks at: expected a kl_coefficient above 0, or reference first"
            )
        if self.estimator.needs_critic:
            return
        linear = [each.name for each in ESTIMATORS.values() if each.linear]
        scales = ("default", "none", "token_whitening")
        if self.kl_placement == "reward" and (
            not self.estimator.linear or self.advantage_scale not in scales
        ):
            raise ValueError(
                f"kl_placement reward needs an advantage that is linear in the rewards "
                f"({', '.join(linear)}, with scale none or token_whitening) or gae, found "
                f"{self.advantage} with scale {self.advantage_scale}"
            )
        based = self.advantage != "reinforce" and not self.kl_by_token
        if self.kl_in_reward and based and self.overlong == "mask":
            raise ValueError(
                "overlong mask keeps what is cut off in the baseline of rewards, and KL in the "
                "reward has a baseline of what is trained on alone: set filters.truncated instead, "
                "which leaves it out of both, or kl_placement loss"
            )
        if self.kl_by_token and self.ratio_level != "token":
            raise ValueError(
                "KL in the reward of every token makes advantages that differ from token to token, "
                f"and needs ratio_level token, found {self.ratio_level}"
            )

    def _turns_go_together(self) -> None:
        if not self.estimator.by_turns:
            raise ValueError(
                f"turn_discount has no meaning with advantage {self.advantage}: expected null "
                "(training.critic.gamma discounts from token to token)"
            )
        if self.ratio_level != "token":
            raise ValueError(
                "turn_discount makes advantages that differ from turn to turn and needs "
                f"ratio_level token, found {self.ratio_level}"
            )
        if self.kl_in_reward:
            raise ValueError(
                "turn_discount goes with kl_placement loss: found reward, which is a reward of the "
                "whole completion"
            )

    def __hash__(self) -> int:
        """Hash the JSON form: options of a loss are a dict, and compiled steps are kept by this."""
        return hash(self.model_dump_json())

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS[self.advantage]

    @property
    def kl_in_reward(self) -> bool:
        """True if rewards, and so advantages, depend on the KL."""
        return self.kl_placement == "reward" and self.kl_coefficient > 0

    @property
    def regularised(self) -> bool:
        """True if a completion moves the policy even where its advantage is 0."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0

    @property
    def kl_by_token(self) -> bool:
        """True if later KL is subtracted from the advantage of each token, before whitening.

        A critic learns it through rewards instead, at any scale.
        """
        whitens = self.advantage_scale == "token_whitening"
        return self.kl_in_reward and whitens and not self.estimator.needs_critic

    @property
    def whitens_tokens(self) -> bool:
        """True if the training stage whitens advantages, over the trained tokens of the round."""
        by_critic = self.estimator.needs_critic and self.advantage_scale != "none"
        return self.kl_by_token or by_critic
