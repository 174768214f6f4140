"""The plan of a run, as `--dry-run` prints it."""

from marin_rl.config import Config
from marin_rl.display.text import size
from marin_rl.machine import room
from marin_rl.planning import Plan


def plan_rows(config: Config, plan: Plan) -> dict[str, str]:
    """A plan as text; sizes are unknown without the model's folder."""

    def or_unknown(n_bytes: int | None) -> str:
        return "unknown: the model folder is not here" if n_bytes is None else size(n_bytes)

    parameters = "unknown" if plan.parameters is None else f"{plan.parameters / 1e6:,.2f}M"
    kinds = "weights, Adam"
    if config.policy.lora is not None:
        kinds = "frozen base; the adapter's weights, Adam"
        if config.policy.quantize_base is not None:
            kinds = f"base in {config.policy.quantize_base}" + kinds.removeprefix("frozen base")
        if plan.trained_parameters is not None:
            parameters += f"; an adapter of {plan.trained_parameters / 1e6:,.2f}M is trained"
    embedded = not config.inference.endpoints
    rows = {
        "rounds": f"{plan.rounds:,}",
        "shards": f"{plan.shards:,} ({config.rollouts.shards_per_round} a round)",
        "rollouts": f"{plan.rollouts:,}"
        + (f" to {plan.rollouts_max:,}" if plan.rollouts_max > plan.rollouts else ""),
        "tokens sampled": f"at most {plan.tokens_sampled_max:,}",
        "tokens trained on": f"at most {plan.tokens_trained_max:,}",
        "parameters": parameters,
        "training memory": f"{or_unknown(plan.training_bytes)} between steps ({kinds})",
        "activations": f"about {or_unknown(plan.activation_bytes)} a microbatch",
        "training step": f"about {or_unknown(plan.step_bytes)}, with gradients and copies",
        "engine cache": or_unknown(plan.engine_cache_bytes) if embedded else "remote endpoints",
        "engine weights": or_unknown(plan.engine_weight_bytes) if embedded else "remote endpoints",
        "memory together": _together(plan) if plan.peak_bytes else or_unknown(None),
        "disk, rollouts": f"at most {size(plan.rollout_disk_bytes)}",
        "disk, batches": f"at most {size(plan.batch_disk_bytes)}",
        "disk, scores": f"at most {size(plan.score_disk_bytes)}",
        "disk, checkpoints": checkpoints_kept(config, plan) or or_unknown(None),
        "root": config.root,
    }
    if overlap := _overlap(config, plan):
        rows["overlap"] = overlap
    return rows


def _together(plan: Plan) -> str:
    """The process's peak; of each device where there are several."""
    assert plan.peak_bytes is not None
    each = f" on each of {plan.devices} devices" if plan.devices > 1 else ""
    here = room()
    return f"about {size(plan.peak_bytes)} at the peak{each}" + (f"; {here}" if here else "")


def checkpoints_kept(config: Config, plan: Plan) -> str:
    """The most that checkpoints take at once, and what all rounds write; empty where unknown."""
    if plan.checkpoint_disk_bytes is None or plan.checkpoint_written_bytes is None:
        return ""
    written = f"{size(plan.checkpoint_written_bytes)} are written in all"
    if config.retention.checkpoints_last is None:
        each = size(plan.checkpoint_bytes or 0)
        several = f"all {plan.checkpoints_kept:,} of {each} are kept"
        remedy = "retention.checkpoints_last keeps fewer"
        return f"{size(plan.checkpoint_disk_bytes)}: {several} ({remedy})"
    kept = f"of at most {plan.checkpoints_kept:,} checkpoints"
    return f"at most {size(plan.checkpoint_disk_bytes)}, {kept}; {written}"


def _overlap(config: Config, plan: Plan) -> str:
    """Gain of sampling during training; empty for the embedded server."""
    if not config.inference.endpoints:
        return ""
    saves = f"up to {plan.overlap_saves:.0%} of a round (estimate)"
    if config.max_staleness:
        return f"sampling during training saves {saves}"
    return f"sampling and training alternate; asynchrony.max_staleness 1 would save {saves}"
