"""Conditions of lengths, and of lists of environments, across sections.

Leaves out lengths of examples, which only the environment knows.
"""

from marin_rl.config.sections import RunSections


def check_lengths(config: RunSections) -> None:
    """Refuse lengths that the context does not hold, and lists where one is expected."""
    sampled = config.reward_model is None  # nothing is sampled to train a reward model
    if sampled and config.sampling.max_tokens >= config.policy.context_length:
        raise ValueError(
            f"sampling.max_tokens ({config.sampling.max_tokens}) leaves no room for a prompt in "
            f"policy.context_length ({config.policy.context_length})"
        )
    buckets = config.batching.length_buckets
    if buckets and buckets[-1] < config.policy.context_length:
        raise ValueError(
            f"batching.length_buckets end at {buckets[-1]}: the largest must reach "
            f"policy.context_length ({config.policy.context_length})"
        )
    if config.sft.environment is not None and config.sft.environment.reward_model is not None:
        raise ValueError("sft.environment.reward_model: a warm start scores nothing; remove it")
    _check_lists(config)
    row = config.batching.row_tokens
    if config.batching.packing != "none" and row is not None and row < config.policy.context_length:
        raise ValueError(
            f"batching.row_tokens is {row}: a row must hold policy.context_length "
            f"({config.policy.context_length})"
        )


def _check_lists(config: RunSections) -> None:
    """Refuse lists of environments where one is expected, and limits above the run's."""
    others = {"sft.environment": config.sft.environment}
    others |= {f"evaluation.sets.{n}": e for n, e in (config.evaluation.sets or {}).items()}
    for key, chosen in others.items():
        if chosen is not None and chosen.mixture is not None:
            raise ValueError(f"{key}: expected one environment, found a list")
    for place, entry in enumerate(config.environment.mixture or ()):
        own = entry.sampling and entry.sampling.max_tokens
        if own and own > config.sampling.max_tokens:
            raise ValueError(
                f"environment.{place}.sampling.max_tokens ({own}) is above sampling.max_tokens "
                f"({config.sampling.max_tokens}), the limit of the run: raise that"
            )
