"""Compilation of an engine's programs before its first request.

Leaves out what the programs compute (`programs`) and how they are called (`runner`).
"""

from collections.abc import Callable
from itertools import count

import jax
import numpy as np

from marin_rl.inference.batch import SlotInputs
from marin_rl.inference.logits_state import ExtraRows
from marin_rl.inference.pieces import Extension
from marin_rl.inference.policy import Policy
from marin_rl.inference.programs import Limits
from marin_rl.inference.runner import Runner
from marin_rl.machine import give_back_freed_memory


def programs_of(runner: Runner) -> int:
    """Number of programs that `warm_up` compiles.

    A chunk, a copy, and for each bucket one that scores and, without a prefix cache, one that
    prefills; with it, one that extends. With adapters also one that copies half of the bank, and a
    chunk with that half.
    """
    plan, buckets = runner.plan, len(runner.buckets)
    halves = 2 if plan.invariance.few_adapters and plan.bank_sizes.adapters > 1 else 0
    return halves + (3 + buckets if plan.keeps_prefixes else 2 + 2 * buckets)


def warm_up(
    runner: Runner,
    policy: Policy,
    inputs: SlotInputs,
    extras: ExtraRows,
    announce: Callable[[str], None],
) -> None:
    """Compile every program, for every bucket, with a line for each; changes nothing else.

    The largest goes first, while the caches are not there, and what compiling freed goes back after
    each: so none of them needs its memory on top of another's.
    """
    total, numbers = programs_of(runner), count(1)

    def begin(program: str) -> None:
        give_back_freed_memory()
        announce(f"compiling {next(numbers)} of {total} programs: {program}")

    # limits are data: a chunk of 0 steps is the same program as any other
    nothing = Limits(np.int32(0), np.int32(0))
    keeps_prefixes = runner.plan.keeps_prefixes
    begin(f"decoding of {runner.plan.lanes.size} at a time")
    _compile_without_caches(runner, policy, inputs, extras, nothing)
    runner.decode(policy, inputs, extras, nothing)
    if runner.bank is not None:
        begin("decoding with all adapters")
        runner.decode(policy, _on_all_adapters(runner, inputs), extras, nothing)
    if keeps_prefixes:
        begin("prefill in pieces")
        # a position that is padding: the program runs, and writes nothing
        nowhere = Extension(0, -1, np.zeros(1, np.int32))
        runner.extend(policy, [nowhere], inputs.adapter_S)
    for bucket in reversed(runner.buckets):
        if not keeps_prefixes:
            begin(f"prefill of {bucket} tokens")
            nothing_to_run = {(bucket, 0): [(np.zeros(0, np.int32), [])]}
            runner.prefill(policy, nothing_to_run, inputs.adapter_S)
        begin(f"scores of {bucket} tokens")
        runner.score(policy, np.zeros(bucket, np.int32), 0)
    begin("copies between slots")
    runner.copy([(0, 0)])
    # until the first request: a trainer in this process may want the memory
    runner.memory.release()


def _compile_without_caches(
    runner: Runner, policy: Policy, inputs: SlotInputs, extras: ExtraRows, limits: Limits
) -> None:
    """Compile a chunk for caches of these shapes, which are empty and not kept."""
    runner.memory.wake()
    cache = jax.tree.map(_shape_of, runner.memory.caches[0])
    runner.memory.release(caches=True)
    give_back_freed_memory()
    runner.compile_chunk(policy, cache, inputs, extras, limits)
    give_back_freed_memory()


def _on_all_adapters(runner: Runner, inputs: SlotInputs) -> SlotInputs:
    """Inputs whose slots use as many adapters as they can, which takes another program."""
    slots = np.arange(runner.lanes.slots)
    row_S = (1 + slots % runner.plan.bank_sizes.adapters).astype(np.int32)
    return inputs._replace(adapter_S=row_S, remaining_S=np.ones_like(row_S))


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype that a program is compiled for."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
