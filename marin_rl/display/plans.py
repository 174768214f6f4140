"""The plan of a run, as `--dry-run` prints it."""

from marin_rl.config import Config
from marin_rl.display.text import size
from marin_rl.planning import Plan


def plan_rows(config: Config, plan: Plan) -> dict[str, str]:
    """A plan as text; sizes are unknown without the model's folder."""

    def or_unknown(n_bytes: int | None) -> str:
        return "unknown: the model folder is not here" if n_bytes is None else size(n_bytes)

    parameters = "unknown" if plan.parameters is None else f"{plan.parameters / 1e6:,.2f}M"
    kinds = "weights, gradients, Adam"
    if config.policy.lora is not None:
        kinds = "frozen base; the adapter's weights, gradients, Adam"
        if config.policy.quantize_base is not None:
            kinds = f"base in {config.policy.quantize_base}" + kinds.removeprefix("frozen base")
        if plan.trained_parameters is not None:
            parameters += f"; an adapter of {plan.trained_parameters / 1e6:,.2f}M is trained"
    embedded = not config.inference.endpoints
    return {
        "rounds": f"{plan.rounds:,}",
        "shards": f"{plan.shards:,} ({config.rollouts.shards_per_round} a round)",
        "rollouts": f"{plan.rollouts:,}"
        + (f" to {plan.rollouts_max:,}" if plan.rollouts_max > plan.rollouts else ""),
        "tokens sampled": f"at most {plan.tokens_sampled_max:,}",
        "tokens trained on": f"at most {plan.tokens_trained_max:,}",
        "parameters": parameters,
        "training memory": f"{or_unknown(plan.training_bytes)} ({kinds})",
        "activations": f"about {or_unknown(plan.activation_bytes)} a microbatch",
        "engine cache": or_unknown(plan.engine_cache_bytes) if embedded else "remote endpoints",
        "overlap": _overlap(config, plan),
        "engine weights": or_unknown(plan.engine_weight_bytes) if embedded else "remote endpoints",
        "memory together": f"about {or_unknown(plan.memory_bytes)}",
        "disk, rollouts": f"at most {size(plan.rollout_disk_bytes)}",
        "disk, batches": f"at most {size(plan.batch_disk_bytes)}",
        "disk, scores": f"at most {size(plan.score_disk_bytes)}",
        "disk, checkpoints": or_unknown(plan.checkpoint_disk_bytes),
        "root": config.root,
    }


def _overlap(config: Config, plan: Plan) -> str:
    """Gain of sampling during training, which a run has or would have."""
    saves = f"up to {plan.overlap_saves:.0%} of a round, by operations"
    if not config.inference.endpoints:
        ahead = "they take one device in turn" if config.max_staleness else "they alternate"
        return f"{ahead}; with endpoints on other devices max_staleness 1 would save {saves}"
    if config.max_staleness:
        return f"sampling during training saves {saves}"
    return f"they alternate; asynchrony.max_staleness 1 would save {saves}"
