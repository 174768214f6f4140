"""The head of every benchmark's output: processor, instruction set, cores, load.

Figures of two machines, or of two instruction sets on one, are not comparable, so each script
prints this line first. The kernels of YNNPACK, which multiply matrices, are chosen by the processor
alone, so both its instruction set and the one that XLA compiles for are named.
"""

import os
from typing import Any

from marin_rl.machine import cores, instruction_set, processor, processor_instruction_set


def machine() -> dict[str, Any]:
    """Processor, instruction sets of the processor and of XLA, cores of this process, load."""
    return {
        "processor": processor(),
        "instructions": processor_instruction_set(),
        "xla_instructions": instruction_set(),
        "cores": cores(),
        "cores_of_machine": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def head() -> str:
    """`machine()` as one line."""
    facts = machine()
    return (
        f"machine: {facts['processor']}, {facts['instructions']}, XLA compiles for "
        f"{facts['xla_instructions']}, {facts['cores']} of {facts['cores_of_machine']} "
        f"cores, load {facts['load_average']}"
    )


def print_head() -> None:
    """Print `head()` at once, before what a script starts prints anything."""
    print(head(), flush=True)
