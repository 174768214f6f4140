"""Check of memory: a run's plan against what this machine, or its accelerator, has."""

from marin_rl.config import Config
from marin_rl.errors import OutOfMemory
from marin_rl.machine import computes_on_host
from marin_rl.memory import gigabytes, room
from marin_rl.planning import Plan, memory_keys, plan

# Share by which a plan may be too high: what it says to be beyond all memory is refused only then.
PLAN_ERROR = 0.15


def memory(config: Config) -> str:
    """Check that what a run needs at its peak is there at all.

    Raises OutOfMemory, naming what is needed, what there is, and the settings that lower it.
    """
    planned, here = plan(config), room()
    if planned.peak_bytes is None or planned.training_bytes is None:
        return "not known without the model's folder"
    if here is None:
        return f"about {gigabytes(planned.peak_bytes)} on a device; it is not started yet"
    # The plan is measured on CPUs. What lies on an accelerator between steps is known exactly.
    least = planned.training_bytes
    if computes_on_host():
        least = round(planned.peak_bytes * (1 - PLAN_ERROR))
    if least > here.total:
        raise OutOfMemory(
            f"the run does not fit into memory: it needs about {gigabytes(planned.peak_bytes)} at "
            f"its peak ({_largest(planned)}), with {here}. Lower it by "
            f"{'; or '.join(_keys(config, planned))}"
        )
    return f"about {gigabytes(planned.peak_bytes)} at the peak; {here}"


def tight(config: Config) -> str | None:
    """A warning where a run fits into memory, and not into what is free of it now."""
    planned, here = plan(config), room()
    if here is None or planned.peak_bytes is None or planned.peak_bytes <= here.free:
        return None
    return (
        f"the run needs about {gigabytes(planned.peak_bytes)} of memory at its peak, with {here}: "
        f"where it is killed without a message, lower "
        f"it by {'; or '.join(_keys(config, planned))}"
    )


def _largest(planned: Plan) -> str:
    step, engine = planned.step_bytes or 0, _engine_bytes(planned)
    of_engine = f", engine {gigabytes(engine)}" if engine else ""
    return f"training step {gigabytes(step)}{of_engine}"


def _engine_bytes(planned: Plan) -> int:
    return (planned.engine_cache_bytes or 0) + (planned.engine_weight_bytes or 0)


def _keys(config: Config, planned: Plan) -> list[str]:
    """Settings that lower the larger of training step and engine."""
    slots = f"fewer inference.engine.slots (now {config.inference.engine.slots})"
    sampling = (planned.training_bytes or 0) + _engine_bytes(planned)
    if sampling > (planned.step_bytes or 0):
        return [slots, f"a smaller policy.context_length (now {config.policy.context_length})"]
    return list(memory_keys(config))
